"""Open checkpointed calls that hold a loss head, so that the passes over heads see it.

    %logp = checkpoint(@body, %hidden, %weight, %ids)
becomes
    %logits = mm(%hidden, %weight)
    %logp   = ...

What the user saved by checkpointing the head, the head's own rewrite saves as well, and more. The
ops keep a mark to be recomputed, which AOTAutograd's partitioner obeys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrl.analysis.attention import SDPA
from fxrl.ir.graph import CHECKPOINT, body_of, is_call
from fxrl.ir.graph_pass import Applied, Miss, Normalisation, PassDoc, Site
from fxrl.ir.plan import Choice
from fxrl.ir.remark import Refusal

aten = torch.ops.aten
_OVER_CLASSES = (
    aten._log_softmax.default,
    aten._softmax.default,
    aten.log_softmax.int,
    aten.softmax.int,
    aten.logsumexp.default,
    aten.gather.default,
    aten.nll_loss_forward.default,
)


@dataclass(frozen=True)
class OpenLossCheckpoints(Normalisation[Site]):
    """Inline checkpointed bodies that compute over classes, their ops marked for recompute."""

    name: ClassVar[str] = "open-loss-checkpoints"
    doc: ClassVar[PassDoc] = PassDoc(
        "`torch.utils.checkpoint` around a loss head",
        "nothing by itself: the head's passes see the head",
        "nothing",
        "the checkpointed body could not be lowered",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Site | Miss]:
        for call in gm.graph.find_nodes(op="call_function", target=CHECKPOINT):
            body = body_of(gm, call)
            if body is None or not _computes_over_classes(body.graph):
                continue
            if (why := body.meta.get("not_lowered")) is not None:
                yield Miss(call, Refusal(f"the checkpointed loss could not be lowered: {why}"))
            else:
                yield Site(call, 0)

    def rewrite(self, gm: fx.GraphModule, site: Site, choice: Choice) -> Applied:
        call, body = site.anchor, body_of(gm, site.anchor)
        assert body is not None
        env: dict[fx.Node, Any] = dict(
            zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True)
        )
        with gm.graph.inserting_before(call):
            for node in body.graph.nodes:
                if node.op == "get_attr":
                    env[node] = _constant(gm, body, node)
                elif node.op == "call_function":
                    env[node] = _copied(gm, node, env, site.name)
        (output,) = body.graph.find_nodes(op="output")
        results: Any = fx.map_arg(output.args[0], lambda n: env[n])
        for item in list(call.users):
            position: Any = item.args[1]
            item.replace_all_uses_with(results[position])
            gm.graph.erase_node(item)
        return Applied("a checkpointed loss is opened: the head's own rewrite takes its place")


def _computes_over_classes(graph: fx.Graph) -> bool:
    heads = any(is_call(node, *_OVER_CLASSES) for node in graph.nodes)
    return heads and not any(is_call(node, SDPA) for node in graph.nodes)


def _copied(gm: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any], site: str) -> fx.Node:
    copy = gm.graph.node_copy(node, lambda n: env[n])
    copy.meta = dict(node.meta)
    copy.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    copy.meta["ac_graph_id"] = hash(site)
    return copy


def _constant(gm: fx.GraphModule, body: fx.GraphModule, node: fx.Node) -> fx.Node:
    """A constant of the body as one of the graph's."""
    name = f"{node.target}_of_body".replace(".", "_")
    while hasattr(gm, name):
        name += "_"
    setattr(gm, name, getattr(body, str(node.target)))
    constant = gm.graph.get_attr(name)
    constant.meta = dict(node.meta)
    return constant
