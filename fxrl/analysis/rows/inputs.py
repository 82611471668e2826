"""How values from outside enter a row program: shared, tiled over rows, or absorbed into it.

A tensor that does not depend on the LM head meets row values by broadcasting. If no token dim of
it counts, every row reads all of it (*shared*: a weight, a bias, a mask over the vocabulary). If
it has the token dims, each row reads its part (*tiled*: targets, advantages). A tiled tensor that
is itself vocabulary-sized would keep the memory the rewrite is to free, so its producers are
*absorbed* where they are row-local: a one-hot, a constant, a teacher's probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import LOCAL, TOKEN, VOCAB, Leaf, RowExpr, RowStep, RowValue, Tag
from fxrl.analysis.rows.rules import (
    RowRules,
    _row_operand,
    dims_of,
    is_one,
    operand,
    static,
)
from fxrl.ir.graph import OpOverload, Size, is_call, is_tensor, shape_of
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


def external(
    rules: RowRules, node: fx.Node, tags: tuple[Tag, ...], sizes: tuple[Size, ...]
) -> RowExpr:
    """``node`` as an expression that broadcasts against a result with these tags and sizes.

    Raises:
        Refusal: it covers only some token dims with vocabulary-sized data.
    """
    shape, offset = shape_of(node), len(tags) - len(shape_of(node))
    own: list[Size] = [*(1 for _ in range(offset)), *shape]
    wanted = tuple(static(own[p]) for p, tag in enumerate(tags) if tag != TOKEN)
    token_at = [p for p, tag in enumerate(tags) if tag == TOKEN]
    covered = [p for p in token_at if not is_one(own[p])]
    if not covered:
        return _shared(rules, node, wanted)
    wide = any(tag == VOCAB and not is_one(own[p]) for p, tag in enumerate(tags))
    if wide and covered == token_at:
        own_tags = tuple(tags[offset:])
        absorbed = absorb(
            rules, node, tuple(_own_tag(t, s) for t, s in zip(own_tags, shape, strict=True))
        )
        if absorbed is not None:
            return _row_operand(rules, absorbed, tags, sizes)
    if wide and covered != token_at:
        raise Refusal(f"%{node} is vocabulary-sized and broadcast over some of the token dims")
    return rules.pool.leaf(_tiled(node, tags, sizes, offset, wanted, covered == token_at))


def _own_tag(tag: Tag, size: Size) -> Tag:
    return LOCAL if is_one(size) else tag


def _shared(rules: RowRules, node: fx.Node, wanted: tuple[int, ...]) -> RowExpr:
    leaf = shared_leaf(rules, node)
    if tuple(shape_of(node)) in ((), wanted):
        return leaf
    return rules.pool.call(aten.reshape.default, leaf, wanted)


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
    wanted: tuple[int, ...],
    complete: bool,
) -> Leaf:
    """The leaf of a tensor whose dims line up with ``tags``; token dims are brought first."""
    prepare: list[tuple[Any, tuple[Any, ...]]] = []
    rank = len(tags)
    if not complete:
        for _ in range(offset):
            prepare.append((aten.unsqueeze.default, (0,)))
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
    sizes = shape_of(node)
    source = node.args[0] if node.args else None
    if target in (aten.full.default, aten.zeros.default, aten.ones.default):
        return _constant(rules, node, tags)
    if target in (aten.unsqueeze.default, aten.expand.default) and isinstance(source, fx.Node):
        return _absorb_broadcast(rules, node, source, tags)
    if target is aten.scatter.value:
        return _absorb_one_hot(rules, node, tags)
    if target is aten.slice.Tensor and isinstance(source, fx.Node):
        return _absorb_slice(rules, node, source, tags)
    copies = (aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default)
    if target in copies and isinstance(source, fx.Node):
        kwargs = {k: v for k, v in node.kwargs.items() if k == "dtype"}
        inner = operand(rules, source, tags, sizes)
        return rules.pool.call(target, inner, **kwargs)
    if not (isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None

    def convert(arg: Any) -> Any:
        return operand(rules, arg, tags, sizes) if is_tensor(arg) else arg

    args = [convert(arg) for arg in node.args]
    return rules.pool.call(target, *args, **{k: convert(v) for k, v in node.kwargs.items()})


def _constant(rules: RowRules, node: fx.Node, tags: tuple[Tag, ...]) -> RowExpr:
    local = [static(s) for s, tag in zip(shape_of(node), tags, strict=True) if tag != TOKEN]
    kwargs = {k: v for k, v in node.kwargs.items() if k in ("dtype", "device") and v is not None}
    kwargs.setdefault("dtype", node.meta["val"].dtype)
    kwargs.setdefault("device", node.meta["val"].device)
    return rules.pool.call(node.target, (1, *local), *node.args[1:], **kwargs)


def _absorb_broadcast(
    rules: RowRules, node: fx.Node, source: fx.Node, tags: tuple[Tag, ...]
) -> RowExpr:
    if node.target is aten.expand.default:
        spread: RowExpr = operand(rules, source, tags, shape_of(node))
        return spread
    dim = int(node.args[1]) % len(tags)  # type: ignore[arg-type]
    inner_tags = tags[:dim] + tags[dim + 1 :]
    sizes = shape_of(source)
    expr: RowExpr = operand(rules, source, inner_tags, sizes)
    local = [static(s) for s, tag in zip(shape_of(node), tags, strict=True) if tag != TOKEN]
    if inner_tags.count(TOKEN) == 0:
        return expr
    return rules.pool.call(aten.reshape.default, expr, (-1, *local))


def _absorb_one_hot(rules: RowRules, node: fx.Node, tags: tuple[Tag, ...]) -> RowExpr | None:
    """``scatter(constant, v, index, value)`` with one index a row, as a comparison."""
    base, dim, index, value = node.args
    rank = len(tags)
    vocab_dim = int(dim) % rank  # type: ignore[arg-type]
    if not is_tensor(index) or not is_one(shape_of(index)[vocab_dim]):
        return None
    if tags[vocab_dim] != VOCAB or sum(tag != TOKEN for tag in tags) != 1:
        return None
    if not is_tensor(base):
        return None
    background = operand(rules, base, tags, shape_of(node))
    picked = operand(rules, index, tags, shape_of(node))
    width = static(shape_of(node)[vocab_dim])
    pool = rules.pool
    positions = pool.call(aten.arange.default, width, device=node.meta["val"].device)
    hit = pool.call(aten.eq.Tensor, picked, positions)
    filled = pool.call(aten.full_like.default, background, value)
    return pool.call(aten.where.self, hit, filled, background)


def _absorb_slice(
    rules: RowRules, node: fx.Node, source: fx.Node, tags: tuple[Tag, ...]
) -> RowExpr | None:
    dim = dims_of(node.args[1] if len(node.args) > 1 else 0, len(tags))[0]
    inner = absorb(rules, source, tags)
    if inner is None:
        return None
    args = (*node.args[2:],)
    if tags[dim] == TOKEN:
        at = sum(tag == TOKEN for tag in tags[:dim])
        left = tuple(s for s, tag in zip(shape_of(node), tags, strict=True) if tag == TOKEN)
        step = RowStep("slice", (at, *args), inner.token_sizes, left)
        return rules.pool.shift(inner.expr, step)
    return rules.pool.call(aten.slice.Tensor, inner.expr, inner.local_dim(dim), *args)
