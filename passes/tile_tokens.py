"""Run the widest stretch of a layer, its MLP, in tiles of tokens, where the plan says so.

    %gate = mm(%x, %w_gate)                [N, W]   each of them three times a layer's width
    %h    = mul(silu(%gate), %up)          [N, W]
    %y    = mm(%h, %w_down)                [N, H]
becomes, inside the layer's region,
    %y    = fxrl.region([%x, %w_gate, %w_up, %w_down])     one tile of rows at a time

A region inside a region: its own backward computes a tile's wide values again. The stretch is found
as a loss head is: rows that depend on no other row, from the products that widen them to those that
make them narrow again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from fxrl.analysis.rows.analysis import analyse_layer
from fxrl.ir.bodies import clone
from fxrl.ir.graph import share_views
from fxrl.ir.graph_pass import Applied, Miss, PassDoc, tidy
from fxrl.ir.plan import CutLayer
from fxrl.ir.region import Region, mark_grads, once_for, set_region
from fxrl.ir.remark import Refusal
from fxrl.passes.chunk_vocab_region import run_by_tiles
from fxrl.passes.recompute import LayerPass, OutlinedLayer


@dataclass(frozen=True)
class TileTokens(LayerPass):
    """Tile each layer's MLP as the plan says."""

    name = "tile-tokens"
    requires = ("outline-layers", "recompute")
    doc = PassDoc(
        "a layer that was outlined and whose plan says `tile_tokens`",
        "all but one tile of the MLP's wide values, in forward and backward",
        "the wide products once more in backward, also where products are kept",
        "the layer holds no stretch of row-wise products that is wider than its ends",
    )

    def obey(self, site: OutlinedLayer, choice: CutLayer) -> Applied | None:
        if not choice.tile_tokens:
            return None
        tiled = [tile_widest(call.meta["region"], choice.tile_tokens) for call in site.calls]
        if not any(tiled):
            raise Refusal("no stretch of row-wise products is wider than the values around it")
        for call, region in zip(site.calls, tiled, strict=True):
            if region is not None:
                set_region(call, region)
        return Applied(f"the MLP runs in tiles of {choice.tile_tokens} rows")


def tile_widest(region: Region, tile: int) -> Region | None:
    """The region with its widest stretch in tiles of ``tile`` rows; None where there is none."""
    tiled = _tiled(region.forward, region.trained, tile)
    return None if tiled is None else replace(region, forward=tiled)


@once_for
def _tiled(body: fx.GraphModule, trained: tuple[bool, ...], tile: int) -> fx.GraphModule | None:
    """A tiled copy of a region's graph."""
    gm, done = clone(body), False
    mark_grads(gm.graph, trained)
    share_views(gm.graph)
    for site in list(analyse_layer(gm.graph)):
        if isinstance(site, Miss):
            continue
        try:
            run_by_tiles(gm, site, tile)
        except Refusal:
            continue
        done = True
    if done:
        tidy(gm)
    return gm if done else None
