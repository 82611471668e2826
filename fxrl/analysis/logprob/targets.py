"""Lists of ids that name the same tokens, where they name any.

    %labels                                          -100 where nothing is to be learnt
    %safe = where(ne(%labels, -100), %labels, 0)     what a cross entropy picks
    %hit  = eq(argmax(%logits), %labels)             a metric beside it

One head serves both. No spelling is looked for: ids that are computed entry by entry from one list
and constants are a function of an integer, and two such functions are compared at all integers that
matter.

NOTE [Why a range of integers proves it]: comparisons, choices, clamps and sums with constants make
functions that are straight lines beyond the sum of their constants' absolute values. So further out
they are constant, or outside of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxrl.analysis.constants import filled_with_whole
from fxrl.analysis.rows.expr import RowExpr, spelled
from fxrl.ir.graph import (
    COPIES,
    RESHAPES,
    OpOverload,
    bound,
    draws_random,
    is_call,
    is_tensor,
    numel_hint,
    skip_whole_slices,
    tensor_val,
    val_of,
)

aten = torch.ops.aten

#: Ops that act entry by entry, and make lines of lines.
_PIECEWISE = {
    *(aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.index_put.default),
    *(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.relu.default),
    *(aten.maximum.default, aten.minimum.default, aten.abs.default, aten.neg.default),
    *(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar),
    *(aten.bitwise_not.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor),
    *(aten.logical_not.default, aten.logical_and.default, aten.logical_or.default),
} | {
    getattr(getattr(aten, name), kind)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in ("Scalar", "Tensor")
}
_VIEWS = (
    *(*RESHAPES, *COPIES, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
_WIDEST = 2**24  # numbers that are tried


@dataclass(frozen=True, slots=True)
class _Ids:
    """A list of ids as a function of another one."""

    source: Any  # that one: a graph value, or an expression; None for a constant
    rows: str  # which of its rows
    reach: int  # sizes of the constants, summed
    at: Callable[[Tensor], Any]


def agree(target: RowExpr, ids: RowExpr, vocab: int, *, picked: bool) -> bool:
    """Whether ``target`` equals ``ids`` in each row whose id is in the vocabulary. A ``picked``
    target is itself known to be in the vocabulary."""
    values = _compared(target, ids, vocab)
    if values is None:
        return False
    ours, theirs = values
    counts = (theirs >= 0) & (theirs < vocab)
    if picked:
        counts &= (ours >= 0) & (ours < vocab)
    return bool(((ours == theirs) | ~counts).all())


def equal(target: RowExpr, ids: RowExpr, vocab: int) -> bool:
    """Whether two lists of ids are equal in each row."""
    values = _compared(target, ids, vocab)
    return values is not None and bool((values[0] == values[1]).all())


def _compared(left: RowExpr, right: RowExpr, vocab: int) -> tuple[Tensor, Tensor] | None:
    """Both as values at all integers that matter; None if they are not functions of one list."""
    one, other = _read(left), _read(right)
    span = 2 * (vocab + one.reach + other.reach)
    if not _of_one_list(one, other) or span > _WIDEST:
        return None
    numbers = torch.arange(-span, span, device="cpu")
    first, second = one.at(numbers), other.at(numbers)
    return torch.broadcast_tensors(first, second)  # type: ignore[no-untyped-call, no-any-return]


def _of_one_list(one: _Ids, other: _Ids) -> bool:
    same = one.source is not None and one.rows == other.rows
    return same and _alike(one.source, other.source)


def _read(ids: Any) -> _Ids:
    """``ids`` as a function of the list that they are computed from, which may be themselves."""
    if isinstance(ids, (bool, int)):
        return _Ids(None, "", abs(ids), lambda _: ids)
    if isinstance(ids, RowExpr):
        return _read_rows(ids)
    node = skip_whole_slices(ids)
    while is_call(node, *_VIEWS) and not val_of(node).is_floating_point():
        node = skip_whole_slices(node.args[0])
    constant = filled_with_whole(node)
    if constant is not None:
        return _read(constant)
    one_mask = node.target is not aten.index_put.default or _is_masked(node)
    made = _applied(node, node.args, node.kwargs) if one_mask and _is_entrywise(node) else None
    return made or _Ids(node, "", 0, lambda numbers: numbers)


def _read_rows(ids: RowExpr) -> _Ids:
    if ids.leaf is not None:
        made = _read(ids.leaf.node)
        rows = str((ids.leaf.prepare, ids.leaf.steps))
        return _Ids(made.source, rows, made.reach, made.at)
    if ids.target is aten.reshape.default:
        return _read_rows(ids.args[0])
    made_of = _applied(ids, ids.args, dict(ids.kwargs)) if ids.target in _PIECEWISE else None
    return made_of or _Ids(ids, "", 0, lambda numbers: numbers)


def _applied(call: Any, args: Any, kwargs: Any) -> _Ids | None:
    """The result of a call on functions of one list; None if they are of several lists."""
    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    known = [_read(one) if isinstance(one, (bool, int, fx.Node, RowExpr)) else None for one in flat]
    lists = [one for one in known if one is not None and one.source is not None]
    if not lists or not all(_of_one_list(lists[0], one) for one in lists):
        return None

    def at(numbers: Tensor) -> Any:
        values = [
            _value(one, one if ids is None else ids.at(numbers))
            for one, ids in zip(flat, known, strict=True)
        ]
        given, named = pytree.tree_unflatten(values, spec)
        return call.target(*given, **named)

    reach = sum(one.reach for one in known if one is not None)
    return _Ids(lists[0].source, lists[0].rows, reach, at)


def _value(place: Any, value: Any) -> Any:
    """An argument; a constant of the graph as its tensor."""
    return torch.as_tensor(value, device="cpu") if isinstance(place, fx.Node) else value


def _is_entrywise(node: fx.Node) -> bool:
    """Whether each entry of a value is computed from one entry of its operands."""
    if node.op != "call_function" or node.target not in _PIECEWISE:
        return False
    sizes = {numel_hint(arg) for arg in node.all_input_nodes if filled_with_whole(arg) is None}
    return all(map(is_tensor, node.all_input_nodes)) and sizes <= {numel_hint(node)}


def _is_masked(node: fx.Node) -> bool:
    """Whether an indexed write sets one value where a mask of all entries says."""
    given = bound(node)
    masks = given["indices"]
    mask = tensor_val(masks[0]) if len(masks) == 1 else None
    whole = mask is not None and mask.dtype == torch.bool and mask.dim() == val_of(node).dim()
    return whole and not given["accumulate"] and filled_with_whole(given["values"]) is not None


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are equal: one value, or the same call of values that are."""
    one, other = skip_whole_slices(one), skip_whole_slices(other)
    if one is other:
        return True
    if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
        return type(one) is type(other) and bool(one == other)
    if not is_tensor(one) or not is_tensor(other):
        return spelled(one) == spelled(other)
    if one.op != "call_function" or one.target != other.target or draws_random(one):
        return False
    if not isinstance(one.target, OpOverload):
        return False
    mine, its = (pytree.tree_flatten((node.args, node.kwargs)) for node in (one, other))
    return mine[1] == its[1] and all(map(_alike, mine[0], its[0]))
