"""Region: a subgraph that owns its backward and runs behind one opaque op.

A pass outlines a region by building its forward graph and putting one ``fxrl::region`` call in
the graph (``fxrl::kept_region`` where the backward keeps instead of recomputing). The backend
derives the vjp (the recompute and the gradients, one graph, so what the
backward does not need is dead code), compiles both once per distinct body and registers them
under the region's id. The id is a hash of the content, so equal bodies are compiled once and a
second process finds Inductor's caches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxrl.ir.printer import Symbols, print_graph


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What a region's input looks like.

    Attributes:
        example: the (fake) tensor the region was outlined with: dtype, device, sizes, strides.
        tiled: its dim 0 is rows; each tile gets its part.
        needs_grad: the region returns a gradient for it.
        alive: it lives until the backward whether the region needs it there or not (a weight),
            so keeping it costs nothing.
    """

    example: torch.Tensor = field(repr=False)
    tiled: bool
    needs_grad: bool
    alive: bool = False


@dataclass(frozen=True)
class Region:
    """A subgraph outlined from the graph.

    Attributes:
        forward: takes the inputs in order, returns a tuple of tensors; functional ATen, no
            random numbers. If any input is tiled, all outputs have the rows in dim 0.
        inputs: one spec per input.
        keep: the forward hands the backward what it needs; otherwise the backward recomputes.
            Not for tiles.
    """

    forward: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    keep: bool = False

    @property
    def tiled(self) -> bool:
        """Whether the region runs tile by tile over rows."""
        return any(spec.tiled for spec in self.inputs)

    @cached_property
    def id(self) -> str:
        """Content hash: body, input types and which gradients are wanted."""
        return self._hash(self.inputs)

    @cached_property
    def id_without_grads(self) -> str:
        """What the id would be if no gradient were wanted: equal where only those differ."""
        return self._hash([replace(spec, needs_grad=False) for spec in self.inputs])

    @cached_property
    def _text(self) -> str:
        return print_graph(self.forward)  # once: the layers of a model have many lines

    def _hash(self, specs: Sequence[InputSpec]) -> str:
        symbols = Symbols()
        inputs = [_signature(spec, symbols) for spec in specs]
        text = "\n".join([self._text, *inputs, "keep" if self.keep else ""])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _signature(spec: InputSpec, symbols: Symbols) -> str:
    """All that compiled code depends on; strides too, but for rows, which are made contiguous."""
    example = spec.example
    sizes = [_text(size, symbols) for size in example.shape[1 if spec.tiled else 0 :]]
    strides = [] if spec.tiled else [_text(stride, symbols) for stride in example.stride()]
    kind = f"{example.dtype} {example.device.type} {sizes} {strides}"
    return f"{kind} {spec.tiled} {spec.needs_grad}" + (" alive" if spec.alive else "")


def _text(size: int | torch.SymInt, symbols: Symbols) -> str:
    return str(size) if isinstance(size, int) else symbols.text(size)


def regions_of(gm: fx.GraphModule) -> dict[str, Region]:
    """The regions that passes outlined from ``gm``, by id; passes add to it."""
    found: dict[str, Region] = gm.meta.setdefault("fxrl_regions", {})
    return found


def call_region(
    gm: fx.GraphModule, region: Region, inputs: list[fx.Node], tile: int, results: list[Any]
) -> list[fx.Node]:
    """Put the region's call at the graph's insertion point.

    Args:
        tile: rows per tile, 0 for the whole at once.
        results: meta value of each output.

    Returns:
        One graph value per output.
    """
    import operator

    region_id = region.id
    regions_of(gm)[region_id] = region
    if region.keep:
        call = gm.graph.call_function(torch.ops.fxrl.kept_region.default, (inputs, region_id))
    else:
        call = gm.graph.call_function(torch.ops.fxrl.region.default, (inputs, region_id, tile))
    call.meta["val"] = list(results)
    values = []
    for index, val in enumerate(results):
        item = gm.graph.call_function(operator.getitem, (call, index))
        item.meta["val"] = val
        values.append(item)
    return values


def replace_region(gm: fx.GraphModule, old: Region, new: Region) -> None:
    """Let the calls of ``old`` in ``gm`` call ``new``, which takes and returns the same."""
    old_id, new_id = old.id, new.id
    regions_of(gm).pop(old_id, None)
    regions_of(gm)[new_id] = new
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.fxrl.kept_region.default):
        if call.args[1] == old_id:
            call.args = (call.args[0], new_id)
