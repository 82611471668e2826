"""Row rules of functions of a whole row: reductions, softmaxes, sorts and normalisations.

All run over local dims; over a token dim they would mix tokens, and are refused.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import LOCAL, TOKEN, RowExpr, RowValue, Tag
from fxrl.analysis.rows.rules import (
    RowRules,
    _name,
    dims_of,
    operand,
    pointwise,
    rule,
    sole_row,
    static,
)
from fxrl.ir.graph import is_tensor, shape_of
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


# ---------------------------------------------------------------------------- reductions
#: op -> (index of the dims argument, index of keepdim or None)
_REDUCTIONS: dict[Any, tuple[int, int | None]] = {
    aten.sum.dim_IntList: (1, 2),
    aten.mean.dim: (1, 2),
    aten.amax.default: (1, 2),
    aten.amin.default: (1, 2),
    aten.logsumexp.default: (1, 2),
    aten.prod.dim_int: (1, 2),
    aten.any.dim: (1, 2),
    aten.any.dims: (1, 2),
    aten.all.dim: (1, 2),
    aten.all.dims: (1, 2),
    aten.argmax.default: (1, 2),
    aten.argmin.default: (1, 2),
    aten.max.dim: (1, 2),
    aten.min.dim: (1, 2),
    aten.median.dim: (1, 2),
    aten.kthvalue.default: (2, 3),
    aten.var.correction: (1, None),
    aten.std.correction: (1, None),
    aten.var_mean.correction: (1, None),
    aten.linalg_vector_norm.default: (2, 3),
    aten.norm.ScalarOpt_dim: (2, 3),
}


@rule(*_REDUCTIONS)
def _reduce(rules: RowRules, node: fx.Node) -> RowValue | tuple[RowValue, ...]:
    value = sole_row(rules, node)
    dim_at, _ = _REDUCTIONS[node.target]
    default = -1 if node.target is aten.kthvalue.default else None  # the others then reduce all
    dims_arg = node.args[dim_at] if len(node.args) > dim_at else node.kwargs.get("dim", default)
    dims = dims_of(dims_arg, len(value.tags))
    if any(value.tags[dim] == TOKEN for dim in dims):
        raise Refusal(f"{_name(node.target)} reduces over tokens")
    local = [value.local_dim(dim) for dim in dims]
    args: list[Any] = list(node.args)
    flat = node.target in (aten.argmax.default, aten.argmin.default)  # of one dim, or of all
    if flat and len(local) != 1:
        raise Refusal(f"{_name(node.target)} reduces several dims at once")
    is_list = isinstance(dims_arg, (list, tuple)) or dims_arg is None
    new_dims: Any = tuple(local) if is_list and not flat else local[0]
    kwargs = dict(node.kwargs)
    if len(args) > dim_at:
        args[dim_at] = new_dims
    else:
        kwargs["dim"] = new_dims
    args[0] = value.expr
    expr = rules.pool.call(node.target, *args, **kwargs)
    keep = _keeps_dims(node, value)
    tags = tuple(
        LOCAL if dim in dims else tag
        for dim, tag in enumerate(value.tags)
        if keep or dim not in dims
    )
    return _outputs(rules, node, expr, tags)


def _keeps_dims(node: fx.Node, value: RowValue) -> bool:
    first = node.meta["val"]
    first = first[0] if isinstance(first, (tuple, list)) else first
    return bool(first.dim() == len(value.tags))


def _outputs(
    rules: RowRules, node: fx.Node, expr: RowExpr, tags: tuple[Tag, ...]
) -> RowValue | tuple[RowValue, ...]:
    """One row value, or one per output when the op returns several tensors."""
    val = node.meta["val"]
    if isinstance(val, torch.Tensor):
        return RowValue(expr, tags, tuple(val.shape))
    return tuple(
        RowValue(rules.pool.call(operator.getitem, expr, index), tags, tuple(item.shape))
        for index, item in enumerate(val)
    )


# ------------------------------------------------------- whole-row ops: shape kept, or top-k
#: op -> (index of the dim argument, its default)
_WHOLE_ROW: dict[Any, tuple[int, int]] = {
    aten._softmax.default: (1, -1),
    aten._log_softmax.default: (1, -1),
    aten.cumsum.default: (1, -1),
    aten.cumprod.default: (1, -1),
    aten.logcumsumexp.default: (1, -1),
    aten.sort.default: (1, -1),
    aten.sort.stable: (2, -1),
    aten.argsort.default: (1, -1),
    aten.topk.default: (2, -1),
    aten.cummax.default: (1, -1),
    aten.cummin.default: (1, -1),
}


@rule(*_WHOLE_ROW)
def _whole_row(rules: RowRules, node: fx.Node) -> RowValue | tuple[RowValue, ...]:
    value = sole_row(rules, node)
    dim_at, default = _WHOLE_ROW[node.target]
    given = node.args[dim_at] if len(node.args) > dim_at else node.kwargs.get("dim", default)
    dim = int(given) % len(value.tags)  # type: ignore[arg-type]
    if value.tags[dim] == TOKEN:
        raise Refusal(f"{_name(node.target)} runs over tokens")
    args: list[Any] = list(node.args)
    kwargs = dict(node.kwargs)
    args[0] = value.expr
    if len(args) > dim_at:
        args[dim_at] = value.local_dim(dim)
    else:
        kwargs["dim"] = value.local_dim(dim)
    expr = rules.pool.call(node.target, *args, **kwargs)
    tags = list(value.tags)
    if node.target is aten.topk.default:
        tags[dim] = rules.tag_of_size(node.args[1])  # type: ignore[arg-type]
    return _outputs(rules, node, expr, tuple(tags))


# ---------------------------------------------------------------------------- others
@rule(aten.flip.default, aten.roll.default)
def _reorder(rules: RowRules, node: fx.Node) -> RowValue:
    """A reversal or rotation of local dims."""
    value = sole_row(rules, node)
    dim_at = 1 if node.target is aten.flip.default else 2
    dims = dims_of(node.args[dim_at] if len(node.args) > dim_at else None, len(value.tags))
    if any(value.tags[dim] == TOKEN for dim in dims):
        raise Refusal(f"{_name(node.target)} moves values between tokens")
    args: list[Any] = list(node.args)
    args[0], args[dim_at:] = value.expr, [tuple(value.local_dim(dim) for dim in dims)]
    return rules.like(node, rules.pool.call(node.target, *args), value.tags)


@rule(aten.native_layer_norm.default)
def _layer_norm(rules: RowRules, node: fx.Node) -> tuple[RowValue, ...]:
    value = sole_row(rules, node)
    over: Any = node.args[1]
    rank, count = len(value.tags), len(over)
    if TOKEN in value.tags[rank - count :]:
        raise Refusal("a layer norm runs over tokens")
    scale = [operand(rules, a, value.tags[-count:], over) if is_tensor(a) else a
             for a in node.args[2:]]  # fmt: skip
    expr = rules.pool.call(node.target, value.expr, [static(size) for size in over], *scale)
    kept = (*value.tags[: rank - count], *(LOCAL,) * count)
    return tuple(
        RowValue(rules.pool.call(operator.getitem, expr, index), tags, tuple(item.shape))
        for index, (item, tags) in enumerate(
            zip(node.meta["val"], (value.tags, kept, kept), strict=True)
        )
    )


@rule(aten.constant_pad_nd.default)
def _pad(rules: RowRules, node: fx.Node) -> RowValue:
    """Padding of local dims; ``pads`` holds (before, after) from the last dim on."""
    value, sizes = sole_row(rules, node), shape_of(node)
    pads: Any = node.args[1]
    local: list[Any] = []
    for at, dim in enumerate(reversed(range(len(value.tags) - len(pads) // 2, len(value.tags)))):
        pair = pads[2 * at : 2 * at + 2]
        if value.tags[dim] != TOKEN:
            local += pair
        elif list(pair) != [0, 0]:
            raise Refusal("tokens are padded with constants", "pad what is computed per token")
    if any(not isinstance(pad, int) for pad in local):
        raise Refusal("the padding of the vocabulary depends on the batch")
    expr = rules.pool.call(node.target, value.expr, local, *node.args[2:])
    tags = [
        tag if tag == TOKEN else rules.tag_of_size(size)
        for tag, size in zip(value.tags, sizes, strict=True)
    ]
    return rules.like(node, expr, tuple(tags))


@rule(aten.log_sigmoid_forward.default)
def _log_sigmoid(rules: RowRules, node: fx.Node) -> tuple[RowValue, ...]:
    """Its second output is a buffer for the backward alone, which no user code can read."""
    value = sole_row(rules, node)
    expr = rules.pool.call(aten.log_sigmoid.default, value.expr)
    return (RowValue(expr, value.tags, value.sizes),)


@rule(
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)
def _loss(rules: RowRules, node: fx.Node) -> RowValue:
    """Elementwise losses: pointwise when they reduce nothing."""
    if shape_of(node) == () and any(shape_of(arg) for arg in node.all_input_nodes):
        raise Refusal(
            f"{_name(node.target)} reduces over tokens and vocabulary at once",
            "take reduction='none', and sum over the vocabulary first",
        )
    result: RowValue = pointwise(rules, node)  # type: ignore[assignment]
    return result
