"""Calls that run a graph: checkpointed functions, the layers of a model, and values whose gradient
is a graph; who holds such bodies, and how they are copied, spliced in and given more inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.ir.graph import HigherOrderOperator, add_input, inputs_of, is_call, needs_grad, val_of


class _CallLayer(HigherOrderOperator):  # type: ignore[misc]  # a type found at run time
    """``call_layer(body, *inputs)``: a call of a graph that all equal layers of a model share."""

    def __call__(self, body: fx.GraphModule, *inputs: Any) -> Any:
        return body(*inputs)


class _WithGradient(HigherOrderOperator):  # type: ignore[misc]
    """``with_gradient(backward, inputs, values, *given)``: values with a gradient of their own.

    ``given`` are the inputs, the values and what ``backward`` reads beside the values' gradients;
    ``inputs`` and ``values`` count the first two. A tuple of the values comes back;
    ``backward(*grads, *saved)`` has a gradient, or None, for each input.
    """

    def __call__(self, backward: fx.GraphModule, inputs: int, values: int, *given: Any) -> Any:
        return _Given.apply(backward, inputs, values, *given)  # type: ignore[no-untyped-call]


class _Given(torch.autograd.Function):
    """What ``with_gradient`` is where it runs."""

    @staticmethod
    def forward(ctx: Any, graph: fx.GraphModule, inputs: int, values: int, *given: Any) -> Any:
        ctx.graph, ctx.inputs, ctx.given = graph, inputs, len(given)
        ahead = inputs + values
        read = given[ahead:]
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in read]
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in read))
        return tuple(value.view_as(value) for value in given[inputs:ahead])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        both = zip(ctx.saved_tensors, ctx.others, strict=True)
        saved = (x if x is not None else other for x, other in both)
        without = [None] * (ctx.given - ctx.inputs)
        return None, None, None, *ctx.graph(*grads, *saved), *without


CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
CALL_LAYER = _CallLayer("fxrl_layer")
#: ``(forward, backward, *inputs)``: the user's own ``autograd.Function``, as Dynamo traces it.
AUTOGRAD_FUNCTION = torch.ops.higher_order.autograd_function_apply
#: Where such a call keeps its ``Halves``, or says why it has none.
HALVES = "halves"
WITH_GRADIENT = _WithGradient("fxrl_with_gradient")


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """An ``autograd.Function`` as two graphs of ATen ops that write nothing."""

    forward: fx.GraphModule  # inputs -> (values, what it saves), two tuples
    backward: fx.GraphModule  # gradients of ``trained``, what was saved -> gradients of the inputs
    trained: tuple[int, ...]  # the values that have a gradient


#: Calls that run a graph as it stands, handed over as their first argument; inputs follow.
WRAPPERS = (CHECKPOINT, CALL_LAYER)
_CONTEXT_FN = "_checkpoint_context_fn"


def body_of(gm: fx.GraphModule, call: fx.Node) -> fx.GraphModule | None:
    """The graph that a call runs, of a checkpointed function or a layer; None for other nodes."""
    if not is_call(call, *WRAPPERS) or not isinstance(call.args[0], fx.Node):
        return None
    body = getattr(gm, str(call.args[0].target), None)
    return body if isinstance(body, fx.GraphModule) else None


def written_inputs(gm: fx.GraphModule) -> frozenset[int]:
    """The indices of the inputs that a lowered graph writes into, itself or in called bodies."""
    places = {node: at for at, node in enumerate(inputs_of(gm.graph))}
    found = set()
    for node in gm.graph.nodes:
        written: list[Any] = (
            list(node.args[:1]) if is_call(node, torch.ops.aten.copy_.default) else []
        )
        if (body := body_of(gm, node)) is not None:
            written = [node.args[1 + at] for at in written_inputs(body)]
        for into in written:
            while isinstance(into, fx.Node) and into not in places and into.args:
                into = into.args[0]  # written into detached
            found.add(places.get(into, -1))
    return frozenset(found - {-1})


def what_it_saves(body: fx.GraphModule) -> Any:
    """The ``context_fn`` of selective checkpointing, as Dynamo notes it; None for a plain call."""
    return body.meta.get(_CONTEXT_FN)


def save_as(body: fx.GraphModule, like: fx.GraphModule) -> None:
    """Let a checkpointed body save what another one does."""
    if (context_fn := what_it_saves(like)) is not None:
        body.meta[_CONTEXT_FN] = context_fn


def set_body(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> None:
    """Let a call of a layer run ``body``, which takes and returns the same."""
    before = call.args[0]
    with call.graph.inserting_before(call):
        call.args = (call.graph.get_attr(hold(gm, body)), *call.args[1:])
    if isinstance(before, fx.Node) and not before.users:
        call.graph.erase_node(before)


def graph_module(
    gm: fx.GraphModule,
    graph: fx.Graph,
    name: str = "GraphModule",
    held: Mapping[str, fx.GraphModule] | None = None,
) -> fx.GraphModule:
    """A graph module of ``graph`` and what it names in ``gm`` (in ``held`` where that is given), of
    the same kind as ``gm``.

    NOTE [Why of the same kind]: while it compiles, torch makes graph modules whose code is written
    when they first run. Others write theirs anew, with that of all graphs inside, at each change:
    25 of the first step's 52 s at 36 checkpointed layers, both under a profiler.
    """
    kind = type(gm).__mro__[1]  # each has a class of its own
    made: fx.GraphModule = kind(gm if held is None else dict(held), graph, name)
    return made


def clone(
    gm: fx.GraphModule, done: dict[fx.GraphModule, fx.GraphModule] | None = None
) -> fx.GraphModule:
    """A copy that may be changed, together with the bodies of its calls; tensors are shared.
    ``done`` holds the copies made so far, so a body that several graphs call stays one."""
    done = {} if done is None else done
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = done[gm] = graph_module(gm, graph)
    copy.meta = dict(gm.meta)
    copies = set()
    for call in graph.nodes:
        body = body_of(copy, call)
        if body is not None and body not in copies:
            made = done[body] if body in done else clone(body, done)
            setattr(copy, str(call.args[0].target), made)
            copies.add(made)
    return copy


def inline(call: fx.Node, body: fx.GraphModule) -> list[fx.Node]:
    """Replace a call by the nodes of its body. Returns all nodes that were made."""
    graph = call.graph
    with graph.inserting_before(call):
        places, made = splice(graph, body, call.args[1:])
    results: Any = body.graph.output_node().args[0]
    for item in list(call.users):
        item.replace_all_uses_with(places[results[item.args[1]]])
        graph.erase_node(item)
    graph.erase_node(call)
    return made


def splice(
    graph: fx.Graph, body: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[dict[fx.Node, Any], list[fx.Node]]:
    """Put the nodes of a body at the graph's insertion point. Returns what each stands for there,
    and all nodes that were made.

    The graph takes over the body's constants, and a copy of each graph that it holds: passes may
    change these differently for each call.
    """
    owner = graph.owning_module
    assert owner is not None
    places: dict[fx.Node, Any] = {}
    places.update(zip(inputs_of(body.graph), inputs, strict=True))
    made = []
    for node in body.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        copy = places[node] = graph.node_copy(node, places.__getitem__)
        made.append(copy)
        if node.op == "get_attr":
            held = getattr(body, str(node.target))
            if isinstance(held, fx.GraphModule):
                held = clone(held)
                made += [inner for each in graphs_of(held) for inner in each.nodes]
            copy.target = hold(owner, held)
    return places, made


def hold(owner: torch.nn.Module, value: Any) -> str:
    """The name of a constant or a graph that a graph module holds, from now on."""
    held = (*owner._modules.items(), *owner._buffers.items(), *owner._parameters.items())
    for name, known in held:
        if known is value:
            return name
    name = next(n for i in itertools.count() if not hasattr(owner, n := f"held_{i}"))
    setattr(owner, name, value)
    return name


def modules_of(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph module and the bodies of its calls, each once, whoever calls it first."""
    found = [gm]
    for one in found:
        bodies = (body_of(one, node) for node in one.graph.nodes)
        found += dict.fromkeys(body for body in bodies if body is not None and body not in found)
    return found


def graphs_of(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    """The graph and those of the bodies of its calls, each once."""
    return (module.graph for module in modules_of(gm))


class Lender:
    """Hands values of a graph down to the bodies that it calls, as further inputs of these."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.calls: dict[fx.Graph, list[fx.Node]] = {}  # of each body's graph the calls that run it
        self._lent: dict[tuple[fx.Graph, fx.Node], fx.Node] = {}
        for owner in modules_of(gm):
            for call in owner.graph.nodes:
                if (body := body_of(owner, call)) is not None:
                    self.calls.setdefault(body.graph, []).append(call)

    def to(self, graph: fx.Graph, value: fx.Node) -> fx.Node:
        """A value as ``graph`` knows it."""
        if graph is value.graph:
            return value
        if (graph, value) not in self._lent:
            given = {call: self.to(call.graph, value) for call in self.calls[graph]}
            self._lent[graph, value] = self.add(graph, given)
        return self._lent[graph, value]

    def add(self, graph: fx.Graph, given: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Add an input to a body; ``given`` is what each of its calls hands to it."""
        for call, value in given.items():
            call.args = (*call.args, value)
        like = given[self.calls[graph][0]]
        return add_input(graph, like.name, val_of(like), requires_grad=needs_grad(like))
