"""Bodies of calls that have a graph as functional ATen as well, so that passes see into them.

Dynamo's graph holds one body per checkpointed call, of torch functions, and one for all layers that
are equal (``repeated``). Each becomes what ``lower`` makes of a graph. Bodies that are alike are
lowered once. Checkpointed calls get a copy each, so that a pass may treat each on its own; calls of
a layer share a body where they need the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fxrl.analysis.layers import layer_path, signature
from fxrl.ir.graph import (
    CALL_LAYER,
    body_of,
    clone,
    is_call,
    needs_grad,
    propagate_requires_grad,
    set_body,
)

Lower = Callable[[fx.GraphModule], fx.GraphModule]


def lower_bodies(gm: fx.GraphModule, lower: Lower, known: dict[Any, fx.GraphModule]) -> None:
    """Lower the body of each call of a lowered graph, in place.

    Args:
        known: bodies that were lowered already, by what they were.

    Raises:
        Exception: a layer cannot be lowered. A checkpointed body then stays as it is.
    """
    for call in list(gm.graph.nodes):
        if (body := body_of(gm, call)) is None:
            continue
        is_layer = is_call(call, CALL_LAYER)
        key = body if is_layer else signature(body.graph.nodes)
        if key not in known:
            known[key] = lower(body) if is_layer else _lowered(body, lower)
        marks = tuple(map(needs_grad, call.args[1:]))
        own = known.get((key, marks)) if is_layer else None
        if own is None:
            own = clone(known[key])
            own.meta["layer_path"] = body.meta.get("layer_path") or _path(body, call)
            _mark(own, marks)
        if is_layer:
            known[key, marks] = own
            set_body(gm, call, own)
        else:
            setattr(gm, str(call.args[0].target), own)


def _lowered(body: fx.GraphModule, lower: Lower) -> fx.GraphModule:
    try:
        return lower(body)
    except Exception as error:
        # The body can hold anything that PyTorch can; it then runs as the user wrote it.
        body.meta["not_lowered"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return body


def _path(body: fx.GraphModule, call: fx.Node) -> str:
    return next((found for n in body.graph.nodes if (found := layer_path(n))), call.name)


def _mark(body: fx.GraphModule, marks: tuple[bool, ...]) -> None:
    """Which inputs need a gradient is known at the call; in the bodies inside, too."""
    inputs = body.graph.find_nodes(op="placeholder")
    for node, mark in zip(inputs, marks, strict=True):
        node.meta["requires_grad"] = mark
    propagate_requires_grad(body.graph)
    for call in body.graph.nodes:
        if (inner := body_of(body, call)) is not None:
            _mark(inner, tuple(map(needs_grad, call.args[1:])))
