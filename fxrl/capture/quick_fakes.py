"""Results of views and elementwise ops over fake tensors, whose looks follow from the arguments'.

    view                       dense x, a size      as_strided(x, size, the strides of a dense one)
    convert_element_type       dense x, a dtype     what looks like x, in that dtype
    mul, where, clamp, lt, ... dense x, numbers,    what looks like x, in the dtype that
                               dense tensors that   the op gives of such dtypes
                               broadcast to it

All else is asked of PyTorch, and so is what is not dense, or of several dtypes.

NOTE [Why]: where sizes are symbols, comparing and multiplying them is what a trace does most of the
time. PyTorch's reference for a view asks of every dim whether it can be merged with the next (2 to
5 ms for [B, T, 4096], as_strided 0.4), that of an elementwise op of every pair of dims how they
broadcast and in which order the strides are (1.5 to 20 ms). A layer's joint graph is half views and
elementwise ops: without those questions it takes 0.6 s instead of 1.1. Of a policy loss masks,
choices and clamps are the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch

from fxrl.capture._torch import FakeTensor, FakeTensorMode
from fxrl.ir.graph import Size

aten, prims = torch.ops.aten, torch.ops.prims

Rule = Callable[[list[FakeTensor]], torch.dtype | None]


def _floats(tensors: list[FakeTensor]) -> torch.dtype | None:
    """The tensors' dtype, where it is one in floating point."""
    dtypes = {x.dtype for x in tensors}
    dtype = dtypes.pop()
    return None if dtypes or not dtype.is_floating_point else dtype


def _truths(tensors: list[FakeTensor]) -> torch.dtype | None:
    return torch.bool if all(x.dtype == torch.bool for x in tensors) else None


def _chosen(tensors: list[FakeTensor]) -> torch.dtype | None:
    """Of a choice the dtype of both."""
    which, one, other = tensors
    return one.dtype if which.dtype == torch.bool and one.dtype == other.dtype else None


#: By elementwise op the dtype that it gives of tensors and numbers; None: that is asked.
_DTYPES: dict[Any, Rule] = dict.fromkeys(
    (
        aten.abs.default,
        aten.add.Tensor,
        aten.clamp.default,
        aten.clamp_max.default,
        aten.clamp_min.default,
        aten.div.Scalar,
        aten.div.Tensor,
        aten.exp.default,
        aten.maximum.default,
        aten.minimum.default,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.rsqrt.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.sub.Tensor,
        aten.tanh.default,
    ),
    _floats,
)
_DTYPES |= dict.fromkeys(
    (aten.bitwise_and.Tensor, aten.bitwise_not.default, aten.bitwise_or.Tensor), _truths
)
_DTYPES |= {
    getattr(getattr(aten, name), kind): lambda _: torch.bool
    for name in ("eq", "ge", "gt", "le", "lt", "ne")
    for kind in ("Scalar", "Tensor")
}
_DTYPES[aten.where.self] = _chosen
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_ask = FakeTensorMode.dispatch


def _dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func in _VIEWS and _is_dense(args[0]) and all(map(_is_known, args[1])):
        x, size = args
        *strides, count = _dense_strides(size)
        if _expr(count) == _expr(x.numel()):
            return _ask(self, aten.as_strided.default, types, (x, size, strides), {})
    if func is prims.convert_element_type.default and _is_dense(args[0]):
        return _dense_like(*args)
    unbounded = func is aten.clamp.default and len(args) == 1  # which is an error
    if func in _DTYPES and not kwargs and not unbounded and (alike := _alike(args)) is not None:
        tensors, most = alike
        if (dtype := _DTYPES[func](tensors)) is not None:
            return _dense_like(most, dtype)
    return _ask(self, func, types, args, kwargs)


#: While a step is captured every fake mode answers so. (Higher-order ops know what to do in a mode
#: by its class: they would not know a class of ours.)
REPLACED: list[tuple[Any, str, Any]] = [(FakeTensorMode, "dispatch", _dispatch)]


def _alike(args: Sequence[Any]) -> tuple[list[FakeTensor], FakeTensor] | None:
    """An elementwise op's tensors, if all are dense, and the one that has the result's size."""
    tensors = [arg for arg in args if type(arg) not in (int, float, NoneType)]
    if not all(map(_is_dense, tensors)):
        return None
    most: FakeTensor = max(tensors, key=torch.Tensor.dim)
    alike = all(x.device == most.device and _broadcasts(x.shape, most.shape) for x in tensors)
    return (tensors, most) if alike else None


def _broadcasts(shape: Sequence[Size], to: Sequence[Size]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return all(_expr(size) in (1, _expr(wanted)) for size, wanted in pairs)


def _is_dense(x: Any) -> bool:
    """Whether it is a fake tensor without gaps, of no known numbers, whose sizes have hints."""
    if type(x) is not FakeTensor or x.layout != torch.strided or x.constant is not None:
        return False
    if not all(map(_is_known, x.shape)) or not x.is_contiguous():
        return False
    strides = [*map(_expr, x.stride()), 1]
    sizes = [*map(_expr, x.shape), 1]  # of a dim of size 1 the stride may be any
    usual = (strides[n + 1] * sizes[n + 1] for n in range(x.dim()))
    return all(sizes[n] != 1 or strides[n] == wanted for n, wanted in enumerate(usual))


def _dense_like(x: FakeTensor, dtype: torch.dtype) -> FakeTensor:
    made = torch.empty(x.shape, dtype=dtype, device="meta")
    return FakeTensor(x.fake_mode, made, x.device)


def _is_known(size: Size) -> bool:
    """Whether a size is a number that can be multiplied by, or a symbol with a hint."""
    return size > 0 if isinstance(size, int) else size.node.has_hint()


def _expr(size: Size) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _dense_strides(shape: Sequence[Size]) -> list[Size]:
    """The strides of a tensor without gaps, and the count of its entries."""
    products: list[Size] = [1]
    for size in reversed(shape):
        products.append(products[-1] * size)
    count = products.pop()
    return [*reversed(products), count]
