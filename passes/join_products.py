"""One product with the head where a loss joins the logits of several forwards.

    %a = view(mm(%rows_a, %w), [b, t, v])
    %b = view(mm(%rows_b, %w), [c, t, v])
    %z = cat([%a, %b])
becomes
    %z = view(mm(cat([%rows_a, %rows_b]), %w), [b + c, t, v])

Pairs that are run apart, and micro-batches, give logits that are put one after the other and read
as one. Their hidden states joined in their place are as many rows of ``hidden`` columns, and the
loss head behind them is one site.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxrl.analysis.rows.heads import factors, is_amplifier
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    COPIES,
    MATRIX_PRODUCTS,
    RESHAPES,
    bound,
    draws_random,
    equal_sizes,
    is_call,
    is_pointwise,
    is_same,
    is_tensor,
    shape_of,
)
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site
from fxrl.ir.plan import Choice
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten

#: Ops that keep their elements' order: of tensors one after the other they give the same.
_SHAPES = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
_END = torch.iinfo(torch.int64).max
Level = tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class JoinedProducts(Site):
    """Values joined along their first dim, each of one widening product with one weight."""

    levels: tuple[Level, ...]  # the products, then what is computed from each, up to what is joined


@dataclass(frozen=True)
class JoinProducts(Normalisation[JoinedProducts]):
    """``cat([f(rows_a @ w), f(rows_b @ w)])`` as ``f(cat([rows_a, rows_b]) @ w)``."""

    name: ClassVar[str] = "join-products"
    doc: ClassVar[PassDoc] = PassDoc(
        "`cat` or `stack` of the logits of several forwards (pairs run apart, micro-batches)",
        "the joined logits; the loss head is one site",
        "nothing",
        "the logits are read apart too, or not computed alike",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[JoinedProducts]:
        for node in gm.graph.nodes:
            if is_call(node, aten.cat.default, aten.stack.default):
                given = bound(node)
                if given["dim"] % len(shape_of(node)) == 0 and len(given["tensors"]) > 1:
                    levels = _levels(tuple(given["tensors"]))
                    if levels:
                        yield JoinedProducts(node, 0, levels)

    def rewrite(self, gm: fx.GraphModule, site: JoinedProducts, choice: Choice) -> Applied:
        anchor, sizes = site.anchor, SizeTable(gm.graph)
        products, *above = site.levels
        with Builder(gm.graph).before(anchor) as builder:
            rows = builder.call(aten.cat.default, [factors(node)[0] for node in products])
            value = _again(builder, products[0], factors(products[0])[0], rows)
            for first, *_ in above:
                if first.target in _SHAPES:
                    value = _reshaped(builder, sizes, value, shape_of(first)[1:])
                else:
                    value = _again(builder, first, first.args[0], value)
            if is_call(anchor, aten.stack.default):
                value = _reshaped(builder, sizes, value, shape_of(anchor)[1:])
        anchor.replace_all_uses_with(value)
        return Applied(f"the rows of {len(products)} products with one weight are one product's")


def _levels(parts: Level) -> tuple[Level, ...]:
    """From the products up to ``parts``; none where these are not computed alike."""
    levels: tuple[Level, ...] = ()
    while all(isinstance(node, fx.Node) and node.op == "call_function" for node in parts):
        parts = tuple(map(_unsliced, parts))
        levels = (parts, *levels)
        if len(set(parts)) < len(parts) or any(_readers(node) > 1 for node in parts):
            return ()
        if not all(_alike(parts[0], node) for node in parts):
            return ()
        if is_call(parts[0], *MATRIX_PRODUCTS):
            return levels if is_amplifier(parts[0]) else ()
        parts = tuple(node.args[0] for node in parts)  # type: ignore[misc]
    return ()


def _unsliced(node: fx.Node) -> fx.Node:
    """Past slices that take all: ``[:]`` of a size that varies, where a fixed one gives none."""
    while is_call(node, aten.slice.Tensor) and _readers(node) == 1:
        given = bound(node)
        if given["start"] or given["end"] != _END or given["step"] != 1:
            break
        node = given["self"]
    return node


def _readers(node: fx.Node) -> int:
    return sum(not is_call(user, aten.sym_size.int) for user in node.users)


def _alike(first: fx.Node, other: fx.Node) -> bool:
    """Whether two calls are one of their operands joined, which are their first ones."""
    left, right = shape_of(first)[1:], shape_of(other)[1:]
    if first.target is not other.target or len(left) != len(right):
        return False
    if not all(map(equal_sizes, left, right)):
        return False
    if first.target in _SHAPES:
        return True
    if first.target in MATRIX_PRODUCTS:
        return is_same(factors(first)[1:], factors(other)[1:], guards=True)
    others = first.kwargs == other.kwargs
    others = others and is_same(first.args[1:], other.args[1:], guards=True)
    return others and _acts_within(first)


def _acts_within(node: fx.Node) -> bool:
    """Whether entries of the first operand's first dim are computed apart, and all alike."""
    if is_call(node, aten.slice.Tensor, aten.select.int):
        return bool(bound(node)["dim"] % len(shape_of(node.args[0])) != 0)  # type: ignore[arg-type]
    if node.target in COPIES:
        return True
    if not is_pointwise(node) or draws_random(node):
        return False
    others = filter(is_tensor, node.all_input_nodes[1:])
    return all(len(shape_of(other)) < len(shape_of(node)) for other in others)


def _again(builder: Builder, node: fx.Node, old: Any, new: fx.Node) -> fx.Node:
    args = (new if arg is old else arg for arg in node.args)
    return builder.call(node.target, *args, **node.kwargs)


def _reshaped(builder: Builder, sizes: SizeTable, value: fx.Node, rest: Any) -> fx.Node:
    return builder.call(aten.reshape.default, value, [-1, *map(sizes.arg, rest)])
