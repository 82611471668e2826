"""One body for equal layers: what becomes of the marks of ``fxrl.capture.repeated``.

    %b = begins(0, %x, %mask)
    ...
    %x1 = ends(0, %b, %h)              ->   %x1 = @layer(%x, %mask, %w0, ...)
    %x2 = again(1, %x1, %mask)              %x2 = @layer(%x1, %mask, %w1, ...)

What lies between a first layer's marks is cut out as the body. Every call is given what its layer
reads: its arguments, its own tensors, which become inputs of the graph, and what all read alike.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import ChainMap
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxrl.analysis.layers import type_of
from fxrl.capture._torch import fake_like, guarded_names, value_at
from fxrl.capture.repeated import Layer, again, begins, ends, feeds, layer_of
from fxrl.ir.bodies import CALL_LAYER, body_of, clone, graph_module, inline, modules_of, set_body
from fxrl.ir.graph import as_node, example_of, inputs_of, last_input
from fxrl.ir.remark import Refusal
from fxrl.ir.site import module_path, rename_site

_SDPA = nn.functional.scaled_dot_product_attention
#: Functions and methods by which a layer without that one mixes tokens.
_MIXING = ("matmul", "bmm", "einsum", "conv1d", "cumsum", "flex_attention")


class Lifted(NamedTuple):
    """A tensor of a layer that was not traced, looked up at every call of the graph."""

    layer: Layer
    place: int

    @property
    def tensor(self) -> Tensor:
        """The one that the layer has now."""
        return self.layer.contents.tensors[self.place]


def share_bodies(gm: fx.GraphModule) -> tuple[fx.GraphModule, tuple[Lifted, ...]]:
    """Equal layers of a Dynamo graph as calls of one body.

    Returns:
        The graph, and the tensors of layers that were not traced: its last inputs.

    Raises:
        Refusal: a layer is not what the first of its kind is; the graph is of no use then.
    """
    if not _is_marked(gm):
        return gm, ()
    gm = clone(gm)  # Dynamo still needs its own
    sharing = _Sharing(gm)
    sharing.walk(_Frame(gm))
    if _is_marked(gm):
        raise Refusal("a layer is called inside a graph that its call does not run as it stands")
    for module in modules_of(gm):
        module.graph.lint()  # what runs it makes code of it; it is lowered as it stands
    return gm, tuple(sharing.lifted)


def _is_marked(gm: fx.GraphModule) -> bool:
    """Whether there are marks of layers in any graph, whatever runs it."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any(node.target in (ends, again) for graph in graphs for node in graph.nodes)


@dataclass(slots=True)
class _Frame:
    """One graph of a captured step: the outer one, or the body of a call with a graph."""

    gm: fx.GraphModule
    outer: _Frame | None = None
    call: fx.Node | None = None  # in the outer frame, the call that runs it
    _brought: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def outermost(self, node: fx.Node) -> fx.Node:
        """The value of the outermost graph that an input of this one is."""
        if self.outer is None or self.call is None or node.op != "placeholder":
            return node
        inputs = inputs_of(self.gm.graph)
        return self.outer.outermost(as_node(self.call.args[1 + inputs.index(node)]))

    def bring(self, node: fx.Node) -> fx.Node:
        """A value of the outermost graph, as an input of this one."""
        if self.outer is None or self.call is None:
            return node
        if node not in self._brought:
            given = self.outer.bring(node)
            inputs = inputs_of(self.gm.graph)
            known: dict[Any, fx.Node] = dict(zip(self.call.args[1:], inputs, strict=True))
            if given not in known:
                known[given] = _new_input(self.gm.graph, _input_name(given), example_of(given))
                self.call.args = (*self.call.args, given)
            self._brought[node] = known[given]
        return self._brought[node]


@dataclass(slots=True)
class _Body:
    """The graph of a first layer, and what its inputs are."""

    gm: fx.GraphModule
    arguments: Any  # what the layer was given, of graph values
    inputs: list[fx.Node]  # the values that it reads, in the order of its inputs
    fed: dict[fx.Node, fx.Node]  # of those, what stands for an argument: for which
    frame: _Frame  # the graph that they are of
    result: Any  # the layer's result, of graph values

    def is_unfed(self, node: fx.Node) -> bool:
        """Whether the layer was given a value, in a dictionary say, as nothing else than itself."""
        given = [leaf for leaf in pytree.tree_leaves(self.arguments) if leaf is node]
        return len(given) > [*self.fed.values()].count(node)


class _Sharing:
    """One run of ``share_bodies``."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._graph = gm.graph
        self._bodies: dict[int, _Body] = {}  # the last one of each first layer
        self._inputs: dict[int, fx.Node] = {}  # by the id of the tensor
        for node in inputs_of(gm.graph):
            example = getattr(node.meta.get("grapharg"), "example", None)
            if isinstance(example, Tensor):
                self._inputs[id(example)] = node
        self._read = guarded_names()
        self.lifted: list[Lifted] = []

    def walk(self, frame: _Frame) -> None:
        """Every layer's call, in the order of the program."""
        begun: dict[int, fx.Node] = {}
        for node in list(frame.gm.graph.nodes):
            if node.target is begins:
                begun[node.args[0]] = node
            elif node.target is ends:
                self._share_first(frame, begun[node.args[0]], node)
            elif node.target is again:
                self._share_again(frame, node)
            elif (body := body_of(frame.gm, node)) is not None:
                self.walk(_Frame(body, frame, node))

    def _share_first(self, frame: _Frame, begin: fx.Node, end: fx.Node) -> None:
        token: Any = end.args[0]
        graph = frame.gm.graph
        order = list(graph.nodes)
        traced = order[order.index(begin) + 1 : order.index(end)]
        fed = {node: as_node(node.args[0]) for node in traced if node.target is feeds}
        if any(_gains_gradient(node, argument, end) for node, argument in fed.items()):
            raise Refusal(f"{layer_of(token).path} writes a gradient into what it is given")
        starved = any(node.args[1] for node in fed)
        inside = [node for node in traced if node not in fed]
        within = {*inside, end}
        for node, argument in fed.items():
            node.replace_all_uses_with(argument, lambda user: user not in within)
        results = [leaf for leaf in pytree.tree_leaves(end.args[2]) if isinstance(leaf, fx.Node)]
        _copy_sizes(inside, begin, end, fed)
        _check_closed(layer_of(token).path, inside, end)
        body, inputs = _cut(frame.gm, inside, results, fed)
        given = [fed.get(node, node) for node in inputs]
        if starved and any(map(_is_trained, results)) and not any(map(_is_trained, given)):
            raise Refusal(f"{layer_of(token).path} reads none of what it trains")
        body.meta["layer_path"] = module_path(end)
        self._bodies[token] = _Body(body, begin.args[1:], inputs, fed, frame, end.args[2])
        _call(frame, end, self._bodies[token], given)
        for node in (*reversed(traced), begin):
            graph.erase_node(node)

    def _share_again(self, frame: _Frame, node: fx.Node) -> None:
        token: Any = node.args[0]
        layer = layer_of(token)
        body = self._bodies[layer.first.token]
        for name in layer.first.contents.counters(layer.contents):
            if any(layer.first.may_hold(value_at(place)) for place in self._read.get(name, ())):
                raise Refusal(f"{layer.first.path} reads its {name}; {layer.path} has another")
        given = _matched(layer, body.arguments, node.args[1:])
        inputs = [self._equal(layer, one, body, frame, given) for one in body.inputs]
        _call(frame, node, body, inputs)

    def _equal(
        self,
        layer: Layer,
        node: fx.Node,
        body: _Body,
        ours: _Frame,
        given: dict[fx.Node, fx.Node],
    ) -> fx.Node:
        """What ``layer`` reads where the first one reads ``node``.

        NOTE [Why all find the same value]: what is no argument a layer finds in Python objects,
        into which nothing is written between its call and the first one's.
        """
        if node in body.fed:
            return given[body.fed[node]]
        if node in given and body.is_unfed(node):
            return given[node]
        outer = body.frame.outermost(node)
        example = getattr(outer.meta.get("grapharg"), "example", None)
        if (place := layer.first.place_of(example)) is not None:
            return ours.bring(self._input(layer, place, outer))
        if outer.graph is ours.gm.graph:
            return outer
        if outer.graph is not self._graph:
            raise Refusal(f"{layer.path} runs in another graph than %{outer}, which it reads")
        return ours.bring(outer)

    def _input(self, layer: Layer, place: int, like: fx.Node) -> fx.Node:
        """An input of the outermost graph for a tensor of a layer that was not traced."""
        tensor = layer.contents.tensors[place]
        if id(tensor) not in self._inputs:
            made = fake_like(example_of(like))
            name = re.sub(r"\W+", "_", f"l_model_{layer.path}_{layer.first.names[place]}_")
            node = _new_input(self._graph, name, made.requires_grad_(tensor.requires_grad))
            self._inputs[id(tensor)] = node
            self.lifted.append(Lifted(layer, place))
        return self._inputs[id(tensor)]


def _input_name(node: fx.Node) -> str:
    """What a body calls its input ``node``; no name of a value that it computes."""
    return node.name if node.op == "placeholder" else f"given_{node.name}"


def _new_input(graph: fx.Graph, name: str, example: Any) -> fx.Node:
    with graph.inserting_after(last_input(graph)):
        node = graph.placeholder(name)
    node.meta["example_value"] = example
    return node


def _gains_gradient(fed: fx.Node, argument: fx.Node, end: fx.Node) -> bool:
    """Whether an argument that needs no gradient is written into, and read behind the layer."""
    traced: Any = example_of(fed)  # a new tensor, of no version yet
    written = traced._version > 0 and traced.requires_grad and not _is_trained(argument)
    return written and any(user > end for user in argument.users)


def _is_trained(node: fx.Node) -> bool:
    value = example_of(node)
    return isinstance(value, Tensor) and value.requires_grad


def _copy_sizes(
    inside: list[fx.Node], begin: fx.Node, end: fx.Node, fed: dict[fx.Node, fx.Node]
) -> None:
    """Let code behind a layer read sizes that were computed in it from copies ahead of it: Dynamo
    computes each size once, where the first tensor has it."""
    within, copies = {*inside}, dict[fx.Node, fx.Node]()
    ahead = ChainMap(copies, fed)
    for node in inside:
        is_size = isinstance(example_of(node), torch.SymInt)
        if is_size and all(n in ahead or n not in within for n in node.all_input_nodes):
            with begin.graph.inserting_before(begin):
                copies[node] = begin.graph.node_copy(node, lambda n: ahead.get(n, n))
    for node, copy in reversed(copies.items()):
        node.replace_all_uses_with(copy, lambda user: user not in within and user is not end)
        if not copy.users:
            copy.graph.erase_node(copy)


def _check_closed(path: str, inside: list[fx.Node], end: fx.Node) -> None:
    known = {*inside, end}
    for node in inside:
        for user in node.users:
            if user not in known:
                raise Refusal(f"%{node} leaves {path} otherwise than as its result", at=node)


def _cut(
    gm: fx.GraphModule, inside: list[fx.Node], results: list[fx.Node], fed: dict[fx.Node, fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """These nodes as a graph of their own, and the values that it reads."""
    known = set(inside)
    read = [arg for node in inside for arg in node.all_input_nodes] + results
    inputs = [n for n in dict.fromkeys(read) if n not in known and n.op != "get_attr"]
    graph = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    values = [fed.get(node, node) for node in inputs]
    for node, value in zip(inputs, values, strict=True):
        places[node] = graph.placeholder(_input_name(value))
        example = example_of(value)
        if node in fed and values.count(value) > 1:  # what is one value here is two elsewhere
            example = fake_like(example).requires_grad_(example.requires_grad)
        places[node].meta["example_value"] = example
    constants = [n for n in dict.fromkeys(read) if n not in known and n.op == "get_attr"]
    for node in (*constants, *inside):
        places[node] = graph.node_copy(node, places.__getitem__)
    graph.output(tuple(places[node] for node in results))
    return graph_module(gm, graph, "Layer"), inputs


def _call(frame: _Frame, old: fx.Node, body: _Body, inputs: list[fx.Node]) -> None:
    """Call ``body`` in the place of ``old``, which has the layer's result."""
    gm = frame.gm
    results = itertools.count()
    with gm.graph.inserting_before(old):
        call = gm.graph.call_function(CALL_LAYER, (None, *inputs))
        set_body(gm, call, body.gm)
        call.meta = {k: v for k, v in old.meta.items() if k != "example_value"}

        def item(part: Any, example: Any) -> Any:
            if not isinstance(part, fx.Node):
                return part
            node = gm.graph.call_function(operator.getitem, (call, next(results)))
            node.meta = {**call.meta, "example_value": example}
            return node

        made = pytree.tree_map(item, body.result, example_of(old))
    call.meta["example_value"] = tuple(
        example_of(leaf) for leaf in pytree.tree_leaves(made) if isinstance(leaf, fx.Node)
    )
    _stand_for(old, made)
    if not _is_a_layers(body):
        for node in inline(call, body.gm):  # it may hold what passes look for, such as a head
            rename_site(node, str(body.gm.meta["layer_path"]), module_path(call))


def _is_a_layers(body: _Body) -> bool:
    """Whether it is given rows and has attention inside, or gives back rows like those and mixes
    tokens, which nothing does that is a part of a head. A model of an ensemble is given ids."""
    nodes = [node for module in modules_of(body.gm) for node in module.graph.nodes]
    given, result = _first_tensor(body.arguments), _first_tensor(body.result)
    if any(node.target is _SDPA for node in nodes):
        return given is None or given.is_floating_point()
    alike = given is not None and result is not None and given.shape == result.shape
    return alike and any(getattr(n.target, "__name__", n.target) in _MIXING for n in nodes)


def _first_tensor(values: Any) -> Tensor | None:
    examples = (example_of(x) for x in pytree.tree_leaves(values) if isinstance(x, fx.Node))
    return next((example for example in examples if isinstance(example, Tensor)), None)


def _stand_for(old: fx.Node, value: Any) -> None:
    """Let ``value``, of graph values, stand wherever ``old`` or a part of it stood."""
    if isinstance(value, fx.Node):
        old.replace_all_uses_with(value)
    else:
        for user in list(old.users):
            if user.target is not operator.getitem:
                raise Refusal(f"%{user} takes the result of a layer as a whole", at=user)
            _stand_for(user, value[user.args[1]])
    old.graph.erase_node(old)


def _matched(layer: Layer, theirs: Any, ours: Any) -> dict[fx.Node, fx.Node]:
    """The first layer's arguments -> this one's, which must be of the same kinds."""
    (mine, spec), (its, its_spec) = pytree.tree_flatten(theirs), pytree.tree_flatten(ours)
    why = f"{layer.path} is called otherwise than {layer.first.path}"
    if spec != its_spec:
        raise Refusal(why)
    found: dict[fx.Node, fx.Node] = {}
    for one, other in zip(mine, its, strict=True):
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            if isinstance(one, fx.Node) or isinstance(other, fx.Node) or one != other:
                raise Refusal(why)
        else:
            alike = type_of(example_of(one)) == type_of(example_of(other))
            if not alike or found.setdefault(one, other) is not other:
                raise Refusal(why)
    return found
