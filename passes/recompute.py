"""Set what the backward of each outlined layer gets, from its products down to its inputs alone.

    fxrl.region([...], cut=products)         the forward keeps products; the backward computes norms
                                             and activations again
    fxrl.region([...], cut=fewest)           it keeps no more than spares the products; whatever is
                                             elementwise is computed again
    fxrl.region([...], cut=attention)        it keeps what attention returned; the backward runs all
                                             else again
    fxrl.region([...], cut=inputs)           the backward runs the layer again, attention too

Where the plan says "again", not even that waits. A layer's input is made again by the layer before,
which may want its own of the one before it: a segment of layers keeps the first one's input. And a
layer's forward may run again and hand what it keeps to its backward; where one run does both,
attention runs once more, never twice.

    %y = fxrl.region([%x, ...], cut=attention, again=forward)
    fxrl.region([%y, ...], cut=inputs, again: %y)

The plan chooses, layer by layer. Where nothing is planned, products are kept, which is fastest; a
layer that the user checkpoints keeps its inputs. Where a part of such a layer runs op by op, the
checkpointed call stays, and keeps only its input in any case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from torch import fx

from fxrl.analysis.saved_tensors import kept_by
from fxrl.ir.graph import maker_of, nbytes, needs_grad
from fxrl.ir.graph_pass import Applied, Pass, PassDoc, Site, Stage
from fxrl.ir.plan import Choice, CutLayer, made_again
from fxrl.ir.region import (
    Again,
    Cut,
    asked_again,
    is_differentiated,
    region_at,
    region_calls,
    set_region,
    take_again,
)
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
        "what autograd keeps of every small op; with the plan's `inputs`, of everything inside; "
        "with its `again`, inputs too, but for the first layer's of a segment",
        "norms and activations once more in backward; with `inputs` and `again` the matrix "
        "products too",
        "the layer was not outlined: `outline-layers` says why; or its input shall be made "
        "`again`, and no layer before makes it, or others read it",
    )

    def decide(self, site: OutlinedLayer) -> Choice:
        """Run everything again in layers that the user checkpoints; keep the products in others."""
        return CutLayer("inputs" if site.opened else "products")

    def obey(self, site: OutlinedLayer, choice: CutLayer) -> Applied:
        again = makes_again(choice)
        for call in site.calls:
            region = call.meta["region"]  # which a later layer may have asked already
            asked = region.again if again == "never" else again
            set_region(call, replace(region, cut=choice.kept, again=asked))
        dropped = _drop_inputs(site) if choice.inputs_on == "again" else 0
        if site.inside:
            return Applied("recompute: the user's checkpointing keeps only its input")
        done = _DONE["inputs" if again == "forward" else choice.kept]
        words = "; ".join(filter(None, (done, made_again(choice))))
        return Applied(words, dropped + (0 if site.opened else _saved(site.calls)))


def makes_again(choice: CutLayer) -> Again:
    """How a layer makes its outputs again where nobody asks for them."""
    return "forward" if choice.kept_on == "again" and choice.kept != "inputs" else "never"


def _drop_inputs(site: OutlinedLayer) -> int:
    """Let the layer before make this one's inputs again, in each forward that is differentiated;
    bytes that do not wait."""
    trained = [*filter(is_differentiated, site.calls)]
    makers = [maker_of_inputs(call, site.calls) for call in trained]
    if site.inside or None in makers:
        raise Refusal(
            "its input waits: the layer before does not make it, or it is read elsewhere too",
            "inputs_on='gpu' or 'host' in the plan's choice for it",
        )
    dropped = 0
    for call, maker in zip(trained, filter(None, makers), strict=True):
        inputs: Any = call.args[0]
        own = own_inputs(call, site.calls)
        take_again(call, own)
        set_region(maker, asked_again(maker.meta["region"]))
        dropped += sum(nbytes(inputs[place]) for place in own)
    return dropped


def own_inputs(call: fx.Node, calls: Sequence[fx.Node]) -> list[int]:
    """Positions of the inputs that nobody but this layer reads."""
    inputs: Any = call.args[0]
    return [
        position
        for position, node in enumerate(inputs)
        if node.op == "call_function" and all(user in calls for user in node.users)
    ]


def maker_of_inputs(call: fx.Node, calls: Sequence[fx.Node]) -> fx.Node | None:
    """The region of another layer that returns all of a layer's own inputs, and so can make them
    again; None where there is none."""
    inputs: Any = call.args[0]
    own = [inputs[place] for place in own_inputs(call, calls)]
    makers = {maker_of(value) for value in own}
    if len(makers) != 1 or not all(map(needs_grad, own)):
        return None
    (maker,) = makers
    region = region_at(maker)
    return maker if region is not None and region.layer and maker not in calls else None


def _saved(calls: Sequence[fx.Node]) -> int:
    """Bytes that these regions keep less than autograd does of their ops."""
    each = [kept_by(call.meta["region"]) for call in filter(is_differentiated, calls)]
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
