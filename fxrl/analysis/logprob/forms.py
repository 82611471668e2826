"""What a vocabulary-sized expression is, as far as the fused loss head knows: three forms.

    Affine    a * (z + k * lse(z) + r)           logits, log-probabilities, shifted logits
    Exp       c * exp(z + k * lse(z) + r)        probabilities and unnormalised ones
    Product   Exp * Affine or Exp * Exp          summands of entropies and of sum p^2

``z`` are the logits after a ``Transform`` (scale, bias, softcap, temperature); ``k`` is a number
(-1 makes log-probabilities), ``r`` one number per row. The sums over the vocabulary of these forms
are exactly what ``fxrl::linear_logprob`` returns, by

    sum_v exp(z + r)      = exp(lse + r)
    sum_v p z             = lse - entropy
    sum_v p p             = sum_p2
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from fxrl.analysis.rows.expr import RowExpr


@dataclass(frozen=True, eq=False)
class Transform:
    """From ``x = h W^T`` to the logits ``z = softcap * tanh(scale * (x + bias) / softcap) / T``."""

    scale: float = 1.0
    bias: RowExpr | None = None  # a shared ``[V]`` vector, added before the scale
    softcap: float = 0.0  # 0 for none
    # The number that divides after the softcap (1 without one: the scale takes it).
    divisor: float = 1.0
    temperature: RowExpr | None = None  # a shared scalar or per-row tensor that divides last

    def key(self) -> tuple[object, ...]:
        """Equal for equal transforms (expressions are interned, so identity decides)."""
        return (self.scale, id(self.bias), self.softcap, self.divisor, id(self.temperature))

    def scaled(self, factor: float) -> Transform:
        """The transform whose logits are ``factor`` times as large."""
        if self.softcap:
            return replace(self, divisor=self.divisor / factor)
        return replace(self, scale=self.scale * factor)


@dataclass(frozen=True, eq=False)
class Affine:
    """``a * (z + k * lse(z) + r)`` with ``attached`` False behind a detach."""

    transform: Transform
    a: float = 1.0
    k: float = 0.0
    r: RowExpr | None = None
    attached: bool = True


@dataclass(frozen=True, eq=False)
class Exp:
    """``c * exp(z + k * lse(z) + r)``."""

    transform: Transform
    k: float
    r: RowExpr | None
    attached: bool
    c: float = 1.0

    @property
    def is_probability(self) -> bool:
        """Whether it is exactly ``softmax(z)``."""
        return self.k == -1 and self.r is None and self.c == 1.0


@dataclass(frozen=True, eq=False)
class Product:
    """``left * right`` of the same logits; ``right`` an affine form or the exponential again."""

    left: Exp
    right: Affine | Exp
    c: float = 1.0


Form = Affine | Exp | Product


def as_number(arg: Any) -> float | None:
    return float(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else None


def finite(value: float) -> bool:
    """Whether a factor can be inverted and moved."""
    return math.isfinite(value) and value != 0
