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
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.runtime.checkpoint_tensors import CheckpointTensors
from fxrl.runtime.checksum import checksum, checksums, model_checksum
from fxrl.runtime.engine import EngineError
from fxrl.runtime.hf_skeleton import build_skeleton, owner_of, parameter_groups
from fxrl.runtime.sharing_report import (
    Binding,
    SharingError,
    SharingReport,
    SharingRow,
    logical,
)
from fxrl.runtime.weight_layout import Placement, Proposal, plan_layout
from fxrl.runtime.weight_search import equal_bits, find_by_content

__all__ = ["SharingError", "SharingReport", "SharingRow", "checksum", "model_checksum", "share"]

log = logging.getLogger(__name__)

PACKED = (
    "vLLM has packed its weights for its CPU kernels (their shape is (0,)); there is nothing to "
    "share on a CPU: after training call engine.update_weights(...)"
)


def share(
    vllm_model: nn.Module,
    config: Any,
    checkpoint_dir: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    requires_grad: bool = True,
    attn_implementation: str | None = None,
    building: AbstractContextManager[Any] | None = None,
) -> tuple[nn.Module, SharingReport]:
    """Builds the Hugging Face model of a checkpoint that vLLM has loaded, over vLLM's storages.

    Every shared parameter is compared with the checkpoint, byte for byte; what differs or finds no
    place gets a storage of its own, filled from the checkpoint, and the report says why.

    Args:
        vllm_model: the ``nn.Module`` inside vLLM, unsharded, weights loaded and resident.
        config: a ``PretrainedConfig``; ``None`` reads the checkpoint's.
        checkpoint_dir: the folder that vLLM has loaded.
        dtype: of the model; parameters that vLLM keeps in another one cannot be shared.
        device: of the model; vLLM's, where anything is to be shared.
        requires_grad: of the parameters (a frozen base gets it switched off by PEFT).
        attn_implementation: as for ``from_pretrained``.
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
    with building or nullcontext():
        model = build_skeleton(config, folder, dtype, attn_implementation)
    binder = _Binder(vllm_model, model, CheckpointTensors(folder, model), torch.device(device))
    for names in parameter_groups(model):
        binder.bind(names, requires_grad)
    model.to(device)  # buffers; every parameter is there already, so none moves
    warnings = derived_tensors(vllm_model)
    bindings = tuple(binder.bindings)
    report = SharingReport(
        rows=tuple(binder.rows),
        warnings=tuple(warnings),
        seconds=time.perf_counter() - started,
        vllm_model=vllm_model,
        bindings=bindings,
        baseline=checksums({binding.name: binding.tensor() for binding in bindings}),
    )
    report.verify_again(contents=False)
    if not report.complete:
        log.warning("%s", report)
    return model, report


class _Binder:
    """Gives the parameters of a skeleton their storages, one after the other."""

    def __init__(
        self,
        vllm_model: nn.Module,
        model: nn.Module,
        checkpoint: CheckpointTensors,
        device: torch.device,
    ) -> None:
        self.model, self.checkpoint, self.device = model, checkpoint, device
        named = dict(vllm_model.named_parameters(remove_duplicate=False))
        self.packed = any(value.numel() == 0 for value in named.values())
        self.tensors = {name: logical(value) for name, value in named.items()}
        wanted = dict(model.named_parameters(remove_duplicate=False))
        shapes = {name: value.shape for name, value in wanted.items()}
        self.plan: Mapping[str, Proposal] = plan_layout(vllm_model, self.tensors, shapes)
        self.taken: dict[tuple[int, int], str] = {}  # address range -> HF name
        self.rows: list[SharingRow] = []
        self.bindings: list[Binding] = []

    def bind(self, names: tuple[str, ...], requires_grad: bool) -> None:
        module, attribute = owner_of(self.model, names[0])
        wanted = getattr(module, attribute)
        reference = self.checkpoint.get(names, wanted.shape)
        place = PACKED if self.packed else self._place(names, wanted, reference)
        nbytes = wanted.numel() * wanted.element_size()
        if isinstance(place, Placement):
            value = place.view(self.tensors[place.name])
            start = value.data_ptr()
            self.taken[start, start + nbytes] = names[0]
            self.bindings.append(Binding(names[0], module, attribute, place.name, place))
            rows = (place.start, place.length)
            row = SharingRow(names[0], place.name, rows, nbytes, True, place.how, names[1:])
        else:
            value = reference.to(self.device, wanted.dtype, copy=True)
            row = SharingRow(names[0], "", None, nbytes, False, place, names[1:])
        self.rows.append(row)
        parameter = nn.Parameter(value, requires_grad)
        for name in names:
            owner, leaf = owner_of(self.model, name)
            setattr(owner, leaf, parameter)

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
        if view.device.type != self.device.type:
            return f"vLLM's {place.name} is on {view.device}, the model on {self.device}"
        if view.dtype != wanted.dtype:
            return f"vLLM keeps {place.name} in {view.dtype}, the model in {wanted.dtype}"
        if view.shape != wanted.shape:
            return f"vLLM's {place.name} gives {list(view.shape)}, not {list(wanted.shape)}"
        start, end = view.data_ptr(), view.data_ptr() + view.numel() * view.element_size()
        for (low, high), other in self.taken.items():
            if start < high and low < end:
                return f"{place.name} is shared with {other} already, which is not tied to it"
        if not equal_bits(view, reference):
            return f"vLLM's {place.name} holds other bytes than the checkpoint's tensor"
        return ""


def derived_tensors(vllm_model: nn.Module, min_elements: int = 2**14) -> list[str]:
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
            if not isinstance(value, Tensor) or value.numel() < min_elements:
                continue
            known = value.untyped_storage().data_ptr() in own
            if not (known or "cache" in name or "lora" in name or not value.is_floating_point()):
                found.setdefault(f"{type(module).__name__}.{name}", path)
    return [
        f"vLLM keeps {name} ({path}) beside its weights: updates of the weight that it was "
        "computed from do not reach it"
        for name, path in found.items()
    ]
