"""A PEFT model's weights as a checkpoint has them, adapters merged in; the model is not changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.runtime.lora_merge import Merge, merge_reference
from fxrl.runtime.lora_sites import (
    PEFT_PREFIX,
    AdapterError,
    LoraSite,
    adapted_layers,
    lora_sites,
)


def why_not_mergeable(model: nn.Module) -> str:
    """Empty, or the first thing that PEFT trains beside W + delta W."""
    for site in adapted_layers(model):
        if not hasattr(site.layer, "merge"):
            kind = type(site.layer).__name__
            return f"{site.name}: {kind} trains the module itself and cannot be merged"
        if site.layer.merged:
            return f"{site.name}: its adapter is merged already; unmerge it first"
    return ""


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by checkpoint names, one at a time.

    Plain LoRA is merged in float32 with one rounding; anything else of PEFT's (DoRA, LoHa, ...) by
    PEFT's own code, on a copy of the layer. A tied weight is given once, by its first name.

    Raises:
        AdapterError: see ``why_not_mergeable``.
    """
    if reason := why_not_mergeable(model):
        raise AdapterError(f"lora: {reason}; leave it out of the adapter, or share the weights")
    layers = {site.name: site for site in adapted_layers(model)}
    plain = _plain(model)
    merged: dict[str, dict[str, Tensor]] = {}
    seen: set[int] = set()
    for full, value in model.state_dict().items():
        name = _checkpoint_name(full)
        module, _, leaf = name.rpartition(".")
        if module in layers and ".base_layer." not in full:
            continue  # the adapter's own
        if value.numel() and value.data_ptr() in seen:
            continue
        seen.add(value.data_ptr())
        if module in layers:
            if module not in merged:
                merged = {module: _merged(layers[module], module in plain)}  # the last one only
            value = merged[module].get(leaf, value)
        if not _inside_adapter(name, layers):
            yield name, value.detach()


def _plain(model: nn.Module) -> set[str]:
    """Modules where W + scaling * B A says all."""
    try:
        return {site.name for site in lora_sites(model)}
    except AdapterError:
        return set()


def _merged(site: LoraSite, is_plain: bool) -> dict[str, Tensor]:
    if is_plain:
        weight = site.weight.clone()
        merge_reference(Merge(weight, tuple(site.factors()), site.is_transposed))
        return {"weight": weight}
    layer: Any = copy.deepcopy(site.layer)
    layer.merge()
    return dict(layer.get_base_layer().state_dict())


def _inside_adapter(name: str, layers: dict[str, LoraSite]) -> bool:
    """Whether ``name`` is of a module that PEFT has put into one of its layers."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in layers for i in range(1, len(parts) - 1))


def _checkpoint_name(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
