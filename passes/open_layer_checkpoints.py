"""Replace the user's checkpointing of layers by fxrl's own cut of each layer.

    %y = checkpoint(@layer, %x, %w)             the whole layer runs again, op by op or region by
                                                region, before its backward
becomes
    %y = fxrl.region([%x, %w], cut=inputs)      the backward runs again what it needs, in one graph

As much memory is saved as before, and the plan may now choose otherwise for each layer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from fxrl.analysis.outline import computes
from fxrl.ir.bodies import CHECKPOINT, body_of, inline, what_it_saves, written_inputs
from fxrl.ir.graph import is_call, is_view
from fxrl.ir.graph_pass import Applied, Miss, Normalisation, PassDoc, Site, Stage
from fxrl.ir.region import region_at, set_region
from fxrl.ir.remark import Refusal


@dataclass(frozen=True)
class OpenLayerCheckpoints(Normalisation[Site]):
    """Inline checkpointed bodies that hold a layer's regions and nothing else."""

    name = "open-layer-checkpoints"
    stage = Stage.FIND
    doc = PassDoc(
        "`torch.utils.checkpoint` around a layer that was outlined whole",
        "running again what the backward does not need; the plan may keep more where there is room",
        "nothing",
        "something of the layer runs op by op, or the checkpointing is selective (`context_fn`); "
        "the checkpointed call stays as it is",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Site | Miss]:
        for call in gm.graph.find_nodes(op="call_function", target=CHECKPOINT):
            body = body_of(gm, call)
            if body is None or not _is_outlined(body.graph):
                continue
            if what_it_saves(body) is not None:
                why = "selective checkpointing (context_fn) says itself what the layer keeps"
                yield Miss(call, Refusal(why, "checkpoint the layer without context_fn"))
            elif not written_inputs(body):  # what it writes into it writes into twice
                yield Site(call, 0)

    def respell(self, gm: fx.GraphModule, site: Site) -> Applied:
        body = body_of(gm, site.anchor)
        assert body is not None
        for node in inline(site.anchor, body):
            if (region := region_at(node)) is not None:
                set_region(node, replace(region, cut="inputs"))
                node.meta["checkpointed"] = True
        return Applied("the user's checkpointing of a layer is taken over")


def _is_outlined(graph: fx.Graph) -> bool:
    """Whether regions do all the work of a body."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    regions = [node for node in calls if (region := region_at(node)) is not None and region.layer]
    return bool(regions) and all(
        node in regions or is_call(node, operator.getitem) or is_view(node) or not computes(node)
        for node in calls
    )
