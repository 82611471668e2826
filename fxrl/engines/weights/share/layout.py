"""Where a Hugging Face parameter lies in vLLM's parameters.

``LayoutPlanner`` proposes places from names, packing and shapes; it reads no value, knows no
architecture and works on the meta device. Whoever binds a place compares the bytes first
(``equal_bits``). What no name leads to, ``find_by_content`` looks for by its bytes.

What is used of the vLLM model, all of it public to vLLM's own loaders: ``packed_modules_mapping``
(``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``), ``hf_to_vllm_mapper`` (a ``WeightsMapper``, with
``orig_to_new_stacked`` where vLLM has it), ``output_sizes`` of a fused layer, ``org_vocab_size`` of
a padded embedding, and the ``.base_layer.`` in names that LoRA wrapping leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.ops.checksum import bits

_SHARD_ORDER = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows ``start`` to ``start + length`` of vLLM's parameter ``name``."""

    name: str  # vLLM's own, as in ``named_parameters``
    start: int
    length: int
    transposed: bool  # the HF parameter is the transpose of those rows (GPT-2's ``Conv1D``)
    how: str  # how it was derived, in words

    def view(self, parameter: Tensor) -> Tensor:
        """The HF parameter's values in ``parameter``'s storage, detached."""
        rows = parameter.detach()
        if rows.dim() and (self.start, self.length) != (0, rows.shape[0]):
            rows = rows.narrow(0, self.start, self.length)
        return rows.t() if self.transposed else rows


@dataclass(frozen=True, slots=True)
class Proposal:
    """The placements worth a look, best first, and why there are no more."""

    placements: tuple[Placement, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class _Stack:
    """``shard`` is part number ``position`` of the fused module ``fused``."""

    shard: str
    fused: str
    position: int


class LayoutPlanner:
    """Proposes places for the HF parameters of ``shapes`` (by name, ties under each of their names)
    in ``tensors``: the parameters of ``vllm_model`` (one GPU's; tensor-parallel shards fit
    nothing), each as [out, in] (``fp8.logical``)."""

    def __init__(
        self, vllm_model: nn.Module, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
    ) -> None:
        self.model, self.tensors, self.shapes = vllm_model, tensors, shapes
        # By the names that parameters had before LoRA wrapped their layers.
        self.by_plain = {name.replace(".base_layer.", "."): name for name in tensors}
        self.rename = _renamer(vllm_model)
        self.stacks = _stacks_of(vllm_model)
        self.parts: dict[str, dict[int, str]] = {}  # vLLM's name -> position -> HF name

    def plan(self) -> dict[str, Proposal]:
        """One proposal for every HF parameter."""
        targets = {name: self._target(name) for name in self.shapes}
        for name, target in targets.items():
            if target is not None and target[1] is not None:
                self.parts.setdefault(target[0], {})[target[1].position] = name
        return {name: self._propose(name, target) for name, target in targets.items()}

    def _target(self, hf_name: str) -> tuple[str, _Stack | None] | None:
        """vLLM's parameter for this name, and the stack if it is a part of it."""
        for name in dict.fromkeys((hf_name, self.rename(hf_name))):
            if name in self.by_plain:
                return self.by_plain[name], None
            module, _, leaf = name.rpartition(".")
            for stack in self.stacks:
                if f".{module}".endswith(f".{stack.shard}"):
                    fused = f"{module.removesuffix(stack.shard)}{stack.fused}.{leaf}"
                    if fused in self.by_plain:
                        return self.by_plain[fused], stack
        return None

    def _propose(self, hf_name: str, target: tuple[str, _Stack | None] | None) -> Proposal:
        if target is None:
            return Proposal((), "vLLM has no parameter of this name, renamed or packed")
        name, stack = target
        if stack is not None:
            return self._part(hf_name, name, stack)
        theirs, ours = self.tensors[name].shape, self.shapes[hf_name]
        found = []
        if theirs == ours:
            found.append(Placement(name, 0, _rows(ours), False, "same name"))
        if len(ours) == 2 and theirs == ours[::-1]:
            found.append(Placement(name, 0, theirs[0], True, "same name, transposed"))
        if self._is_padded_vocabulary(name, theirs, ours):
            found.append(Placement(name, 0, ours[0], False, "padded vocabulary"))
        why = "" if found else f"vLLM's {name} is {list(theirs)}, not {list(ours)}"
        return Proposal(tuple(found), why)

    def _part(self, hf_name: str, name: str, stack: _Stack) -> Proposal:
        """Rows of a fused parameter: the parts lie one after the other, in the packed order."""
        parts = self.parts[name]
        count = 1 + max(one.position for one in self.stacks if one.fused == stack.fused)
        if sorted(parts) != list(range(count)):
            return Proposal((), f"vLLM fuses {count} parts into {name}, {len(parts)} are known")
        sizes = [_rows(self.shapes[parts[position]]) for position in range(count)]
        theirs, ours = self.tensors[name].shape, self.shapes[hf_name]
        if theirs[1:] != ours[1:] or theirs[0] != sum(sizes):
            told = f"{sizes} rows of {list(ours[1:])}"
            return Proposal((), f"vLLM's {name} is {list(theirs)}, its parts have {told}")
        own = getattr(self._module(name), "output_sizes", None)
        if own is not None and len(own) == count and list(own) != sizes:
            return Proposal((), f"vLLM splits {name} into {list(own)}, its parts have {sizes} rows")
        start = sum(sizes[: stack.position])
        return Proposal((Placement(name, start, sizes[stack.position], False, "packed"),), "")

    def _is_padded_vocabulary(self, name: str, theirs: torch.Size, ours: torch.Size) -> bool:
        longer = len(theirs) == len(ours) > 0 and theirs[0] > ours[0] and theirs[1:] == ours[1:]
        module = self._module(name)
        return longer and getattr(module, "org_vocab_size", None) == ours[0]

    def _module(self, name: str) -> Any:
        return self.model.get_submodule(name.rpartition(".")[0])


def _rows(shape: torch.Size) -> int:
    return shape[0] if shape else 1


def _stacks_of(vllm_model: nn.Module) -> list[_Stack]:
    """The stacks that any module of the model declares, longer shard names first."""
    found: dict[_Stack, None] = {}
    for module in vllm_model.modules():
        for fused, shards in (getattr(module, "packed_modules_mapping", None) or {}).items():
            if len(shards) > 1:
                found |= {_Stack(shard, fused, i): None for i, shard in enumerate(shards)}
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        order: dict[str, int] = {}
        for shard, (fused, given) in (getattr(mapper, "orig_to_new_stacked", None) or {}).items():
            order[fused] = order.get(fused, -1) + 1
            position = given if isinstance(given, int) else _SHARD_ORDER.get(given, order[fused])
            found[_Stack(shard.strip("."), fused.strip("."), position)] = None
    return sorted(found, key=lambda stack: -len(stack.shard))


def _renamer(vllm_model: nn.Module) -> Any:
    """HF name -> vLLM's name, packing aside; the identity where the model has no mapper."""
    mapper: Any = getattr(vllm_model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    if is_dataclass(mapper) and "orig_to_new_stacked" in {field.name for field in fields(mapper)}:
        mapper = replace(mapper, orig_to_new_stacked={})  # type: ignore[type-var]
    apply = getattr(mapper, "map_name", None) or mapper._map_name
    return lambda name: apply(name) or name


BLOCK_BYTES = 64 * 2**20
"""Moved to the device and compared at a time: beside a vLLM engine little memory is free."""
MAX_HITS = 64
"""Rows that may look like the tensor's first row; with more, it is no fingerprint."""


def row_blocks(tensor: Tensor, max_bytes: int = BLOCK_BYTES) -> list[tuple[int, int]]:
    """(start, length) of blocks of rows of at most ``max_bytes``, at least one row each."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return []
    row_bytes = max(1, tensor[0].numel() * tensor.element_size())
    step = max(1, max_bytes // row_bytes)
    return [(at, min(step, len(tensor) - at)) for at in range(0, len(tensor), step)]


def equal_bits(view: Tensor, reference: Tensor) -> bool:
    """Whether both have the same bytes (NaN equals itself, 0.0 is not -0.0). ``reference`` is on
    the CPU, in any floating dtype, and is cast to that of ``view``, which may have any device and
    strides."""
    if view.dim() == 0:
        view, reference = view.reshape(1), reference.reshape(1)
    return all(
        torch.equal(
            bits(view.narrow(0, start, length)),
            bits(reference.narrow(0, start, length).to(view.device, view.dtype)),
        )
        for start, length in row_blocks(view)
    )


def find_by_content(
    hf_name: str, reference: Tensor, dtype: torch.dtype, tensors: Mapping[str, Tensor]
) -> Placement | str:
    """The one place in the same layer's parameters that holds these bytes, or why there is none.

    For packings that vLLM declares nowhere (mixtures of experts, models that fuse inside
    ``load_weights``) the loaded bytes themselves say where the loader has put them. A constant
    tensor proves nothing, and two places with the same bytes could be two parameters that differ
    after the first update: both are refused.
    """
    if reference.dim() == 0 or bool((reference == reference.flatten()[0]).all()):
        return "all its values are equal, so its bytes show no place"
    found = []
    for name, tensor in tensors.items():
        fits = tensor.dtype == dtype and tensor.dim() == reference.dim() and tensor.numel() > 0
        if fits and layer_numbers(name) == layer_numbers(hf_name):
            found += _places(name, tensor, reference)
    if len(found) == 1:
        return found[0]
    return "its bytes are " + ("at several places" if found else "nowhere in vLLM's layer")


def layer_numbers(name: str) -> tuple[int, ...]:
    """The numbers in a dotted name: layer, expert."""
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def _places(name: str, tensor: Tensor, reference: Tensor) -> list[Placement]:
    rows = len(reference)
    if tensor.shape[1:] != reference.shape[1:] or len(tensor) < rows:
        return []
    first = bits(reference[:1].to(tensor.device, tensor.dtype))
    same = bits(tensor.narrow(0, 0, len(tensor) - rows + 1)) == first
    starts = same.flatten(1).all(1).nonzero() if same.dim() > 1 else same.nonzero()
    if len(starts) > MAX_HITS:
        return []
    return [
        Placement(name, start, rows, False, "found by its bytes")
        for start in starts.flatten().tolist()
        if equal_bits(tensor.narrow(0, start, rows), reference)
    ]
