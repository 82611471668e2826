"""How each ATen op acts on rows: the transfer rules of the row analysis.

``RowRules.apply`` takes a node that reads at least one row value and returns what the node is as
rows, or raises ``Refusal`` with the reason why it is none. Rules exist per kind of op, not per
model or loss: pointwise ops (by PyTorch's own tag) here; reductions, softmaxes and sorts over
local dims in ``row_functions``; layout in ``row_layout``; indexing in ``row_indexing`` and
``row_writes``; products in ``row_products``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import LOCAL, TOKEN, VOCAB, ExprPool, RowExpr, RowValue, Tag
from fxrl.ir.graph import OpOverload, Size, hint, is_tensor, shape_of, tensor_val
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


Rule = Callable[["RowRules", fx.Node], "RowValue | tuple[RowValue, ...]"]
RULES: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule for ATen overloads."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


class RowRules:
    """Applies the rules and remembers what every visited node is.

    Attributes:
        values: row value of each node that is one; a tuple for ops with several outputs.
        vocab: the size of the vocabulary, which tells wide local dims from small ones.
    """

    def __init__(self, vocab: int) -> None:
        self.pool = ExprPool()
        self.vocab = vocab
        self.values: dict[fx.Node, RowValue | tuple[RowValue, ...]] = {}

    def apply(self, node: fx.Node) -> RowValue | tuple[RowValue, ...]:
        """What ``node`` is as rows.

        Raises:
            Refusal: it mixes tokens, draws random numbers, or has no rule.
        """
        target: Any = node.target
        if target in RULES:
            return RULES[target](self, node)
        if not isinstance(target, OpOverload):
            raise Refusal(
                f"the logits enter {_name(target)}, an autograd.Function or kernel opaque to fxrl",
                "write it in PyTorch ops",
            )
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise Refusal(f"{_name(target)} draws random numbers, which a recompute would repeat")
        if torch.Tag.pointwise in target.tags:
            return pointwise(self, node)
        raise Refusal(f"no row rule for {_name(target)}")

    def row(self, node: object) -> RowValue | None:
        """The row value of a graph value, or None."""
        value = self.values.get(node) if isinstance(node, fx.Node) else None
        return value if isinstance(value, RowValue) else None

    def tag_of_size(self, size: Size) -> Tag:
        """A local dim's tag by its size."""
        return VOCAB if 2 * hint(size) >= self.vocab else LOCAL

    def like(self, node: fx.Node, expr: RowExpr, tags: tuple[Tag, ...]) -> RowValue:
        """The row value of ``node`` with the sizes its meta tells."""
        return RowValue(expr, tags, shape_of(node))


def _name(target: Any) -> str:
    return (
        str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))
    )


# ---------------------------------------------------------------------------- operands
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


def operand(rules: RowRules, node: fx.Node, tags: tuple[Tag, ...], sizes: tuple[Size, ...]) -> Any:
    """``node`` as an expression that broadcasts against ``[n, *locals]`` of a result."""
    value = rules.row(node)
    if value is not None:
        return _row_operand(rules, value, tags, sizes)
    from fxrl.analysis.rows.inputs import external  # the mutual recursion of absorption

    return external(rules, node, tags, sizes)


def _row_operand(
    rules: RowRules, value: RowValue, tags: tuple[Tag, ...], sizes: tuple[Size, ...]
) -> RowExpr:
    """Line a row value's local dims up with those of the result; its rows are the result's."""
    rank = len(tags)
    local_at: dict[int, Size] = {}
    tokens = 0
    for position, tag, size in _positions(value.tags, value.sizes, rank):
        if tag == TOKEN:
            if tags[position] != TOKEN or not same_size(size, sizes[position]):
                raise Refusal("tokens are paired with other tokens by broadcasting")
            tokens += 1
        elif tags[position] != TOKEN:
            local_at[position] = size
    if tokens != tags.count(TOKEN):
        raise Refusal("tokens are paired with other tokens by broadcasting")
    wanted = [p for p, tag in enumerate(tags) if tag != TOKEN]
    shape = [static(local_at.get(p, 1)) for p in wanted]
    if [static(s) for s in value.local_sizes] == shape:
        return value.expr
    return rules.pool.call(aten.reshape.default, value.expr, (-1, *shape))


def same_size(left: Size, right: Size) -> bool:
    """Whether two sizes are equal as expressions, or as plain numbers."""
    if isinstance(left, int) or isinstance(right, int):
        return hint(left) == hint(right)
    return bool(left.node.expr == right.node.expr) or hint(left) == hint(right)


def static(size: Size) -> int:
    """A local size as a number; local dims must not depend on the batch."""
    if isinstance(size, int):
        return size
    if size.node.expr.is_number:
        return int(size.node.expr)
    raise Refusal(
        f"a vocabulary or feature dim has the symbolic size {size}",
        "do not mark that dim dynamic",
    )


def is_one(size: Size) -> bool:
    """Whether a size is the number 1; a symbolic size never is (PyTorch specialises 0 and 1)."""
    return isinstance(size, int) and size == 1


def dims_of(dims: Any, rank: int) -> list[int]:
    """Normalised dims: ``None`` or an empty list means all."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    return [int(d) % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def sole_row(rules: RowRules, node: fx.Node, index: int = 0) -> RowValue:
    """The row value in argument ``index``; a Refusal when the rows come in elsewhere."""
    value = rules.row(node.args[index]) if len(node.args) > index else None
    if value is None:
        raise Refusal(f"{_name(node.target)} reads rows in an argument fxrl does not follow")
    return value


# ---------------------------------------------------------------------------- pointwise
@rule(
    aten.masked_fill.Tensor,
    aten.fill.Tensor,
    aten.fill.Scalar,
    aten.rsub.Tensor,
    aten.floor_divide.default,
    aten.hardswish.default,
)
def pointwise(rules: RowRules, node: fx.Node) -> RowValue:
    """Any elementwise op, tagged so or not: the same op on rows, operands lined up."""
    operands = [arg for arg in node.all_input_nodes if is_tensor(arg)]
    sizes = shape_of(node)
    tags = common_tags(rules, operands, len(sizes))

    def convert(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            if not is_tensor(arg):
                raise Refusal(f"%{arg} is a Python number computed from data", "keep it a tensor")
            return operand(rules, arg, tags, sizes)
        return tuple(map(convert, arg)) if isinstance(arg, (list, tuple)) else arg

    args = [convert(arg) for arg in node.args]
    kwargs = {name: convert(arg) for name, arg in node.kwargs.items()}
    return rules.like(node, rules.pool.call(node.target, *args, **kwargs), tags)


@rule(aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default)
def _copy(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    source, result = tensor_val(node.args[0]), tensor_val(node)
    assert source is not None
    assert result is not None
    if source.device != result.device:
        raise Refusal(f"the logits move from {source.device} to {result.device}")
    kwargs = {k: v for k, v in node.kwargs.items() if k in ("dtype",)}
    if node.target is aten.clone.default:
        return RowValue(value.expr, value.tags, shape_of(node))
    return rules.like(node, rules.pool.call(node.target, value.expr, **kwargs), value.tags)


@rule(
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
)
def _filled_like(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    kwargs = {k: v for k, v in node.kwargs.items() if k == "dtype" and v is not None}
    expr = rules.pool.call(node.target, value.expr, *node.args[1:], **kwargs)
    return rules.like(node, expr, value.tags)


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
def _new_filled(rules: RowRules, node: fx.Node) -> RowValue:
    """``logits.new_zeros(logits.shape)``; a constant of another shape is no row."""
    value, sizes = sole_row(rules, node), shape_of(node)
    if list(map(str, sizes)) != list(map(str, value.sizes)):
        name = _name(node.target)
        raise Refusal(f"{name} reads the logits for their dtype only", "make it with torch.full")
    target: Any = node.target
    constants: dict[Any, Any] = {aten.new_zeros.default: 0, aten.new_ones.default: 1}
    fill = constants[target] if target in constants else node.args[2]
    dtype = node.meta["val"].dtype
    expr = rules.pool.call(aten.full_like.default, value.expr, fill, dtype=dtype)
    return rules.like(node, expr, value.tags)
