"""Copies new weights into a model in place, so that every view and optimizer keeps its storage."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fxrl.runtime.engine import EngineError


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies by parameter name; names that are left out keep their values.

    Raises:
        EngineError: a name is unknown or a shape differs; nothing has been copied then.
    """
    # Tied weights go by each of their names.
    own: dict[str, Tensor] = {}
    own.update(model.named_parameters(remove_duplicate=False))
    own.update(model.named_buffers(remove_duplicate=False))
    for name, value in weights.items():
        if name not in own:
            raise EngineError(f"weights: the model has no {name!r}; use its named_parameters()")
        if own[name].shape != value.shape:
            raise EngineError(
                f"weights: {name!r} has shape {tuple(value.shape)}, the model's has "
                f"{tuple(own[name].shape)}; both must be the same architecture"
            )
    for name, value in weights.items():
        if own[name].data_ptr() != value.data_ptr():
            own[name].copy_(value)


@torch.no_grad()
def copy_lora(
    model: nn.Module, adapter: Mapping[str, Tensor], adapter_name: str = "default"
) -> None:
    """Copies LoRA factors by the names of ``peft.get_peft_model_state_dict``.

    Those are the parameters' names without the adapter's own.

    Raises:
        EngineError: as ``copy_weights``.
    """
    inner = f".{adapter_name}."
    full = {
        name.replace(inner, "."): name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if ".lora_" in name and inner in name
    }
    if not full:
        raise EngineError(f"adapter: the model has no LoRA adapter {adapter_name!r}; add one first")
    copy_weights(model, {full.get(name, name): value for name, value in adapter.items()})
