"""Where a Hugging Face parameter should lie in vLLM's parameters: names, packing and shapes only.

Nothing here reads a value or knows an architecture. Every placement is a proposal; whoever binds it
compares the bytes first (``shared_weights``). Works on the meta device.

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

_SHARD_ORDER = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows ``start`` to ``start + length`` of vLLM's parameter ``name``.

    Attributes:
        name: vLLM's own, as in ``named_parameters``.
        transposed: the HF parameter is the transpose of those rows (GPT-2's ``Conv1D``).
        how: how it was derived, in words.
    """

    name: str
    start: int
    length: int
    transposed: bool
    how: str

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


def plain_name(name: str) -> str:
    """vLLM's name of a parameter before LoRA wrapped its layer."""
    return name.replace(".base_layer.", ".")


def plan_layout(
    vllm_model: nn.Module, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> dict[str, Proposal]:
    """One proposal for every HF parameter.

    Args:
        vllm_model: the model inside vLLM (one GPU's; tensor-parallel shards fit nothing).
        tensors: its parameters by name, each as [out, in] (``shared_weights.logical_parameters``).
        shapes: HF parameter names (ties under each of their names) and shapes.
    """
    return _Planner(vllm_model, tensors, shapes).plan()


@dataclass(frozen=True, slots=True)
class _Stack:
    """``shard`` is part number ``position`` of the fused module ``fused``."""

    shard: str
    fused: str
    position: int


class _Planner:
    def __init__(
        self, vllm_model: nn.Module, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
    ) -> None:
        self.model, self.tensors, self.shapes = vllm_model, tensors, shapes
        self.by_plain = {plain_name(name): name for name in tensors}
        self.rename = _renamer(vllm_model)
        self.stacks = _stacks_of(vllm_model)
        self.parts: dict[str, dict[int, str]] = {}  # vLLM's name -> position -> HF name

    def plan(self) -> dict[str, Proposal]:
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
        parts, count = self.parts[name], self._number_of_parts(stack.fused)
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

    def _number_of_parts(self, fused: str) -> int:
        return 1 + max(stack.position for stack in self.stacks if stack.fused == fused)

    def _is_padded_vocabulary(self, name: str, theirs: torch.Size, ours: torch.Size) -> bool:
        longer = len(theirs) == len(ours) > 0 and theirs[0] > ours[0] and theirs[1:] == ours[1:]
        module = self._module(name)
        return longer and getattr(module, "org_vocab_size", None) == ours[0]

    def _module(self, name: str) -> Any:
        return self.model.get_submodule(name.rpartition(".")[0])


def _rows(shape: torch.Size) -> int:
    return shape[0] if shape else 1


def _stacks_of(vllm_model: nn.Module) -> list[_Stack]:
    """What any module of the model declares; longer shard names first."""
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
