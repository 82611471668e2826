"""Frozen Linears, and on request embeddings and head, that hold their weight in 8 or 4 bits, once:
read as stored, or quantised here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fxrl.errors import ConfigError, check_one_of, did_you_mean
from fxrl.ir.site import names_module
from fxrl.models.checkpoint import (
    CheckpointTensors,
    HeldWeight,
    build_skeleton,
    held_weights,
    owner_of,
    stored_names,
)
from fxrl.models.hf import ModelError
from fxrl.models.stored import (
    WEIGHTS,
    Stored,
    config_of,
    is_stored,
    names_stored,
    read_stored,
    recipe_of,
    stored_format,
    to_store,
    words_stored,
)
from fxrl.ops.checksum import bits
from fxrl.ops.dequantized import (
    FORMATS,
    GROUP,
    Format,
    dequantized_mm,
    dequantized_rows,
    quantized,
    sizes,
)
from fxrl.ops.fp8 import RECIPES, Recipe


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's frozen weights are held.

    Attributes:
        format: ``"fp8"`` (e4m3), ``"int4"`` or ``"nf4"`` (a scale for 64 entries of a row).
        recipe: a weight's scales in FP8: one for each output ``"row"``, for each ``"block"`` of
            128 x 128, or for the whole ``"tensor"``.
        skip: module paths, or parts of them, that stay; ``*`` stands for anything.
        least_values: entries of a weight below which it stays.
        embeddings: hold the table of input embeddings so, too, of which what is looked up is
            widened.
        head: hold the output layer so, too, which a loss head widens a piece of the vocabulary at
            a time. Where both are one weight they are held so together, once.

    Raises:
        ConfigError: a value is unknown, or the format has no such recipe.
    """

    format: Format
    recipe: Recipe = "row"
    skip: tuple[str, ...] = ()
    least_values: int = 0
    embeddings: bool = False
    head: bool = False

    def __post_init__(self) -> None:
        check_one_of("quantization", self.format, FORMATS)
        check_one_of("recipe", self.recipe, RECIPES)
        if isinstance(self.skip, str):
            raise ConfigError(f"skip={self.skip!r} is no list of names; write [{self.skip!r}]")
        if self.recipe != "row" and self.format != "fp8":
            raise ConfigError(
                f"recipe={self.recipe!r} is of FP8's scales, and {self.format} has one for "
                f"{GROUP} entries; leave it out"
            )

    def chosen(
        self, model: nn.Module, *, trained: bool = False, linears: bool = True
    ) -> list[HeldWeight]:
        """The weights of a model that are to be quantised: frozen ones, and with ``trained`` all;
        without ``linears`` only embeddings and head.

        Raises ``ModelError`` if ``skip`` names no Linear, the inputs of one are no multiple of 64
        in 4 bits, or embeddings or head cannot be quantised.
        """
        weights, ends = held_weights(model), self.ends(model)
        found = [p for one in weights for p, m in one.holders.items() if type(m) is nn.Linear]
        for pattern in self.skip:
            if not any(names_module(pattern, path) for path in found):
                leaves = {path.removesuffix(".base_layer").rpartition(".")[2] for path in found}
                near = did_you_mean(pattern, leaves)
                raise ModelError(f"skip={pattern!r} names no Linear of the model{near}")
        for name, end in ends.items():
            able = any(end in one.holders.values() for one in weights)
            if getattr(self, name) and not (able or isinstance(end, Quantized)):
                why = "has none"
                if end is not None:
                    why = f"has a {type(end).__name__} whose weight is not a plain layer's alone"
                raise ModelError(f"{name}=true: the model {why}; leave it out")
        chosen = [
            one
            for one in weights
            if self._takes(one, ends)
            and (trained or not one.weight.requires_grad)
            and (linears or any(end in one.holders.values() for end in ends.values()))
        ]
        for one in chosen:
            columns = one.weight.shape[1]
            if self.format != "fp8" and columns % GROUP:
                path = next(iter(one.holders))
                raise ModelError(
                    f"{path} has {columns} inputs; {self.format} takes multiples of {GROUP}; use "
                    "'fp8', or name it in skip"
                )
        return chosen

    @staticmethod
    def ends(model: nn.Module) -> dict[str, nn.Module | None]:
        """The input embeddings and the output layer, beneath any adapter."""
        names = {"embeddings": "get_input_embeddings", "head": "get_output_embeddings"}
        found = {end: getattr(model, name, lambda: None)() for end, name in names.items()}
        return {end: getattr(module, "base_layer", module) for end, module in found.items()}

    def _takes(self, one: HeldWeight, ends: dict[str, nn.Module | None]) -> bool:
        asked = {name: module for name, module in ends.items() if module in one.holders.values()}
        told = {name: getattr(self, name) for name in asked}
        if len({*told.values()}) > 1:
            (asked_for,) = (name for name, on in told.items() if on)
            raise ModelError(
                f"{asked_for}=true alone: embeddings and head of this model are one weight; set "
                "both, or none"
            )
        rest = [path for path, module in one.holders.items() if module not in asked.values()]
        return (
            all(told.values())
            and all(isinstance(one.holders[path], nn.Linear) for path in rest)
            and one.weight.numel() >= self.least_values
            and not any(names_module(p, path) for p in self.skip for path in one.holders)
        )

    def put(self, model: nn.Module, one: HeldWeight, weight: Tensor) -> None:
        """Hold one of the model's weights so, in the places of its holders."""
        _put(model, one, quantized(weight, self.format, self.recipe), self.format)


#: How a caller says it: the format alone leaves the rest at its defaults.
Asked = Format | Quantization


def as_quantization(asked: Asked) -> Quantization:
    """A format by name is that with its defaults."""
    try:
        return asked if isinstance(asked, Quantization) else Quantization(asked)
    except ConfigError as error:
        raise ModelError(str(error)) from error


class Quantized(nn.Module):
    """What has a weight in 8 or 4 bits; the base of those that compute with it.

    Its ``state_dict`` has the names and bytes that a checkpoint would (``fxrl.models.stored``): a
    model that was read so is saved so, by whatever saves it.
    """

    # In the layout of ``fxrl.ops.dequantized``; kept as views.
    weight: Tensor
    weight_scale: Tensor
    format: Format
    stored: Stored  # further tensors that the checkpoint has beside the weight; saved unchanged
    tied: bool  # another module owns the weight, and saves and loads it

    def hold(
        self, weight: Tensor, scale: Tensor, format: Format, stored: Stored | None, *, tied: bool
    ) -> torch.Size:
        """Set the attributes; called instead of ``__init__``, since PyTorch's would draw a weight.
        Returns the weight's shape."""
        self.format, self.stored, self.tied = format, dict(stored or {}), tied
        for name, value in (("weight", weight), ("weight_scale", scale)):
            made = value if isinstance(value, nn.Parameter) else nn.Parameter(value, False)
            self.register_parameter(name, made)
        return torch.Size(sizes(self.held, format))

    @property
    def held(self) -> list[Tensor]:
        """Values and scales, as the ops take them."""
        return [self.weight, self.weight_scale]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the weight with the model; a cast of the model leaves its dtypes alone."""
        held = {name: self._parameters.pop(name) for name in ("weight", "weight_scale")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, parameter in held.items():
            assert parameter is not None
            before = bits(parameter)  # which no cast of floating-point numbers is of
            moved = fn(before).to(before.dtype).view(parameter.dtype)
            if moved.is_meta and not parameter.is_meta:
                parameter = nn.Parameter(moved, False)
            elif moved.data_ptr() != parameter.data_ptr() or moved.device != parameter.device:
                parameter.data = moved  # the same parameter, for whoever is tied to it
            self.register_parameter(name, parameter)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight, scale = (destination.pop(f"{prefix}{name}") for name in ("weight", "weight_scale"))
        if self.tied:
            return
        for name, tensor in to_store(weight, scale, self.format, self.stored).items():
            destination[f"{prefix}{name}"] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        stored = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items()}
        weight, scale = self.held
        if found := is_stored(stored):
            shape = torch.Size(sizes(self.held, self.format))
            weight, scale = read_stored(stored, shape, self.format)
        if found or self.tied:
            own = {name: p for name, p in self._parameters.items() if p is not None}
            own |= {"weight": weight, "weight_scale": scale}  # type: ignore[dict-item]
            own |= {name: stored[name] for name in own.keys() & {"bias"} & stored.keys()}
            state_dict = {f"{prefix}{name}": tensor for name, tensor in own.items()}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Sizes and format, as ``print(model)`` shows them."""
        return f"{super().extra_repr()}, format={self.format!r}"


class QuantizedLinear(Quantized, nn.Linear):
    """``x weight^T + bias`` with a weight that is widened a part at a time.

    NOTE [Why a subclass of nn.Linear]: PEFT puts a LoRA beside what is one, and asks for
    ``compute_dtype`` where the weight's own dtype is none for an adapter.

    Args:
        weight, scale, format, stored, tied: see ``Quantized``.
        bias: [out], or None.
        compute_dtype: what adapters take as the base's dtype.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        format: Format,
        bias: nn.Parameter | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
        stored: Stored | None = None,
        *,
        tied: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.compute_dtype = compute_dtype
        shape = self.hold(weight, scale, format, stored, tied=tied)
        self.out_features, self.in_features = shape
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the input's dtype."""
        rows = input.reshape(-1, self.in_features)
        made: Tensor = dequantized_mm(rows, self.held, self.format, False)
        made = made.view(*input.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias


class QuantizedEmbedding(Quantized, nn.Embedding):
    """A table of which the rows that are looked up are widened.

    NOTE [Why there is an empty parameter]: rows come in the model's dtype, which a cast of the
    model changes, and ``verify`` for one run. And transformers takes the dtype of a model's first
    parameter in floating point for the model's, which it writes into what it saves.

    Args:
        weight, scale, format, stored, tied: see ``Quantized``.
        compute_dtype: of the rows.

    Attributes:
        like: [0], of the rows' dtype.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        format: Format,
        compute_dtype: torch.dtype = torch.bfloat16,
        stored: Stored | None = None,
        *,
        tied: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.like = nn.Parameter(weight.new_empty(0, dtype=compute_dtype), False)
        self.num_embeddings, self.embedding_dim = self.hold(
            weight, scale, format, stored, tied=tied
        )
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self.like.dtype

    def forward(self, input: Tensor) -> Tensor:
        """ids -> [*ids, embedding_dim]."""
        return dequantized_rows(input, self.held, self.format, self.like.dtype)  # type: ignore[no-any-return]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}like"]


def dtype_of(module: nn.Module) -> torch.dtype:
    """Dtype of the rows of an embedding table, or the one that adapters take beside a Linear."""
    held: Any = module
    return held.compute_dtype if isinstance(module, Quantized) else held.weight.dtype  # type: ignore[no-any-return]


def _put(
    model: nn.Module,
    one: HeldWeight,
    weight: tuple[Tensor, Tensor],
    format: Format,
    stored: Stored | None = None,
) -> None:
    """A weight's values and scales in the places of its holders, which have them in common."""
    (values, scale), dtype, tied = weight, one.weight.dtype, False
    for path, module in one.holders.items():
        made: Quantized
        if isinstance(module, nn.Linear):
            bias = module.bias
            made = QuantizedLinear(values, scale, format, bias, dtype, stored, tied=tied)
        else:
            made = QuantizedEmbedding(values, scale, format, dtype, stored, tied=tied)
        setattr(*owner_of(model, path), made.train(module.training))
        (values, scale), tied = made.held, True


def quantize(model: nn.Module, format: Asked) -> nn.Module:
    """Replace each frozen ``nn.Linear`` of a model, one at a time, by one that holds 8 or 4 bits.

    A layer's weight in more goes as soon as its values are made. Embeddings and the output layer
    stay where nobody asks for them, and so does what is trained. ``load_model`` does it while it
    reads. The configuration of a model of transformers says it from then on, so that
    ``save_pretrained`` writes a checkpoint that is read again as it is.

    Args:
        model: changed in place; as it was where this raises.
        format: a name, or all options.

    Raises:
        ModelError: there is no such format; or see ``Quantization.chosen``.
    """
    how = as_quantization(format)
    chosen = how.chosen(model)
    while chosen:  # nothing else has a weight in full when it is gone
        one = chosen.pop()
        how.put(model, one, one.weight.detach())
    note_format(model, how)
    return model


def in_bits(model: nn.Module, how: Quantization) -> nn.Module:
    """A model that was made whole, its weights in so few bits."""
    for one in how.chosen(model, trained=True):
        one.weight.requires_grad_(False)
    return quantize(model, how)


# ---------------------------------------------------------------------------- from a checkpoint
def load_quantized(
    folder: Path,
    format: Asked | None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The model of a checkpoint, its weights in 8 or 4 bits.

    What the checkpoint holds so is read as it is; else each weight is quantised when it is read, so
    that the host never has more than what is made and a weight in full. Of a checkpoint that has
    its Linears so, embeddings and head are quantised where ``format`` asks for them.

    Args:
        folder: with ``config.json`` and safetensors.
        format: to quantise in; None, or the same, where the checkpoint is quantised.
        dtype: of what stays; None is the checkpoint's.

    Raises:
        ModelError: the checkpoint is quantised otherwise, or something of it is not read.
    """
    model: Any = build_skeleton(folder, dtype)
    how, checkpoint = settled(folder, model.config, format), CheckpointTensors(folder, model)
    if how is not None:
        for one in _to_hold(model, folder, how):
            shape, own = one.weight.shape, one.weight.dtype
            values, scale, kept = read_in_bits(checkpoint, one.holders, shape, own, how, device)
            _put(model, one, (values.to(device), scale.to(device)), how.format, kept)
        note_format(model, how)
    checkpoint.fill(device)
    return model.to(device).eval()  # type: ignore[no-any-return]


def skeleton_in_bits(model: nn.Module, place: Path | None, how: Quantization) -> nn.Module:
    """Hold the weights of a model on ``meta`` as ``load_quantized`` would (``how`` is ``settled``),
    and read none of them; the model is changed in place.

    The names of the tensors in the checkpoint's folder ``place`` say which weights are quantised;
    without one that has safetensors, the model's configuration says it.
    """
    for one in _to_hold(model, place, how):
        how.put(model, one, one.weight.detach())
    note_format(model, how)
    return model


def _to_hold(model: nn.Module, place: Path | None, how: Quantization) -> list[HeldWeight]:
    """The weights that are to be in 8 or 4 bits; see ``skeleton_in_bits``."""
    config = quantization_of(getattr(model, "config", None)) or {}
    if stored_format(config) is None:
        return how.chosen(model, trained=True)
    names = stored_names(place) if place is not None else {}
    head = Quantization.ends(model)["head"]

    def stored(path: str, module: nn.Module) -> bool:
        if names:
            return names_stored(names, path)
        kind = "Embedding" if isinstance(module, nn.Embedding) else "Linear"
        return words_stored(config, path, "head" if module is head else kind)

    held = [w for w in held_weights(model) if any(stored(*one) for one in w.holders.items())]
    known = {id(one.weight) for one in held}
    ends = how.chosen(model, trained=True, linears=False)
    return [*held, *(one for one in ends if id(one.weight) not in known)]


def read_in_bits(
    checkpoint: CheckpointTensors,
    paths: Iterable[str],
    shape: torch.Size,
    dtype: torch.dtype,
    how: Quantization,
    device: torch.device | str,
) -> tuple[Tensor, Tensor, Stored]:
    """Values and scales of a weight [N, K] of the modules at ``paths``: as stored, with what the
    checkpoint has beside them; else rounded to ``dtype`` and quantised on ``device``. Raises as
    ``load_quantized`` does."""
    for path in paths:
        if is_stored(stored := checkpoint.beside(path)):
            kept = {name: x for name, x in stored.items() if name not in (*WEIGHTS, "bias")}
            return *_read_stored(checkpoint, path, stored, shape, how.format), kept
    weight = checkpoint.get([f"{path}.weight" for path in paths], shape).to(device, dtype)
    return *quantized(weight, how.format, how.recipe), {}


def _read_stored(
    checkpoint: CheckpointTensors, path: str, stored: Stored, shape: torch.Size, format: Format
) -> tuple[Tensor, Tensor]:
    try:
        return read_stored(stored, shape, format)
    except ValueError as error:
        where = f"checkpoint {str(checkpoint.folder)!r}: {path}"
        raise ModelError(f"{where}: {error}") from error


def settled(place: Path | str, config: Any, asked: Asked | None) -> Quantization | None:
    """How a checkpoint's weights will be held: as they are stored, which nothing else may be asked
    for then, else as asked for; None in full."""
    said = quantization_of(config)
    held = stored_format(said)
    how = None if asked is None else as_quantization(asked)
    if held is None:
        return how
    stored = Quantization(held, recipe_of(said))
    if how is not None:
        stored = replace(stored, embeddings=how.embeddings, head=how.head)
    default = replace(stored, recipe="row")  # what the name of the format alone asks for
    if how not in (None, stored, default):
        raise ModelError(
            f"model {str(place)!r} is quantised already, as {held}: quantization={asked!r} needs "
            f"the checkpoint in bf16; leave it out, or set {held!r}"
        )
    return stored


def quantization_of(config: Any) -> dict[str, Any] | None:
    """A configuration's ``quantization_config`` as a dictionary; None where there is none."""
    found: Any = getattr(config, "quantization_config", None)
    return found.to_dict() if hasattr(found, "to_dict") else found  # type: ignore[no-any-return]


def note_format(model: Any, how: Quantization) -> None:
    """Writes into the configuration of a model that is quantised here what ``save_pretrained``
    shall say of its weights; of one under adapters, as its layers are called without them."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(model, "save_pretrained") or stored_format(quantization_of(model.config)):
        return
    wide = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    wide = [path.removesuffix(".base_layer") for path in wide]
    made = config_of(how.format, how.recipe, wide, embeddings=how.embeddings)
    model.config.quantization_config = made
