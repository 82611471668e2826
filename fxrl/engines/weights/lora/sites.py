"""Where a PEFT model has LoRA, and whether W + scaling * B A says all that the adapter does.

Both ways of handing an adapter to the engine (folding it into the weights, or writing it into
vLLM's slots) need the same: per module one A, one B and one factor. Everything that PEFT can do
beside that is refused here by name, because a rollout that leaves a part of the policy out is
wrong without any sign of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fxrl.engines.engine import EngineError

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of the model that it wraps."""


class AdapterError(EngineError):
    """The model has no LoRA adapter, or one that cannot be handed to the engine as B A."""


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter's low-rank pair at one module: delta = scaling * B A (transposed for [in, out]).

    Attributes:
        a: [rank, in], the trainer's own tensor (never written here).
        b: [out, rank], likewise.
        scaling: alpha / r, or alpha / sqrt(r) with rsLoRA; PEFT's number.
    """

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True, eq=False)
class LoraSite:
    """A module with LoRA.

    Attributes:
        name: the module's name in the model without PEFT's wrapper, as checkpoints have it.
        layer: PEFT's layer around it.
    """

    name: str
    layer: Any

    @property
    def weight(self) -> Tensor:
        """The frozen weight: [out, in], or [in, out] where ``is_transposed``."""
        weight: Tensor = self.layer.get_base_layer().weight
        return weight.detach()

    @property
    def is_transposed(self) -> bool:
        """True where the weight is stored [in, out] (PEFT's ``fan_in_fan_out``, GPT-2)."""
        return bool(self.layer.fan_in_fan_out)

    def factors(self) -> list[Factors]:
        """Of the adapters that are active now; empty where none of them targets this module."""
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
    """All modules that an active LoRA adapter changes, in the model's order.

    Args:
        model: a ``peft.PeftModel``, or a model with PEFT layers inside.

    Raises:
        AdapterError: there is no adapter; or something of it is not of the form
            W + scaling * B A (DoRA and other variants, biases, modules saved whole, embeddings,
            convolutions, quantized bases, merged or disabled adapters). The message names the
            module, the reason and the cure.
    """
    if reason := _bias_reason(model):
        raise AdapterError(f"lora: {reason}")
    sites = active_sites(adapted_layers(model))
    if not sites:
        raise AdapterError(
            f"lora: {type(model).__name__} has no active LoRA adapter; with full fine-tuning the "
            "weights are the policy (engine.update_weights), else wrap it (fxrl.models.lora)"
        )
    return sites


def adapted_layers(model: nn.Module) -> tuple[LoraSite, ...]:
    """All of PEFT's wrappers, whatever is active; what it is made of is not checked here.

    Stays valid until adapters are added to or deleted from the model.
    """
    return tuple(LoraSite(name, layer) for name, layer in _tuner_layers(model))


def active_sites(layers: Sequence[LoraSite]) -> tuple[LoraSite, ...]:
    """Those that an active adapter changes; refuses as ``lora_sites`` does."""
    for site in layers:
        if reason := _why_not_plain(site.layer):
            raise AdapterError(
                f"lora: {site.name}: {reason}; train plain LoRA on linear layers, or have the "
                "engine copy merged weights (route 'copy')"
            )
    return tuple(site for site in layers if site.factors())


def _tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's wrappers in the model, LoRA or not; none where PEFT is not installed."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError:
        return
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield name.removeprefix(PEFT_PREFIX), module


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
    weight = getattr(layer.get_base_layer(), "weight", None)
    if getattr(layer, "quantization_backend", None) is not None or weight is None:
        return f"its base layer {type(layer.get_base_layer()).__name__} is quantized"
    if weight.dim() != 2 or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"its weight is {weight.dtype} {tuple(weight.shape)}, not an unquantized matrix"
    if weight.is_meta:
        return "its weight is on the meta device (offloaded or never loaded)"
    return None


def _bias_reason(model: nn.Module) -> str | None:
    for name, config in getattr(model, "peft_config", {}).items():
        if (bias := getattr(config, "bias", "none")) != "none":
            return f"adapter {name!r} trains biases too (bias={bias!r}); set bias='none'"
    return None


def check_storages(model: nn.Module, sites: Sequence[LoraSite]) -> None:
    """Every site's weight must be contiguous, on one device, and nobody else's.

    Raises:
        AdapterError: two parameters of the model share memory and one of them is a site's (a tied
            embedding, say); or a weight is not contiguous, or on another device than the first.
    """
    _check_owners(model, sites)
    device = sites[0].weight.device
    for site in sites:
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
