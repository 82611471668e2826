"""Frozen Linears that hold their weight in 8 or 4 bits, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from fxrl.models.hf import ModelError
from fxrl.ops.dequantized import FORMATS, GROUP, Format, dequantized_mm, quantized


class QuantizedLinear(nn.Module):
    """``x weight^T + bias`` with a weight that is widened a part at a time.

    Attributes:
        values, scale: the weight, as ``fxrl.ops.dequantized`` has it.
        format: ``"fp8"``, ``"int4"`` or ``"nf4"``.
    """

    values: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, format: Format) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format, self.bias = format, linear.bias
        values, scale = quantized(linear.weight.detach(), format)
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in x's dtype."""
        rows = x.reshape(-1, self.in_features)
        made: Tensor = dequantized_mm(rows, [self.values, self.scale], self.format, False)
        made = made.view(*x.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the weight with the model; a cast of the model leaves its dtypes alone."""
        held = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in held.items():
            after = self._buffers[name]
            if before is not None and after is not None and before.dtype != after.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        """Sizes and format, as ``print(model)`` shows them."""
        return f"{self.in_features}, {self.out_features}, format={self.format!r}"


def quantize(model: nn.Module, format: Format) -> nn.Module:
    """Replace each frozen ``nn.Linear`` of a model, one at a time, by one that holds 8 or 4 bits.

    A layer's weight in more goes as soon as its values are made. The output layer stays, and so
    does what is trained; call it behind ``lora``, which wants the Linears as they were.

    Args:
        model: changed in place.
        format: ``"fp8"`` (e4m3, a scale for each output), ``"int4"`` or ``"nf4"`` (a scale for 64
            entries of a row).

    Raises:
        ModelError: no such format, or a Linear's inputs are no multiple of 64, in 4 bits.
    """
    if format not in FORMATS:
        raise ModelError(f"quantization={format!r} is not one of {', '.join(map(repr, FORMATS))}")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or child is head or child.weight.requires_grad:
                continue
            if format != "fp8" and child.in_features % GROUP:
                where = f"{path}.{name}".removeprefix(".")
                raise ModelError(
                    f"{where} has {child.in_features} inputs; {format} takes multiples of {GROUP}; "
                    "use 'fp8'"
                )
            setattr(module, name, QuantizedLinear(child, format))
    return model
