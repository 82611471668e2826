"""A weight that is multiplied in FP8, and its products in arithmetic of their own.

``fxrl.ops.fp8`` specifies them: rows and weight rounded, the product in float32 or wider, and so
for the rows' gradient. ``verify`` compares with these: only the rounding is shared with a step, and
no kernel of it runs here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxrl.dtypes import wide_dtype
from fxrl.ops.fp8 import BLOCK, dequantized, scales_rows

ops = torch.ops.fxrl


class Agreement:
    """The cosine of two tensors that come in parts, by what they are called."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))

    def add(self, what: str, one: Tensor, other: Tensor) -> None:
        """A part of both."""
        a, b = (each.detach().to(wide_dtype(one.dtype)).flatten() for each in (one, other))
        self._sums[what] += torch.stack([a @ b, a @ a, b @ b]).double().cpu()

    def cosine(self, what: str) -> float | None:
        """The cosine over all parts; None if either tensor is zero or no part was added."""
        dot, *squares = self._sums[what].tolist()
        return dot / (squares[0] * squares[1]) ** 0.5 if all(squares) else None


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """A weight that is multiplied in FP8."""

    source: Tensor  # as the model has it: [N, K], [K, N] where ``turned``, or the values themselves
    turned: bool
    # In FP8, as ``fxrl.ops.fp8`` has them.
    values: Tensor
    scale: Tensor
    gradient: str  # ``"fp8"`` or ``"bf16"``, as ``fp8_linear`` takes it
    site: str = ""  # of the product, as reports name it
    # How near its products came to those in full.
    seen: Agreement = field(default_factory=Agreement)

    def product(self, rows: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        by_row = scales_rows(self.scale, self.values)
        values, scale = ops.quantize_rows.default(rows, 0 if by_row else BLOCK)
        wide = wide_dtype(rows.dtype)
        weight = dequantized(self.values, self.scale, wide)
        return (dequantized(values, scale, wide) @ weight.t()).to(rows.dtype)

    def rows_gradient(self, grad: Tensor) -> Tensor:
        """[T, N] -> [T, K]."""
        if self.gradient == "bf16" or not scales_rows(self.scale, self.values):
            return grad @ dequantized(self.values, self.scale, grad.dtype)
        values, scale = ops.quantize_rows.default(grad * self.scale.t(), 0)
        wide = wide_dtype(grad.dtype)
        return (dequantized(values, scale, wide) @ self.values.to(wide)).to(grad.dtype)
