"""The two halves of the user's own ``autograd.Function``, as ATen graphs beside the call.

The call stays one opaque op, as Dynamo traced it, unless a pass opens it
(``open-loss-functions``): its forward then stands in the graph, and its backward is the gradient
that the forward's results are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxrl.analysis.layers import layer_path
from fxrl.capture._torch import SET_GRAD, FakeTensor, fake_like
from fxrl.capture.opaque import under
from fxrl.errors import first_line
from fxrl.ir.bodies import AUTOGRAD_FUNCTION, HALVES, Halves, clone
from fxrl.ir.graph import (
    HigherOrderOperator,
    as_node,
    draws_random,
    eliminate_dead_code,
    example_of,
    inputs_of,
    is_call,
    tensor_val,
    writes,
)
from fxrl.ir.remark import Refusal

Lower = Callable[..., fx.GraphModule]


def lower_functions(gm: fx.GraphModule, lower: Lower) -> None:
    """Leave at each call of an ``autograd.Function`` outside of the layers its halves, or why they
    could not be lowered."""
    for call in gm.graph.find_nodes(op="call_function", target=AUTOGRAD_FUNCTION):
        if layer_path(call) is None:
            try:
                call.meta[HALVES] = _halves(gm, call, lower)
            except Exception as error:  # a body can hold anything that PyTorch can
                call.meta[HALVES] = first_line(error)


def _halves(gm: fx.GraphModule, call: fx.Node, lower: Lower) -> Halves:
    forward, backward = (getattr(gm, str(as_node(arg).target)) for arg in call.args[:2])
    with under(call.meta["autocasts"]):
        ahead = _half(forward, lower)
    if writes(ahead):
        raise Refusal("its forward writes into what it is given")
    with under(()):  # where its backward runs
        back = _half(backward, lower)
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


def _half(body: fx.GraphModule, lower: Lower) -> fx.GraphModule:
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
