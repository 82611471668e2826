"""Row rules of what puts rows together: joins, padding, and writes into a part.

    stack([%logits[0:7], cat([%logits[7:12], zeros])])
    buffer[0, :7] = %logits[0:7]; buffer[1, :5] = %logits[7:12]

Rows of one computation are joined by joining the hidden states that they are computed from, so a
join moves down to these like any selection. Rows of constants among them are *blank*: they are
computed from hidden states of zeros, if that gives the constant, or else set by a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxrl.analysis.constants import filled_with
from fxrl.analysis.rows.expr import LOCAL, PATCHED, TOKEN, RowExpr, RowStep, RowValue, Tag, leaves
from fxrl.analysis.rows.layout import (
    from_the_start,
    is_list,
    normalised,
    over_rows,
    picked,
    reshaped,
    selected,
    spans_of,
    takes_all_rows,
    units_as_tokens,
)
from fxrl.analysis.rows.rules import (
    RowRules,
    Rows,
    is_one,
    one_per_row,
    operand,
    shared_leaf,
    slice_bounds,
    sole_row,
    static,
)
from fxrl.ir.graph import COPIES, RESHAPES, Size, bound, has_hint, hint, op_name, shape_of, val_of
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


# ---------------------------------------------------------------------------- cat and stack
def join(rules: RowRules, node: fx.Node) -> RowValue:
    """``cat`` and ``stack``: of rows of one computation, also with blank ones; else along a
    local dim, also with what is no row, such as a teacher's log-probs."""
    items, sizes = bound(node)["tensors"], shape_of(node)
    dim = bound(node)["dim"] % len(sizes)
    given = [row for item in items if (row := rules.row(item)) is not None]
    if (joined := _joined_rows(rules, node, dim)) is not None:
        return joined
    stacks = node.target is aten.stack.default
    if len(given) != len(items):
        given = [_joined_with(rules, item, given[0], None if stacks else dim) for item in items]
    if stacks:
        given = [_with_unit(rules, row, dim) for row in given]
    rest = {row.retagged(dim, LOCAL) for row in given}
    if len(rest) > 1 or any(row.is_token(dim) for row in given):
        raise Refusal(f"{op_name(node)} joins the rows of different tokens")
    first, *others = given
    expr = first.expr
    if others:
        expr = rules.pool.call(aten.cat.default, [r.expr for r in given], first.local_dim(dim))
    return RowValue(expr, given[0].retagged(dim, rules.tag_of_size(sizes[dim])), sizes)


def _joined_rows(rules: RowRules, node: fx.Node, dim: int) -> RowValue | None:
    """Rows of one computation side by side in a token dim, also with blank ones; None where the
    parts are computed in different ways, or are the same rows."""
    items, stacks = bound(node)["tensors"], node.target is aten.stack.default
    fills = {fill for item in items if (fill := filled_with(item)) is not None}
    rows: dict[fx.Node, RowValue] = {}
    for item in items:
        if filled_with(item) is not None:
            continue
        row = _as_wide(rules, item, node)
        if row is not None and not stacks:
            row = units_as_tokens(rules, row, [dim])
        if row is not None and fills:
            row = _keeping(rules, row, *fills) if len(fills) == 1 else None
        if row is None or not row.wide or not (stacks or row.is_token(dim)):
            return None
        rows[item] = row
    first = next(iter(rows.values()), None)
    if first is None or len({row.tags for row in rows.values()}) > 1:
        return None
    if stacks and len({row.expr for row in rows.values()}) == 1 and not fills:
        return None
    parts = []
    for item in items:
        length = RowValue(first.expr, first.tags, shape_of(item)).token_sizes
        expr = rows[item].expr if item in rows else _zeros(rules, first, length)
        parts.append((expr, length))
    tags = (*first.tags[:dim], TOKEN, *first.tags[dim:]) if stacks else first.tags
    try:
        return _side_by_side(rules, node, dim, tags, parts)
    except Refusal:
        return None


def _as_wide(rules: RowRules, item: fx.Node, node: fx.Node) -> RowValue | None:
    """The rows of ``item`` in the dtype of ``node``; None if it is no row."""
    value, dtype = rules.row(item), val_of(node).dtype
    if value is None or val_of(item).dtype == dtype:
        return value
    wider = rules.pool.call(aten._to_copy.default, value.expr, dtype=dtype)
    return RowValue(wider, value.tags, value.sizes)


def _side_by_side(
    rules: RowRules,
    node: fx.Node,
    dim: int,
    tags: tuple[Tag, ...],
    parts: list[tuple[RowExpr, tuple[Size, ...]]],
) -> RowValue:
    """``node`` as parts joined in its dim ``dim``, each with the sizes of its token dims: ``cat``,
    or ``stack`` if the parts lack this dim."""
    sizes = shape_of(node)
    left = RowValue(parts[0][0], tags, sizes).token_sizes
    kind = "cat" if len(parts[0][1]) == len(left) else "stack"
    expr = rules.pool.join(kind, tags[:dim].count(TOKEN), parts, left)
    return normalised(rules, RowValue(expr, tags, sizes))


def _zeros(rules: RowRules, row: RowValue, tokens: tuple[Size, ...]) -> RowExpr:
    """What ``row`` computes from hidden states of zeros, for this many tokens."""
    return rules.pool.shift(row.expr, RowStep("zeros", (), row.token_sizes, tokens))


def _joined_with(rules: RowRules, item: fx.Node, row: RowValue, dim: int | None) -> RowValue:
    """``item`` as rows that are joined with ``row``; its size is free in ``dim`` alone."""
    if (value := rules.row(item)) is not None:
        return value
    tags, sizes = row.tags, shape_of(item)
    if dim is not None:
        if row.is_token(dim):
            raise Refusal("tokens are joined with values that are none of the logits")
        tags = row.retagged(dim, rules.tag_of_size(sizes[dim]))
    return RowValue(operand(rules, item, tags, sizes, each=True), tags, sizes)


# ---------------------------------------------------------------------------- blank rows
#: Ops that give zero if their first operand is zero.
_KEEP_ZEROS = (
    *(aten.mm.default, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.tanh.default),
    *(*RESHAPES, *COPIES),
)
#: Ops that have finite values and gradients if their operands have.
_FINITE = (
    *(*_KEEP_ZEROS, aten.addmm.default, aten.add.Tensor, aten.sub.Tensor),
    *(aten._log_softmax.default, aten._softmax.default, aten.masked_fill.Scalar, aten.where.self),
)


def _is_shared(expr: RowExpr) -> bool:
    return not any(part.leaf.tiled for part in leaves([expr]) if part.leaf is not None)


def _blank(expr: RowExpr) -> Any:
    """The number that an expression gives for a row whose inputs are zeros; None if it gives
    several, or if its gradient there is not finite."""
    if expr.leaf is not None:
        return 0 if expr.leaf.tiled else None
    first, *rest = expr.operands()
    if expr.target is aten.masked_fill.Scalar and rest[0].target is aten.le.Scalar:
        told = _blank(next(rest[0].operands())) == 0 == rest[0].args[1]
        return expr.args[2] if told and _is_finite(first) else None
    if expr.target in (aten.add.Tensor, aten.sub.Tensor):
        return 0 if len(rest) == 1 and _blank(first) == 0 == _blank(rest[0]) else None
    keeps = expr.target in _KEEP_ZEROS and all(map(_is_shared, rest))
    return 0 if keeps and _blank(first) == 0 else None


def _is_finite(expr: RowExpr) -> bool:
    """Whether values and gradients are finite for a row whose inputs are zeros."""
    if expr.leaf is not None or _is_shared(expr):
        return True
    operands = list(expr.operands())
    if expr.target is aten.div.Tensor and not all(map(_is_shared, operands[1:])):
        return False
    return expr.target in _FINITE and all(map(_is_finite, operands))


def _keeping(rules: RowRules, value: RowValue, fill: Any) -> RowValue | None:
    """``value`` as a computation that gives ``fill`` for a row whose inputs are zeros: as it is, or
    masked by a vector of ones that is moved as the rows are. None if neither is possible."""
    if fill is None or _blank(value.expr) == fill:
        return None if fill is None else value
    rows = next(part.leaf for part in leaves([value.expr]) if part.leaf and part.leaf.tiled)
    if not _is_finite(value.expr) or any(map(rows.takes, ("place", "write", "zeros"))):
        return None
    rank = len(rows.token_sizes or ())
    ones: list[tuple[Any, tuple[Any, ...]]] = [(aten.detach.default, ())]
    ones += [(aten.select.int, (rank, 0)) for _ in rows.local_sizes]
    ones += [(aten.ones_like.default, ())]
    mask = rules.pool.leaf(replace(rows, prepare=(*rows.prepare, *ones), local_sizes=()))
    mask = one_per_row(rules, mask, value)
    blank = rules.pool.call(aten.le.Scalar, mask, 0)
    expr = rules.pool.call(aten.masked_fill.Scalar, value.expr, blank, fill)
    return RowValue(expr, value.tags, value.sizes)


def _with_unit(rules: RowRules, row: RowValue, dim: int) -> RowValue:
    tags = (*row.tags[:dim], LOCAL, *row.tags[dim:])
    return reshaped(rules, row, tags, (*row.sizes[:dim], 1, *row.sizes[dim:]))


def pad(rules: RowRules, node: fx.Node) -> Rows:
    """Padding of local dims, or of tokens; ``pads`` is (before, after) from the last."""
    value, sizes = sole_row(rules, node), shape_of(node)
    constants = Refusal("tokens are padded with constants", "pad what is computed per token")
    pads = bound(node)["pad"]
    padded = [len(value.tags) - 1 - at // 2 for at, size in enumerate(pads) if size != 0]
    if not padded:
        return value
    if len(set(padded)) == 1 and value.wide:
        rows, at = units_as_tokens(rules, value, padded), 2 * (len(sizes) - 1 - padded[0])
        around = pads[at : at + 2]
        if rows.is_token(padded[0]) and not any(isinstance(n, int) and n < 0 for n in around):
            kept = _keeping(rules, rows, float(bound(node)["value"] or 0))
            if kept is None:
                raise constants
            return _between_blank(rules, node, kept, padded[0], around)
    local: list[Any] = []
    for at, dim in enumerate(reversed(range(len(value.tags) - len(pads) // 2, len(value.tags)))):
        pair = pads[2 * at : 2 * at + 2]
        if not value.is_token(dim):
            local += pair
        elif list(pair) != [0, 0]:
            raise constants
    if any(not isinstance(size, int) for size in local):
        raise Refusal("the padding of the vocabulary depends on the batch")
    return rules.call(node, rules.resized(value.tags, sizes), self=value.expr, pad=local)


def _between_blank(
    rules: RowRules, node: fx.Node, row: RowValue, dim: int, around: Sequence[Any]
) -> RowValue:
    """Rows with this many blank ones before and after them."""
    parts = [(row.expr, row.token_sizes)]
    for place, size in zip((0, 2), around, strict=True):
        if size != 0:
            count = size.meta["val"] if isinstance(size, fx.Node) else size
            tokens = replace(
                row, sizes=(*row.sizes[:dim], count, *row.sizes[dim + 1 :])
            ).token_sizes
            parts.insert(place, (_zeros(rules, row, tokens), tokens))
    return _side_by_side(rules, node, dim, row.tags, parts)


# ---------------------------------------------------------------------------- writes into a part
def index_put(rules: RowRules, node: fx.Node) -> RowValue:
    """``z[mask] = x`` and ``z[..., ids] = x`` of one value: a choice between old and new;
    ``z[rows, ids] = x`` of all rows writes one entry of each."""
    if rules.row(node.args[0]) is None:
        return _placed(rules, node)
    value, given = sole_row(rules, node), bound(node)
    (dims, where), *more = spans = spans_of(given["indices"])
    written = given["values"]
    one_each = len(more) == 1 and value.tokens == (True, False)
    if one_each and takes_all_rows(rules, spans[:1], value):
        return _write_entries(rules, node, value, more[0][1])
    if more or given["accumulate"] or not all(map(is_one, shape_of(written))):
        cure = "write where a mask says: torch.where"
        raise Refusal("an indexed write fxrl cannot follow", cure)
    val = val_of(where)
    if val.dtype == torch.bool:
        mask = _mask(rules, value, dims, where)
    elif is_list(where) and not value.is_token(dims[0]):
        mask = _membership(rules, value, dims[0], where)
    else:
        cure = "write where a mask says: torch.where"
        raise Refusal("an indexed write selects tokens", cure)
    filling = operand(rules, written, value.tags, value.sizes)
    expr = rules.pool.call(aten.where.self, mask, filling, value.expr)
    return RowValue(expr, value.tags, shape_of(node))


def _placed(rules: RowRules, node: fx.Node) -> RowValue:
    """Rows written among blank ones, as packed ones are into a padded batch."""
    given, sizes, spans = bound(node), shape_of(node), spans_of(bound(node)["indices"])
    value, dims = rules.row(given["values"]), [dim for span, _ in spans for dim in span]
    masked = any(val_of(at).dtype == torch.bool for _, at in spans)
    rank = 1 if masked else max(len(shape_of(at)) for _, at in spans)
    followed = dims == list(range(len(dims))) and not (masked and len(spans) > 1)
    rows = (True,) * rank + (False,) * (len(sizes) - len(dims))
    if value is not None and value.tokens == rows:
        value = _keeping(rules, value, filled_with(given["self"]))
    else:
        value = None
    if value is None or not followed or given["accumulate"]:
        reason = "the logits are written into rows of another tensor"
        raise Refusal(reason, "write what is computed per token there")
    step = RowStep("place", tuple(at for _, at in spans), value.token_sizes, sizes[: len(dims)])
    tags = (TOKEN,) * len(dims) + value.tags[rank:]
    return normalised(rules, RowValue(rules.pool.shift(value.expr, step), tags, sizes))


def _write_entries(rules: RowRules, node: fx.Node, value: RowValue, ids: fx.Node) -> RowValue:
    """One entry of each row overwritten, or added to."""
    given, rows = bound(node), value.sizes[:1]
    at, written = (
        one_per_row(rules, operand(rules, one, (TOKEN,), rows, each=True), value)
        for one in (ids, given["values"])
    )
    at = from_the_start(rules, at, value.sizes[1])
    write = aten.scatter_add.default if given["accumulate"] else aten.scatter.src
    return RowValue(rules.pool.call(write, value.expr, 1, at, written), value.tags, value.sizes)


def _mask(rules: RowRules, value: RowValue, dims: list[int], where: fx.Node) -> RowExpr:
    """A bool mask over some dims, so shaped that it broadcasts against the rows."""
    tags = tuple(value.tags[dim] for dim in dims)
    tokens = tags.count(TOKEN)
    if tokens not in (0, value.tags.count(TOKEN)):
        raise Refusal("an indexed write selects some of the token dims")
    if rules.row(where) is not None and not tokens:
        raise Refusal("a mask of the vocabulary depends on the tokens as a whole")
    mask = operand(rules, where, tags, tuple(value.sizes[dim] for dim in dims))
    if len(dims) == len(value.tags):
        return mask
    own = [static(value.sizes[dim]) for dim in dims if not value.is_token(dim)]
    before = sum(tag != TOKEN for tag in value.tags[: dims[0]])
    after = sum(tag != TOKEN for tag in value.tags[dims[-1] + 1 :])
    rows = (-1,) if tokens else (1,)
    return rules.pool.call(aten.reshape.default, mask, (*rows, *(1,) * before, *own, *(1,) * after))


def _membership(rules: RowRules, value: RowValue, dim: int, where: fx.Node) -> RowExpr:
    """A mask over the local dim that is true at the listed positions."""
    width, device = static(value.sizes[dim]), val_of(where).device
    empty = rules.pool.call(aten.full.default, (width,), False, dtype=torch.bool, device=device)
    mask = rules.pool.call(aten.index_fill.int_Scalar, empty, 0, shared_leaf(rules, where), True)
    after = sum(tag != TOKEN for tag in value.tags[dim + 1 :])
    return rules.pool.call(aten.reshape.default, mask, (width, *(1,) * after))


def write_part(rules: RowRules, node: fx.Node) -> Rows:
    """``slice_scatter`` and ``select_scatter``, as functionalised writes into a view are."""
    given = bound(node)
    source, row = given["src"], rules.row(given["src"])
    is_slice = node.target is aten.slice_scatter.default
    if is_slice and row is not None and _covers(rules, node):
        return row
    if (among := _among_blank(rules, node)) is not None:
        return among
    value = over_rows(rules, node, "src") if is_slice else sole_row(rules, node)
    dim = given["dim"] % len(value.tags)
    own = value.tags if is_slice else (*value.tags[:dim], *value.tags[dim + 1 :])
    if row is None:
        if value.is_token(dim):
            raise Refusal("tokens of the logits are overwritten by a value that is no row")
        part = operand(rules, source, own, shape_of(source), each=True)
        return rules.call(node, value.tags, self=value.expr, src=part, dim=value.local_dim(dim))
    if value.is_token(dim):
        args = slice_bounds(node) if is_slice else (given["index"],)
        kind, at = ("slice" if is_slice else "select"), value.token_dim(dim)
        step = RowStep(kind, (at, *args), value.token_sizes, row.token_sizes)
        local = [static(size) for size in value.local_sizes]
        written = row.expr
        if [static(size) for size in row.local_sizes] != local:
            written = rules.pool.call(aten.reshape.default, written, (-1, *local))
        expr = rules.pool.call(PATCHED, value.expr, written, step)
        return RowValue(expr, value.tags, value.sizes)
    if row.tokens != tuple(tag == TOKEN for tag in own):
        raise Refusal("a slice of the vocabulary is overwritten by other tokens")
    return rules.call(node, value.tags, self=value.expr, src=row.expr, dim=value.local_dim(dim))


def _among_blank(rules: RowRules, node: fx.Node) -> RowValue | None:
    """Rows written among blank ones: into a slice of a buffer, or one entry after another. None
    where what is written over are other rows."""
    given, sizes = bound(node), shape_of(node)
    row, old = _as_wide(rules, given["src"], node), rules.row(given["self"])
    dim = given["dim"] % len(sizes)
    if row is None or not row.wide:
        return None
    if (fill := filled_with(given["self"])) is not None:
        old = None
    elif old is not None and (kind := _last_step(old.expr)) in ("zeros", "stack"):
        fill, old = _blank(old.expr), old if kind == "stack" else None
    if (row := _keeping(rules, row, fill)) is None:
        return None
    if node.target is aten.slice_scatter.default:
        row = units_as_tokens(rules, row, [dim])
        if old is not None or not row.is_token(dim):
            return None
        args = row.token_dim(dim), slice_bounds(node), row.token_sizes
        return selected(rules, row, "write", args, sizes)
    if not has_hint(sizes[dim]) or not rules.same_size(sizes[dim], hint(sizes[dim])):
        return None
    tags, rest = (*row.tags[:dim], TOKEN, *row.tags[dim:]), (*sizes[:dim], *sizes[dim + 1 :])
    entries: list[RowExpr] = [
        _zeros(rules, row, row.token_sizes)
        if old is None
        else picked(rules, old, dim, at, rest).expr
        for at in range(hint(sizes[dim]))
    ]
    entries[given["index"]] = row.expr
    if old is not None and old.tags != tags:
        return None
    return _side_by_side(rules, node, dim, tags, [(entry, row.token_sizes) for entry in entries])


def _last_step(expr: RowExpr) -> str:
    """The kind of step that all rows which an expression reads come from."""
    read = [part.leaf for part in leaves([expr]) if part.leaf is not None and part.leaf.tiled]
    kinds = {leaf.steps[-1].kind if leaf.steps else "" for leaf in read}
    return kinds.pop() if len(kinds) == 1 else ""


def _covers(rules: RowRules, node: fx.Node) -> bool:
    """Whether a write into a slice overwrites everything (as functionalised writes often do)."""
    given = bound(node)
    return all(map(rules.same_size, shape_of(given["src"]), shape_of(given["self"])))
