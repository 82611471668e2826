"""Spell logits that a loss trains in some rows only as a choice for each row.

    %live  = slice(%z, 0, k, end)
    %still = detach(slice(%z, 0, 0, k))
    %rows  = cat([%still, %live])
becomes
    %rows  = where(%mask, detach(%z), %z)           mask [b, 1, 1], true in the first k rows

Rows joined from different computations are no loss head, so the logits would be stored. A choice
between a value and its own detached twin can be computed row by row, in tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.heads import is_amplifier
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    COPIES,
    RESHAPES,
    as_node,
    bound,
    equal_sizes,
    is_call,
    is_pointwise,
    is_whole_slice,
    reached,
    shape_of,
    val_of,
)
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten
_END = 2**63 - 1


@dataclass(frozen=True, slots=True)
class DetachedRows(Site):
    """Parts of one value, some of them detached, in their old order."""

    value: fx.Node
    dim: int
    bounds: tuple[int, int]  # of what is joined
    parts: tuple[tuple[fx.Node, bool], ...]  # and whether each is detached


@dataclass(frozen=True)
class SelectDetachedRows(Normalisation[DetachedRows]):
    """``cat([z[:k].detach(), z[k:]])`` as ``where(mask, z.detach(), z)``."""

    name = "select-detached-rows"
    doc = PassDoc(
        "`cat` of the logits' rows, some of them detached",
        "the joined logits; the loss head is one site",
        "nothing",
        "the parts are not all of the rows, in their order",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[DetachedRows]:
        for node in gm.graph.find_nodes(op="call_function", target=aten.cat.default):
            dim = bound(node)["dim"] % len(shape_of(node))
            parts = [_part(item, dim) for item in bound(node)["tensors"]]
            if len({detached for *_, detached in parts}) < 2 or dim == len(shape_of(node)) - 1:
                continue
            value, start, end = parts[0][0], parts[0][1], parts[-1][2]
            if _are_consecutive(node, dim, parts) and _is_wide(value):
                still = (detached for *_, detached in parts)
                items = tuple(zip(bound(node)["tensors"], still, strict=True))
                yield DetachedRows(node, 0, value, dim, (start, end), items)

    def respell(self, gm: fx.GraphModule, site: DetachedRows) -> Applied:
        sizes, rank = SizeTable(gm.graph), len(shape_of(site.anchor))
        options = {"dtype": torch.bool, "device": val_of(site.value).device}
        with Builder(gm.graph).before(site.anchor) as builder:
            marks = []
            for part, detached in site.parts:
                shape: list[Any] = [1] * rank
                shape[site.dim] = sizes.arg(shape_of(part)[site.dim])
                marks.append(builder.call(aten.full.default, shape, detached, **options))
            mask = builder.call(aten.cat.default, marks, site.dim)
            live = site.value
            if site.bounds != (0, _END):
                live = builder.call(aten.slice.Tensor, live, site.dim, *site.bounds)
            still = builder.call(aten.detach.default, live)
            chosen = builder.call(aten.where.self, mask, still, live)
        site.anchor.replace_all_uses_with(chosen)
        return Applied("rows of which some are detached are chosen from one value")


def _part(item: fx.Node, dim: int) -> tuple[fx.Node, Any, Any, bool]:
    """The value that a part is a slice of in ``dim``, its bounds, and whether it is detached."""
    start, end, detached = 0, _END, False
    while is_call(item, aten.detach.default) or is_whole_slice(item) or _slices(item, dim):
        detached |= is_call(item, aten.detach.default)
        if _slices(item, dim):
            if (start, end) != (0, _END):
                break
            start, end = bound(item)["start"] or 0, bound(item)["end"]
            end = _END if end is None else end
        item = as_node(item.args[0])
    return item, start, end, detached


def _slices(item: fx.Node, dim: int) -> bool:
    if not is_call(item, aten.slice.Tensor) or is_whole_slice(item) or bound(item)["step"] != 1:
        return False
    return bool(bound(item)["dim"] % len(shape_of(item)) == dim)


def _are_consecutive(node: fx.Node, dim: int, parts: list[Any]) -> bool:
    """Whether they are parts of one value, each of which begins where the one before it ended."""
    values, starts, ends, _ = zip(*parts, strict=True)
    start, end = starts[0], ends[-1]
    known = isinstance(start, int) and isinstance(end, int) and start >= 0
    if not known or len(set(values)) > 1 or starts[1:] != ends[:-1]:
        return False
    size = shape_of(values[0])[dim]
    rows = size if end == _END else size + end if end < 0 else end
    return equal_sizes(shape_of(node)[dim], rows - start)  # none of them ends before it begins


def _is_wide(value: fx.Node) -> bool:
    """Whether it is computed row by row from a product that widens its rows, as a head does."""
    shaped = *RESHAPES, *COPIES, aten.slice.Tensor

    def row_by_row(node: fx.Node) -> list[fx.Node]:
        return node.all_input_nodes if node.target in shaped or is_pointwise(node) else []

    return any(map(is_amplifier, reached([value], row_by_row)))
