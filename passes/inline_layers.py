"""Put the graphs of layers that were captured once where they are called.

    %x1 = fxrl_layer(@layer, %x, %mask, %w0)        %q, %k, %v = fxrl.region([%x, %w0])
                                            becomes  %o = scaled_dot_product_attention(%q, %k, %v)
                                                     ...

Before this pass each kind of layer is in the graph once, however deep the model is. After it each
layer is a site of its own, about which the plan decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxrl.ir.bodies import CALL_LAYER, body_of, inline, modules_of
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site, Stage
from fxrl.ir.region import region_at, set_region
from fxrl.ir.site import module_path, rename_site, site_name


@dataclass(frozen=True, slots=True)
class LayerCalls(Site):
    """Every call of a layer that was captured once."""

    calls: tuple[fx.Node, ...]


@dataclass(frozen=True)
class InlineLayers(Normalisation[LayerCalls]):
    """Replaces each call of a layer by the nodes of the layer's graph."""

    name = "inline-layers"
    stage = Stage.FIND
    doc = PassDoc(
        "layers that equal an earlier one: capture follows the first of a kind and calls its graph",
        "seconds before the first step: neither tracing, lowering nor outlining grows with depth",
        "nothing",
        "a layer differs from the others, or is called otherwise: it is captured by itself",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[LayerCalls]:
        calls = tuple(
            call
            for owner in modules_of(gm)
            for call in owner.graph.find_nodes(op="call_function", target=CALL_LAYER)
        )
        if calls:
            yield LayerCalls(calls[0], 0, calls)

    def respell(self, gm: fx.GraphModule, site: LayerCalls) -> Applied:
        firsts = {_inline(call) for call in site.calls}
        return Applied(f"{len(site.calls)} layers were captured as {len(firsts)}")


def _inline(call: fx.Node) -> str:
    """Inline one call; returns the path of the layer that was captured."""
    owner: Any = call.graph.owning_module
    body: Any = body_of(owner, call)
    theirs, ours = str(body.meta["layer_path"]), module_path(call)
    layer = site_name(call).partition(":")[0] + f":{ours}"
    for node in inline(call, body):
        rename_site(node, theirs, ours)
        if (region := region_at(node)) is not None:
            set_region(node, replace(region, layer=layer))
    return theirs
