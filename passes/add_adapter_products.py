"""Add products of low rank inside the products in FP8 beside them. The algebra is exact.

    fp8(%x, %w) + (%a @ %b) * s    becomes    fp8(%x, %w, left=%a * s, right=%b)

An adapter beside a frozen Linear writes a value as wide as the layer, which an elementwise op reads
again with the layer's own; here it is added before the result is rounded and written. So is what an
adapter gives to the gradient of the rows. Such sums are rounded once.

NOTE [Why results no narrower than the product is deep]: what is saved goes by the result's width,
and what a kernel that adds takes more than cuBLAS, by the product's depth (``kernels.hopper``).

NOTE [Why over the joint graph]: a cut that keeps products keeps the sum, and no backward multiplies
by an adapter again to have it.

NOTE [Why this rounding may go]: others stay (``compile.bodies.inductor``), for sums of two bf16
values lie half-way between two others so often that an adapter far below half a unit decides them,
each in the gradient's direction. Sums of products in float32 lie there as seldom as anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import fxrl.ops.fp8  # noqa: F401  # defines the op
from fxrl.ir.build import Builder
from fxrl.ir.graph import RESHAPES, hint, is_call, shape_of
from fxrl.ir.graph_pass import Applied, Normalisation, Site, Stage
from fxrl.ir.plan import Choice
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

    name: ClassVar[str] = "add-adapter-products"
    stage: ClassVar[Stage] = Stage.CLEAN

    def match(self, gm: fx.GraphModule) -> Iterator[SumWithScaled]:
        for products in sums_of_products(gm.graph, _FP8, _MM):
            scaled = tuple(p for p in products if is_call(p.node, _FP8) and len(p.node.args) == 6)
            others = tuple(p for p in products if is_call(p.node, _MM))
            if scaled and others:
                yield SumWithScaled(scaled[0].node, 0, scaled, others)

    def rewrite(self, gm: fx.GraphModule, site: SumWithScaled, choice: Choice) -> Applied:
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
