"""What the rules of the row analysis work with: their operands' rows, and values from outside.

``RowRules.apply`` takes a node that reads at least one row value and returns the node as rows, or
raises ``Refusal`` with the reason why it cannot be. There is a rule for each kind of op, none for a
model or a loss; ``analysis.RULES`` lists them all.

A tensor that does not depend on the LM head meets row values by broadcasting. If it has no token
dims, every row reads all of it (*shared*: a weight, a bias, a mask over the vocabulary). If it has
token dims, each row reads its part (*tiled*: targets, advantages). A tiled tensor that is itself
vocabulary-sized would keep the memory that the rewrite should free, so if it is computed row by row
it is computed inside the region (*absorbed*: a one-hot, a constant, a teacher's probabilities).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import (
    LOCAL,
    TOKEN,
    VOCAB,
    ExprPool,
    Leaf,
    RowExpr,
    RowStep,
    RowValue,
    Tag,
)
from fxrl.ir.graph import (
    COPIES,
    OpOverload,
    Size,
    bound,
    draws_random,
    equal_shapes,
    equal_sizes,
    fixed_size,
    hint,
    is_call,
    is_equal,
    is_pointwise,
    is_tensor,
    library_weight,
    op_name,
    shape_of,
    val_of,
    with_arguments,
)
from fxrl.ir.remark import Refusal

aten = torch.ops.aten

#: The name of a library's ops that multiply rows by a weight.
LIBRARY_PRODUCT = "library's product"

Rows = RowValue | tuple[RowValue, ...]
Rule = Callable[["RowRules", fx.Node], Rows]


@dataclass(eq=False)
class RowRules:
    """Applies the rules and remembers what every visited node is."""

    wide: int  # from which size on a local dim counts as vocabulary-sized
    table: Mapping[Any, Rule]  # by op, or by its name
    pointwise: Rule  # of elementwise ops that the table does not list
    narrow_products: bool  # whether rows that are narrow again may be multiplied once more
    guards: bool  # whether sizes that are equal as seen may be taken as such, by a guard
    asserted: Set[frozenset[str]]  # pairs of sizes that the graph asserts to be equal when it runs
    # Whether a product may make rows vocabulary-sized again, as the backward of one does.
    widens_again: bool = False
    pool: ExprPool = field(default_factory=ExprPool, init=False)
    # Row value of each node that is one; a tuple for ops with several outputs.
    values: dict[fx.Node, Rows] = field(default_factory=dict, init=False)

    def apply(self, node: fx.Node) -> Rows:
        """``node`` as rows. Raises ``Refusal`` if it mixes tokens, draws random numbers, or has no
        rule."""
        target: Any = node.target
        named = LIBRARY_PRODUCT if library_weight(node) is not None else str(target)
        rule = self.table.get(target) or self.table.get(named)
        if rule is not None:
            return rule(self, node)
        if op_name(node) == "register_hook":
            raise Refusal(
                "a hook gets the gradient of the logits",
                "register it on what is computed of them per token, such as log-probs",
            )
        if not isinstance(target, OpOverload):
            raise Refusal(
                f"the logits enter {op_name(node)}, an autograd.Function or kernel opaque to fxrl",
                "write it in PyTorch ops",
            )
        if draws_random(node):
            raise Refusal(
                f"{target} draws random numbers, which a recompute would repeat",
                "compute with noise of the logits' shape: torch.rand_like(logits)",
            )
        if is_pointwise(node) and is_tensor(node):  # ``frexp`` gives two
            return self.pointwise(self, node)
        raise Refusal(f"no row rule for {target}", "compute it of what the loss has per token")

    def follow(self, node: fx.Node) -> None:
        """Remember what a node that reads a row value is. Raises ``Refusal`` as ``apply`` does."""
        if node.target is operator.getitem:
            several: Any = self.values[node.args[0]]  # type: ignore[index]
            self.values[node] = several[node.args[1]]
        else:
            self.values[node] = self.apply(node)

    def of_backward(self) -> RowRules:
        """The same rules, for a graph that computes gradients."""
        return replace(self, widens_again=True)

    def row(self, node: object) -> RowValue | None:
        value = self.values.get(node) if isinstance(node, fx.Node) else None
        return value if isinstance(value, RowValue) else None

    def tag_of_size(self, size: Size) -> Tag:
        return VOCAB if hint(size) >= self.wide else LOCAL

    def resized(self, tags: tuple[Tag, ...], sizes: tuple[Size, ...]) -> tuple[Tag, ...]:
        """Tags for the same dims with other sizes; token dims stay token dims."""
        pairs = zip(tags, sizes, strict=True)
        return tuple(tag if tag == TOKEN else self.tag_of_size(size) for tag, size in pairs)

    def same_size(self, left: Size, right: Size) -> bool:
        """Whether two sizes are equal in each batch that this capture runs."""
        if frozenset((str(left), str(right))) in self.asserted:
            return True
        return (equal_sizes if self.guards else is_equal)(left, right)

    def call(self, node: fx.Node, tags: tuple[Tag, ...], /, **changed: Any) -> Rows:
        """``node`` as the same op on rows, with some arguments (by name) others; a row value for
        each tensor where it returns several."""
        args, kwargs = with_arguments(node, **changed)
        expr, val = self.pool.call(node.target, *args, **kwargs), node.meta["val"]
        if isinstance(val, torch.Tensor):
            return RowValue(expr, tags, tuple(val.shape))
        items = (self.pool.call(operator.getitem, expr, index) for index in range(len(val)))
        return tuple(RowValue(i, tags, tuple(x.shape)) for i, x in zip(items, val, strict=True))


def sole_row(rules: RowRules, node: fx.Node) -> RowValue:
    """The row value in the first argument; a Refusal when the rows come in elsewhere."""
    value = rules.row(node.args[0]) if node.args else None
    if value is None:
        raise Refusal(f"{op_name(node)} reads rows in an argument fxrl does not follow")
    return value


# ---------------------------------------------------------------------------- sizes and dims
def static(size: Size) -> int:
    """A local size as a number; local dims must not depend on the batch."""
    if (number := fixed_size(size)) is not None:
        return number
    raise Refusal(
        f"a vocabulary or feature dim has the symbolic size {size}",
        "scatter what it lists into a mask over the vocabulary",
    )


def is_one(size: Size) -> bool:
    """Whether a size is 1 in every batch that this capture runs."""
    return hint(size) == 1 and fixed_size(size) == 1


def dims_of(dims: Any, rank: int) -> list[int]:
    """Normalised dims: ``None`` or an empty list means all."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    return [int(d) % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def slice_bounds(node: fx.Node) -> tuple[Any, ...]:
    """Start, end and step of a slice, without those at the end that select all."""
    given = bound(node)
    start, end, step = given["start"] or 0, given["end"], given["step"]
    return (start, end, step) if step != 1 else (start,) if end is None else (start, end)


# ---------------------------------------------------------------------------- broadcasting
def common_tags(rules: RowRules, operands: list[fx.Node], rank: int) -> tuple[Tag, ...]:
    """Tags of an elementwise result of ``rank`` dims over broadcast ``operands``."""
    tags: list[Tag | None] = [None] * rank
    for node in operands:
        value = rules.row(node)
        if value is None:
            continue
        for position, tag, size in _positions(value.tags, value.sizes, rank):
            if tag != TOKEN and hint(size) == 1:
                continue
            if TOKEN in (tag, tags[position]) and tags[position] not in (None, tag):
                raise Refusal("a token dim meets a vocabulary dim in an elementwise op")
            tags[position] = VOCAB if VOCAB in (tag, tags[position]) else tag
    for node in operands:
        for position, _, size in _positions(("",) * len(shape_of(node)), shape_of(node), rank):
            if tags[position] in (None, LOCAL) and (tags[position] is None or hint(size) > 1):
                tags[position] = rules.tag_of_size(size) if hint(size) > 1 else LOCAL
    return tuple(tag or LOCAL for tag in tags)


def _positions(tags: tuple[Tag, ...], sizes: tuple[Size, ...], rank: int) -> list[Any]:
    """``(position in the result, tag, size)`` of each dim under right-aligned broadcasting."""
    offset = rank - len(tags)
    return [(offset + i, tag, size) for i, (tag, size) in enumerate(zip(tags, sizes, strict=True))]


def operand(
    rules: RowRules,
    node: fx.Node,
    tags: tuple[Tag, ...],
    sizes: tuple[Size, ...],
    *,
    each: bool = False,
    any_width: bool = False,
) -> RowExpr:
    """``node`` as an expression that broadcasts against ``[n, *locals]`` of a result; with
    ``each``, as a row per row of the result, for ops that do not broadcast; with ``any_width``, of
    local dims that may vary, which the result does not have. Raises ``Refusal`` if it pairs tokens
    with other tokens."""
    value = rules.row(node)
    if value is not None:
        return _row_operand(rules, value, tags, sizes)
    shape, offset = shape_of(node), len(tags) - len(shape_of(node))
    own: list[Size] = [*(1 for _ in range(offset)), *shape]
    wanted = tuple(own[p] for p, tag in enumerate(tags) if tag != TOKEN)
    token_at = [p for p, tag in enumerate(tags) if tag == TOKEN]
    covered = [p for p in token_at if not is_one(own[p])]
    if not covered and not each:
        leaf = shared_leaf(rules, node)
        plain = not shape or equal_shapes(shape, wanted)
        sizes_of_all = () if plain else tuple(map(static, wanted))
        return leaf if plain else rules.pool.call(aten.reshape.default, leaf, sizes_of_all)
    wide = not any_width and any(tag == VOCAB and not is_one(own[p]) for p, tag in enumerate(tags))
    if wide and covered == token_at and not each:
        own_tags = tuple(
            LOCAL if is_one(s) else t for t, s in zip(tags[offset:], shape, strict=True)
        )
        absorbed = absorb(rules, node, own_tags)
        if absorbed is not None:
            return _row_operand(rules, absorbed, tags, sizes)
    if wide and covered != token_at:
        return _of_groups(rules, node, tags, sizes, wanted)
    return rules.pool.leaf(_tiled(node, tags, sizes, offset, wanted, covered == token_at))


def _of_groups(
    rules: RowRules,
    node: fx.Node,
    tags: tuple[Tag, ...],
    sizes: tuple[Size, ...],
    wanted: tuple[Size, ...],
) -> RowExpr:
    """A vocabulary for each group of tokens (a bias for each sequence, ``[B, 1, V]``): all groups
    are shared, and each row picks its own by number."""
    shape, rank = shape_of(node), len(tags)
    own_tags = tags[rank - len(shape) :]
    tokens = [d for d, tag in enumerate(own_tags) if tag == TOKEN]
    local = [d for d, tag in enumerate(own_tags) if tag != TOKEN]
    groups = shared_leaf(rules, node)
    if tokens + local != list(range(len(shape))):
        groups = rules.pool.call(aten.permute.default, groups, (*tokens, *local))
    groups = rules.pool.call(aten.reshape.default, groups, (-1, *map(static, wanted)))
    own = tuple(shape[d] for d in tokens)
    expanded = tuple(size for size, tag in zip(sizes, tags, strict=True) if tag == TOKEN)
    numbers: list[tuple[Any, tuple[Any, ...]]] = [(aten.detach.default, ())]
    numbers += [(aten.select.int, (d, 0)) for d in reversed(local)]
    numbers += [
        (aten.ones_like.default, ()),
        (aten.gt.Scalar, (0,)),  # counted in whole numbers, whatever the dtype
        (aten.reshape.default, ([-1],)),
        (aten.cumsum.default, (0,)),
        (aten.sub.Tensor, (1,)),
        (aten.reshape.default, (own,)),
        (aten.expand.default, (expanded,)),
    ]
    mine = rules.pool.leaf(Leaf(node, tuple(numbers), expanded, ()))
    return rules.pool.call(aten.index_select.default, groups, 0, mine)


def _row_operand(
    rules: RowRules, value: RowValue, tags: tuple[Tag, ...], sizes: tuple[Size, ...]
) -> RowExpr:
    """A row value with its local dims aligned to those of the result, which has the same rows."""
    rank = len(tags)
    local_at: dict[int, Size] = {}
    tokens = 0
    for position, tag, size in _positions(value.tags, value.sizes, rank):
        if tag == TOKEN:
            if tags[position] != TOKEN or not rules.same_size(size, sizes[position]):
                raise _pairs_tokens()
            tokens += 1
        elif tags[position] != TOKEN:
            local_at[position] = size
    if tokens != tags.count(TOKEN):
        raise _pairs_tokens()
    shape = [local_at.get(p, 1) for p, tag in enumerate(tags) if tag != TOKEN]
    if equal_shapes(value.local_sizes, shape):
        return value.expr
    return rules.pool.call(aten.reshape.default, value.expr, (-1, *map(static, shape)))


def one_per_row(rules: RowRules, expr: RowExpr, value: RowValue) -> RowExpr:
    """A number for each row, in a shape that broadcasts against the local dims of ``value``."""
    sizes = (-1, *(1,) * len(value.local_sizes))
    return rules.pool.call(aten.reshape.default, expr, sizes)


def _pairs_tokens() -> Refusal:
    cure = "expand the hidden states to the tokens ahead of the product with the head"
    return Refusal("tokens are paired with other tokens by broadcasting", cure)


def shared_leaf(rules: RowRules, node: fx.Node) -> RowExpr:
    """All of ``node``, the same for every row.

    A transposed weight enters untransposed: its gradient is then accumulated in the parameter's
    own layout and needs no second copy.
    """
    if is_call(node, aten.t.default) and not rules.row(node.args[0]):
        return rules.pool.call(aten.t.default, shared_leaf(rules, node.args[0]))  # type: ignore[arg-type]
    return rules.pool.leaf(Leaf(node))


def _tiled(
    node: fx.Node,
    tags: tuple[Tag, ...],
    sizes: tuple[Size, ...],
    offset: int,
    wanted: tuple[Size, ...],
    complete: bool,
) -> Leaf:
    """The leaf of a tensor whose dims line up with ``tags``; token dims are brought first."""
    prepare: list[tuple[Any, tuple[Any, ...]]] = []
    rank = len(tags)
    if not complete:
        prepare += [(aten.unsqueeze.default, (0,))] * offset
        offset = 0
        target = [sizes[p] if tags[p] == TOKEN else -1 for p in range(rank)]
        prepare.append((aten.expand.default, (target,)))
    own_tags = tags[offset:]
    first = [d for d, tag in enumerate(own_tags) if tag == TOKEN]
    rest = [d for d, tag in enumerate(own_tags) if tag != TOKEN]
    if first + rest != list(range(len(own_tags))):
        prepare.append((aten.permute.default, (first + rest,)))
    tokens = tuple(sizes[p] for p in range(rank) if tags[p] == TOKEN)
    return Leaf(node, tuple(prepare), tokens, wanted)


# ---------------------------------------------------------------------------- absorption
def absorb(rules: RowRules, node: fx.Node, tags: tuple[Tag, ...]) -> RowValue | None:
    """``node`` computed row by row from smaller inputs, or None when it is an input itself."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    known = rules.row(node)
    if known is not None:
        return known
    try:
        expr = _absorbed(rules, node, tags)
    except Refusal:
        return None  # it stays an input: legal, only larger
    return None if expr is None else RowValue(expr, tags, shape_of(node))


def _absorbed(rules: RowRules, node: fx.Node, tags: tuple[Tag, ...]) -> RowExpr | None:
    target: Any = node.target
    if target in _CONSTANTS:
        return _constant(rules, node, tags)
    if target is aten.expand.default:
        return operand(rules, bound(node)["self"], tags, shape_of(node))
    if target is aten.unsqueeze.default:
        return _absorb_unsqueeze(rules, node, tags)
    if target is aten.scatter.value:
        return _absorb_one_hot(rules, node, tags)
    if target is aten.slice.Tensor:
        return _absorb_slice(rules, node, tags)
    if target in COPIES:
        kwargs = {k: v for k, v in node.kwargs.items() if k == "dtype"}
        inner = operand(rules, bound(node)["self"], tags, shape_of(node))
        return rules.pool.call(target, inner, **kwargs)
    if not is_pointwise(node) or draws_random(node):
        return None

    def convert(arg: Any) -> Any:
        return operand(rules, arg, tags, shape_of(node)) if is_tensor(arg) else arg

    args = [convert(arg) for arg in node.args]
    return rules.pool.call(target, *args, **{k: convert(v) for k, v in node.kwargs.items()})


_CONSTANTS = (
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,  # written over, or nobody's business
)


def _constant(rules: RowRules, node: fx.Node, tags: tuple[Tag, ...]) -> RowExpr:
    local = [static(s) for s, tag in zip(shape_of(node), tags, strict=True) if tag != TOKEN]
    val = val_of(node)
    kwargs = {"dtype": val.dtype, "device": val.device}
    return rules.pool.call(node.target, (1, *local), *node.args[1:], **kwargs)


def _absorb_unsqueeze(rules: RowRules, node: fx.Node, tags: tuple[Tag, ...]) -> RowExpr:
    given = bound(node)
    source, dim = given["self"], given["dim"] % len(tags)
    inner_tags = tags[:dim] + tags[dim + 1 :]
    expr = operand(rules, source, inner_tags, shape_of(source))
    if TOKEN not in inner_tags:
        return expr
    local = [static(s) for s, tag in zip(shape_of(node), tags, strict=True) if tag != TOKEN]
    return rules.pool.call(aten.reshape.default, expr, (-1, *local))


def _absorb_one_hot(rules: RowRules, node: fx.Node, tags: tuple[Tag, ...]) -> RowExpr | None:
    """``scatter(constant, v, index, value)`` with one index a row, as a comparison."""
    given, sizes = bound(node), shape_of(node)
    dim = given["dim"] % len(tags)
    if not is_one(shape_of(given["index"])[dim]):
        return None
    if tags[dim] != VOCAB or sum(tag != TOKEN for tag in tags) != 1:
        return None
    background = operand(rules, given["self"], tags, sizes)
    picked = operand(rules, given["index"], tags, sizes)
    pool, device = rules.pool, val_of(node).device
    positions = pool.call(aten.arange.default, static(sizes[dim]), device=device)
    hit = pool.call(aten.eq.Tensor, picked, positions)
    filled = pool.call(aten.full_like.default, background, given["value"])
    return pool.call(aten.where.self, hit, filled, background)


def _absorb_slice(rules: RowRules, node: fx.Node, tags: tuple[Tag, ...]) -> RowExpr | None:
    given = bound(node)
    dim = given["dim"] % len(tags)
    inner = absorb(rules, given["self"], tags)
    if inner is None:
        return None
    bounds = slice_bounds(node)
    if inner.is_token(dim):
        left = RowValue(inner.expr, tags, shape_of(node)).token_sizes
        step = RowStep("slice", (inner.token_dim(dim), *bounds), inner.token_sizes, left)
        return rules.pool.shift(inner.expr, step)
    return rules.pool.call(aten.slice.Tensor, inner.expr, inner.local_dim(dim), *bounds)
