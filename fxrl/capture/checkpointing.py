"""Activation checkpointing that the user already switched on: honoured, and said so.

Dynamo turns ``torch.utils.checkpoint`` into one higher-order call per checkpointed function. The
calls stay in the graph and AOTAutograd's partitioner recomputes their bodies in the backward.
Bodies that hold a loss head are opened, so that the passes see it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrl.ir.remark import Remark, RemarkKind, Report
from fxrl.ir.source import user_source

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_CLASS_OPS = ("log_softmax", "softmax", "logsumexp", "cross_entropy", "gather")


def _checkpoints(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target is _CHECKPOINT]


def checkpoint_remarks(gm: fx.GraphModule) -> Report:
    """One remark that says how many checkpointed calls are taken over."""
    calls = _checkpoints(gm)
    if not calls:
        return Report()
    reason = f"{len(calls)} checkpointed calls taken over: recomputed inside the captured backward"
    site = calls[0]
    return Report((Remark(RemarkKind.ANALYSIS, "recompute", site.name, user_source(site), reason),))


def open_loss_checkpoints(gm: fx.GraphModule) -> None:
    """Inline checkpointed bodies that compute over classes, their ops tagged for recompute."""
    opened = False
    for index, call in enumerate(_checkpoints(gm)):
        body = _body(gm, call)
        if body is not None and _computes_over_classes(body):
            _inline(gm, call, body, index)
            opened = True
    if opened:
        gm.graph.lint()
        gm.recompile()


def _body(gm: fx.GraphModule, call: fx.Node) -> fx.GraphModule | None:
    attr = call.args[0]
    if not (isinstance(attr, fx.Node) and attr.op == "get_attr"):
        return None
    body = getattr(gm, str(attr.target))
    return body if isinstance(body, fx.GraphModule) else None


def _computes_over_classes(body: fx.GraphModule) -> bool:
    names = [
        node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        for node in body.graph.nodes
    ]
    return any(name in _CLASS_OPS for name in names) and not any(
        "attention" in name for name in names
    )


def _inline(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule, index: int) -> None:
    env: dict[fx.Node, Any] = {}
    inputs = iter(call.args[1:])
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
            elif node.op == "output":
                results = fx.node.map_arg(node.args[0], lambda n: env[n])
            else:
                copy = gm.graph.node_copy(node, lambda n: env[n])
                copy.meta = dict(node.meta)
                copy.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                copy.meta["ac_graph_id"] = index
                env[node] = copy
    for item in list(call.users):
        position: Any = item.args[1]
        item.replace_all_uses_with(results[position])
        gm.graph.erase_node(item)
    gm.graph.erase_node(call)


def drop_unused_inputs(gm: fx.GraphModule) -> None:
    """Take inputs that a checkpointed body no longer reads (such as a mask) off its call.

    A checkpoint keeps all its inputs alive until the backward, read or not.
    """
    bodies = [(call, _body(gm, call)) for call in _checkpoints(gm)]
    for call, body in bodies:
        if body is None or sum(other is body for _, other in bodies) > 1:
            continue
        inputs = body.graph.find_nodes(op="placeholder")
        kept = [arg for node, arg in zip(inputs, call.args[1:], strict=True) if node.users]
        if len(kept) == len(inputs):
            continue
        call.args = (call.args[0], *kept)
        for node in inputs:
            if not node.users:
                body.graph.erase_node(node)
        body.recompile()
