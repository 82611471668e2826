"""Open checkpointed calls that hold a loss head, so that the passes over heads see it.

    %logp = checkpoint(@body, %hidden, %weight, %ids)
becomes
    %logits = mm(%hidden, %weight)
    %logp   = ...

The head's own rewrite saves what the user saved by checkpointing it, and more. The inlined ops stay
marked for recomputation, which AOTAutograd's partitioner obeys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrl.analysis.attention import SDPA
from fxrl.analysis.layers import layer_path
from fxrl.analysis.rows.heads import CLASS_OPS, feeds_class_op
from fxrl.ir.bodies import CHECKPOINT, HALVES, Halves, body_of, inline, written_inputs
from fxrl.ir.graph import PRODUCTS, is_call, is_tensor
from fxrl.ir.graph_pass import Applied, Miss, Normalisation, PassDoc, Site
from fxrl.ir.remark import Refusal


@dataclass(frozen=True)
class OpenLossCheckpoints(Normalisation[Site]):
    """Inline checkpointed bodies that compute logits or over classes, marked for recompute."""

    name = "open-loss-checkpoints"
    doc = PassDoc(
        "`torch.utils.checkpoint` around a loss head",
        "nothing by itself: the head's passes see the head",
        "nothing",
        "the checkpointed body could not be lowered",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Site | Miss]:
        for call in gm.graph.find_nodes(op="call_function", target=CHECKPOINT):
            body = body_of(gm, call)
            if body is None or not _is_of_head(call, body.graph):
                continue
            if (why := body.meta.get("not_lowered")) is not None:
                yield Miss(call, Refusal(f"the checkpointed loss could not be lowered: {why}"))
            elif written_inputs(body):
                why = "the checkpointed loss writes into a tensor, in its backward once more"
                yield Miss(call, Refusal(why, "write behind the checkpointed call"))
            else:
                yield Site(call, 0)

    def respell(self, gm: fx.GraphModule, site: Site) -> Applied:
        body = body_of(gm, site.anchor)
        assert body is not None
        number = 1 + max(node.meta.get("ac_graph_id", 0) for node in gm.graph.nodes)
        for node in inline(site.anchor, body):
            if node.op == "call_function":
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = number  # the partitioner compares their order
        return Applied("a checkpointed loss is opened: the head's own rewrite takes its place")


def _is_of_head(call: fx.Node, body: fx.Graph) -> bool:
    """Whether a body holds the loss, or the head's product for a loss that is outside."""
    own = _besides_layers(body)  # a layer's router computes over classes, too
    if any(map(_is_over_classes, own)):
        return True
    results = filter(is_tensor, call.users)
    return any(is_call(node, *PRODUCTS) for node in own) and any(map(feeds_class_op, results))


def _is_over_classes(node: fx.Node) -> bool:
    """Whether an op, or the forward of an ``autograd.Function``, treats a dim as classes."""
    halves = node.meta.get(HALVES)
    if isinstance(halves, Halves):
        return any(map(_is_over_classes, halves.forward.graph.nodes))
    return is_call(node, *CLASS_OPS)


def _besides_layers(body: fx.Graph) -> list[fx.Node]:
    """What a body computes besides the model's layers inside it; nothing if it has attention
    outside of these, for then it is a layer or a part of one."""
    attention = [node for node in body.nodes if is_call(node, SDPA)]
    if not attention:
        return list(body.nodes)
    if any(layer_path(node) is None for node in attention):
        return []
    return [node for node in body.nodes if layer_path(node) is None]
