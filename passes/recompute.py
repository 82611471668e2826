"""Set what the backward of each outlined layer gets: its matrix products, or only its inputs.

    fxrl.region([...], cut=products)         the forward keeps products; the backward computes norms
                                             and activations again
    fxrl.region([...], cut=inputs)           the backward runs the layer's part again, products too

The plan chooses, layer by layer. Where nothing is planned, products are kept: they are what takes
time. Inside a body that the user checkpoints, only the layer's input is kept in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from fxrl.analysis.saved_tensors import bytes_not_saved
from fxrl.ir.graph_pass import Applied, Pass, PassDoc, Site, Stage
from fxrl.ir.plan import Choice, CutLayer
from fxrl.ir.region import region_calls, set_region
from fxrl.ir.remark import Refusal


@dataclass(frozen=True, slots=True)
class OutlinedLayer(Site):
    """One layer's regions.

    Attributes:
        layer: the layer's name.
        calls: its region calls, in order.
        checkpointed: the user's checkpointing runs the layer again.
    """

    layer: str
    calls: tuple[fx.Node, ...]
    checkpointed: bool

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.layer


@dataclass(frozen=True)
class Recompute(Pass[OutlinedLayer]):
    """Cut each layer as the plan says."""

    name: ClassVar[str] = "recompute"
    stage: ClassVar[Stage] = Stage.ACT
    requires: ClassVar[tuple[str, ...]] = ("outline-layers",)
    doc: ClassVar[PassDoc] = PassDoc(
        "a layer that was outlined",
        "what autograd keeps of every small op; with the plan's `inputs`, of everything inside",
        "norms and activations once more in backward; with `inputs` the matrix products too",
        "the layer was not outlined: `outline-layers` says why",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[OutlinedLayer]:
        layers: dict[str, list[fx.Node]] = {}
        for call in region_calls(gm):
            if layer := call.meta["region"].layer:
                layers.setdefault(layer, []).append(call)
        found = [call.meta["region"] for calls in layers.values() for call in calls]
        bytes_of = {i: bytes_not_saved(region) for i, region in {r.id: r for r in found}.items()}
        for layer, calls in layers.items():
            checkpointed = calls[0].graph.owning_module is not gm
            saved = 0 if checkpointed else sum(bytes_of[c.meta["region"].id] for c in calls)
            yield OutlinedLayer(calls[0], saved, layer, tuple(calls), checkpointed)

    def decide(self, site: OutlinedLayer) -> Choice:
        """Products are kept: what may be computed again in no time is."""
        return CutLayer("products")

    def rewrite(self, gm: fx.GraphModule, site: OutlinedLayer, choice: Choice) -> Applied:
        if not isinstance(choice, CutLayer):
            raise Refusal(f"the plan's choice for a layer is {choice}, which is for another site")
        for call in site.calls:
            set_region(call, replace(call.meta["region"], cut=choice.kept))
        if site.checkpointed:
            return Applied("recompute: the user's checkpointing keeps only its input")
        if choice.kept == "inputs":
            return Applied("recompute: only its inputs are kept", site.saved_bytes)
        return Applied("keep: matrix products; norms and activations run again", site.saved_bytes)
