"""From Dynamo's graph to one functional ATen graph whose values are differentiable again.

    Dynamo graph     torch functions, in-place ops, no_grad blocks, higher-order ops
    lowered graph    functional ATen; every op has an autograd formula; no_grad became detach

The passes work on the lowered graph; AOTAutograd differentiates it afterwards. So lowering must
not lose what autograd needs: code under ``no_grad`` becomes a ``detach`` of its results, and what
has a backward of its own (autograd.Function, checkpoint, attention) stays one opaque call.

A graph is traced (``capture.tracing``), spelled in one way (``capture.canonical``) and given its
inputs' marks; then the bodies of its calls are lowered likewise. An ``autograd.Function`` stays one
call until ``open-functions`` opens it by its two halves, which are kept beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxrl.analysis.layers import layer_path, signature
from fxrl.capture._torch import SET_GRAD, STATIC_INPUT, FakeTensor, fake_like
from fxrl.capture.canonical import canonicalize
from fxrl.capture.opaque import allow_any_strides, under
from fxrl.capture.tracing import trace, tracing
from fxrl.capture.writes import refuse_lost_values
from fxrl.errors import first_line
from fxrl.ir.bodies import (
    AUTOGRAD_FUNCTION,
    CALL_LAYER,
    HALVES,
    Halves,
    body_of,
    clone,
    graphs_of,
    save_as,
    set_body,
    what_it_saves,
)
from fxrl.ir.graph import (
    HigherOrderOperator,
    as_node,
    draws_random,
    eliminate_dead_code,
    example_of,
    inputs_of,
    is_call,
    needs_grad,
    propagate_requires_grad,
    tensor_val,
    writes,
)
from fxrl.ir.remark import Refusal
from fxrl.ir.site import rename_site


def lower(
    gm: fx.GraphModule, *, grad_enabled: bool = True, known: dict[Any, fx.GraphModule] | None = None
) -> fx.GraphModule:
    """The functional ATen graph of a Dynamo graph, with fake values in ``meta["val"]``.

    The placeholders are Dynamo's, in order. Shapes stay symbolic in Dynamo's own symbols.

    Args:
        known: bodies that were lowered already.

    Raises:
        Refusal: a value is a nested tensor, whose parts functional ATen cannot tell autograd; or
            autograd is switched on inside of a call that is made without it.
    """
    _refuse_nested(gm)
    if not grad_enabled:
        _refuse_autograd(gm)
    inputs = inputs_of(gm.graph)
    _mark_gradients(inputs)
    examples = [example_of(node) for node in inputs]
    lowered = trace(gm, grad_enabled)
    _name_placeholders(gm, lowered, examples)
    allow_any_strides(lowered.graph)
    with tracing(gm):
        canonicalize(lowered.graph)
    propagate_requires_grad(lowered.graph)
    if not grad_enabled:
        for node in lowered.graph.nodes:
            node.meta["requires_grad"] = False
    else:
        refuse_lost_values(lowered.graph)
        _check_gradients(gm, lowered)
    known = {} if known is None else known
    _lower_bodies(lowered, grad_enabled, known)
    _lower_functions(lowered)
    lowered.recompile()
    return lowered


def _refuse_nested(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        value = example_of(node)
        if isinstance(value, torch.Tensor) and value.is_nested:
            reason = "a nested tensor is not followed into its parts"
            raise Refusal(reason, "compute the loss from packed or padded logits", node)


def _refuse_autograd(gm: fx.GraphModule) -> None:
    """Nothing may get a gradient where a call without autograd switches it on. What needs none gets
    none there either, such as what ``torch.distributions`` computes at first use."""
    for graph in graphs_of(gm):
        on = False
        for node in graph.nodes:
            if is_call(node, SET_GRAD):
                on = bool(node.args[0])
            elif on and node.op in ("call_function", "call_method", "call_module"):
                made = pytree.tree_leaves(example_of(node))
                if any(isinstance(one, torch.Tensor) and one.requires_grad for one in made):
                    reason = "autograd is switched on inside of a call under no_grad"
                    raise Refusal(reason, "call the step where autograd is on", node)


def _mark_gradients(inputs: list[fx.Node]) -> None:
    """Let each input need a gradient that Dynamo saw with one: from torch 2.15 on, one that is
    given other data (``x.data = y``) is described by a copy that needs none."""
    for node in inputs:
        seen = getattr(node.meta.get("grapharg"), "fake_tensor", None)
        if seen is not None and seen.requires_grad:
            example_of(node).requires_grad_()


def _name_placeholders(gm: fx.GraphModule, lowered: fx.GraphModule, examples: list[Any]) -> None:
    """Give the lowered graph Dynamo's input names, and mark what needs a gradient and what is a
    parameter or buffer."""
    theirs = inputs_of(gm.graph)
    ours = inputs_of(lowered.graph)
    taken = {source.name for source in theirs}
    for node in lowered.graph.nodes:
        if node.name in taken and node.op != "placeholder":  # an input of a body is some op's value
            node._rename(f"{node.name}_here")
    for source, node, example in zip(theirs, ours, examples, strict=True):
        node.name = node.target = source.name
        if "val" not in node.meta and isinstance(example, FakeTensor):  # it was only passed
            node.meta["val"] = fake_like(example)
        node.meta["requires_grad"] = isinstance(example, torch.Tensor) and example.requires_grad
        node.meta["of_model"] = STATIC_INPUT in source.meta.get("tensor_dict", {})
        for key in ("stack_trace", "tensor_dict"):
            if key in source.meta:
                node.meta[key] = source.meta[key]


def _check_gradients(gm: fx.GraphModule, lowered: fx.GraphModule) -> None:
    """What needs a gradient in Dynamo's graph must need one here: training would not notice."""
    theirs, ours = (g.graph.output_node().args[0] for g in (gm, lowered))
    for source, node in zip(pytree.tree_leaves(theirs), pytree.tree_leaves(ours), strict=True):
        value = example_of(source) if isinstance(source, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.requires_grad and not needs_grad(node):
            raise Refusal("a result would lose its gradient", at=source)


# ---------------------------------------------------------------------------- bodies of calls
def _lower_bodies(gm: fx.GraphModule, grad_enabled: bool, known: dict[Any, fx.GraphModule]) -> None:
    """Lower the body of each call of a lowered graph, in place, so that passes see into it.

    Dynamo's graph holds one body per checkpointed call, and one for all layers that are equal
    (``repeated``). Bodies that are alike are lowered once. Checkpointed calls get a copy each, so
    that a pass may treat each on its own; calls of a layer share a body where they need the same
    gradients.

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
                known[key] = _lowered(body, grad_enabled, known, must=is_layer)
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
    for node, mark in zip(inputs_of(own.graph), marks, strict=True):
        node.meta["requires_grad"] = mark
    propagate_requires_grad(own.graph)
    for call in list(own.graph.nodes):
        if (inner := body_of(own, call)) is not None:
            _give_body(own, call, inner, known)
    return own


def _lowered(
    body: fx.GraphModule, grad_enabled: bool, known: dict[Any, fx.GraphModule], *, must: bool
) -> fx.GraphModule:
    try:
        lowered = lower(body, grad_enabled=grad_enabled, known=known)
    except Exception as error:
        if must:
            raise
        # The body can hold anything that PyTorch can; it then runs as the user wrote it.
        body.meta["not_lowered"] = first_line(error)
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


# ---------------------------------------------------------------------------- halves of functions
def _lower_functions(gm: fx.GraphModule) -> None:
    """Leave at each call of an ``autograd.Function`` its halves, or why it cannot be lowered."""
    for call in gm.graph.find_nodes(op="call_function", target=AUTOGRAD_FUNCTION):
        try:
            call.meta[HALVES] = _halves(gm, call)
        except Refusal as refusal:
            call.meta[HALVES] = refusal.reason
        except Exception as error:  # a body can hold anything that PyTorch can
            call.meta[HALVES] = first_line(error)


def _halves(gm: fx.GraphModule, call: fx.Node) -> Halves:
    forward, backward = (getattr(gm, str(as_node(arg).target)) for arg in call.args[:2])
    with under(call.meta["autocasts"]):
        ahead = _half(forward)
    if writes(ahead):
        raise Refusal("its forward writes into what it is given")
    with under(()):  # where its backward runs
        back = _half(backward)
    _forget_writes(back.graph)
    if writes(back):
        raise Refusal("its backward writes into what it is given")
    eliminate_dead_code(back.graph)
    trained = _without_constants(call, ahead, back)
    back.recompile()
    return Halves(ahead, back, trained)


def _without_constants(
    call: fx.Node, ahead: fx.GraphModule, back: fx.GraphModule
) -> tuple[int, ...]:
    """Which values have a gradient; the backward is asked for no other. Torch 2.11 returns each
    value in between, too."""
    results: Any = ahead.graph.output_node().args[0]
    constant: Any = call.kwargs["non_differentiable_idx"]
    read = {item.args[1] for item in call.users}
    grads = inputs_of(back.graph)[: len(results[0])]
    trained = []
    for index, (value, grad) in enumerate(zip(results[0], grads, strict=True)):
        val = tensor_val(value)
        differs = index not in constant and val is not None and val.is_floating_point()
        if differs and (index in read or grad.users):
            trained.append(index)
        elif grad.users:
            raise Refusal("its backward reads the gradient of a value that has none")
        else:
            back.graph.erase_node(grad)
    return tuple(trained)


def _forget_writes(graph: fx.Graph) -> None:
    """Leave out the final writes into arguments: what was saved, nobody reads any more."""
    for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written, value = map(as_node, write.args[:2])
        if written.op == "placeholder":
            write.replace_all_uses_with(value)
            graph.output_node().replace_input_with(written, value)  # it is returned as written
            graph.erase_node(write)


def _half(body: fx.GraphModule) -> fx.GraphModule:
    """A half as ATen alone: what it computes has no gradient of its own."""
    plain = clone(body)
    for node in list(plain.graph.nodes):
        if is_call(node, SET_GRAD):
            plain.graph.erase_node(node)
        elif isinstance(node.target, HigherOrderOperator):
            raise Refusal(f"it calls {node.target}, which has a graph or a kernel for a body")
        elif node.op == "placeholder" and isinstance(value := example_of(node), FakeTensor):
            # A gradient is described by the tensor that it is of, and a trace tells them by it.
            node.meta["example_value"] = fake_like(value)
    lowered = lower(plain, grad_enabled=False)
    if any(map(draws_random, lowered.graph.nodes)):
        raise Refusal("it draws random numbers")
    return lowered
