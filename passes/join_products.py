"""One product with the head where a loss joins the logits of several forwards.

    %a = view(mm(%rows_a, %w), [b, t, v])
    %b = view(mm(%rows_b, %w), [c, t, v])
    %z = cat([%a, %b])
becomes
    %z = view(mm(cat([%rows_a, %rows_b]), %w), [b + c, t, v])

Losses concatenate the logits of pairs or micro-batches that were run apart. Here their hidden
states are concatenated instead, which are far narrower, and the loss head becomes one site. The
same is done along tokens (a prompt's last logits before a completion's, also expanded to all
completions of the prompt) if only slices, reshapes and expansions stand between the products and
``cat``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.heads import factors, is_amplifier
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    COPIES,
    MATRIX_PRODUCTS,
    RESHAPES,
    as_node,
    bound,
    draws_random,
    equal_shapes,
    equal_sizes,
    is_call,
    is_pointwise,
    is_same,
    is_tensor,
    is_whole_slice,
    shape_of,
)
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten

#: Ops that keep their elements' order: of tensors one after the other they give the same.
_SHAPES = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
Level = tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class JoinedProducts(Site):
    """Values joined, each computed from one product with the same weight."""

    levels: tuple[Level, ...]  # the products, then what is computed from each, up to what is joined
    moves: tuple[Level, ...] = ()  # or how the rows of each product are moved up to what is joined


@dataclass(frozen=True)
class JoinProducts(Normalisation[JoinedProducts]):
    """``cat([f(rows_a @ w), f(rows_b @ w)])`` as ``f(cat([rows_a, rows_b]) @ w)``."""

    name = "join-products"
    doc = PassDoc(
        "`cat` or `stack` of the logits of several forwards (pairs run apart, micro-batches)",
        "the joined logits; the loss head is one site",
        "nothing",
        "the logits are read apart too, or not computed alike",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[JoinedProducts]:
        for node in gm.graph.nodes:
            if is_call(node, aten.cat.default, aten.stack.default):
                given = bound(node)
                parts, dim = tuple(given["tensors"]), given["dim"] % len(shape_of(node))
                if len(parts) < 2:
                    continue
                if dim == 0 and (levels := _levels(parts)):
                    yield JoinedProducts(node, 0, levels)
                elif is_call(node, aten.cat.default) and dim < len(shape_of(node)) - 1:
                    products, moves = zip(*map(_moved, parts), strict=True)
                    if _are_one(products):
                        yield JoinedProducts(node, 0, (products,), moves)

    def respell(self, gm: fx.GraphModule, site: JoinedProducts) -> Applied:
        with Builder(gm.graph).before(site.anchor) as builder:
            joined = _of_moved_rows if site.moves else _of_all_rows
            value = joined(builder, SizeTable(gm.graph), site)
        site.anchor.replace_all_uses_with(value)
        products = len(site.levels[0])
        return Applied(f"the rows of {products} products with one weight are one product's")


def _of_all_rows(builder: Builder, sizes: SizeTable, site: JoinedProducts) -> fx.Node:
    """One product of the rows one after the other, and what is computed from each, of all."""
    products, *above = site.levels
    rows = builder.call(aten.cat.default, [factors(node)[0] for node in products])
    value = _again(builder, products[0], factors(products[0])[0], rows)
    for first, *_ in above:
        if first.target in _SHAPES:
            value = _reshaped(builder, sizes, value, shape_of(first)[1:])
        else:
            value = _again(builder, first, first.args[0], value)
    if is_call(site.anchor, aten.stack.default):
        value = _reshaped(builder, sizes, value, shape_of(site.anchor)[1:])
    return value


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


def _moved(part: Any) -> tuple[Any, Level]:
    """The product that a value comes from, and the calls between them, which move whole rows; no
    product if something else happens on the way, or if another op reads what is between."""
    moves: Level = ()
    while isinstance(part, fx.Node) and part.op == "call_function" and _readers(part) == 1:
        if is_call(part, *MATRIX_PRODUCTS):
            return part, moves
        if not is_call(part, *_SHAPES, aten.expand.default, aten.slice.Tensor, aten.select.int):
            break
        source: Any = part.args[0]
        dim, end = bound(part).get("dim"), len(shape_of(source)) - 1
        crosses = isinstance(dim, int) and dim in (-1, end)
        if crosses or not equal_shapes(shape_of(part)[-1:], shape_of(source)[-1:]):
            break
        moves, part = (part, *moves), source
    return None, ()


def _are_one(products: Level) -> bool:
    first, *others = products
    if not all(products) or len(set(products)) < len(products) or not is_amplifier(first):
        return False
    return all(first.target is p.target and _one_weight(first, p) for p in others)


def _one_weight(first: fx.Node, other: fx.Node) -> bool:
    return is_same(factors(first)[1:], factors(other)[1:], guards=True)


def _of_moved_rows(builder: Builder, sizes: SizeTable, site: JoinedProducts) -> fx.Node:
    """One product of all rows, which are moved and joined as the products' results were."""
    (products,) = site.levels
    features = shape_of(factors(products[0])[0])[-1:]
    parts = []
    for product, moves in zip(products, site.moves, strict=True):
        here = factors(product)[0]
        for move in moves:
            if move.target in (*RESHAPES, aten.expand.default):
                leading: Any = move.args[1]
                target = move.target if is_call(move, aten.expand.default) else aten.reshape.default
                here = builder.call(target, here, [*leading[:-1], *features])
            else:
                here = _again(builder, move, move.args[0], here)
        parts.append(here)
    joined = builder.call(aten.cat.default, parts, bound(site.anchor)["dim"])
    rows = _reshaped(builder, sizes, joined, features)
    value = _again(builder, products[0], factors(products[0])[0], rows)
    return _reshaped(builder, sizes, value, shape_of(site.anchor)[1:])


def _unsliced(node: fx.Node) -> fx.Node:
    """The operand of slices that take all of it and that nothing else reads."""
    while is_whole_slice(node) and _readers(node) == 1:
        node = as_node(node.args[0])
    return node


def _readers(node: fx.Node) -> int:
    return sum(not is_call(user, aten.sym_size.int) for user in node.users)


def _alike(first: fx.Node, other: fx.Node) -> bool:
    """Whether two calls could be one call, of their first operands joined."""
    left, right = shape_of(first)[1:], shape_of(other)[1:]
    if first.target is not other.target or len(left) != len(right):
        return False
    if not all(map(equal_sizes, left, right)):
        return False
    if first.target in _SHAPES:
        return True
    if first.target in MATRIX_PRODUCTS:
        return _one_weight(first, other)
    others = first.kwargs == other.kwargs
    others = others and is_same(first.args[1:], other.args[1:], guards=True)
    return others and _acts_within(first)


def _acts_within(node: fx.Node) -> bool:
    """Whether each entry along the first operand's first dim is computed alone, by one formula."""
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
