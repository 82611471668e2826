"""The number that all entries of a tensor are, where the graph alone tells it.

%a = full([2, 3], 1, dtype=bool)      True
%b = expand(%a, [4, 2, 3])            True
%c = _to_copy(%b, dtype=float32)      1.0
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor, fx

from fxrl.ir.graph import COPIES, as_node, base_of, bound, held, is_call, is_tensor, val_of

Number = bool | int | float

aten = torch.ops.aten
_FILLED = (
    *(aten.full.default, aten.full_like.default, aten.new_full.default),
    *(aten.fill.Scalar, aten.scalar_tensor.default),
)
_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)
#: The last of them hold any numbers, so zeros as well.
_ZEROS = (
    *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default),
    *(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default),
)


def filled_with(node: object) -> Number | None:
    """The number that all entries of ``node`` are, a bool where these are; None where none is
    told."""
    if not is_tensor(node):
        return None
    made, dtype = base_of(node), val_of(node).dtype
    if val_of(made).dtype != dtype:  # the same bits as another number
        return None
    number = filled_with(made.args[0]) if is_call(made, *COPIES) else _made_of(made)
    return None if number is None else _in_dtype(number, dtype)


def filled_with_whole(node: object) -> bool | int | None:
    """As ``filled_with``, where the number is whole."""
    number = filled_with(node)
    if isinstance(number, float):
        return int(number) if number.is_integer() else None
    return number


def _in_dtype(number: Number, dtype: torch.dtype) -> Number | None:
    """A number as a tensor of ``dtype`` holds it, if it can."""
    if dtype == torch.bool:
        return bool(number)
    if dtype.is_floating_point:
        return float(number)
    return int(number) if isfinite(number) and not dtype.is_complex else None


def _made_of(node: fx.Node) -> Number | None:
    if is_call(node, *_ZEROS):
        return 0
    if is_call(node, *_ONES):
        return 1
    given: object = None
    if is_call(node, *_FILLED):
        named = bound(node)
        given = next(named[name] for name in ("fill_value", "value", "s") if name in named)
    elif is_call(node, aten.lift_fresh_copy.default):  # of ``torch.tensor(0)``
        constant = held(as_node(node.args[0]))
        given = constant.item() if type(constant) is Tensor and constant.numel() == 1 else None
    return given if isinstance(given, (bool, int, float)) else None
