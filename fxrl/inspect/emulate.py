"""Eager code whose products are rounded as those of a step are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxrl.capture._torch import TorchDispatchMode
from fxrl.ir.graph import COPIES
from fxrl.ops.rounded import RoundedWeight

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


class Emulation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the products with these weights for the time of a block, backward included.

    A weight is known by where it lies, so that views and, while they live, copies of it (autocast,
    a run in a wider dtype) are the same weight. Each product is made in full, too, and how near
    the rounded one comes is noted in ``RoundedWeight.seen``.
    """

    def __init__(self, weights: Sequence[RoundedWeight]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[Any, Callable[[Tensor], Tensor]] = {}
        self._alive: list[Tensor] = []  # nothing else may come to lie where a known one lies
        for one in weights:
            self._know(one.source if one.turned else one.source.t(), one)

    def _know(self, right: Tensor, weight: RoundedWeight) -> None:
        """``right`` [K, N] is what rows are multiplied by, and its transpose what gradients are."""
        self._alive.append(right)
        self._known[_place(right)] = weight.product
        self._known[_place(right.t())] = weight.rows_gradient

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _PRODUCTS and not kwargs and (made := self._rounded(func, args)) is not None:
            return made
        if func is torch.ops.fxrl.dequantized_mm.default:
            rows, (values, _), _, transpose = args
            known = self._known.get(_place(values if transpose else values.t()))
            if known is not None:
                return _seen(known, known(rows), func(*args))
        made = func(*args, **(kwargs or {}))
        if func in COPIES:
            self._follow(args[0], made)
        return made

    def _follow(self, source: Tensor, copy: Tensor) -> None:
        known: Any = self._known.get(_place(source)) if source.dim() == 2 else None
        if known is not None and source.stride() == copy.stride():
            right = copy if known == known.__self__.product else copy.t()
            self._know(right, known.__self__)

    def _rounded(self, func: Any, args: Sequence[Any]) -> Tensor | None:
        *bias, rows, right = args
        whole = right[0] if right.dim() == 3 and (len(right) == 1 or not right.stride(0)) else right
        if (known := self._known.get(_place(whole))) is not None:
            flat = rows.flatten(0, -2)
            made = _seen(known, known(flat), flat @ whole)
            made = made.view(*rows.shape[:-1], made.shape[-1])
            return made + bias[0] if bias else made
        # Autograd's spelling of a gradient whose rows are the columns of what they lie in.
        left: Any = self._known.get(_place(rows)) if func is aten.mm.default else None
        if left is not None and left == left.__self__.product:
            gradient = left.__self__.rows_gradient
            return _seen(gradient, gradient(right.t()), (rows @ right).t()).t()
        return None


def _seen(rounded: Any, made: Tensor, full: Tensor) -> Tensor:
    """Return the result of a rounded product after noting how far it is from the full one."""
    weight: RoundedWeight = rounded.__self__
    weight.seen.add("product" if rounded == weight.product else "gradient", made, full)
    return made


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's storage, offset, shape and strides."""
    where = tensor.untyped_storage()._cdata
    return where, tensor.storage_offset(), tensor.shape, tensor.stride()
