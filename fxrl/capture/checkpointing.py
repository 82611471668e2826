"""Bodies of checkpointed calls as functional ATen as well, so that passes see into them.

Dynamo's graph holds one body per checkpointed call, of torch functions. Each becomes what ``lower``
makes of a graph; bodies that are alike (the layers of a model) are lowered once and copied, so that
a pass may treat each call on its own. A body that cannot be lowered stays as it is and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxrl.analysis.layers import layer_path, signature
from fxrl.ir.graph import is_call, needs_grad, propagate_requires_grad

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
Lower = Callable[[fx.GraphModule], fx.GraphModule]


def lower_checkpointed(gm: fx.GraphModule, lower: Lower) -> None:
    """Lower the body of each checkpointed call of a lowered graph, in place."""
    known: dict[Any, fx.GraphModule] = {}
    for call in gm.graph.nodes:
        if not is_call(call, _CHECKPOINT):
            continue
        name = str(call.args[0].target)  # type: ignore[union-attr]
        body = getattr(gm, name)
        key = signature(body.graph.nodes)
        if key not in known:
            known[key] = _lowered(body, lower)
        own = _copy(known[key])
        own.meta["layer_path"] = _path(body, call)
        own.meta["not_lowered"] = known[key].meta.get("not_lowered")
        _mark(own, call)
        setattr(gm, name, own)


def _lowered(body: fx.GraphModule, lower: Lower) -> fx.GraphModule:
    try:
        return lower(body)
    except Exception as error:
        # The body can hold anything that PyTorch can; it then runs as the user wrote it.
        body.meta["not_lowered"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return body


def _copy(body: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    return fx.GraphModule(body, graph)


def _path(body: fx.GraphModule, call: fx.Node) -> str:
    return next((found for n in body.graph.nodes if (found := layer_path(n))), call.name)


def _mark(body: fx.GraphModule, call: fx.Node) -> None:
    """Which inputs need a gradient is known at the call."""
    inputs = body.graph.find_nodes(op="placeholder")
    for node, given in zip(inputs, call.args[1:], strict=True):
        node.meta["requires_grad"] = needs_grad(given)
    propagate_requires_grad(body.graph)
