"""Row rules of indexing: gather and scatter over the vocabulary, index-selects of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import TOKEN, RowExpr, RowStep, RowValue, Tag
from fxrl.analysis.rows.layout import normalise
from fxrl.analysis.rows.rules import (
    RowRules,
    operand,
    rule,
    same_size,
    sole_row,
)
from fxrl.ir.graph import is_call, is_tensor, shape_of, tensor_val
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


def _local_dim(value: RowValue, dim: Any, what: str) -> int:
    at: int = int(dim) % len(value.tags)
    if value.tags[at] == TOKEN:
        raise Refusal(f"{what} runs over tokens")
    return at


def _matching(rules: RowRules, value: RowValue, other: fx.Node, dim: int, what: str) -> RowExpr:
    """An index or source of the same rows, free in size along ``dim`` only."""
    sizes = shape_of(other)
    for d, (mine, its) in enumerate(zip(value.sizes, sizes, strict=True)):
        if d != dim and not same_size(mine, its):
            raise Refusal(f"{what} covers only part of the tokens")
    tags = (*value.tags[:dim], rules.tag_of_size(sizes[dim]), *value.tags[dim + 1 :])
    expr: RowExpr = operand(rules, other, tags, sizes)
    return expr


@rule(aten.gather.default)
def _gather(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    dim = _local_dim(value, node.args[1], "gather")
    index: Any = node.args[2]
    expr = _matching(rules, value, index, dim, "gather's index")
    width = shape_of(index)[dim]
    tags = (*value.tags[:dim], rules.tag_of_size(width), *value.tags[dim + 1 :])
    call = rules.pool.call(aten.gather.default, value.expr, value.local_dim(dim), expr)
    return RowValue(call, tags, shape_of(node))


@rule(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_reduce.two,
)
def _scatter(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    dim = _local_dim(value, node.args[1], "scatter")
    args: list[Any] = list(node.args)
    args[0], args[1] = value.expr, value.local_dim(dim)
    for position in (2, 3):
        if is_tensor(args[position]):
            args[position] = _matching(rules, value, args[position], dim, "scatter's index")
    return rules.like(node, rules.pool.call(node.target, *args, **node.kwargs), value.tags)


@rule(aten.index_select.default)
def _index_select(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    dim = int(node.args[1]) % len(value.tags)  # type: ignore[arg-type]
    index: Any = node.args[2]
    return _take(rules, node, value, dim, index)


def _take(rules: RowRules, node: fx.Node, value: RowValue, dim: int, index: fx.Node) -> RowValue:
    """The entries of one dim that a list of positions names."""
    if value.tags[dim] == TOKEN:
        at = value.tags[:dim].count(TOKEN)
        indices = (None,) * at + (index,)
        left = RowValue(value.expr, value.tags, shape_of(node)).token_sizes
        step = RowStep("index", indices, value.token_sizes, left)
        moved = rules.pool.shift(value.expr, step)
        return normalise(rules, RowValue(moved, value.tags, shape_of(node)))
    return _take_local(rules, node, value, dim, index)


def _take_local(
    rules: RowRules, node: fx.Node, value: RowValue, dim: int, index: fx.Node
) -> RowValue:
    from fxrl.analysis.rows.inputs import shared_leaf

    if rules.row(index) is not None:
        raise Refusal("an index into the vocabulary depends on the tokens as a whole")
    picked = shared_leaf(rules, index)
    expr = rules.pool.call(aten.index_select.default, value.expr, value.local_dim(dim), picked)
    width = shape_of(index)[0]
    return rules.like(
        node, expr, (*value.tags[:dim], rules.tag_of_size(width), *value.tags[dim + 1 :])
    )


# ---------------------------------------------------------------------------- x[i, j, ...]
@rule(aten.index.Tensor)
def _index(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    indices: Any = node.args[1]
    spans = _spans(indices)
    dims = [dim for dims, _ in spans for dim in dims]
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise Refusal("advanced indexing skips a dim between its indices")
    kinds = [value.tags[dim] for dim in dims]
    if TOKEN not in kinds:
        return _index_local(rules, node, value, spans)
    if any(len({value.tags[d] == TOKEN for d in span}) > 1 for span, _ in spans):
        raise Refusal("a mask covers tokens and vocabulary together")
    if len(spans) == 1 and len(dims) == 1 and _is_list(spans[0][1]) and dims[0] != 0:
        return _take(rules, node, value, dims[0], spans[0][1])
    tokens = [(d, index) for d, index in spans if value.tags[d[0]] == TOKEN]
    local = [(d, index) for d, index in spans if value.tags[d[0]] != TOKEN]
    if len(local) > 1 or dims[0] != 0:
        raise Refusal("advanced indexing of tokens that fxrl cannot follow")
    return _index_tokens(rules, node, value, tokens, local)


def _spans(indices: Any) -> list[tuple[list[int], fx.Node]]:
    """Each index tensor with the dims it consumes; a bool mask consumes as many as it has."""
    spans, dim = [], 0
    for index in indices:
        val = tensor_val(index)
        width = val.dim() if val is not None and val.dtype in (torch.bool, torch.uint8) else 1
        if index is not None:
            spans.append((list(range(dim, dim + width)), index))
        dim += width
    return spans


def _is_list(index: fx.Node) -> bool:
    val = tensor_val(index)
    return val is not None and val.dim() == 1 and val.dtype == torch.int64


def _index_local(
    rules: RowRules, node: fx.Node, value: RowValue, spans: list[tuple[list[int], fx.Node]]
) -> RowValue:
    (dims, index), *more = spans
    val = tensor_val(index)
    if more or len(dims) != 1 or val is None or val.dim() != 1 or val.dtype != torch.int64:
        raise Refusal("the vocabulary is indexed by something other than one list of ids")
    return _take_local(rules, node, value, dims[0], index)


def _index_tokens(
    rules: RowRules,
    node: fx.Node,
    value: RowValue,
    tokens: list[tuple[list[int], fx.Node]],
    local: list[tuple[list[int], fx.Node]],
) -> RowValue:
    """``x[rows]``, ``x[mask]`` or ``x[rows, ids]``: select rows, then pick one entry of each."""
    sizes = shape_of(node)
    count = value.token_sizes
    covered = sum(len(dims) for dims, _ in tokens)
    rest = len(value.tags) - covered - len(local)
    rank = len(sizes) - rest  # dims of the broadcast index
    row_tags: tuple[Tag, ...] = (TOKEN,) * rank
    expr = value.expr
    if not _takes_all_rows(tokens, value):
        if covered != len(count) and value.tags[:covered] != (TOKEN,) * covered:
            raise Refusal("advanced indexing of tokens that fxrl cannot follow")
        left = (*sizes[:rank], *count[covered:])
        expr = rules.pool.shift(expr, RowStep("index", tuple(i for _, i in tokens), count, left))
    rest_tags = value.tags[covered + len(local) :]
    if not local:
        return normalise(rules, RowValue(expr, row_tags + rest_tags, sizes))
    if rest or covered != len(count):
        raise Refusal("one entry per row is picked, and other dims are kept")
    picks = operand(rules, local[0][1], row_tags, sizes)
    picks = rules.pool.call(aten.reshape.default, picks, (-1, 1))
    gathered = rules.pool.call(aten.gather.default, expr, 1, picks)
    return normalise(
        rules, RowValue(rules.pool.call(aten.select.int, gathered, 1, 0), row_tags, sizes)
    )


def _takes_all_rows(tokens: list[tuple[list[int], fx.Node]], value: RowValue) -> bool:
    """Whether the row indices are each dim's whole range, in order: ``x[arange(n), ids]``."""
    if len(tokens) != 1:
        return False
    index, size = tokens[0][1], value.sizes[tokens[0][0][0]]
    while is_call(index, aten.unsqueeze.default, aten.view.default, aten._to_copy.default):
        index = index.args[0]  # type: ignore[assignment]
    ranges = (aten.arange.default, aten.arange.start, aten.arange.start_step)
    if not is_call(index, *ranges) or not same_size(shape_of(index)[0], size):
        return False
    start = index.args[0] if index.target is not aten.arange.default else 0
    step = index.args[2] if len(index.args) > 2 else 1
    return bool(start == 0 and step == 1)
