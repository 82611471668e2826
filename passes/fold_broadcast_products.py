"""Turn batched products with one weight into plain products.

    %w3 = expand(unsqueeze(%w, 0), [b, ...])
    %y  = bmm(%x, %w3)                              x [b, t, k], w [k, n]
becomes
    %y  = mm(reshape(%x, [b * t, k]), %w)           in the old shape again

``baddbmm`` becomes that plus its bias. A convolution one token wide, as some loss heads are
written, becomes the product of all tokens, with features and tokens swapped before and after it.
Heads of a few codebooks (``bmm(x [q, n, k], w [q, k, v])``) become one product each, stacked.

NOTE [Why fold broadcast products]: ``matmul`` of a non-contiguous 3-D tensor (hidden states after
a slice) with a weight becomes a batched product with the weight expanded over the batch, whose
weight gradient is computed once per sequence. As the linear layer that it is, it is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.heads import feeds_class_op
from fxrl.ir.bodies import graphs_of
from fxrl.ir.build import Builder
from fxrl.ir.graph import RESHAPES, ancestors, equal_shapes, hint, is_call, is_tensor, shape_of
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site
from fxrl.ir.site import name_instead
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten


_MANY = 64  # codebooks; each is a product of its own
_BATCHED = (aten.bmm.default, aten.baddbmm.default)
_ONE_WIDE = ([1], [0], [1], False, [0], 1)  # stride, padding, dilation, transposed, of it, groups


@dataclass(frozen=True, slots=True)
class BroadcastProduct(Site):
    """A batched product, or a convolution, with one weight for all of the batch, or several."""

    weight: fx.Node


@dataclass(frozen=True)
class FoldBroadcastProducts(Normalisation[BroadcastProduct]):
    """``bmm(rows [B, T, H], expand(weight [H, V]))`` as ``mm`` of the flattened rows. Where what is
    computed is read as classes, ``convolution(rows [B, H, T], weight [V, H, 1])`` too, and
    ``bmm(rows [Q, N, H], weights [Q, H, V])`` as Q of them."""

    name = "fold-broadcast-products"
    doc = PassDoc(
        "a batched product whose right operand is one weight, expanded (`matmul` after a slice), "
        "or a loss head that is a convolution one token wide, or one for each codebook",
        "the weight's gradient once per sequence",
        "nothing",
        "the result's sizes cannot be written in the graph",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[BroadcastProduct]:
        for graph in graphs_of(gm):
            for target in _BATCHED:
                for node in graph.find_nodes(op="call_function", target=target):
                    if (weight := _expanded(node)) is not None:
                        yield BroadcastProduct(node, 0, weight)
                    elif _are_heads(node):
                        yield BroadcastProduct(node, 0, node.args[-1])
            for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
                if node.args[3:] == _ONE_WIDE and _is_head(node):
                    yield BroadcastProduct(node, 0, node.args[1])

    def respell(self, gm: fx.GraphModule, site: BroadcastProduct) -> Applied:
        graph, node = site.anchor.graph, site.anchor
        with Builder(graph).before(node) as builder:
            if node.target is aten.convolution.default:
                what = "a convolution one token wide is a product of all rows"
                made = _fold_convolution(builder, SizeTable(graph), node, site.weight)
            elif len(shape_of(site.weight)) == 3 and shape_of(site.weight)[0] != 1:
                what = "a batched product with several heads is one with each"
                made = _product_each(builder, node, site.weight)
            else:
                what = "a batched product with one weight is a product of all rows"
                made = _fold(builder, SizeTable(graph), node, site.weight)
            node.replace_all_uses_with(made)
        return Applied(what)


def _is_head(node: fx.Node) -> bool:
    """Whether a convolution gives more channels than it reads, and these are read as classes."""
    rows, weight, *_ = node.all_input_nodes
    given, made = shape_of(rows), shape_of(node)
    wide = len(made) == 3 and hint(shape_of(weight)[2]) == 1
    return wide and hint(made[1]) > hint(given[1]) and feeds_class_op(node, hint(made[1]))


def _are_heads(node: fx.Node) -> bool:
    """Whether a batched product has a weight for each of a few batches, and computes classes."""
    if node.kwargs:
        return False
    args: Any = node.args
    *_, weights = args
    count, features, classes = shape_of(weights)
    inputs = [given for given in ancestors([weights]) if given.op in ("placeholder", "get_attr")]
    few = isinstance(count, int) and 1 < count <= _MANY and hint(classes) > hint(features)
    held = all(given.meta.get("of_model") for given in inputs if is_tensor(given))
    return few and held and feeds_class_op(node)


def _expanded(node: fx.Node) -> fx.Node | None:
    """The weight that a batched product's right operand repeats over the batch.

    2-D, or the operand itself, of a batch of one (how ``einsum`` writes a plain product).
    """
    if not is_call(node, *_BATCHED) or node.kwargs:
        return None
    right: Any = node.args[-1]
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


def _fold(builder: Builder, sizes: SizeTable, node: fx.Node, weight: fx.Node) -> fx.Node:
    args: Any = node.args
    *bias, rows, _ = args
    first, *rest = shape_of(node)
    batch = sizes.find(first)
    target = [-1 if batch is None else batch, *map(sizes.arg, rest)]
    if len(shape_of(weight)) == 3:
        weight = builder.call(aten.squeeze.dim, weight, 0)
    flat = builder.call(aten.reshape.default, rows, [-1, sizes.arg(shape_of(rows)[2])])
    product = builder.call(aten.mm.default, flat, weight)
    name_instead(product, node)
    product = builder.call(aten.reshape.default, product, target)
    return builder.call(aten.add.Tensor, product, bias[0]) if bias else product


def _product_each(builder: Builder, node: fx.Node, weights: fx.Node) -> fx.Node:
    args: Any = node.args
    *bias, rows, _ = args
    each = [
        builder.call(
            aten.mm.default,
            builder.call(aten.select.int, rows, 0, at),
            builder.call(aten.select.int, weights, 0, at),
        )
        for at in range(int(shape_of(weights)[0]))
    ]
    products = builder.call(aten.stack.default, each)
    return builder.call(aten.add.Tensor, products, bias[0]) if bias else products


def _fold_convolution(
    builder: Builder, sizes: SizeTable, node: fx.Node, weight: fx.Node
) -> fx.Node:
    """The product with the memory layout of the convolution's result, which views rely on."""
    args: Any = node.args
    rows, _, bias = args[:3]
    batch, classes, tokens = map(sizes.arg, shape_of(node))
    flat = builder.call(aten.transpose.int, rows, 1, 2)
    flat = builder.call(aten.reshape.default, flat, [-1, sizes.arg(shape_of(rows)[1])])
    weight = builder.call(aten.t.default, builder.call(aten.squeeze.dim, weight, 2))
    product = builder.call(aten.mm.default, flat, weight)
    if bias is not None:
        product = builder.call(aten.add.Tensor, product, bias)
    product = builder.call(aten.reshape.default, product, [batch, tokens, classes])
    product = builder.call(aten.transpose.int, product, 1, 2)
    dense = {"memory_format": torch.contiguous_format}
    return builder.call(aten.clone.default, product, **dense)
