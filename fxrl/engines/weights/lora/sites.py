"""Where a PEFT model has LoRA, whether W + scaling * B A says all of it, and the merge of both.

Both ways of handing an adapter to the engine (folding it into the weights, or writing it into
vLLM's slots) need the same: per module one A, one B and one factor. Everything that PEFT can do
beside that is refused here by name, because a rollout that leaves a part of the policy out is
wrong without any sign of it.

NOTE [Why a fold into FP8 may be refused]
Neighbours in e4m3 lie 2^-3 to 2^-4 apart, relative to them, and a LoRA's change of a weight is
often less: W + delta W is then rounded back to W, the engine would serve the base model, and
nothing would say so. What is lost is measured, as a share of the change's norm.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.dtypes import at_least_float32
from fxrl.engines.engine import EngineError
from fxrl.models import QuantizedLinear, Sharded
from fxrl.models.hf import VALUE_HEAD
from fxrl.ops.dithered import DROPPED, dithered, seed_of
from fxrl.ops.fp8 import dequantized, requantized

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of the model that it wraps."""


class AdapterError(EngineError):
    """The model has no LoRA adapter, or one that cannot be handed to the engine as B A."""


@dataclass(frozen=True, slots=True)
class Factors:
    """An adapter's low-rank pair at a module: delta = scaling * B A, transposed for [in, out]."""

    a: Tensor  # [rank, in], the trainer's own tensor (never written here)
    b: Tensor  # [out, rank], likewise
    scaling: float  # alpha / r, or alpha / sqrt(r) with rsLoRA; PEFT's number


@dataclass(frozen=True, eq=False)
class LoraSite:
    name: str  # the module's name in the model without PEFT's wrapper, as checkpoints have it
    layer: Any  # PEFT's layer around it

    @property
    def weight(self) -> Tensor:
        """The frozen weight: [out, in], or [in, out] where ``is_transposed``."""
        weight: Tensor = self.layer.get_base_layer().weight
        return weight.detach()

    @property
    def scale(self) -> Tensor | None:
        """The scales of a weight in FP8 (``fxrl.ops.fp8``); None of others."""
        base = self.layer.get_base_layer()
        is_fp8 = isinstance(base, QuantizedLinear) and base.format == "fp8"
        return base.weight_scale.detach() if is_fp8 else None

    @property
    def is_transposed(self) -> bool:
        """True where the weight is stored [in, out] (PEFT's ``fan_in_fan_out``, GPT-2)."""
        return bool(self.layer.fan_in_fan_out)

    def factors(self) -> list[Factors]:
        """Factors of the active adapters; empty if none of them targets this module."""
        layer = self.layer
        return [
            Factors(
                layer.lora_A[name].weight.detach(),
                layer.lora_B[name].weight.detach(),
                float(layer.scaling[name]),
            )
            for name in layer.active_adapters
            if name in layer.lora_A
        ]


def lora_sites(model: nn.Module) -> tuple[LoraSite, ...]:
    """All modules that an active LoRA adapter changes, in the model's order. The model is a
    ``peft.PeftModel``, or has PEFT layers inside.

    Raises ``AdapterError``, naming module, reason and cure, if there is no adapter, or anything of
    it is not of the form W + scaling * B A: DoRA and other variants, biases, modules saved whole,
    embeddings, convolutions, quantized bases, merged or disabled adapters.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if (bias := getattr(config, "bias", "none")) != "none":
            raise AdapterError(
                f"lora: adapter {name!r} trains biases too (bias={bias!r}); set bias='none'"
            )
    sites = active_sites(adapted_layers(model))
    if not sites:
        raise AdapterError(
            f"lora: {type(model).__name__} has no active LoRA adapter; with full fine-tuning the "
            "weights are the policy (engine.update_weights), else wrap it (fxrl.models.lora)"
        )
    return sites


def adapted_layers(model: nn.Module) -> tuple[LoraSite, ...]:
    """All of PEFT's wrappers, LoRA or not, whatever is active; none where PEFT is not installed.

    Stays valid until adapters are added to or deleted from the model.
    """
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError:
        return ()
    return tuple(
        LoraSite(name.removeprefix(PEFT_PREFIX), module)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
    )


def active_sites(layers: Sequence[LoraSite]) -> tuple[LoraSite, ...]:
    """The layers that an active adapter changes; refuses as ``lora_sites`` does."""
    for site in layers:
        if reason := _why_not_plain(site.layer):
            raise AdapterError(
                f"lora: {site.name}: {reason}; train plain LoRA on linear layers, or have the "
                "engine copy merged weights (route 'copy')"
            )
    return tuple(site for site in layers if site.factors())


def _why_not_plain(layer: Any) -> str | None:
    """The first reason why this wrapper is not W + scaling * B A; None if it is."""
    from peft.tuners.lora.layer import Linear
    from peft.utils.other import AuxiliaryTrainingWrapper

    kind = type(layer).__name__
    if isinstance(layer, AuxiliaryTrainingWrapper):
        return f"{kind} trains the module itself (modules_to_save or trainable tokens)"
    if type(layer) is not Linear:
        return f"PEFT's {kind} is not LoRA on an unquantized linear layer"
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    for name in active:
        if variant := layer.lora_variant.get(name):
            return f"adapter {name!r} is a variant ({type(variant).__name__}), not plain LoRA"
        if layer.lora_bias.get(name):
            return f"adapter {name!r} has a bias on B (lora_bias=True)"
    if layer.merged:
        return f"adapter {layer.merged_adapters} is merged already; unmerge it first"
    if active and layer.disable_adapters:
        return "its adapters are disabled now (disable_adapter()); leave that block first"
    return _why_not_a_weight(layer)


def _why_not_a_weight(layer: Any) -> str | None:
    base = layer.get_base_layer()
    if isinstance(base, Sharded):
        return "its weight is shared out over ranks, and none of them has it to change"
    weight = getattr(base, "weight", None)
    if isinstance(base, QuantizedLinear) and weight is not None and not weight.is_meta:
        return None  # what it holds is no obstacle to slots
    if getattr(layer, "quantization_backend", None) is not None or weight is None:
        return f"its base layer {type(layer.get_base_layer()).__name__} is quantized"
    if weight.dim() != 2 or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"its weight is {weight.dtype} {tuple(weight.shape)}, not an unquantized matrix"
    if weight.is_meta:
        return "its weight is on the meta device (offloaded or never loaded)"
    return None


def check_storages(model: nn.Module, sites: Sequence[LoraSite]) -> None:
    """Raise ``AdapterError`` unless every site's weight is contiguous, on the same device as the
    others, and shares memory with no other parameter (a tied embedding, say)."""
    _check_owners(model, sites)
    device = sites[0].weight.device
    for site in sites:
        if site.weight.dtype.itemsize < 2 and site.scale is None:
            kind = site.layer.get_base_layer().format
            raise AdapterError(f"lora: {site.name}: its weight is {kind}, cannot be folded into")
        if not site.weight.is_contiguous():
            raise AdapterError(f"lora: {site.name}: its weight is not contiguous, cannot be folded")
        if site.weight.device != device:
            raise AdapterError(
                f"lora: {site.name} is on {site.weight.device}, {sites[0].name} on {device}; "
                "folding needs one device"
            )


def _check_owners(model: nn.Module, sites: Sequence[LoraSite]) -> None:
    owners = {id(site.layer.get_base_layer().weight): site.name for site in sites}
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name, owners.get(id(tensor), ""))
        for name, tensor in model.named_parameters(remove_duplicate=False)
        if tensor.numel() and not tensor.is_meta
    )
    reach, last, last_owner = 0, "", ""
    for start, end, name, owner in spans:
        if start < reach and (owner or last_owner):
            raise AdapterError(
                f"lora: {name} and {last} share memory, so folding {owner or last_owner} would "
                "change both; leave tied weights out of target_modules, or use the engine's LoRA"
            )
        if end > reach:
            reach, last, last_owner = end, name, owner


@dataclass(frozen=True, eq=False)
class Merge:
    """One weight to fold into."""

    weight: Tensor  # [out, in] (or [in, out] where ``is_transposed``), overwritten
    factors: tuple[Factors, ...]  # not empty
    is_transposed: bool = False
    scale: Tensor | None = None  # of a weight [out, in] in FP8, which the sum keeps
    seed: int = 0  # of the rounding to 16 bits (``fxrl.ops.dithered``)

    @classmethod
    def of(cls, site: LoraSite, weight: Tensor | None = None) -> Merge:
        """A site's active adapters into its weight, or another one like it."""
        weight = site.weight if weight is None else weight
        seed = seed_of(site.name)
        return cls(weight, tuple(site.factors()), site.is_transposed, site.scale, seed)

    def total(self) -> tuple[Tensor, Tensor]:
        """The sum and the delta in float32 (float64 for a float64 weight)."""
        if self.scale is not None:
            total = dequantized(self.weight, self.scale, torch.float32)
        else:
            total = at_least_float32(self.weight)
        delta = torch.zeros_like(total)
        with torch.autocast(self.weight.device.type, enabled=False):
            for pair in self.factors:
                one = pair.scaling * (pair.b.to(total.dtype) @ pair.a.to(total.dtype))
                delta += one.t() if self.is_transposed else one
        return total + delta, delta

    def rounded(self, total: Tensor) -> Tensor:
        """The sum as the weight holds numbers."""
        if self.scale is None:
            return dithered(total, self.weight.dtype, self.seed)
        return requantized(total, self.scale)


@torch.no_grad()
def merge_reference(merge: Merge) -> None:
    """The definition: the delta in float32 (float64 for a float64 weight), one rounding, by chance
    to 16 bits."""
    merge.weight.copy_(merge.rounded(merge.total()[0]))


#: A fold into FP8 that takes a larger share off an adapter's change of a weight is refused.
MOST_LOST = 0.25


@torch.no_grad()
def lost_share(merge: Merge) -> float:
    """What rounding W + delta W to FP8 takes off it, as a share of delta W's norm (Frobenius).

    NaN where delta W is zero, as before the first update: of what follows that says nothing.
    """
    assert merge.scale is not None, "of a weight in FP8"
    total, delta = merge.total()
    kept = dequantized(merge.rounded(total), merge.scale, torch.float32)
    return float((kept - total).norm() / delta.norm())


def why_lost(merges: Mapping[str, Merge], *, zero_too: bool = False) -> str:
    """Which FP8 weights are too coarse for their adapter, in words; empty if none is. ``zero_too``
    counts weights whose delta is still zero."""
    shares = {name: lost_share(one) for name, one in merges.items() if one.scale is not None}
    refused = {
        name: share
        for name, share in shares.items()
        if share > MOST_LOST or (zero_too and isnan(share))
    }
    if not refused:
        return ""
    worst = max(refused, key=lambda name: -1.0 if isnan(refused[name]) else refused[name])
    lost = f"loses {refused[worst]:.0%} of its change"
    if isnan(refused[worst]):
        lost = "is zero yet, and what it would lose is not known"
    return (
        f"{len(refused)} of {len(merges)} weights are in FP8 and too coarse for their adapter: at "
        f"{worst} it {lost} (at most {MOST_LOST:.0%}); build the engine with LoRA slots "
        "(max_lora_rank), or serve the base in bf16"
    )


@torch.no_grad()
def merge_all(merges: Sequence[Merge]) -> None:
    """``merge_reference`` for each; of 16 bits on a GPU in one pass over the weight."""
    for merge in merges:
        if merge.weight.is_cuda and merge.weight.dtype in DROPPED:
            _merge_in_one_pass(merge)
        else:
            merge_reference(merge)


def _merge_in_one_pass(merge: Merge) -> None:
    from fxrl.kernels.merge import merge as kernel  # Triton, which only a GPU needs

    first, *others = merge.factors
    b, a, scaling = first.b, first.a, first.scaling
    if others:
        b = torch.cat([pair.scaling * pair.b.float() for pair in merge.factors], 1)
        a, scaling = torch.cat([pair.a.float() for pair in merge.factors]), 1.0
    kernel(merge.weight.t() if merge.is_transposed else merge.weight, b, a, scaling, merge.seed)


def why_not_mergeable(model: nn.Module) -> str:
    """Empty, or the first thing that PEFT trains beside W + delta W."""
    for site in adapted_layers(model):
        base = site.layer.get_base_layer() if hasattr(site.layer, "get_base_layer") else None
        if isinstance(base, Sharded):
            return f"{site.name}: its weight is shared out over ranks"
        if isinstance(base, QuantizedLinear):
            return f"{site.name}: its weight is {base.format}, and a merge would round it again"
        if not hasattr(site.layer, "merge"):
            kind = type(site.layer).__name__
            return f"{site.name}: {kind} trains the module itself and cannot be merged"
        if site.layer.merged:
            return f"{site.name}: its adapter is merged already; unmerge it first"
    return ""


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by checkpoint names, one at a time.

    Plain LoRA is merged in float32 with one rounding, by chance; anything else of PEFT's (DoRA,
    LoHa, ...) by PEFT's own code, on a copy of the layer. A tied weight is given once, by its first
    name.
    """
    if reason := why_not_mergeable(model):
        raise AdapterError(f"lora: {reason}; leave it out of the adapter, or share the weights")
    layers = {site.name: site for site in adapted_layers(model)}
    plain = _plain(model)
    merged: dict[str, dict[str, Tensor]] = {}
    seen: set[int] = set()
    for full, value in model.state_dict().items():
        name = full.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
        module, _, leaf = name.rpartition(".")
        if module in layers and ".base_layer." not in full:
            continue  # the adapter's own
        if module == VALUE_HEAD:
            continue  # the trainer's alone
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
        merge_reference(Merge.of(site, weight))
        return {"weight": weight}
    layer: Any = copy.deepcopy(site.layer)
    layer.merge()
    return dict(layer.get_base_layer().state_dict())


def _inside_adapter(name: str, layers: dict[str, LoraSite]) -> bool:
    """Whether ``name`` is of a module that PEFT has put into one of its layers."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in layers for i in range(1, len(parts) - 1))
