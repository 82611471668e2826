"""Frozen Linears that hold their weight in 8 or 4 bits, once: read as stored, or quantised here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fxrl.errors import ConfigError, did_you_mean
from fxrl.ir.site import names_module
from fxrl.models.checkpoint import (
    CheckpointTensors,
    build_skeleton,
    owner_of,
)
from fxrl.models.hf import ModelError
from fxrl.models.stored import (
    WEIGHTS,
    Stored,
    config_of,
    is_stored,
    read_stored,
    stored_format,
    to_store,
)
from fxrl.ops.dequantized import FORMATS, GROUP, Format, dequantized_mm, quantized
from fxrl.ops.fp8 import RECIPES, Recipe


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's frozen Linears are held.

    Attributes:
        format: ``"fp8"`` (e4m3), ``"int4"`` or ``"nf4"`` (a scale for 64 entries of a row).
        recipe: a weight's scales in FP8: one for each output ``"row"``, for each ``"block"`` of
            128 x 128, or for the whole ``"tensor"``.
        skip: module paths, or parts of them, that stay; ``*`` stands for anything.
        least_values: entries of a weight below which it stays.

    Raises:
        ConfigError: a value is unknown, or the format has no such recipe.
    """

    format: Format
    recipe: Recipe = "row"
    skip: tuple[str, ...] = ()
    least_values: int = 0

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            known = ", ".join(map(repr, FORMATS))
            raise ConfigError(f"quantization={self.format!r} is not one of {known}")
        if self.recipe not in RECIPES:
            known = ", ".join(map(repr, RECIPES))
            raise ConfigError(f"recipe={self.recipe!r} is not one of {known}")
        if isinstance(self.skip, str):
            raise ConfigError(f"skip={self.skip!r} is no list of names; write [{self.skip!r}]")
        if self.recipe != "row" and self.format != "fp8":
            raise ConfigError(
                f"recipe={self.recipe!r} is of FP8's scales, and {self.format} has one for "
                f"{GROUP} entries; leave it out"
            )

    def chosen(self, model: nn.Module, *, trained: bool = False) -> dict[str, nn.Linear]:
        """The Linears of a model that are to be held so, by path.

        Args:
            trained: those whose weight requires a gradient, too.

        Raises:
            ModelError: ``skip`` names none, or one's inputs are no multiple of 64, in 4 bits.
        """
        found = dict(linears_of(model))
        for pattern in self.skip:
            if not any(names_module(pattern, path) for path in found):
                leaves = {path.removesuffix(".base_layer").rpartition(".")[2] for path in found}
                near = did_you_mean(pattern, leaves)
                raise ModelError(f"skip={pattern!r} names no Linear of the model{near}")
        chosen = {
            path: linear
            for path, linear in found.items()
            if (trained or not linear.weight.requires_grad)
            and linear.weight.numel() >= self.least_values
            and not any(names_module(pattern, path) for pattern in self.skip)
        }
        for path, linear in chosen.items():
            if self.format != "fp8" and linear.in_features % GROUP:
                raise ModelError(
                    f"{path} has {linear.in_features} inputs; {self.format} takes multiples of "
                    f"{GROUP}; use 'fp8', or name it in skip"
                )
        return chosen

    def made(self, linear: nn.Linear, weight: Tensor) -> QuantizedLinear:
        """What takes a Linear's place, with a weight of its dtype."""
        values = quantized(weight, self.format, self.recipe)
        return QuantizedLinear(*values, self.format, linear.bias, linear.weight.dtype)


#: How a caller says it: the format alone leaves the rest at its defaults.
Asked = Format | Quantization


def as_quantization(asked: Asked) -> Quantization:
    """A format by name is that with its defaults.

    Raises:
        ModelError: there is no such format.
    """
    try:
        return asked if isinstance(asked, Quantization) else Quantization(asked)
    except ConfigError as error:
        raise ModelError(str(error)) from error


class QuantizedLinear(nn.Linear):
    """``x weight^T + bias`` with a weight that is widened a part at a time.

    Its ``state_dict`` has the names and bytes that a checkpoint would (``fxrl.models.stored``): a
    model that was read so is saved so, by whatever saves it.

    NOTE [Why a subclass of nn.Linear]: PEFT puts a LoRA beside what is one, and asks for
    ``compute_dtype`` where the weight's own dtype is none for an adapter.

    Args:
        weight, scale: as ``fxrl.ops.dequantized`` has them; kept as views.
        format: ``"fp8"``, ``"int4"`` or ``"nf4"``.
        bias: [out], or None.
        compute_dtype: what adapters take as the base's dtype.
        stored: what the checkpoint has beside the weight, which is saved as it is.
    """

    weight_scale: nn.Parameter

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        format: Format,
        bias: nn.Parameter | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
        stored: Stored | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and draw a weight
        self.out_features, self.in_features = weight.shape
        if format != "fp8":
            self.in_features *= 2
        self.format, self.compute_dtype, self.stored = format, compute_dtype, dict(stored or {})
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the input's dtype."""
        rows = input.reshape(-1, self.in_features)
        made: Tensor = dequantized_mm(rows, [self.weight, self.weight_scale], self.format, False)
        made = made.view(*input.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the weight with the model; a cast of the model leaves its dtypes alone."""
        held = {name: self._parameters.pop(name) for name in ("weight", "weight_scale")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, parameter in held.items():
            assert parameter is not None
            moved = fn(parameter.detach())
            if moved.dtype != parameter.dtype:
                moved = parameter.detach().to(moved.device)
            same = moved.data_ptr() == parameter.data_ptr() and moved.device == parameter.device
            kept = parameter if same else nn.Parameter(moved, requires_grad=False)
            self.register_parameter(name, kept)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight, scale = (destination.pop(f"{prefix}{name}") for name in ("weight", "weight_scale"))
        for name, tensor in to_store(weight, scale, self.format, self.stored).items():
            destination[f"{prefix}{name}"] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        stored = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items()}
        if is_stored(stored):
            shape = torch.Size((self.out_features, self.in_features))
            weight, scale = read_stored(stored, shape, self.format)
            state_dict = {f"{prefix}weight": weight, f"{prefix}weight_scale": scale}
            if "bias" in stored:
                state_dict[f"{prefix}bias"] = stored["bias"]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Sizes and format, as ``print(model)`` shows them."""
        return f"{super().extra_repr()}, format={self.format!r}"


def quantize(model: nn.Module, format: Asked) -> nn.Module:
    """Replace each frozen ``nn.Linear`` of a model, one at a time, by one that holds 8 or 4 bits.

    A layer's weight in more goes as soon as its values are made. The output layer stays, and so
    does what is trained. ``load_model`` does it while it reads.

    Args:
        model: changed in place; as it was where this raises.
        format: a name, or all options.

    Raises:
        ModelError: there is no such format; or see ``Quantization.chosen``.
    """
    how = as_quantization(format)
    for path, child in how.chosen(model).items():
        setattr(*owner_of(model, path), how.made(child, child.weight.detach()))
    return model


def linears_of(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The plain Linears of a model but its output layer, by path."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            yield path, module


# ---------------------------------------------------------------------------- from a checkpoint
def load_quantized(
    folder: Path,
    format: Asked | None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The model of a checkpoint, its Linears in 8 or 4 bits.

    What the checkpoint holds so is read as it is; else each Linear is quantised when it is read, so
    that the host never has more than what is made and a Linear in full.

    Args:
        folder: with ``config.json`` and safetensors.
        format: to quantise in; None where the checkpoint is quantised.
        dtype: of what stays; None is the checkpoint's.
        device: of the model.

    Returns:
        The model in eval mode.

    Raises:
        ModelError: the checkpoint is quantised otherwise, or something of it is not read.
    """
    model: Any = build_skeleton(folder, dtype)
    held = stored_format(quantization_of(model.config))
    how = settled(folder, model.config, format)
    checkpoint = CheckpointTensors(folder, model)
    if held is not None:
        _take_stored(model, checkpoint, held, device)
    elif how is not None:
        _take_quantized(model, checkpoint, how, device)
    checkpoint.fill(device)
    return model.to(device).eval()  # type: ignore[no-any-return]


def settled(place: Path | str, config: Any, asked: Asked | None) -> Quantization | None:
    """How a checkpoint's Linears will be held: as they are stored, else as asked for.

    Raises:
        ModelError: it is quantised already, and something else is asked for.
    """
    held = stored_format(quantization_of(config))
    how = None if asked is None else as_quantization(asked)
    if held is None:
        return how
    if how not in (None, Quantization(held)):
        raise ModelError(
            f"model {str(place)!r} is quantised already, as {held}: quantization={asked!r} needs "
            f"the checkpoint in bf16; leave it out, or set {held!r}"
        )
    return Quantization(held)


def quantization_of(config: Any) -> dict[str, Any] | None:
    """A configuration's ``quantization_config`` as a dictionary; None where there is none."""
    found: Any = getattr(config, "quantization_config", None)
    return found.to_dict() if hasattr(found, "to_dict") else found  # type: ignore[no-any-return]


def _take_quantized(
    model: Any, checkpoint: CheckpointTensors, how: Quantization, device: torch.device | str
) -> None:
    for path, linear in how.chosen(model, trained=True).items():
        shape, dtype = linear.weight.shape, linear.weight.dtype
        weight = checkpoint.get([f"{path}.weight"], shape).to(device, dtype)
        setattr(*owner_of(model, path), how.made(linear, weight))
    note_format(model, how)


def note_format(model: Any, how: Quantization) -> None:
    """Writes into a model's configuration what ``save_pretrained`` shall say of its Linears."""
    wide = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    model.config.quantization_config = config_of(how.format, how.recipe, wide)


def _take_stored(
    model: Any, checkpoint: CheckpointTensors, format: Format, device: torch.device | str
) -> None:
    linears = {path: m for path, m in model.named_modules() if type(m) is nn.Linear}
    for path, linear in linears.items():
        stored = checkpoint.beside(path)
        stored.pop("bias", None)
        if not is_stored(stored):
            continue
        try:
            values, scale = read_stored(stored, linear.weight.shape, format)
        except ValueError as error:
            raise ModelError(f"checkpoint {str(checkpoint.folder)!r}: {path}: {error}") from error
        kept = {name: tensor for name, tensor in stored.items() if name not in WEIGHTS}
        made = QuantizedLinear(
            values.to(device), scale.to(device), format, linear.bias, linear.weight.dtype, kept
        )
        setattr(*owner_of(model, path), made)
