"""Row rules of what moves values: views, slices, joins, indexing, and writes into a part.

What happens on local dims happens inside the row program; what picks or permutes tokens becomes a
``RowStep`` and leaves it; what merges tokens with local dims is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import (
    LOCAL,
    PATCHED,
    TOKEN,
    Leaf,
    RowExpr,
    RowStep,
    RowValue,
    Tag,
    leaves,
)
from fxrl.analysis.rows.rules import (
    RowRules,
    Rows,
    dims_of,
    is_one,
    op_name,
    operand,
    shared_leaf,
    slice_bounds,
    sole_row,
    static,
)
from fxrl.ir.graph import (
    COPIES,
    RESHAPES,
    Size,
    as_node,
    bound,
    hint,
    is_call,
    shape_of,
    tensor_val,
    val_of,
)
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


def reshaped(
    rules: RowRules, value: RowValue, tags: tuple[Tag, ...], sizes: tuple[Size, ...]
) -> RowValue:
    """``value`` with its local dims reshaped to ``tags`` and ``sizes``."""
    result = RowValue(value.expr, tags, sizes)
    old = [static(size) for size in value.local_sizes]
    new = [static(size) for size in result.local_sizes]
    if old == new:
        return result
    return RowValue(rules.pool.call(aten.reshape.default, value.expr, (-1, *new)), tags, sizes)


def normalised(rules: RowRules, value: RowValue) -> RowValue:
    """Call token dims of size 1 local: they hold no rows, and broadcasting treats them alike."""
    tags = tuple(
        LOCAL if tag == TOKEN and is_one(size) else tag
        for tag, size in zip(value.tags, value.sizes, strict=True)
    )
    return value if tags == value.tags else reshaped(rules, value, tags, value.sizes)


def selected(
    rules: RowRules, value: RowValue, kind: str, args: tuple[Any, ...], sizes: tuple[Size, ...]
) -> RowValue:
    """The rows that a step selects, as a value of ``sizes`` with the same dims."""
    left = RowValue(value.expr, value.tags, sizes).token_sizes
    step = RowStep(kind, args, value.token_sizes, left)
    return normalised(rules, RowValue(rules.pool.shift(value.expr, step), value.tags, sizes))


# ---------------------------------------------------------------------------- views
def view(rules: RowRules, node: fx.Node) -> RowValue:
    """A reshape or squeeze: the blocks of dims that hold the same elements keep their tags."""
    value, sizes = sole_row(rules, node), shape_of(node)
    return reshaped(rules, value, _reshaped_tags(rules, value, sizes), sizes)


def _reshaped_tags(rules: RowRules, value: RowValue, sizes: tuple[Size, ...]) -> tuple[Tag, ...]:
    """Tags after a reshape, from the blocks of dims whose products agree."""
    tags: list[Tag] = [LOCAL] * len(sizes)
    old = [(size, tag) for size, tag in zip(value.sizes, value.tags, strict=True)]
    old = [(size, tag) for size, tag in old if not is_one(size)]
    new = [(size, d) for d, size in enumerate(sizes) if not is_one(size)]
    i = j = 0
    while i < len(old) or j < len(new):
        i_end, j_end = _block(rules, old, new, i, j)
        block_tags = {tag for _, tag in old[i:i_end]}
        if TOKEN in block_tags and len(block_tags) > 1:
            cure = "pick entries with gather, or with x[rows, ids]"
            raise Refusal("a view merges token dims with the vocabulary dim", cure)
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
    rules: RowRules, old: list[tuple[Size, Tag]], new: list[tuple[Size, int]], i: int, j: int
) -> tuple[int, int]:
    """The smallest runs of old and new dims, from i and j, that hold the same elements."""
    i_end, j_end = i + 1, j + 1
    if i >= len(old) or j >= len(new):
        raise Refusal("a view splits dims in a way fxrl cannot follow")
    left, right = old[i][0], new[j][0]
    while hint(left) != hint(right):
        if hint(left) < hint(right) and i_end < len(old):
            left *= old[i_end][0]
            i_end += 1
        elif hint(right) < hint(left) and j_end < len(new):
            right *= new[j_end][0]
            j_end += 1
        else:
            raise Refusal("a view splits dims in a way fxrl cannot follow")
    at_end = i_end == len(old) and j_end == len(new)  # equal, or it were no view
    if not at_end and not rules.same_size(left, right):
        raise Refusal("a view splits dims in a way fxrl cannot follow")
    return i_end, j_end


def unsqueeze(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    dim = bound(node)["dim"] % (len(value.tags) + 1)
    return reshaped(rules, value, (*value.tags[:dim], LOCAL, *value.tags[dim:]), shape_of(node))


def expand(rules: RowRules, node: fx.Node) -> RowValue:
    value, sizes = sole_row(rules, node), shape_of(node)
    offset = len(sizes) - len(value.tags)
    old_tags, old = (LOCAL,) * offset + value.tags, (1,) * offset + value.sizes
    if any(
        tag == TOKEN and not rules.same_size(new, was)
        for tag, was, new in zip(old_tags, old, sizes, strict=True)
    ):
        raise Refusal("rows are expanded to other tokens")
    if offset == 0 and all(map(rules.same_size, old, sizes)):
        return value
    tags = rules.resized(old_tags, sizes)
    lined = reshaped(rules, value, tags, old)
    target = [-1] + [static(s) for s, t in zip(sizes, tags, strict=True) if t != TOKEN]
    return RowValue(rules.pool.call(aten.expand.default, lined.expr, target), tags, sizes)


def permute(rules: RowRules, node: fx.Node) -> RowValue:
    """``permute``, ``transpose`` and ``t``."""
    value = sole_row(rules, node)
    order = _order(node, len(value.tags))
    tags = tuple(value.tags[d] for d in order)
    tokens = [d for d in order if value.is_token(d)]
    locals_ = [d for d in order if not value.is_token(d)]
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
    given, order = bound(node), list(range(rank))
    if node.target is aten.permute.default:
        return dims_of(given["dims"], rank)
    if node.target is aten.t.default:
        return order[::-1]
    first, second = given["dim0"] % rank, given["dim1"] % rank
    order[first], order[second] = order[second], order[first]
    return order


def reorder(rules: RowRules, node: fx.Node) -> Rows:
    """``flip`` and ``roll`` of local dims."""
    value = sole_row(rules, node)
    dims = dims_of(bound(node)["dims"], len(value.tags))
    if any(map(value.is_token, dims)):
        raise Refusal(f"{op_name(node)} moves values between tokens")
    return rules.call(node, value.tags, self=value.expr, dims=tuple(map(value.local_dim, dims)))


# ---------------------------------------------------------------------------- picking
def slice_(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    dim = bound(node)["dim"] % len(value.tags)
    return _sliced(rules, value, dim, slice_bounds(node), shape_of(node))


def _sliced(
    rules: RowRules, value: RowValue, dim: int, bounds: tuple[Any, ...], sizes: tuple[Size, ...]
) -> RowValue:
    alike = str(sizes[dim]) == str(value.sizes[dim])  # for all batches; a slice is right anyway
    if alike and bounds[0] == 0 and len(bounds) < 3:
        return RowValue(value.expr, value.tags, sizes)
    if value.is_token(dim):
        return selected(rules, value, "slice", (value.token_dim(dim), *bounds), sizes)
    expr = rules.pool.call(aten.slice.Tensor, value.expr, value.local_dim(dim), *bounds)
    return RowValue(expr, value.retagged(dim, rules.tag_of_size(sizes[dim])), sizes)


def select(rules: RowRules, node: fx.Node) -> RowValue:
    value, given = sole_row(rules, node), bound(node)
    return _picked(rules, value, given["dim"] % len(value.tags), given["index"], shape_of(node))


def _picked(
    rules: RowRules, value: RowValue, dim: int, index: Any, sizes: tuple[Size, ...]
) -> RowValue:
    tags = value.tags[:dim] + value.tags[dim + 1 :]
    if value.is_token(dim):
        left = RowValue(value.expr, tags, sizes).token_sizes
        step = RowStep("select", (value.token_dim(dim), index), value.token_sizes, left)
        return RowValue(rules.pool.shift(value.expr, step), tags, sizes)
    if is_one(value.sizes[dim]):  # a batch of one holds no rows
        return reshaped(rules, value, tags, sizes)
    own, expr = value.local_dim(dim), value.expr
    if is_call(index, aten._local_scalar_dense.default):  # ``logp[i, t, ids[i, t]]``
        position = rules.pool.call(aten.reshape.default, _ids(rules, as_node(index.args[0])), (1,))
        at = _from_the_start(rules, position, value.sizes[dim])
        expr, index = rules.pool.call(aten.index_select.default, expr, own, at), 0
    return RowValue(rules.pool.call(aten.select.int, expr, own, index), tags, sizes)


def _from_the_start(rules: RowRules, at: RowExpr, size: Size) -> RowExpr:
    """Positions in a local dim, which indexing counts from its end where they are negative."""
    from_the_end = rules.pool.call(aten.lt.Scalar, at, 0)
    moved = rules.pool.call(aten.add.Scalar, at, static(size))
    return rules.pool.call(aten.where.self, from_the_end, moved, at)


def unbind(rules: RowRules, node: fx.Node) -> tuple[RowValue, ...]:
    value = sole_row(rules, node)
    dim = bound(node)["dim"] % len(value.tags)
    return tuple(
        _picked(rules, value, dim, index, tuple(part.shape))
        for index, part in enumerate(node.meta["val"])
    )


def split(rules: RowRules, node: fx.Node) -> tuple[RowValue, ...]:
    """Parts of tokens keep the split's own sizes, maybe symbols that no slice could spell."""
    value, given = sole_row(rules, node), bound(node)
    dim = given["dim"] % len(value.tags)
    parts, start = [], 0
    for index, part in enumerate(node.meta["val"]):
        sizes = tuple(part.shape)
        if value.is_token(dim):
            args = (node.target, value.token_dim(dim), node.args[1], index)
            parts.append(selected(rules, value, "split", args, sizes))
        else:
            stop = start + static(sizes[dim])
            parts.append(_sliced(rules, value, dim, (start, stop), sizes))
            start = stop
    return tuple(parts)


def join(rules: RowRules, node: fx.Node) -> RowValue:
    """``cat`` and ``stack`` along a local dim, also with what is no row, such as a teacher's
    log-probs; and rows of zeros put around tokens."""
    items, sizes = bound(node)["tensors"], shape_of(node)
    dim = bound(node)["dim"] % len(sizes)
    given = [row for item in items if (row := rules.row(item)) is not None]
    zeros = [_is_zero(item) for item in items]
    if zeros.count(False) == 1 and node.target is aten.cat.default:
        at = zeros.index(False)
        value = rules.row(items[at])
        if value is not None and value.is_token(dim):
            rows = [shape_of(item)[dim] for item in items]
            if (dtype := val_of(node).dtype) != val_of(items[at]).dtype:  # zeros may be wider
                wider = rules.pool.call(aten._to_copy.default, value.expr, dtype=dtype)
                value = RowValue(wider, value.tags, value.sizes)
            return _padded(rules, value, dim, sum(rows[:at]), sum(rows[at + 1 :]), sizes)
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


def _is_zero(item: fx.Node) -> bool:
    """Whether a value is zeros, of any tokens."""
    if is_call(item, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return True
    filled = aten.full.default, aten.full_like.default, aten.new_full.default
    return is_call(item, *filled) and bound(item)["fill_value"] == 0


def _padded(
    rules: RowRules, value: RowValue, dim: int, before: Size, after: Size, sizes: tuple[Size, ...]
) -> RowValue:
    """Rows of zeros around the tokens of a dim: those that hidden states of zeros have."""
    if not _vanishes(value.expr):
        raise Refusal("tokens are padded with constants", "pad what is computed per token")
    return selected(rules, value, "pad", (value.token_dim(dim), before, after), sizes)


def _vanishes(expr: RowExpr) -> bool:
    """Whether an expression is zero for a row whose inputs are zeros, with a finite gradient."""
    if expr.leaf is not None:
        return expr.leaf.tiled
    first, *rest = expr.operands()
    if expr.target in (aten.add.Tensor, aten.sub.Tensor):
        return _vanishes(first) and len(rest) == 1 and _vanishes(rest[0])
    shared = not any(part.leaf.tiled for part in leaves(rest) if part.leaf is not None)
    return expr.target in _KEEP_ZEROS and shared and _vanishes(first)


_KEEP_ZEROS = (
    *(aten.mm.default, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.tanh.default),
    *(*RESHAPES, *COPIES),
)


def _with_unit(rules: RowRules, row: RowValue, dim: int) -> RowValue:
    tags = (*row.tags[:dim], LOCAL, *row.tags[dim:])
    return reshaped(rules, row, tags, (*row.sizes[:dim], 1, *row.sizes[dim:]))


def pad(rules: RowRules, node: fx.Node) -> Rows:
    """Padding of local dims, or of tokens with zeros; ``pads`` is (before, after) from the last."""
    value, sizes = sole_row(rules, node), shape_of(node)
    pads = bound(node)["pad"]
    padded = [len(value.tags) - 1 - at // 2 for at, size in enumerate(pads) if size != 0]
    if len(set(padded)) == 1 and value.is_token(padded[0]) and bound(node)["value"] in (0, None):
        dim = padded[0]
        at = 2 * (len(value.tags) - 1 - dim)
        return _padded(rules, value, dim, pads[at], pads[at + 1], sizes)
    local: list[Any] = []
    for at, dim in enumerate(reversed(range(len(value.tags) - len(pads) // 2, len(value.tags)))):
        pair = pads[2 * at : 2 * at + 2]
        if not value.is_token(dim):
            local += pair
        elif list(pair) != [0, 0]:
            raise Refusal("tokens are padded with constants", "pad what is computed per token")
    if any(not isinstance(size, int) for size in local):
        raise Refusal("the padding of the vocabulary depends on the batch")
    return rules.call(node, rules.resized(value.tags, sizes), self=value.expr, pad=local)


# ---------------------------------------------------------------------------- indices per row
def _own_dim(value: RowValue, dim: int, what: str) -> int:
    dim = dim % len(value.tags)
    if value.is_token(dim):
        raise Refusal(f"{what} runs over tokens")
    return dim


def _matching(
    rules: RowRules,
    value: RowValue,
    other: fx.Node,
    dim: int,
    what: str,
    *,
    any_width: bool = False,
) -> RowExpr:
    """An index or source of the same rows, free in size along ``dim`` only."""
    sizes = shape_of(other)
    for d, (mine, its) in enumerate(zip(value.sizes, sizes, strict=True)):
        if d != dim and not rules.same_size(mine, its):
            raise Refusal(f"{what} covers only part of the tokens")
    tags = value.retagged(dim, rules.tag_of_size(sizes[dim]))
    return operand(rules, other, tags, sizes, each=True, any_width=any_width)


def gather(rules: RowRules, node: fx.Node) -> Rows:
    value, given = sole_row(rules, node), bound(node)
    dim = _own_dim(value, given["dim"], "gather")
    index = _matching(rules, value, given["index"], dim, "gather's index", any_width=True)
    tags = value.retagged(dim, rules.tag_of_size(shape_of(node)[dim]))
    return rules.call(node, tags, self=value.expr, dim=value.local_dim(dim), index=index)


def scatter(rules: RowRules, node: fx.Node) -> Rows:
    value, given = sole_row(rules, node), bound(node)
    dim = _own_dim(value, given["dim"], "scatter")
    rows = {  # of as many entries as there are tokens, where those are listed that came before
        name: _matching(rules, value, given[name], dim, "scatter's index", any_width=True)
        for name in ("index", "src")
        if tensor_val(given.get(name)) is not None
    }
    return rules.call(node, value.tags, self=value.expr, dim=value.local_dim(dim), **rows)


# ---------------------------------------------------------------------------- lists of positions
def index_select(rules: RowRules, node: fx.Node) -> RowValue:
    value, given = sole_row(rules, node), bound(node)
    return _taken(rules, node, value, given["dim"] % len(value.tags), given["index"])


def _taken(rules: RowRules, node: fx.Node, value: RowValue, dim: int, index: fx.Node) -> RowValue:
    """The entries of one dim that a list of positions names."""
    if value.is_token(dim):
        indices = (None,) * value.token_dim(dim) + (index,)
        return selected(rules, value, "index", indices, shape_of(node))
    picked = _ids(rules, index)
    expr = rules.pool.call(aten.index_select.default, value.expr, value.local_dim(dim), picked)
    tags = value.retagged(dim, rules.tag_of_size(shape_of(index)[0]))
    return RowValue(expr, tags, shape_of(node))


def _ids(rules: RowRules, index: fx.Node) -> RowExpr:
    """A list of positions in the vocabulary, the same for every row."""
    if rules.row(index) is not None:
        raise Refusal("an index into the vocabulary depends on the tokens as a whole")
    return shared_leaf(rules, index)


def write_columns(rules: RowRules, node: fx.Node) -> Rows:
    """``index_fill``, ``index_add`` and ``index_copy`` of a local dim; ``index_fill`` of tokens."""
    value, given = sole_row(rules, node), bound(node)
    if value.is_token(given["dim"] % len(value.tags)) and "source" not in given:
        return _fill_tokens(rules, node, value, given["dim"] % len(value.tags))
    dim = _own_dim(value, given["dim"], op_name(node))
    changed: dict[str, Any] = {"dim": value.local_dim(dim), "index": _ids(rules, given["index"])}
    if "source" in given:
        changed["source"] = _matching(rules, value, given["source"], dim, "the source of a write")
    elif tensor_val(given["value"]) is not None:
        changed["value"] = shared_leaf(rules, given["value"])
    return rules.call(node, value.tags, self=value.expr, **changed)


def _fill_tokens(rules: RowRules, node: fx.Node, value: RowValue, dim: int) -> RowValue:
    """One value for all of the rows that are listed: a choice between old and new."""
    given, tokens, at = bound(node), value.token_sizes, value.token_dim(dim)
    lined = [tokens[at] if t == at else 1 for t in range(len(tokens))]
    listed = (
        (aten.new_zeros.default, ([tokens[at]],)),
        (aten.index_fill.int_Scalar, (0, given["index"], 1)),
        (aten.gt.Scalar, (0,)),
        (aten.reshape.default, (lined,)),
        (aten.expand.default, (tokens,)),
    )
    mask = rules.pool.leaf(Leaf(given["index"], listed, tokens))
    mask = rules.pool.call(aten.reshape.default, mask, (-1, *(1,) * len(value.local_sizes)))
    filling = given["value"]
    if tensor_val(filling) is None:
        filled = rules.pool.call(aten.masked_fill.Scalar, value.expr, mask, filling)
    else:
        filled = rules.pool.call(
            aten.masked_fill.Tensor, value.expr, mask, shared_leaf(rules, filling)
        )
    return RowValue(filled, value.tags, value.sizes)


# ---------------------------------------------------------------------------- x[i, j, ...]
def index(rules: RowRules, node: fx.Node) -> RowValue:
    """``x[rows]``, ``x[mask]``, ``x[..., ids]`` and ``x[rows, ids]``; ``table[x]``."""
    spans = _spans(bound(node)["indices"])
    if rules.row(node.args[0]) is None and len(spans) == 1:
        return _looked_up(rules, node, *spans[0])
    value = sole_row(rules, node)
    dims = [dim for dims, _ in spans for dim in dims]
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise Refusal("advanced indexing skips a dim between its indices")
    if len(dims) > 1:
        value = _units_as_tokens(rules, value, dims)
    if not any(map(value.is_token, dims)):
        (_, ids), *more = spans
        if more or len(dims) != 1 or not _is_list(ids):
            raise Refusal("the vocabulary is indexed by something other than one list of ids")
        return _taken(rules, node, value, dims[0], ids)
    if any(len({value.is_token(d) for d in span}) > 1 for span, _ in spans):
        cure = "multiply by it, and sum over the vocabulary"
        raise Refusal("a mask covers tokens and vocabulary together", cure)
    if len(dims) == 1 and dims[0] != 0 and _is_list(spans[0][1]):
        return _taken(rules, node, value, dims[0], spans[0][1])
    tokens = [span for span in spans if value.is_token(span[0][0])]
    local = [span for span in spans if not value.is_token(span[0][0])]
    if len(local) > 1 or dims[0] != 0:
        raise Refusal("advanced indexing of tokens that fxrl cannot follow")
    return _index_tokens(rules, node, value, tokens, local)


def _looked_up(rules: RowRules, node: fx.Node, dims: list[int], ids: fx.Node) -> RowValue:
    """Entries of a table that is the same for all rows: the weight of a row's class."""
    row, table = rules.row(ids) if dims == [0] else None, as_node(node.args[0])
    if row is None or val_of(ids).dtype == torch.bool:
        raise Refusal("a mask that depends on the logits selects from other values")
    expr = rules.pool.call(aten.index.Tensor, shared_leaf(rules, table), [row.expr])
    rest = shape_of(table)[1:]
    return RowValue(expr, (*row.tags, *map(rules.tag_of_size, rest)), shape_of(node))


Spans = list[tuple[list[int], fx.Node]]


def _spans(indices: Any) -> Spans:
    """Each index tensor with the dims it consumes; a bool mask consumes as many as it has."""
    spans, dim = [], 0
    for at in indices:
        val = tensor_val(at)
        width = val.dim() if val is not None and val.dtype in (torch.bool, torch.uint8) else 1
        if at is not None:
            spans.append((list(range(dim, dim + width)), at))
        dim += width
    return spans


def _is_list(at: fx.Node) -> bool:
    val = tensor_val(at)
    return val is not None and val.dim() == 1 and val.dtype == torch.int64


def _units_as_tokens(rules: RowRules, value: RowValue, dims: list[int]) -> RowValue:
    """Dims of size 1 hold one row each if an index says so (see ``normalised``)."""
    tags = tuple(
        TOKEN if d in dims and is_one(size) else tag
        for d, (tag, size) in enumerate(zip(value.tags, value.sizes, strict=True))
    )
    return value if tags == value.tags else reshaped(rules, value, tags, value.sizes)


def _index_tokens(
    rules: RowRules, node: fx.Node, value: RowValue, tokens: Spans, local: Spans
) -> RowValue:
    """Select rows, then pick one entry of each where the vocabulary is indexed too."""
    sizes, count = shape_of(node), value.token_sizes
    covered = sum(len(dims) for dims, _ in tokens)
    rest = len(value.tags) - covered - len(local)
    rank = len(sizes) - rest  # dims of the broadcast index
    row_tags: tuple[Tag, ...] = (TOKEN,) * rank
    expr = value.expr
    if not _takes_all_rows(rules, tokens, value):
        if covered != len(count) and value.tags[:covered] != (TOKEN,) * covered:
            raise Refusal("advanced indexing of tokens that fxrl cannot follow")
        left = (*sizes[:rank], *count[covered:])
        expr = rules.pool.shift(expr, RowStep("index", tuple(i for _, i in tokens), count, left))
    if not local:
        return normalised(rules, RowValue(expr, row_tags + value.tags[covered:], sizes))
    if rest or covered != len(count):
        raise Refusal("one entry per row is picked, and other dims are kept")
    picks = operand(rules, local[0][1], row_tags, sizes, each=True)
    picks = _from_the_start(rules, picks, value.local_sizes[0])
    picks = rules.pool.call(aten.reshape.default, picks, (-1, 1))
    gathered = rules.pool.call(aten.gather.default, expr, 1, picks)
    entry = rules.pool.call(aten.select.int, gathered, 1, 0)
    return normalised(rules, RowValue(entry, row_tags, sizes))


def _takes_all_rows(rules: RowRules, tokens: Spans, value: RowValue) -> bool:
    """Whether the row indices are each dim's whole range, in order: ``x[arange(n), ids]``."""
    if len(tokens) != 1:
        return False
    rows, size = tokens[0][1], value.sizes[tokens[0][0][0]]
    while is_call(rows, aten.unsqueeze.default, aten.view.default, *COPIES):
        rows = bound(rows)["self"]
    ranges = (aten.arange.default, aten.arange.start, aten.arange.start_step)
    if not is_call(rows, *ranges) or not rules.same_size(shape_of(rows)[0], size):
        return False
    given = bound(rows)
    return bool(given.get("start", 0) == 0 and given.get("step", 1) == 1)


def masked_select(rules: RowRules, node: fx.Node) -> RowValue:
    """Entries one by one: where a mask selects whole rows the lowering has made it ``x[rows]``."""
    cure = "select rows by a mask of the rows: x[mask]"
    raise Refusal(f"{op_name(node)} takes entries one by one", cure)


# ---------------------------------------------------------------------------- writes into a part
def index_put(rules: RowRules, node: fx.Node) -> RowValue:
    """``z[mask] = x`` and ``z[..., ids] = x`` of one value: a choice between old and new;
    ``z[rows, ids] = x`` of all rows writes one entry of each."""
    if rules.row(node.args[0]) is None:
        return _placed(rules, node)
    value, given = sole_row(rules, node), bound(node)
    (dims, where), *more = spans = _spans(given["indices"])
    written = given["values"]
    one_each = len(more) == 1 and value.tokens == (True, False)
    if one_each and _takes_all_rows(rules, spans[:1], value):
        return _write_entries(rules, node, value, more[0][1])
    if more or given["accumulate"] or not all(map(is_one, shape_of(written))):
        cure = "write where a mask says: torch.where"
        raise Refusal("an indexed write fxrl cannot follow", cure)
    val = val_of(where)
    if val.dtype == torch.bool:
        mask = _mask(rules, value, dims, where)
    elif _is_list(where) and not value.is_token(dims[0]):
        mask = _membership(rules, value, dims[0], where)
    else:
        cure = "write where a mask says: torch.where"
        raise Refusal("an indexed write selects tokens", cure)
    filling = operand(rules, written, value.tags, value.sizes)
    expr = rules.pool.call(aten.where.self, mask, filling, value.expr)
    return RowValue(expr, value.tags, shape_of(node))


def _placed(rules: RowRules, node: fx.Node) -> RowValue:
    """Rows written into zeros, as packed ones are into a padded batch: rows of zeros are those that
    hidden states of zeros have."""
    given, sizes, spans = bound(node), shape_of(node), _spans(bound(node)["indices"])
    value, dims = rules.row(given["values"]), [dim for span, _ in spans for dim in span]
    masked = any(val_of(at).dtype == torch.bool for _, at in spans)
    rank = 1 if masked else max(len(shape_of(at)) for _, at in spans)
    followed = dims == list(range(len(dims))) and not (masked and len(spans) > 1)
    rows = (True,) * rank + (False,) * (len(sizes) - len(dims))
    if (
        value is None
        or value.tokens != rows
        or not (followed and _is_zero(given["self"]) and _vanishes(value.expr))
        or given["accumulate"]
    ):
        reason = "the logits are written into rows of another tensor"
        raise Refusal(reason, "write what is computed per token there")
    step = RowStep("place", tuple(at for _, at in spans), value.token_sizes, sizes[: len(dims)])
    tags = (TOKEN,) * len(dims) + value.tags[rank:]
    return normalised(rules, RowValue(rules.pool.shift(value.expr, step), tags, sizes))


def _write_entries(rules: RowRules, node: fx.Node, value: RowValue, ids: fx.Node) -> RowValue:
    """One entry of each row overwritten, or added to."""
    given, rows = bound(node), value.sizes[:1]
    at, written = (
        rules.pool.call(
            aten.reshape.default, operand(rules, one, (TOKEN,), rows, each=True), (-1, 1)
        )
        for one in (ids, given["values"])
    )
    at = _from_the_start(rules, at, value.sizes[1])
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
    value = sole_row(rules, node)
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


def _covers(rules: RowRules, node: fx.Node) -> bool:
    """Whether a write into a slice overwrites everything (as functionalised writes often do)."""
    given = bound(node)
    return all(map(rules.same_size, shape_of(given["src"]), shape_of(given["self"])))
