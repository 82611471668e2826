"""Replace writes of whole values by what was written, which has a derivative.

    %b = copy(%a, %x)                   a.copy_(x), or a[:, 1:] = x of a slice
becomes
    %b = expand(_to_copy(%x), shape)    x in the dtype, the shape and the layout of a

Tracing makes every in-place write functional. It spells an assignment as ``aten.copy``, the one
such op that autograd cannot differentiate, since eager mode never runs it. All of ``%a`` is
overwritten, so the result does not depend on its values. Writes into a part are ``slice_scatter``,
``select_scatter`` or ``index_put`` of the copy, which have derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fxrl.ir.bodies import graphs_of
from fxrl.ir.build import Builder
from fxrl.ir.graph import bound, equal_shapes, hint, shape_of, val_of
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten


@dataclass(frozen=True)
class DifferentiateCopies(Normalisation[Site]):
    """``copy(old, new)`` as ``new``, cast, expanded and laid out as ``old`` is."""

    name = "differentiate-copies"
    doc = PassDoc(
        "`out[:, 1:] = logp`, `out[i] = x`, `out.copy_(x)` anywhere in the loss",
        "the copy, where dtype, shape and layout agree; what it stands in may be differentiated",
        "nothing",
        "the sizes of what is overwritten cannot be written in the graph",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Site]:
        for graph in graphs_of(gm):
            for node in graph.find_nodes(op="call_function", target=aten.copy.default):
                yield Site(node, 0)

    def respell(self, gm: fx.GraphModule, site: Site) -> Applied:
        copy = site.anchor
        with Builder(copy.graph).before(copy) as builder:
            value = _written(builder, copy)
        copy.replace_all_uses_with(value)
        return Applied("what is copied is read where it was copied to")


def _written(builder: Builder, copy: fx.Node) -> fx.Node:
    value, wanted = bound(copy)["src"], val_of(copy)
    have = val_of(value)
    kind = {
        name: getattr(wanted, name)
        for name in ("dtype", "device")
        if getattr(have, name) != getattr(wanted, name)
    }
    if kind:
        value = builder.call(aten._to_copy.default, value, **kind)
    if not equal_shapes(have.shape, wanted.shape):
        table = SizeTable(copy.graph)
        value = builder.call(aten.expand.default, value, [*map(table.arg, wanted.shape)])
    return _laid_out(builder, value, wanted)


def _laid_out(builder: Builder, value: fx.Node, like: torch.Tensor) -> fx.Node:
    """``value`` with the strides of ``like``, which views of the result may rely on."""
    if equal_shapes(val_of(value).stride(), like.stride()):
        return value
    rank = len(shape_of(value))
    order = sorted(range(rank), key=lambda dim: -hint(like.stride()[dim]))
    if order == list(range(rank)):
        return builder.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    turned = builder.call(aten.permute.default, value, order)
    dense = builder.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return builder.call(aten.permute.default, dense, [order.index(dim) for dim in range(rank)])
