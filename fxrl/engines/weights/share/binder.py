"""One copy of the weights: a Hugging Face model whose parameters are views of vLLM's.

NOTE [Who owns the memory]
vLLM's parameters are the owners; the model's are views. So the engine must outlive the model, and
vLLM's own sleep (levels 1 and 2) would unmap weights under the trainer: only KV-only standby fits.
Whoever updates a shared parameter writes in place (``optimizer.step()`` does, ``p.data = ...`` does
not); vLLM's next forward, CUDA graphs included, reads the new values, with nothing to synchronise.
What vLLM derived from weights at load (``warnings`` of the report) does not follow.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.engines.engine import EngineError
from fxrl.engines.weights.share.fp8 import FP8_DTYPES, find_scale, logical, why_not_quantized
from fxrl.engines.weights.share.layout import (
    LayoutPlanner,
    Placement,
    Proposal,
    equal_bits,
    find_by_content,
)
from fxrl.ir.table import cell, open_table, plain_text
from fxrl.models import ModelError, QuantizedLinear
from fxrl.models.checkpoint import (
    CheckpointTensors,
    build_skeleton,
    owner_of,
    parameter_groups,
    put_parameter,
)

log = logging.getLogger(__name__)


def share(
    vllm_model: nn.Module,
    checkpoint_dir: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    building: AbstractContextManager[Any] | None = None,
) -> tuple[nn.Module, SharingReport]:
    """Builds the Hugging Face model of a checkpoint that vLLM has loaded, over vLLM's storages.

    Every shared parameter is compared with the checkpoint, byte for byte; what differs or finds no
    place gets a storage of its own, filled from the checkpoint, and the report says why. Linear
    layers that vLLM has in FP8 become a ``QuantizedLinear`` over vLLM's values and scales, if those
    are the checkpoint's rounded.

    Args:
        vllm_model: the ``nn.Module`` inside vLLM, unsharded, weights loaded and resident.
        checkpoint_dir: the folder that vLLM has loaded.
        dtype: of the model; parameters that vLLM keeps in another one cannot be shared.
        device: of the model; vLLM's, where anything is to be shared.
        building: entered while the Hugging Face classes are instantiated. vLLM's own "transformers"
            backend patches those classes for the whole process: they then ask for a current vLLM
            config (one that compiles nothing keeps their ``forward`` as it was).

    Returns:
        The model in eval mode and what was shared.

    Raises:
        EngineError: no such folder, no causal LM, a parameter that the checkpoint lacks.
        SharingError: an alias failed its check after binding.
    """
    started = time.perf_counter()
    folder = Path(checkpoint_dir).expanduser()
    if not folder.is_dir():
        raise EngineError(
            f"checkpoint {str(checkpoint_dir)!r}: no such folder; shared weights need the folder "
            "that vLLM has loaded (load_format='dummy' leaves nothing to compare with)"
        )
    try:
        with building or nullcontext():
            model = build_skeleton(folder, dtype)
            checkpoint = CheckpointTensors(folder, model)
            binder = WeightBinder(vllm_model, model, checkpoint, torch.device(device))
            binder.bind_all()
    except ModelError as error:
        raise EngineError(f"sharing vLLM's weights: {error}") from error
    model.to(device)  # buffers; every parameter is there already, so none moves
    warnings = derived_tensors(vllm_model)
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        warnings.append("FP8 weights are frozen: only what stayed wider can be trained, or a LoRA")
    report = SharingReport(
        rows=tuple(binder.rows),
        warnings=tuple(warnings),
        seconds=time.perf_counter() - started,
        mirrors=binder.mirrors,
        vllm_model=vllm_model,
        bindings=tuple(binder.bindings),
    )
    report.verify_again()
    if not report.complete:
        log.warning("%s", report)
    return model, report


_FEW = 2**10  # elements: no weight was rearranged into so little


def derived_tensors(vllm_model: nn.Module) -> list[str]:
    """Warns of plain tensors that vLLM's modules keep beside their parameters and buffers.

    Some layers (multi-head latent attention) rearrange a weight once, after loading, and use only
    the result; a shared parameter that is updated later does not change it. The KV cache and LoRA's
    slots are no weights.
    """
    own = {value.untyped_storage().data_ptr() for value in vllm_model.parameters()}
    own |= {value.untyped_storage().data_ptr() for value in vllm_model.buffers()}
    found: dict[str, str] = {}
    for path, module in vllm_model.named_modules():
        for name, value in vars(module).items():
            if not isinstance(value, Tensor) or value.numel() < _FEW:
                continue
            known = value.untyped_storage().data_ptr() in own
            if not (known or "cache" in name or "lora" in name or not value.is_floating_point()):
                found.setdefault(f"{type(module).__name__}.{name}", path)
    return [
        f"vLLM keeps {name} ({path}) beside its weights: updates of the weight that it was "
        "computed from do not reach it"
        for name, path in found.items()
    ]


_SHOWN = 5


class SharingError(EngineError):
    """An alias of vLLM's weights no longer is one."""


@dataclass(frozen=True, slots=True)
class SharingRow:
    """One tensor of the model (tied parameters are one)."""

    name: str  # of the HF parameter; tied ones have more names, see ``also``
    vllm_name: str  # of the vLLM parameter it lies in, "" if it was copied
    nbytes: int  # its size
    shared: bool  # one storage with vLLM, byte for byte what the checkpoint says
    reason: str  # how the place was found, or why the tensor has a storage of its own
    also: tuple[str, ...] = ()  # the other names of a tied parameter


@dataclass(frozen=True, slots=True)
class Binding:
    """Which attribute of which module aliases what. (PEFT wraps such modules, it keeps them.)

    ``view`` makes what the attribute should be of vLLM's parameter.
    """

    name: str
    module: nn.Module
    attribute: str
    vllm_name: str
    view: Callable[[Tensor], Tensor]

    def tensor(self) -> Tensor:
        value = getattr(self.module, self.attribute)
        assert isinstance(value, Tensor)
        return value.detach()


@dataclass(frozen=True)
class SharingReport:
    """The result of ``share``.

    It keeps the vLLM model alive; drop it together with the engine.
    """

    rows: tuple[SharingRow, ...]  # one for every tensor
    warnings: tuple[str, ...]  # what a user should know though it works
    seconds: float  # how long sharing took, the comparison with the checkpoint included
    # For copied parameters that vLLM has in another dtype, by HF name: vLLM's values in the
    # parameter's shape. ``mirrors[name].copy_(parameter)`` is an update.
    mirrors: Mapping[str, Tensor] = field(repr=False)
    vllm_model: nn.Module = field(repr=False)
    bindings: tuple[Binding, ...] = field(repr=False)

    @property
    def shared_bytes(self) -> int:
        """Bytes that exist once, for vLLM and the trainer."""
        return sum(row.nbytes for row in self.rows if row.shared)

    @property
    def copied_bytes(self) -> int:
        """Bytes that exist twice."""
        return sum(row.nbytes for row in self.rows if not row.shared)

    @property
    def copied(self) -> tuple[str, ...]:
        """Names of the parameters that have a storage of their own: updates of these reach vLLM
        only if somebody copies them."""
        return tuple(n for row in self.rows if not row.shared for n in (row.name, *row.also))

    @property
    def complete(self) -> bool:
        """Whether every tensor is shared."""
        return all(row.shared for row in self.rows)

    def verify_again(self) -> None:
        """Checks that every alias still is one.

        Catches what breaks aliases without an error: ``model.to(...)``, a rebound ``.data``, an
        optimizer or FSDP that flattens parameters, vLLM replacing a parameter while it reloads.
        """
        faults = [f"{b.name}: {why}" for b in self.bindings if (why := self._why_no_alias(b))]
        if faults:
            more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise SharingError(
                f"{len(faults)} of {len(self.bindings)} shared weights are broken: "
                f"{'; '.join(faults[:_SHOWN])}{more}. Use the model no further: make it anew with "
                "share(), and update its parameters in place only"
            )

    def _why_no_alias(self, binding: Binding) -> str:
        owner = getattr(*owner_of(self.vllm_model, binding.vllm_name), None)
        if not isinstance(owner, Tensor):
            return f"vLLM has dropped {binding.vllm_name}"
        here = binding.tensor()
        if owner.numel() == 0:
            return f"vLLM has packed {binding.vllm_name}"
        there = binding.view(owner)
        if here.data_ptr() != there.data_ptr():
            return "lies in another storage than vLLM's weight"
        if (here.shape, here.stride(), here.dtype) != (there.shape, there.stride(), there.dtype):
            return f"has shape {list(here.shape)}, strides {list(here.stride())}, {here.dtype}"
        return ""

    def __str__(self) -> str:
        shared = [row for row in self.rows if row.shared]
        table = open_table("weights", "tensors", "GiB", "why", right=("tensors", "GiB"))
        for kind, rows in (("shared", shared), ("copied", [r for r in self.rows if not r.shared])):
            for reason, count in Counter(_any_layer(row.reason) for row in rows).most_common():
                alike = [row for row in rows if _any_layer(row.reason) == reason]
                size, example = sum(row.nbytes for row in alike), alike[0].name
                why = reason if kind == "shared" else f"{example}: {reason}"
                table.add_row(*map(cell, (kind, count, f"{size / 2**30:.3f}", why)))
        told = (
            f"{len(shared)} of {len(self.rows)} tensors shared with vLLM, "
            f"{self.shared_bytes / 2**30:.3f} GiB; {self.copied_bytes / 2**30:.3f} GiB copied "
            f"({self.seconds:.1f} s)"
        )
        warnings = (f"warning: {warning}" for warning in self.warnings)
        return "\n".join([told, plain_text(table, 120), *warnings])


def _any_layer(reason: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", reason)


PACKED = (
    "vLLM has packed its weights for its CPU kernels (their shape is (0,)); there is nothing to "
    "share on a CPU: after training call engine.update_weights(...)"
)


class WeightBinder:
    """Binds every parameter once; ``rows``, ``bindings`` and ``mirrors`` say what came of it."""

    def __init__(
        self,
        vllm_model: nn.Module,
        model: nn.Module,
        checkpoint: CheckpointTensors,
        device: torch.device,
    ) -> None:
        self.vllm_model, self.model = vllm_model, model
        self.checkpoint, self.device = checkpoint, device
        named = dict(vllm_model.named_parameters(remove_duplicate=False))
        self.packed = any(value.numel() == 0 for value in named.values())
        self.tensors = {name: logical(value) for name, value in named.items()}
        wanted = dict(model.named_parameters(remove_duplicate=False))
        shapes = {name: value.shape for name, value in wanted.items()}
        self.plan: Mapping[str, Proposal] = LayoutPlanner(vllm_model, self.tensors, shapes).plan()
        self.taken: dict[tuple[int, int], str] = {}  # address range -> HF name
        self.rows: list[SharingRow] = []
        self.bindings: list[Binding] = []
        self.mirrors: dict[str, Tensor] = {}

    def bind_all(self) -> None:
        """Every parameter, then the buffers that the checkpoint has."""
        linears = [n for n, m in self.model.named_modules() if type(m) is nn.Linear]
        why_no_fp8 = {f"{name}.weight": self._bind_fp8(name) for name in linears}
        for names in parameter_groups(self.model):
            if getattr(*owner_of(self.model, names[0])).is_meta:
                self._bind(names, why_no_fp8.get(names[0], ""))
        self.checkpoint.fill_buffers()

    def _bind(self, names: tuple[str, ...], why_no_fp8: str) -> None:
        module, attribute = owner_of(self.model, names[0])
        wanted = getattr(module, attribute)
        reference = self.checkpoint.get(names, wanted.shape)
        if self.packed or why_no_fp8:
            place: Placement | str = why_no_fp8 or PACKED
        else:
            place = self._mirror(names, wanted, reference) or self._place(names, wanted, reference)
        if isinstance(place, Placement):
            value = place.view(self.tensors[place.name])
            self._record(names, module, attribute, place, value)
        else:
            value = reference.to(self.device, wanted.dtype, copy=True)
            self.rows.append(SharingRow(names[0], "", value.nbytes, False, place, names[1:]))
        put_parameter(self.model, names, value)

    def _mirror(self, names: tuple[str, ...], wanted: Tensor, reference: Tensor) -> str:
        """Find where vLLM holds the same values in another dtype (beside fp32 master weights).
        Returns why the parameter is copied; empty if there is no such place."""
        for name in names:
            for place in self.plan[name].placements:
                view = place.view(self.tensors[place.name])
                if view.dtype in (wanted.dtype, *FP8_DTYPES):
                    continue
                if not self._why_not_there(place, view, wanted) and equal_bits(view, reference):
                    self.mirrors |= dict.fromkeys(names, view)
                    return f"vLLM keeps it in {view.dtype}; rounded into it at each update"
        return ""

    def _place(self, names: tuple[str, ...], wanted: Tensor, reference: Tensor) -> Placement | str:
        """The first proposed place that holds the checkpoint's bytes, or why there is none."""
        reasons = []
        for name in names:
            proposal = self.plan[name]
            for place in proposal.placements:
                if not (why := self._why_not(place, wanted, reference)):
                    return place
                reasons.append(why)
            if not proposal.placements:
                reasons.append(proposal.reason)
        found = find_by_content(names[0], reference, wanted.dtype, self.tensors)
        if isinstance(found, str):
            return f"{reasons[0]}; {found}"
        return self._why_not(found, wanted, reference) or found

    def _why_not(self, place: Placement, wanted: Tensor, reference: Tensor) -> str:
        view = place.view(self.tensors[place.name])
        if view.dtype != wanted.dtype:
            return f"vLLM keeps {place.name} in {view.dtype}, the model in {wanted.dtype}"
        if why := self._why_not_there(place, view, wanted):
            return why
        if not equal_bits(view, reference):
            return f"vLLM's {place.name} holds other bytes than the checkpoint's tensor"
        return ""

    def _why_not_there(self, place: Placement, view: Tensor, wanted: Tensor) -> str:
        if view.device.type != self.device.type:
            return f"vLLM's {place.name} is on {view.device}, the model on {self.device}"
        if view.shape != wanted.shape:
            return f"vLLM's {place.name} gives {list(view.shape)}, not {list(wanted.shape)}"
        start, end = view.data_ptr(), view.data_ptr() + view.nbytes
        for (low, high), other in self.taken.items():
            if start < high and low < end:
                return f"{place.name} is shared with {other} already, which is not tied to it"
        return ""

    def _bind_fp8(self, path: str) -> str:
        """Makes a linear layer quantized if vLLM has its weight in FP8; why not, if so."""
        name = f"{path}.weight"
        place = next(iter(self.plan[name].placements), None)
        if self.packed or place is None or self.tensors[place.name].dtype not in FP8_DTYPES:
            return ""
        linear = self.model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        whole = self.tensors[place.name]
        view, found = place.view(whole), find_scale(self.vllm_model, whole, place)
        if isinstance(found, str):
            return found
        scale_name, scale = found
        reference = self.checkpoint.get([name], linear.weight.shape)
        if why := self._why_not_there(place, view, linear.weight):
            return why
        if why := why_not_quantized(view, scale, reference):
            return f"vLLM's {place.name}: {why}"
        module = QuantizedLinear(view, scale, "fp8", linear.bias, linear.weight.dtype).eval()
        setattr(*owner_of(self.model, path), module)
        self._record((name,), module, "weight", place, module.weight)
        self._record_scale(f"{path}.weight_scale", scale_name, module, place)
        return ""

    def _record(
        self,
        names: tuple[str, ...],
        module: nn.Module,
        attribute: str,
        place: Placement,
        value: Tensor,
    ) -> None:
        nbytes, start = value.nbytes, value.data_ptr()
        self.taken[start, start + nbytes] = names[0]
        self.bindings.append(
            Binding(names[0], module, attribute, place.name, lambda own: place.view(logical(own)))
        )
        self.rows.append(SharingRow(names[0], place.name, nbytes, True, place.how, names[1:]))

    def _record_scale(
        self, name: str, vllm_name: str, module: QuantizedLinear, place: Placement
    ) -> None:
        def view(_: Tensor) -> Tensor:
            weight = logical(self.vllm_model.get_parameter(place.name))
            found = find_scale(self.vllm_model, weight, place)
            return module.weight_scale.new_empty(0) if isinstance(found, str) else found[1]

        scale, owner = module.weight_scale, getattr(*owner_of(self.vllm_model, vllm_name))
        how = "FP8 scales"
        if scale.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr():
            self.bindings.append(Binding(name, module, "weight_scale", vllm_name, view))
        else:
            how += ", spread over rows that begin inside a block"
        self.rows.append(SharingRow(name, vllm_name, scale.nbytes, True, how))
