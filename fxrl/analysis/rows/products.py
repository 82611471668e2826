"""Row rules of matrix products, and the seeds: the LM heads where rows begin to be wide."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import LOCAL, TOKEN, VOCAB, Leaf, RowExpr, RowValue, Tag
from fxrl.analysis.rows.inputs import shared_leaf
from fxrl.analysis.rows.layout import normalise
from fxrl.analysis.rows.rules import RowRules, operand, rule, sole_row, static
from fxrl.ir.graph import Size, hint, is_call, shape_of
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


def factors(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """``(rows, weight, bias)`` of a product node."""
    args: Any = node.args
    if node.target in (aten.addmm.default, aten.baddbmm.default):
        return args[1], args[2], args[0]
    return args[0], args[1], None


def is_amplifier(node: fx.Node) -> bool:
    """Whether a product widens its rows: more columns out than features in, one batch."""
    if not is_call(node, aten.mm.default, aten.addmm.default, aten.bmm.default):
        return False
    rows, weight, _ = factors(node)
    if node.target is aten.bmm.default and hint(shape_of(weight)[0]) != 1:
        return False
    return hint(shape_of(weight)[-1]) > hint(shape_of(rows)[-1])


def seed(rules: RowRules, head: fx.Node) -> RowValue:
    """The logits of an LM head as rows of its hidden states.

    Raises:
        Refusal: a feature or vocabulary dim is symbolic, or the product has options.
    """
    rows, weight, bias = factors(head)
    if head.kwargs:
        raise Refusal("the head's addmm has alpha or beta")
    width = static(shape_of(weight)[-1])
    features = static(shape_of(weight)[-2])
    hidden = rules.pool.leaf(Leaf(rows, (), tuple(shape_of(rows)[:-1]), (features,)))
    matrix = shared_leaf(rules, weight)
    if head.target is aten.bmm.default:
        matrix = rules.pool.call(aten.reshape.default, matrix, (features, width))
    expr = _product(rules, hidden, matrix, bias)
    tokens = (TOKEN,) * (len(shape_of(head)) - 1)
    return normalise(rules, RowValue(expr, (*tokens, VOCAB), shape_of(head)))


def _product(rules: RowRules, rows: RowExpr, matrix: RowExpr, bias: fx.Node | None) -> RowExpr:
    if bias is None:
        return rules.pool.call(aten.mm.default, rows, matrix)
    if len(shape_of(bias)) != 1:
        raise Refusal("the head's bias differs between tokens")
    return rules.pool.call(aten.addmm.default, shared_leaf(rules, bias), rows, matrix)


@rule(aten.mm.default, aten.addmm.default)
def _contract(rules: RowRules, node: fx.Node) -> RowValue:
    """Rows times a fixed matrix: row-local; refused where the result is vocabulary-sized again."""
    rows, weight, bias = factors(node)
    value = rules.row(rows)
    if value is None or rules.row(weight) is not None:
        raise Refusal("a matrix product contracts tokens")
    if not value.wide:
        raise Refusal("a product on narrow rows stays outside")
    if value.tags[-1] == TOKEN or value.tags[0] != TOKEN:
        raise Refusal("a matrix product contracts tokens")
    tag = rules.tag_of_size(shape_of(weight)[-1])
    if tag == VOCAB:
        raise Refusal("the logits re-enter a layer that keeps the vocabulary dim")
    expr = _product(rules, value.expr, shared_leaf(rules, weight), bias)
    return RowValue(expr, (TOKEN, tag), shape_of(node))


@rule(aten.mv.default)
def _weigh(rules: RowRules, node: fx.Node) -> RowValue:
    """Rows times a vector, such as the mean of a categorical value head."""
    value = sole_row(rules, node)
    vector: Any = node.args[1]
    if value.tags[0] != TOKEN or value.tags[1] == TOKEN or rules.row(vector) is not None:
        raise Refusal("a matrix product contracts tokens")
    expr = rules.pool.call(aten.mv.default, value.expr, shared_leaf(rules, vector))
    return RowValue(expr, (TOKEN,), shape_of(node))


@rule(aten.bmm.default)
def _row_products(rules: RowRules, node: fx.Node) -> RowValue:
    """A product of two values per token, such as ``einsum("nv,nv->n")``; one may be an input."""
    sides: list[Any] = [node.args[0], node.args[1]]
    rows = [rules.row(side) for side in sides]
    exprs = []
    for side, row in zip(sides, rows, strict=True):
        sizes = shape_of(side)
        tags = row.tags if row is not None else (TOKEN, *_local_tags(rules, sizes[1:]))
        if tags[0] != TOKEN:
            raise Refusal("a batched product contracts tokens or re-enters a layer")
        if TOKEN in tags[1:]:
            raise Refusal("a batched product pairs tokens with tokens")
        exprs.append(operand(rules, side, tags, sizes))
    sizes = shape_of(node)
    tags = (TOKEN, *_local_tags(rules, sizes[1:]))
    return RowValue(rules.pool.call(aten.bmm.default, *exprs), tags, sizes)


def _local_tags(rules: RowRules, sizes: tuple[Size, ...]) -> tuple[Tag, ...]:
    for size in sizes:
        static(size)
    return tuple(rules.tag_of_size(size) if hint(size) > 1 else LOCAL for size in sizes)
