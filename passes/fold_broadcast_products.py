"""One spelling for what PyTorch spells in several ways, so that passes need to know one.

NOTE [Why fold broadcast products]: ``matmul`` of a non-contiguous 3-D tensor (hidden states after
a slice) with a weight becomes a batched product with the weight expanded over the batch. It is a
linear layer all the same, and as one its weight gradient is not made once per sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.ir.build import Builder
from fxrl.ir.graph import RESHAPES, is_call, is_tensor, shape_of, topological_sort
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten


def fold_broadcast_products(graph: fx.Graph) -> None:
    """``bmm(rows [B, T, H], expand(weight [H, V]))`` as ``mm`` of the flattened rows."""
    found = [(node, weight) for node in graph.nodes if (weight := _expanded(node)) is not None]
    if not found:
        return
    sizes, builder = SizeTable(graph), Builder(graph)
    for node, weight in found:
        with builder.before(node):
            _fold(builder, sizes, node, weight)
    topological_sort(graph)


def _expanded(node: fx.Node) -> fx.Node | None:
    """The 2-D weight that a batched product's right operand repeats over the batch."""
    if not is_call(node, aten.bmm.default):
        return None
    right: Any = node.args[1]
    sizes = shape_of(right)
    if sizes[0] == 1 and not isinstance(sizes[0], torch.SymInt):
        return _only(right)
    while is_call(right, *RESHAPES):
        if [str(s) for s in shape_of(right)] != [str(s) for s in sizes]:
            return None
        right = right.args[0]
    if not is_call(right, aten.expand.default) or not is_tensor(right.args[0]):
        return None
    weight = right.args[0]
    return weight if len(shape_of(weight)) == 2 else None


def _only(batch: fx.Node) -> fx.Node:
    """The one matrix of a batch of one (how ``einsum`` writes a plain product)."""
    with Builder(batch.graph).after(batch) as builder:
        return builder.call(aten.squeeze.dim, batch, 0)


def _fold(builder: Builder, sizes: SizeTable, node: fx.Node, weight: fx.Node) -> None:
    rows: Any = node.args[0]
    target = [sizes.arg(size) for size in shape_of(node)]
    if None in target[1:]:
        return
    target[0] = -1 if target[0] is None else target[0]
    flat = builder.call(aten.reshape.default, rows, [-1, sizes.arg(shape_of(rows)[2])])
    product = builder.call(aten.mm.default, flat, weight)
    node.replace_all_uses_with(builder.call(aten.reshape.default, product, target))
