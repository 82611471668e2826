"""Take inputs that a checkpointed body no longer reads (such as a mask) off its call.

A checkpoint keeps all its inputs alive until the backward, read or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from fxrl.ir.bodies import CHECKPOINT, body_of
from fxrl.ir.graph import inputs_of, nbytes
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site, Stage


@dataclass(frozen=True)
class DropUnusedInputs(Normalisation[Site]):
    """Checkpointed calls keep what their bodies read."""

    name = "drop-unused-inputs"
    stage = Stage.CLEAN
    doc = PassDoc(
        "a checkpointed call with an input that its body does not read any more",
        "that input's memory until the backward",
        "nothing",
        "the body reads all of its inputs",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Site]:
        for call in gm.graph.find_nodes(op="call_function", target=CHECKPOINT):
            body = body_of(gm, call)  # each call has its own: ``capture.lower``
            if body is not None and not all(n.users for n in inputs_of(body.graph)):
                yield Site(call, 0)

    def respell(self, gm: fx.GraphModule, site: Site) -> Applied:
        call, body = site.anchor, body_of(gm, site.anchor)
        assert body is not None
        pairs = list(zip(inputs_of(body.graph), call.args[1:], strict=True))
        dropped = [(node, arg) for node, arg in pairs if not node.users]
        call.args = (call.args[0], *(arg for node, arg in pairs if node.users))
        for node, _ in dropped:
            body.graph.erase_node(node)
        saved = sum(nbytes(arg) for _, arg in dropped if isinstance(arg, fx.Node))
        return Applied("a checkpointed call does not keep what it does not read", saved)
