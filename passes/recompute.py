"""Set what the backward of each outlined layer gets, from its products down to its inputs alone.

    fxrl.region([...], cut=products)         the forward keeps products; the backward computes norms
                                             and activations again
    fxrl.region([...], cut=fewest)           it keeps no more than spares the products; whatever is
                                             elementwise is computed again
    fxrl.region([...], cut=attention)        it keeps what attention returned; the backward runs all
                                             else again
    fxrl.region([...], cut=inputs)           the backward runs the layer again, attention too

The plan chooses, layer by layer. Where nothing is planned, products are kept, which is fastest; a
layer that the user checkpoints keeps its inputs. Where a part of such a layer runs op by op, the
checkpointed call stays, and keeps only its input in any case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import fx

from fxrl.analysis.saved_tensors import kept_by
from fxrl.ir.graph_pass import Applied, Pass, PassDoc, Site, Stage
from fxrl.ir.plan import Choice, CutLayer
from fxrl.ir.region import Cut, region_calls, set_region
from fxrl.ir.remark import Refusal


@dataclass(frozen=True, slots=True)
class OutlinedLayer(Site):
    """One layer's regions."""

    layer: str  # the layer's name
    calls: tuple[fx.Node, ...]  # its region calls, in order
    # The calls stand in a body that the user checkpoints, so the layer runs again anyway.
    inside: bool
    opened: bool  # the user checkpointed the layer, and ``open-layer-checkpoints`` took that over

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.layer


class LayerPass(Pass[OutlinedLayer]):
    """Base of the passes that do to each layer what its ``CutLayer`` says."""

    stage: ClassVar[Stage] = Stage.ACT
    shares_choice: ClassVar[bool] = True

    def match(self, gm: fx.GraphModule) -> Iterator[OutlinedLayer]:
        return outlined_layers(gm)

    def decide(self, site: OutlinedLayer) -> Choice:
        return CutLayer()

    @final
    def rewrite(self, gm: fx.GraphModule, site: OutlinedLayer, choice: Choice) -> Applied | None:
        if not isinstance(choice, CutLayer):
            raise Refusal(f"the plan's choice for a layer is {choice}, which is for another site")
        return self.obey(site, choice)

    @abstractmethod
    def obey(self, site: OutlinedLayer, choice: CutLayer) -> Applied | None:
        """Rewrite one layer, as ``rewrite`` does a site."""


@dataclass(frozen=True)
class Recompute(LayerPass):
    """Cut each layer as the plan says."""

    name: ClassVar[str] = "recompute"
    requires: ClassVar[tuple[str, ...]] = ("outline-layers",)
    doc: ClassVar[PassDoc] = PassDoc(
        "a layer that was outlined",
        "what autograd keeps of every small op; with the plan's `inputs`, of everything inside",
        "norms and activations once more in backward; with `inputs` the matrix products too",
        "the layer was not outlined: `outline-layers` says why",
    )

    def decide(self, site: OutlinedLayer) -> Choice:
        """Run everything again in layers that the user checkpoints; keep the products in others."""
        return CutLayer("inputs" if site.opened else "products")

    def obey(self, site: OutlinedLayer, choice: CutLayer) -> Applied:
        for call in site.calls:
            set_region(call, replace(call.meta["region"], cut=choice.kept))
        if site.inside:
            return Applied("recompute: the user's checkpointing keeps only its input")
        return Applied(_DONE[choice.kept], 0 if site.opened else _saved(site.calls))


def _saved(calls: Sequence[fx.Node]) -> int:
    """Bytes that these regions keep less than autograd does of their ops."""
    each = [kept_by(call.meta["region"]) for call in calls]
    return max(0, sum(kept.by_autograd - kept.inputs - kept.made for kept in each))


_DONE: dict[Cut, str] = {
    "products": "keep: matrix products; norms and activations run again",
    "fewest": "keep: no more than spares the matrix products",
    "attention": "recompute: only its inputs and what attention returned are kept",
    "inputs": "recompute: only its inputs are kept",
}


def outlined_layers(gm: fx.GraphModule) -> Iterator[OutlinedLayer]:
    """The layers that are regions, in order."""
    layers: dict[str, list[fx.Node]] = {}
    for call in region_calls(gm):
        if layer := call.meta["region"].layer:
            layers.setdefault(layer, []).append(call)
    for layer, calls in layers.items():
        inside = calls[0].graph.owning_module is not gm
        opened = "checkpointed" in calls[0].meta
        yield OutlinedLayer(calls[0], 0, layer, tuple(calls), inside, opened)
