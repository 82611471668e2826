"""Row rules of what moves values: views, slices, indexing, and writes into columns.

What happens on local dims happens inside the row program; what picks or permutes tokens becomes a
``RowStep`` and leaves it; what merges tokens with local dims is refused.
"""

from __future__ import annotations

import math
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no stubs
import torch
from torch import fx

from fxrl.analysis.rows.expr import LOCAL, TOKEN, Leaf, RowExpr, RowStep, RowValue, Tag
from fxrl.analysis.rows.rules import (
    RowRules,
    Rows,
    absorb,
    dims_of,
    is_one,
    one_per_row,
    operand,
    shared_leaf,
    slice_bounds,
    sole_row,
    static,
)
from fxrl.ir.graph import (
    COPIES,
    Size,
    as_node,
    bound,
    fixed_size,
    has_hint,
    hint,
    is_call,
    is_equal,
    op_name,
    order_of_dims,
    shape_of,
    tensor_val,
    val_of,
)
from fxrl.ir.remark import Refusal

aten = torch.ops.aten
_UNTOLD = "a view splits dims in a way fxrl cannot follow"

EXPANDED = "rows are expanded to other tokens"
_EXPAND_AHEAD = "expand the hidden states ahead of the product with the head"


def reshaped(
    rules: RowRules, value: RowValue, tags: tuple[Tag, ...], sizes: tuple[Size, ...]
) -> RowValue:
    """``value`` with its local dims reshaped to ``tags`` and ``sizes``."""
    result = RowValue(value.expr, tags, sizes)
    old = [static(size) for size in value.local_sizes]
    new = [static(size) for size in result.local_sizes]
    return RowValue(rules.pool.reshaped(value.expr, old, new), tags, sizes)


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
        raise Refusal(_UNTOLD)
    left, right = old[i][0], new[j][0]
    while (more := _compared(left, right)) != 0:
        if more < 0 and i_end < len(old):
            left *= old[i_end][0]
            i_end += 1
        elif more > 0 and j_end < len(new):
            right *= new[j_end][0]
            j_end += 1
        else:
            raise Refusal(_UNTOLD)
    at_end = i_end == len(old) and j_end == len(new)  # equal, or it were no view
    if not at_end and not rules.same_size(left, right):
        raise Refusal(_UNTOLD)
    return i_end, j_end


def _compared(left: Size, right: Size) -> int:
    """Whether one holds more (1, -1) or both the same (0). Of what data decides, and was not seen
    as a number, a product holds more that has the other in it."""
    if has_hint(left, right):
        return (hint(left) > hint(right)) - (hint(left) < hint(right))
    if is_equal(left, right):
        return 0
    one, other = (size if isinstance(size, int) else size.node.expr for size in (left, right))
    ratio = sympy.sympify(one) / other
    if ratio.as_numer_denom()[1] == 1:
        return 1
    if (1 / ratio).as_numer_denom()[1] == 1:
        return -1
    raise Refusal(_UNTOLD)


def unsqueeze(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    dim = bound(node)["dim"] % (len(value.tags) + 1)
    return reshaped(rules, value, (*value.tags[:dim], LOCAL, *value.tags[dim:]), shape_of(node))


def expand(rules: RowRules, node: fx.Node) -> RowValue:
    value, sizes = sole_row(rules, node), shape_of(node)
    offset = len(sizes) - len(value.tags)
    old_tags, old = (LOCAL,) * offset + value.tags, (1,) * offset + value.sizes
    others = [
        (was, new)
        for tag, was, new in zip(old_tags, old, sizes, strict=True)
        if tag == TOKEN and not rules.same_size(new, was)
    ]
    if others and offset == 0 and not any(has_hint(*pair) for pair in others):
        return selected(rules, value, "expand", (), sizes)  # as a write of one row or of all does
    rest = [size for size, tag in zip(sizes, old_tags, strict=True) if tag != TOKEN]
    if others or None in map(fixed_size, rest):
        raise Refusal(EXPANDED, _EXPAND_AHEAD)
    if offset == 0 and all(map(rules.same_size, old, sizes)):
        return value
    tags = rules.resized(old_tags, sizes)
    lined = reshaped(rules, value, tags, old)
    target = [-1] + [static(s) for s, t in zip(sizes, tags, strict=True) if t != TOKEN]
    return RowValue(rules.pool.call(aten.expand.default, lined.expr, target), tags, sizes)


def permute(rules: RowRules, node: fx.Node) -> RowValue:
    """``permute``, ``transpose`` and ``t``."""
    value = sole_row(rules, node)
    order = order_of_dims(node)
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
    return picked(rules, value, given["dim"] % len(value.tags), given["index"], shape_of(node))


def picked(
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
        position = rules.pool.call(
            aten.reshape.default, shared_ids(rules, as_node(index.args[0])), (1,)
        )
        at = from_the_start(rules, position, value.sizes[dim])
        expr, index = rules.pool.call(aten.index_select.default, expr, own, at), 0
    return RowValue(rules.pool.call(aten.select.int, expr, own, index), tags, sizes)


def from_the_start(rules: RowRules, at: RowExpr, size: Size) -> RowExpr:
    """Positions in a local dim, which indexing counts from its end where they are negative."""
    from_the_end = rules.pool.call(aten.lt.Scalar, at, 0)
    moved = rules.pool.call(aten.add.Scalar, at, static(size))
    return rules.pool.call(aten.where.self, from_the_end, moved, at)


def unbind(rules: RowRules, node: fx.Node) -> tuple[RowValue, ...]:
    value = sole_row(rules, node)
    dim = bound(node)["dim"] % len(value.tags)
    return tuple(
        picked(rules, value, dim, index, tuple(part.shape))
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
    if _others(rules, value, sizes, dim):
        raise Refusal(f"{what} covers only part of the tokens")
    tags = value.retagged(dim, rules.tag_of_size(sizes[dim]))
    return operand(rules, other, tags, sizes, each=True, any_width=any_width)


def _others(rules: RowRules, value: RowValue, sizes: tuple[Size, ...], dim: int) -> tuple[int, ...]:
    """The dims but ``dim`` of which an index of ``sizes`` has another size, or maybe."""
    pairs = enumerate(zip(value.sizes, sizes, strict=True))
    return tuple(d for d, pair in pairs if d != dim and not rules.same_size(*pair))


def over_rows(rules: RowRules, node: fx.Node, *others: str) -> RowValue:
    """What entries are taken from or written into, as rows: those of an index or a source where it
    is none by itself, as blank entries are, or a teacher's under the student's best tokens."""
    given = bound(node)
    value, own = rules.row(given["self"]), given["self"]
    row = next((row for name in others if (row := rules.row(given.get(name)))), None)
    if value is not None or row is None:
        return sole_row(rules, node)
    dim, sizes = _own_dim(row, given["dim"], op_name(node)), shape_of(own)
    tags = row.retagged(dim, rules.tag_of_size(sizes[dim]))
    if (absorbed := absorb(rules, own, tags)) is None:
        return RowValue(operand(rules, own, tags, sizes, each=True), tags, sizes)
    expr = rules.pool.call(aten.add.Tensor, absorbed.expr, _zero_rows(rules, row, absorbed, own))
    return RowValue(expr, tags, sizes)


def _zero_rows(rules: RowRules, row: RowValue, like: RowValue, own: fx.Node) -> RowExpr:
    """Zeros for each row, in all of the local dims of ``like``: what is absorbed may broadcast.

    NOTE [Why not expanded]: Inductor leaves out what is added to zeros, and then lets
    ``index_add`` write into the one place that an expanded row has for all its entries.
    """
    call, local = rules.pool.call, [*map(static, like.local_sizes)]
    one = row.expr
    for _ in row.local_sizes:
        one = call(aten.select.int, one, 1, 0)
    dtype, device = val_of(own).dtype, val_of(own).device
    zero = call(aten.reshape.default, call(aten.zeros_like.default, one, dtype=dtype), (-1, 1))
    many = call(aten.full.default, (math.prod(local),), 0, dtype=torch.int64, device=device)
    return call(aten.reshape.default, call(aten.index_select.default, zero, 1, many), (-1, *local))


def gather(rules: RowRules, node: fx.Node) -> Rows:
    """Where the index has fewer rows, these are the first ones."""
    value, given = over_rows(rules, node, "index"), bound(node)
    dim, wanted = _own_dim(value, given["dim"], "gather"), shape_of(given["index"])
    for d in _others(rules, value, wanted, dim):
        sizes = (*value.sizes[:d], wanted[d], *value.sizes[d + 1 :])
        stop = wanted[d] if value.is_token(d) else static(wanted[d])
        value = _sliced(rules, value, d, (0, stop), sizes)
    index = _matching(rules, value, given["index"], dim, "gather's index", any_width=True)
    tags = value.retagged(dim, rules.tag_of_size(shape_of(node)[dim]))
    return rules.call(node, tags, self=value.expr, dim=value.local_dim(dim), index=index)


def scatter(rules: RowRules, node: fx.Node) -> Rows:
    value, given = over_rows(rules, node, "src", "index"), bound(node)
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
    picked = shared_ids(rules, index)
    expr = rules.pool.call(aten.index_select.default, value.expr, value.local_dim(dim), picked)
    tags = value.retagged(dim, rules.tag_of_size(shape_of(index)[0]))
    return RowValue(expr, tags, shape_of(node))


def shared_ids(rules: RowRules, index: fx.Node) -> RowExpr:
    """A list of positions in the vocabulary, the same for every row."""
    if rules.row(index) is not None:
        raise Refusal("an index into the vocabulary depends on the tokens as a whole")
    return shared_leaf(rules, index)


def write_columns(rules: RowRules, node: fx.Node) -> Rows:
    """``index_fill``, ``index_add`` and ``index_copy`` of a local dim; ``index_fill`` of tokens."""
    value, given = over_rows(rules, node, "source"), bound(node)
    if value.is_token(given["dim"] % len(value.tags)) and "source" not in given:
        return _fill_tokens(rules, node, value, given["dim"] % len(value.tags))
    dim = _own_dim(value, given["dim"], op_name(node))
    changed: dict[str, Any] = {
        "dim": value.local_dim(dim),
        "index": shared_ids(rules, given["index"]),
    }
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
    mask = one_per_row(rules, rules.pool.leaf(Leaf(given["index"], listed, tokens)), value)
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
    spans = spans_of(bound(node)["indices"])
    if rules.row(node.args[0]) is None and len(spans) == 1:
        return _looked_up(rules, node, *spans[0])
    value = sole_row(rules, node)
    dims = [dim for dims, _ in spans for dim in dims]
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise Refusal("advanced indexing skips a dim between its indices")
    if len(dims) > 1:
        value = units_as_tokens(rules, value, dims)
    if not any(map(value.is_token, dims)):
        (_, ids), *more = spans
        if more or len(dims) != 1 or not is_list(ids):
            reason = "the vocabulary is indexed by something other than one list of ids"
            raise Refusal(reason, "fill what a mask leaves out: logits.masked_fill(~mask, -inf)")
        return _taken(rules, node, value, dims[0], ids)
    if any(len({value.is_token(d) for d in span}) > 1 for span, _ in spans):
        cure = "multiply by it, and sum over the vocabulary"
        raise Refusal("a mask covers tokens and vocabulary together", cure)
    if len(dims) == 1 and dims[0] != 0 and is_list(spans[0][1]):
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


def spans_of(indices: Any) -> Spans:
    """Each index tensor with the dims it consumes; a bool mask consumes as many as it has."""
    spans, dim = [], 0
    for at in indices:
        val = tensor_val(at)
        width = val.dim() if val is not None and val.dtype in (torch.bool, torch.uint8) else 1
        if at is not None:
            spans.append((list(range(dim, dim + width)), at))
        dim += width
    return spans


def is_list(at: fx.Node) -> bool:
    val = tensor_val(at)
    return val is not None and val.dim() == 1 and val.dtype == torch.int64


def units_as_tokens(rules: RowRules, value: RowValue, dims: list[int]) -> RowValue:
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
    if not takes_all_rows(rules, tokens, value):
        if covered != len(count) and value.tags[:covered] != (TOKEN,) * covered:
            raise Refusal("advanced indexing of tokens that fxrl cannot follow")
        left = (*sizes[:rank], *count[covered:])
        expr = rules.pool.shift(expr, RowStep("index", tuple(i for _, i in tokens), count, left))
    if not local:
        return normalised(rules, RowValue(expr, row_tags + value.tags[covered:], sizes))
    if rest or covered != len(count):
        raise Refusal("one entry per row is picked, and other dims are kept")
    picks = operand(rules, local[0][1], row_tags, sizes, each=True)
    picks = from_the_start(rules, picks, value.local_sizes[0])
    picks = one_per_row(rules, picks, value)
    gathered = rules.pool.call(aten.gather.default, expr, 1, picks)
    entry = rules.pool.call(aten.select.int, gathered, 1, 0)
    return normalised(rules, RowValue(entry, row_tags, sizes))


def takes_all_rows(rules: RowRules, tokens: Spans, value: RowValue) -> bool:
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


def entry_by_entry(rules: RowRules, node: fx.Node) -> RowValue:
    """Entries one by one: where a mask selects whole rows the lowering has made it ``x[rows]``."""
    cure = "select rows by a mask of the rows, x[mask], or pick entries with gather"
    raise Refusal(f"{op_name(node)} takes entries one by one", cure)
