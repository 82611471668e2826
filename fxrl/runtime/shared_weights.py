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
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.runtime.checkpoint_tensors import CheckpointTensors
from fxrl.runtime.checksum import checksum, checksums
from fxrl.runtime.engine import EngineError
from fxrl.runtime.fp8_linear import Fp8Linear
from fxrl.runtime.hf_skeleton import build_skeleton
from fxrl.runtime.sharing_report import SharingError, SharingReport, SharingRow
from fxrl.runtime.weight_binder import WeightBinder

__all__ = ["SharingError", "SharingReport", "SharingRow", "checksum", "share"]

log = logging.getLogger(__name__)


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
    place gets a storage of its own, filled from the checkpoint, and the report says why. Linear
    layers that vLLM has quantized to FP8 become ``Fp8Linear`` over vLLM's values and scales, if
    those are the checkpoint's rounded.

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
        checkpoint = CheckpointTensors(folder, model)
        binder = WeightBinder(vllm_model, model, checkpoint, torch.device(device))
        binder.bind_all(requires_grad)
    model.to(device)  # buffers; every parameter is there already, so none moves
    warnings = derived_tensors(vllm_model)
    if requires_grad and any(isinstance(module, Fp8Linear) for module in model.modules()):
        warnings.append("FP8 weights are frozen: only what stayed wider can be trained, or a LoRA")
    bindings = tuple(binder.bindings)
    baseline = checksums({binding.name: binding.tensor() for binding in bindings})
    report = SharingReport(
        rows=tuple(binder.rows),
        warnings=tuple(warnings),
        seconds=time.perf_counter() - started,
        mirrors=binder.mirrors,
        vllm_model=vllm_model,
        bindings=bindings,
        baseline=baseline,
    )
    report.verify_again(contents=False)
    if not report.complete:
        log.warning("%s", report)
    return model, report


def derived_tensors(vllm_model: nn.Module, min_elements: int = 2**10) -> list[str]:
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
