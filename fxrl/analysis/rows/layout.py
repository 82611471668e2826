"""Row rules of layout ops: views, permutes, slices, splits, concatenations.

A layout op on local dims happens inside the row program; one that picks or permutes tokens
becomes a ``RowStep`` and leaves the program; one that merges tokens with local dims is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import LOCAL, TOKEN, RowStep, RowValue, Tag
from fxrl.analysis.rows.rules import (
    RowRules,
    _name,
    is_one,
    rule,
    same_size,
    sole_row,
    static,
)
from fxrl.ir.graph import RESHAPES, Size, hint, shape_of
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


def _with_local_sizes(
    rules: RowRules, value: RowValue, tags: tuple[Tag, ...], sizes: tuple[Size, ...]
) -> RowValue:
    """The same rows with their local dims reshaped to what ``tags`` and ``sizes`` say."""
    result = RowValue(value.expr, tags, sizes)
    old = [static(size) for size in value.local_sizes]
    new = [static(size) for size in result.local_sizes]
    if old == new:
        return result
    return RowValue(rules.pool.call(aten.reshape.default, value.expr, (-1, *new)), tags, sizes)


def normalise(rules: RowRules, value: RowValue) -> RowValue:
    """Call token dims of size 1 local: they hold no rows, and broadcasting treats them alike."""
    tags = tuple(
        LOCAL if tag == TOKEN and is_one(size) else tag
        for tag, size in zip(value.tags, value.sizes, strict=True)
    )
    return value if tags == value.tags else _with_local_sizes(rules, value, tags, value.sizes)


# ---------------------------------------------------------------------------- views
@rule(*RESHAPES)
def _view(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    sizes = shape_of(node)
    return _with_local_sizes(rules, value, _reshaped_tags(rules, value, sizes), sizes)


def _reshaped_tags(rules: RowRules, value: RowValue, sizes: tuple[Size, ...]) -> tuple[Tag, ...]:
    """Tags after a reshape, from the blocks of dims whose products agree."""
    tags: list[Tag] = [LOCAL] * len(sizes)
    old = [(size, tag) for size, tag in zip(value.sizes, value.tags, strict=True)]
    old = [(size, tag) for size, tag in old if not is_one(size)]
    new = [(size, d) for d, size in enumerate(sizes) if not is_one(size)]
    i = j = 0
    while i < len(old) or j < len(new):
        i_end, j_end = _block(old, new, i, j)
        block_tags = {tag for _, tag in old[i:i_end]}
        if TOKEN in block_tags and len(block_tags) > 1:
            raise Refusal("a view merges token dims with the vocabulary dim")
        for size, dim in new[j:j_end]:
            if TOKEN in block_tags:
                tags[dim] = TOKEN
            elif i_end - i == 1 and j_end - j == 1:
                tags[dim] = old[i][1]
            else:
                tags[dim] = rules.tag_of_size(size)
        i, j = i_end, j_end
    return tuple(tags)


def _block(
    old: list[tuple[Size, Tag]], new: list[tuple[Size, int]], i: int, j: int
) -> tuple[int, int]:
    """The smallest runs of old and new dims, from i and j, that hold the same elements."""
    i_end, j_end = i + 1, j + 1
    if i >= len(old) or j >= len(new):
        raise Refusal("a view splits dims in a way fxrl cannot follow")
    left, right = hint(old[i][0]), hint(new[j][0])
    if same_size(old[i][0], new[j][0]):
        return i_end, j_end
    while left != right:
        if left < right and i_end < len(old):
            left *= hint(old[i_end][0])
            i_end += 1
        elif right < left and j_end < len(new):
            right *= hint(new[j_end][0])
            j_end += 1
        else:
            raise Refusal("a view splits dims in a way fxrl cannot follow")
    return i_end, j_end


@rule(aten.unsqueeze.default)
def _unsqueeze(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    dim = int(node.args[1]) % (len(value.tags) + 1)  # type: ignore[arg-type]
    tags = (*value.tags[:dim], LOCAL, *value.tags[dim:])
    return _with_local_sizes(rules, value, tags, shape_of(node))


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    return _with_local_sizes(
        rules, value, _reshaped_tags(rules, value, shape_of(node)), shape_of(node)
    )


@rule(aten.expand.default)
def _expand(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    sizes = shape_of(node)
    offset = len(sizes) - len(value.tags)
    tags: list[Tag] = []
    for position, size in enumerate(sizes):
        tag = value.tags[position - offset] if position >= offset else LOCAL
        if tag == TOKEN and not same_size(size, value.sizes[position - offset]):
            raise Refusal("rows are expanded to other tokens")
        tags.append(tag if tag == TOKEN else rules.tag_of_size(size))
    old = (1,) * offset + value.sizes
    lined = RowValue(value.expr, tuple(tags), old)
    if offset:
        lined = _with_local_sizes(rules, value, tuple(tags), old)
    target = [-1] + [static(s) for s, t in zip(sizes, tags, strict=True) if t != TOKEN]
    expr = rules.pool.call(aten.expand.default, lined.expr, target)
    return RowValue(expr, tuple(tags), sizes)


@rule(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    order = _order(node, len(value.tags))
    tags = tuple(value.tags[d] for d in order)
    tokens = [d for d in order if value.tags[d] == TOKEN]
    locals_ = [d for d in order if value.tags[d] != TOKEN]
    expr = value.expr
    if tokens != sorted(tokens):
        ranks = tuple(sorted(tokens).index(d) for d in tokens)
        left = tuple(value.sizes[d] for d in tokens)
        expr = rules.pool.shift(expr, RowStep("permute", ranks, value.token_sizes, left))
    if locals_ != sorted(locals_):
        inner = [0] + [1 + sorted(locals_).index(d) for d in locals_]
        expr = rules.pool.call(aten.permute.default, expr, inner)
    return RowValue(expr, tags, shape_of(node))


def _order(node: fx.Node, rank: int) -> list[int]:
    if node.target is aten.permute.default:
        return [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    order = list(range(rank))
    if node.target is aten.t.default:
        return order[::-1]
    first, second = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
    order[first], order[second] = order[second], order[first]
    return order


# ---------------------------------------------------------------------------- picking
@rule(aten.slice.Tensor)
def _slice(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    dim = int(node.args[1] if len(node.args) > 1 else 0) % len(value.tags)  # type: ignore[arg-type]
    bounds = tuple(node.args[2:]) or (0,)
    return _sliced(rules, value, dim, bounds, shape_of(node))


def _sliced(
    rules: RowRules, value: RowValue, dim: int, bounds: tuple[Any, ...], sizes: tuple[Size, ...]
) -> RowValue:
    start, step = bounds[0], bounds[2] if len(bounds) > 2 else 1
    if start in (0, None) and step == 1 and same_size(sizes[dim], value.sizes[dim]):
        return RowValue(value.expr, value.tags, sizes)
    if value.tags[dim] == TOKEN:
        at = value.tags[:dim].count(TOKEN)
        result = RowValue(value.expr, value.tags, sizes)
        step = RowStep("slice", (at, *bounds), value.token_sizes, result.token_sizes)
        moved = rules.pool.shift(value.expr, step)
        return normalise(rules, RowValue(moved, value.tags, sizes))
    expr = rules.pool.call(aten.slice.Tensor, value.expr, value.local_dim(dim), *bounds)
    tags = (*value.tags[:dim], rules.tag_of_size(sizes[dim]), *value.tags[dim + 1 :])
    return RowValue(expr, tags, sizes)


@rule(aten.select.int)
def _select(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    dim = int(node.args[1]) % len(value.tags)  # type: ignore[arg-type]
    return _selected(rules, value, dim, node.args[2], shape_of(node))


def _selected(
    rules: RowRules, value: RowValue, dim: int, index: Any, sizes: tuple[Size, ...]
) -> RowValue:
    tags = value.tags[:dim] + value.tags[dim + 1 :]
    if value.tags[dim] == TOKEN:
        at = value.tags[:dim].count(TOKEN)
        left = RowValue(value.expr, tags, sizes).token_sizes
        step = RowStep("select", (at, index), value.token_sizes, left)
        return RowValue(rules.pool.shift(value.expr, step), tags, sizes)
    expr = rules.pool.call(aten.select.int, value.expr, value.local_dim(dim), index)
    return RowValue(expr, tags, sizes)


@rule(aten.unbind.int)
def _unbind(rules: RowRules, node: fx.Node) -> tuple[RowValue, ...]:
    value = sole_row(rules, node)
    dim = int(node.args[1] if len(node.args) > 1 else 0) % len(value.tags)  # type: ignore[arg-type]
    return tuple(
        _selected(rules, value, dim, index, tuple(part.shape))
        for index, part in enumerate(node.meta["val"])
    )


@rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(rules: RowRules, node: fx.Node) -> tuple[RowValue, ...]:
    value = sole_row(rules, node)
    dim = int(node.args[2] if len(node.args) > 2 else 0) % len(value.tags)  # type: ignore[arg-type]
    if value.tags[dim] == TOKEN:
        return _split_tokens(rules, node, value, dim)
    parts, start = [], 0
    for part in node.meta["val"]:
        length = static(part.shape[dim])
        parts.append(_sliced(rules, value, dim, (start, start + length), tuple(part.shape)))
        start += length
    return tuple(parts)


def _split_tokens(
    rules: RowRules, node: fx.Node, value: RowValue, dim: int
) -> tuple[RowValue, ...]:
    """The parts keep the split's own sizes, which may be symbols that no slice could spell."""
    at = value.tags[:dim].count(TOKEN)
    parts = []
    for index, part in enumerate(node.meta["val"]):
        result = RowValue(value.expr, value.tags, tuple(part.shape))
        args = (node.target, at, node.args[1], index)
        step = RowStep("split", args, value.token_sizes, result.token_sizes)
        moved = rules.pool.shift(value.expr, step)
        parts.append(normalise(rules, RowValue(moved, value.tags, result.sizes)))
    return tuple(parts)


@rule(aten.cat.default, aten.stack.default)
def _cat(rules: RowRules, node: fx.Node) -> RowValue:
    nodes: Any = node.args[0]
    values = [rules.row(item) for item in nodes]
    rows = [value for value in values if value is not None]
    if len(rows) != len(values):
        raise Refusal(f"{_name(node.target)} joins rows with a value that is none")
    sizes = shape_of(node)
    dim = int(node.args[1] if len(node.args) > 1 else 0) % len(sizes)  # type: ignore[arg-type]
    if node.target is aten.stack.default:
        rows = [_stacked(rules, row, dim) for row in rows]
    if any(row.tags[:dim] + row.tags[dim + 1 :] != rows[0].tags[:dim] + rows[0].tags[dim + 1 :]
           or row.tags[dim] == TOKEN for row in rows):  # fmt: skip
        raise Refusal(f"{_name(node.target)} joins the rows of different tokens")
    at = rows[0].local_dim(dim)
    expr = rules.pool.call(aten.cat.default, [r.expr for r in rows], at)
    tags = (*rows[0].tags[:dim], rules.tag_of_size(sizes[dim]), *rows[0].tags[dim + 1 :])
    return RowValue(expr, tags, sizes)


def _stacked(rules: RowRules, row: RowValue, dim: int) -> RowValue:
    tags = (*row.tags[:dim], LOCAL, *row.tags[dim:])
    return _with_local_sizes(rules, row, tags, (*row.sizes[:dim], 1, *row.sizes[dim:]))
