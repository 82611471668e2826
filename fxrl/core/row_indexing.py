"""Row rules of indexing: gather and scatter over the vocabulary, index-selects of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.core.graph import is_call, is_tensor, shape_of, tensor_val
from fxrl.core.row_expr import TOKEN, RowExpr, RowStep, RowValue, Tag
from fxrl.core.row_layout import normalise
from fxrl.core.row_rules import (
    Refusal,
    RowRules,
    is_one,
    operand,
    rule,
    same_size,
    sole_row,
    static,
)

aten = torch.ops.aten


def _local_dim(value: RowValue, dim: Any, what: str) -> int:
    dim = int(dim) % len(value.tags)
    if value.tags[dim] == TOKEN:
        raise Refusal(f"{what} runs over tokens")
    return dim


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
    args = list(node.args)
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
    from fxrl.core.row_inputs import shared_leaf

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
    tokens = [(d, index) for d, index in spans if value.tags[d[0]] == TOKEN]
    local = [(d, index) for d, index in spans if value.tags[d[0]] != TOKEN]
    if any(TOKEN in (value.tags[d] for d in span) for span, _ in local):
        raise Refusal("a mask covers tokens and vocabulary together")
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
    return start == 0 and step == 1


# ---------------------------------------------------------------------------- writes
@rule(aten.index_put.default)
def _index_put(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    indices: Any = node.args[1]
    spans = _spans(indices)
    accumulate = len(node.args) > 3 and bool(node.args[3])
    written: Any = node.args[2]
    (dims, index), *more = spans
    scalar = all(is_one(size) for size in shape_of(written))
    if more or accumulate or not scalar:
        raise Refusal("an indexed write fxrl cannot follow")
    val = tensor_val(index)
    assert val is not None
    if val.dtype == torch.bool and len(dims) == len(value.tags):
        mask = operand(rules, index, value.tags, value.sizes)
    elif val.dtype == torch.int64 and val.dim() == 1 and value.tags[dims[0]] != TOKEN:
        mask = _membership(rules, value, dims[0], index)
    else:
        raise Refusal("an indexed write selects tokens")
    filling = operand(rules, written, value.tags, value.sizes)
    return rules.like(node, rules.pool.call(aten.where.self, mask, filling, value.expr), value.tags)


def _membership(rules: RowRules, value: RowValue, dim: int, index: fx.Node) -> RowExpr:
    """A mask over the local dim that is true at ``index``."""
    from fxrl.core.row_inputs import shared_leaf

    width = static(value.sizes[dim])
    device = node_device(index)
    empty = rules.pool.call(aten.full.default, (width,), False, dtype=torch.bool, device=device)
    mask = rules.pool.call(aten.index_fill.int_Scalar, empty, 0, shared_leaf(rules, index), True)
    after = sum(tag != TOKEN for tag in value.tags[dim + 1 :])
    return rules.pool.call(aten.reshape.default, mask, (width, *(1,) * after))


def node_device(node: fx.Node) -> torch.device:
    """The device of a tensor node."""
    val = tensor_val(node)
    assert val is not None
    return val.device


@rule(aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default)
def _write_part(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    source: Any = node.args[1]
    if node.target is aten.copy.default:
        part = operand(rules, source, value.tags, value.sizes)
        return rules.like(node, rules.pool.call(node.target, value.expr, part), value.tags)
    given = node.args[2] if len(node.args) > 2 else 0
    dim = _local_dim(value, given, "a write into a slice")
    row = rules.row(source)
    if row is None:
        raise Refusal("a slice of the vocabulary is overwritten by a value that is no row")
    args = list(node.args)
    args[0], args[1], args[2] = value.expr, row.expr, value.local_dim(dim)
    return rules.like(node, rules.pool.call(node.target, *args), value.tags)
