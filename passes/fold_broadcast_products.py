"""Fold a batched product with one weight for all of the batch into a plain product.

    %w3 = expand(unsqueeze(%w, 0), [b, ...])
    %y  = bmm(%x, %w3)                              x [b, t, k], w [k, n]
becomes
    %y  = mm(reshape(%x, [b * t, k]), %w)           in the old shape again

NOTE [Why fold broadcast products]: ``matmul`` of a non-contiguous 3-D tensor (hidden states after
a slice) with a weight becomes a batched product with the weight expanded over the batch. It is a
linear layer all the same, and as one its weight gradient is not made once per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxrl.ir.bodies import graphs_of
from fxrl.ir.build import Builder
from fxrl.ir.graph import RESHAPES, equal_shapes, is_call, is_tensor, shape_of
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site
from fxrl.ir.plan import Choice
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class BroadcastProduct(Site):
    """A batched product with one weight for all of the batch."""

    weight: fx.Node


@dataclass(frozen=True)
class FoldBroadcastProducts(Normalisation[BroadcastProduct]):
    """``bmm(rows [B, T, H], expand(weight [H, V]))`` as ``mm`` of the flattened rows."""

    name: ClassVar[str] = "fold-broadcast-products"
    doc: ClassVar[PassDoc] = PassDoc(
        "a batched product whose right operand is one weight, expanded (`matmul` after a slice)",
        "the weight's gradient once per sequence",
        "nothing",
        "the result's sizes cannot be written in the graph",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[BroadcastProduct]:
        for graph in graphs_of(gm):
            for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
                if (weight := _expanded(node)) is not None:
                    yield BroadcastProduct(node, 0, weight)

    def rewrite(self, gm: fx.GraphModule, site: BroadcastProduct, choice: Choice) -> Applied:
        graph = site.anchor.graph
        with Builder(graph).before(site.anchor) as builder:
            _fold(builder, SizeTable(graph), site.anchor, site.weight)
        return Applied("a batched product with one weight is a product of all rows")


def _expanded(node: fx.Node) -> fx.Node | None:
    """The weight that a batched product's right operand repeats over the batch.

    2-D, or the operand itself, of a batch of one (how ``einsum`` writes a plain product).
    """
    if not is_call(node, aten.bmm.default):
        return None
    right: Any = node.args[1]
    sizes = shape_of(right)
    if sizes[0] == 1 and not isinstance(sizes[0], torch.SymInt):
        return right  # type: ignore[no-any-return]
    while is_call(right, *RESHAPES):
        if not equal_shapes(shape_of(right), sizes):
            return None
        right = right.args[0]
    if not is_call(right, aten.expand.default) or not is_tensor(right.args[0]):
        return None
    weight = right.args[0]
    return weight if len(shape_of(weight)) == 2 else None


def _fold(builder: Builder, sizes: SizeTable, node: fx.Node, weight: fx.Node) -> None:
    rows: Any = node.args[0]
    first, *rest = shape_of(node)
    batch = sizes.find(first)
    target = [-1 if batch is None else batch, *map(sizes.arg, rest)]
    if len(shape_of(weight)) == 3:
        weight = builder.call(aten.squeeze.dim, weight, 0)
    flat = builder.call(aten.reshape.default, rows, [-1, sizes.arg(shape_of(rows)[2])])
    product = builder.call(aten.mm.default, flat, weight)
    node.replace_all_uses_with(builder.call(aten.reshape.default, product, target))
