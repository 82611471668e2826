"""One spelling for what PyTorch spells in several ways, so that passes need to know one.

NOTE [Why fold broadcast products]: ``matmul`` of a non-contiguous 3-D tensor (hidden states after
a slice) with a weight becomes a batched product with the weight expanded over the batch. It is a
linear layer all the same, and as one its weight gradient is not made once per sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.ir.graph import (
    RESHAPES,
    is_call,
    is_tensor,
    shape_of,
    tensor_val,
    topological_sort,
)
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten


def fold_broadcast_products(graph: fx.Graph) -> None:
    """``bmm(rows [B, T, H], expand(weight [H, V]))`` as ``mm`` of the flattened rows."""
    found = [(node, weight) for node in graph.nodes if (weight := _expanded(node)) is not None]
    if not found:
        return
    sizes = SizeTable(graph)
    for node, weight in found:
        with graph.inserting_before(node):
            _fold(graph, sizes, node, weight)
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
    val = tensor_val(batch)
    assert val is not None
    with batch.graph.inserting_after(batch):
        matrix = batch.graph.call_function(aten.squeeze.dim, (batch, 0))
    matrix.meta = {**batch.meta, "val": val.squeeze(0)}
    return matrix


def _fold(graph: fx.Graph, sizes: SizeTable, node: fx.Node, weight: fx.Node) -> None:
    rows, result = tensor_val(node.args[0]), tensor_val(node)
    assert rows is not None
    assert result is not None
    target = [sizes.arg(size) for size in result.shape]
    if None in target[1:]:
        return
    target[0] = -1 if target[0] is None else target[0]
    count = rows.shape[0] * rows.shape[1]

    def call(op: Any, *args: Any, val: torch.Tensor) -> fx.Node:
        made = graph.call_function(op, args)
        made.meta = {**node.meta, "val": val}
        return made

    flat = call(
        aten.reshape.default,
        node.args[0],
        [-1, rows.shape[2]],
        val=rows.new_empty((count, rows.shape[2])),
    )
    product = call(aten.mm.default, flat, weight, val=result.new_empty((count, result.shape[2])))
    shaped = call(aten.reshape.default, product, target, val=result)
    node.replace_all_uses_with(shaped)
