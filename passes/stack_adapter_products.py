"""Stack narrow products that share an operand, which is then read once. The algebra is exact.

    %x @ %a, %x @ %b     become the columns of   %x @ [%a, %b]
    %f @ %x, %g @ %x     become the rows of      [%f; %g] @ %x

The first are the down-projections of a layer's adapters (of queries, keys and values, of gate and
up), the others are their gradients. A product of so few columns takes as long as reading its wide
operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.ir.build import Builder
from fxrl.ir.graph import ancestors, is_same, nbytes, shape_of
from fxrl.ir.graph_pass import Applied, Normalisation, Site, Stage
from fxrl.ir.remark import Refusal
from fxrl.passes.merge_adapter_products import stacked

aten = torch.ops.aten

#: Columns up to which a product is bound by memory: wider ones gain nothing, and are the layer's.
_NARROW = 128


@dataclass(frozen=True, slots=True)
class NarrowProducts(Site):
    """Products of one operand."""

    products: tuple[fx.Node, ...]  # in the graph's order
    shared: int  # the place of their operand; they are stacked along the other one's dim


@dataclass(frozen=True)
class StackAdapterProducts(Normalisation[NarrowProducts]):
    """One product where several narrow ones read the same rows."""

    name = "stack-adapter-products"
    stage = Stage.CLEAN

    def match(self, gm: fx.GraphModule) -> Iterator[NarrowProducts]:
        products = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
        for shared in (0, 1):
            groups: list[list[fx.Node]] = []
            for node in products:
                width = shape_of(node)[1 - shared]
                if not isinstance(width, int) or width > _NARROW:
                    continue
                alike = (g for g in groups if is_same(g[0].args[shared], node.args[shared]))
                if (group := next(alike, None)) is None:
                    groups.append([node])
                else:
                    group.append(node)
            for group in groups:
                if len(group) > 1:
                    yield NarrowProducts(group[0], 0, tuple(group), shared)

    def respell(self, gm: fx.GraphModule, site: NarrowProducts) -> Applied:
        products, dim = site.products, 1 - site.shared
        others: list[Any] = [product.args[dim] for product in products]
        wide: Any = products[0].args[site.shared]
        if not ancestors(others).isdisjoint(products):
            raise Refusal("one needs another's result")
        copied = 2 * sum(map(nbytes, (*others, *products)))
        if copied >= (len(products) - 1) * nbytes(wide):
            raise Refusal("copies of operands and results would cost more than reading again")
        with Builder(gm.graph).before(products[0]) as build:
            narrow = stacked(build, others, dim)
            pair = (narrow, wide) if site.shared else (wide, narrow)
            whole = build.call(aten.mm.default, *pair)
            start = 0
            for product in products:
                end = start + int(shape_of(product)[dim])
                part = build.call(aten.slice.Tensor, whole, dim, start, end)
                if dim:  # columns: what was contiguous stays so
                    said = {"memory_format": torch.contiguous_format}
                    part = build.call(aten.clone.default, part, **said)
                product.replace_all_uses_with(part)
                start = end
        return Applied(f"{len(products)} narrow products of one operand in one")
