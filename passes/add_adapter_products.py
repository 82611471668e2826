"""Add products of low rank inside the products in FP8 beside them. The algebra is exact.

    fp8(%x, %w) + (%a @ %b) * s    becomes    fp8(%x, %w, left=%a * s, right=%b)

Op by op, an adapter beside a frozen Linear writes an output as wide as the layer's, and one more op
reads both to add them. Here the FP8 kernel adds it before it rounds and writes its result. What an
adapter adds to the gradient of the rows is added likewise. Each sum is rounded once.

NOTE [Why results no narrower than the product is deep]: the time saved grows with the result's
width, and what the adding kernel loses to cuBLAS with the product's depth (``kernels.hopper``).

NOTE [Why over the joint graph]: a cut that keeps products then keeps the sum, so no backward
computes the adapter's product again.

NOTE [Why this rounding may go]: others stay (``compile.bodies.inductor``): the sum of two bf16
values is so often a tie between two others that an adapter far below half a unit would decide the
ties, all in the gradient's direction. Sums of products in float32 are hardly ever ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

import fxrl.ops.fp8  # noqa: F401  # defines the op
from fxrl.ir.build import Builder
from fxrl.ir.graph import RESHAPES, hint, is_call, shape_of
from fxrl.ir.graph_pass import Applied, Normalisation, Site, Stage
from fxrl.ir.remark import Refusal
from fxrl.passes.merge_adapter_products import (
    NARROW,
    Product,
    drop,
    scaled_left,
    sums_of_products,
)

_FP8, _MM = torch.ops.fxrl.scaled_mm.default, torch.ops.aten.mm.default


@dataclass(frozen=True, slots=True)
class SumWithScaled(Site):
    """A sum of products."""

    scaled: tuple[Product, ...]  # those in FP8
    others: tuple[Product, ...]  # those that are not


@dataclass(frozen=True)
class AddAdapterProducts(Normalisation[SumWithScaled]):
    """One product where one in FP8 and one of low rank were added."""

    name = "add-adapter-products"
    stage = Stage.CLEAN

    def match(self, gm: fx.GraphModule) -> Iterator[SumWithScaled]:
        for products in sums_of_products(gm.graph, _FP8, _MM):
            scaled = tuple(p for p in products if is_call(p.node, _FP8) and len(p.node.args) == 6)
            others = tuple(p for p in products if is_call(p.node, _MM))
            if scaled and others:
                yield SumWithScaled(scaled[0].node, 0, scaled, others)

    def respell(self, gm: fx.GraphModule, site: SumWithScaled) -> Applied:
        scaled = [p for p in site.scaled if p.top is p.node or is_call(p.top, *RESHAPES)]
        scaled = [p for p in scaled if hint(shape_of(p.node)[1]) >= hint(shape_of(p.left)[1])]
        narrow = [p for p in site.others if hint(shape_of(p.left)[1]) <= NARROW]
        pairs = [*zip(scaled, narrow, strict=False)]
        if not scaled:
            raise Refusal("no product in FP8 is added as it is, and as wide as it is deep")
        if not pairs:
            raise Refusal(f"no product beside it is of {NARROW} columns or fewer")
        for product, adapter in pairs:
            top = product.top
            with Builder(gm.graph).before(max(top, adapter.node)) as build:
                left = scaled_left(build, adapter)
                made = build.call(_FP8, *product.node.args, left, adapter.right)
                if top is not product.node:
                    made = build.call(top.target, made, *top.args[1:])
            top.replace_all_uses_with(made)
            drop(adapter.top)
        return Applied(f"{len(pairs)} of {len(site.others)} products are added inside FP8's")
