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
from fxrl.capture.opaque import under
from fxrl.ir.graph import (
    CALL_LAYER,
    as_node,
    body_of,
    clone,
    is_call,
    needs_grad,
    propagate_requires_grad,
    save_as,
    set_body,
    what_it_saves,
)
from fxrl.ir.site import rename_site

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
        casts, path = call.meta["autocasts"], _path(body, call)
        key = "lowered", body if is_layer else _key(body), casts
        if key not in known:
            with under(casts):
                known[key] = lower(body) if is_layer else _lowered(body, lower)
            known[key].meta["layer_path"] = path
        own = _give_body(gm, call, known[key], known)
        if not is_layer:
            _move(own, path)


def _give_body(
    gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule, known: dict[Any, fx.GraphModule]
) -> fx.GraphModule:
    """Let a call run a copy of ``body`` that knows which inputs need a gradient here."""
    marks = tuple(map(needs_grad, call.args[1:]))
    if not is_call(call, CALL_LAYER):
        own = _marked(body, marks, known)
        setattr(gm, str(as_node(call.args[0]).target), own)
        return own
    if (body, marks) not in known:
        known[body, marks] = _marked(body, marks, known)
    set_body(gm, call, known[body, marks])
    return known[body, marks]


def _marked(
    body: fx.GraphModule, marks: tuple[bool, ...], known: dict[Any, fx.GraphModule]
) -> fx.GraphModule:
    """A copy with these marks; the calls inside get theirs."""
    inside = (body_of(body, call) for call in body.graph.nodes)
    own = clone(body, {inner: inner for inner in inside if inner is not None})
    for node, mark in zip(own.graph.find_nodes(op="placeholder"), marks, strict=True):
        node.meta["requires_grad"] = mark
    propagate_requires_grad(own.graph)
    for call in list(own.graph.nodes):
        if (inner := body_of(own, call)) is not None:
            _give_body(own, call, inner, known)
    return own


def _lowered(body: fx.GraphModule, lower: Lower) -> fx.GraphModule:
    try:
        lowered = lower(body)
    except Exception as error:
        # The body can hold anything that PyTorch can; it then runs as the user wrote it.
        body.meta["not_lowered"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return body
    save_as(lowered, body)
    return lowered


def _key(body: fx.GraphModule) -> Any:
    """Equal for checkpointed bodies that compute and save the same."""
    return signature(body.graph.nodes), what_it_saves(body)


def _path(body: fx.GraphModule, call: fx.Node) -> str:
    """The layer that a body is of."""
    inside = (found for node in body.graph.nodes if (found := layer_path(node)))
    return str(body.meta.get("layer_path") or next(inside, call.name))


def _move(own: fx.GraphModule, path: str) -> None:
    """Let a copy of a checkpointed body be the one of the layer at ``path``."""
    theirs = str(own.meta["layer_path"])
    if theirs != path:
        own.meta["layer_path"] = path
        for node in own.graph.nodes:
            rename_site(node, theirs, path)
