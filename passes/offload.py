"""Move what a layer keeps for its backward to host memory, where the plan says so.

fxrl.region([%x, ...], cut=attention)          %x and attention's output stay on the GPU
fxrl.region([%x, ...], cut=attention, host)    they are copied to pinned memory while the next
                                               layer runs, and come back, bit for bit, while the
                                               backward of the layer behind runs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxrl.analysis.saved_tensors import kept_by
from fxrl.ir.graph import nbytes
from fxrl.ir.graph_pass import Applied, PassDoc
from fxrl.ir.plan import CutLayer, waiting
from fxrl.ir.region import is_differentiated, send_to_host, set_pace
from fxrl.ir.remark import Refusal
from fxrl.passes.recompute import LayerPass, OutlinedLayer, own_inputs


@dataclass(frozen=True)
class Offload(LayerPass):
    """Mark in each layer's region what waits on the host."""

    name = "offload"
    requires = ("outline-layers", "recompute")
    doc = PassDoc(
        "a layer that was outlined and whose plan says `host`",
        "the layer's input, and what its cut keeps, on the GPU between forward and backward",
        "host memory; time where the link to the host is slower than a layer",
        "the layer was not outlined, the user's checkpointing of it stays, or all that could wait "
        "is read elsewhere",
    )

    def obey(self, site: OutlinedLayer, choice: CutLayer) -> Applied | None:
        calls = [*filter(is_differentiated, site.calls)]  # nothing of others waits for a backward
        if choice.sending is not None and choice.fetching is not None and not site.inside:
            for call in calls:
                set_pace(call, choice.sending, choice.fetching)
        if not calls or not (words := waiting(choice)):
            return None
        if site.inside:
            raise Refusal(
                "the user's checkpointing of this layer runs it as a whole",
                "let the plan choose: switch activation checkpointing off",
            )
        kept, moved = choice.kept_on == "host", 0
        own_of = {
            call: own_inputs(call, site.calls) if choice.inputs_on == "host" else []
            for call in calls
        }
        if not kept and not any(own_of.values()):
            raise Refusal("its input stays on the GPU: it is read outside of this layer, too")
        for call, own in own_of.items():
            send_to_host(call, own, kept=kept)
            inputs: Any = call.args[0]
            moved += sum(nbytes(inputs[position]) for position in own)
            moved += kept * kept_by(call.meta["region"]).made
        return Applied(words, moved)
