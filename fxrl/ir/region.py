"""Region: a subgraph that owns its backward and runs behind one opaque op, ``fxrl::region``.

A pass outlines a region by building its forward graph and putting one call in the graph. The
compiler derives the backward from it as the region's cut says, compiles both once per distinct
body and keeps them under a key made of content and options.

What a region's backward needs of its forward is the region's **cut**: its ``inputs`` (the backward
runs the forward again, inside one graph, so what it does not need is dead code), these and what
``attention`` returned, the ``fewest`` bytes that spare the matrix products (all norms and
activations are computed again), or the ``products`` (and what of the rest is not cheap). Of tiles
it may be ``vectors``: each output has one number per row, whose gradient by that row of an input is
made in the forward while the tile is there; the backward scales these by what comes in.

An input that another region returned may wait nowhere: who made it makes it **again** when the
backward asks. So regions in a row, a segment, keep the first one's inputs alone.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import fx

from fxrl.ir.bodies import WITH_GRADIENT, graphs_of
from fxrl.ir.graph import inputs_of, is_call, needs_grad, propagate_requires_grad, reached
from fxrl.ir.printer import Symbols, print_graph
from fxrl.ir.remark import Refusal

Cut = Literal["inputs", "attention", "fewest", "products", "vectors"]
Again = Literal["never", "outputs", "forward"]

T = TypeVar("T")


def once_for(make: Callable[..., T]) -> Callable[..., T]:
    """What ``make`` makes of a body or a region, or why it refuses, is kept for as long as that
    lives, by its other arguments, the named ones apart: the layers of a model share one body."""
    known: WeakKeyDictionary[Any, dict[Any, T | Refusal]] = WeakKeyDictionary()

    def kept(source: Any, *args: Any, **like: Any) -> T:
        of_source = known.setdefault(source, {})
        if args not in of_source:
            try:
                of_source[args] = make(source, *args, **like)
            except Refusal as refusal:
                of_source[args] = refusal.with_traceback(None)  # which would hold the source
        if isinstance(made := of_source[args], Refusal):
            raise Refusal(made.reason, made.cure, made.at)
        return made

    return kept


@dataclass(frozen=True, slots=True, eq=False)
class InputSpec:
    """What a region's input looks like."""

    # The (fake) tensor the region was outlined with: dtype, device, sizes, strides.
    example: torch.Tensor = field(repr=False)
    tiled: bool  # its dim 0 is rows; each tile gets its part
    needs_grad: bool  # the region returns a gradient for it
    # It lives until the backward whether the region needs it there or not (a weight), so keeping it
    # costs nothing.
    alive: bool = False
    # The dim along which each group has its part; ``example`` is the first group's.
    split: int | None = None


@dataclass(frozen=True, eq=False)
class Region:
    """A subgraph outlined from the graph; regions that compute the same have the same ``id``."""

    # Takes the inputs in order, returns a tuple of tensors; functional ATen, no random numbers. If
    # any input is tiled, all outputs have the rows in dim 0.
    forward: fx.GraphModule
    inputs: tuple[InputSpec, ...]  # one spec per input
    cut: Cut = "inputs"  # what the backward gets; for tiles ``inputs`` or ``vectors``
    layer: str = ""  # site of the layer that it is a part of; no part of the content
    # How many groups run the body one after the other, each with its part of the inputs that are
    # split. The outputs are sums over the groups.
    groups: int = 1
    # How it makes its outputs again where a backward asks for them: of what it keeps, or by its
    # whole forward, which keeps nothing before and hands what its cut says to its own backward.
    again: Again = "never"

    @property
    def tiled(self) -> bool:
        """Whether the region runs tile by tile over rows."""
        return any(spec.tiled for spec in self.inputs)

    @property
    def trained(self) -> tuple[bool, ...]:
        """Which of its inputs its backward computes a gradient for."""
        return tuple(spec.needs_grad for spec in self.inputs)

    @property
    def num_grads(self) -> int:
        """How many gradients its backward computes."""
        return sum(self.trained)

    @cached_property
    def id(self) -> str:
        """Content hash: body, input types, which gradients are wanted, and the cut."""
        return self._hash(body_text(self.forward), self.inputs)

    @cached_property
    def id_without_grads(self) -> str:
        """What the id would be if no gradient were wanted: equal where only those differ."""
        return self._hash_without_grads(body_text(self.forward))

    @cached_property
    def id_of_values(self) -> str:
        """Equal for regions that return the same, whatever has a gradient, and which one."""
        return self._hash_without_grads(_text_of_values(self.forward))

    @cached_property
    def id_on_any_gpu(self) -> str:
        """What the id would be were the GPU another one of its kind."""
        return self._hash(text_on_any_gpu(self.forward), self.inputs, any_gpu=True)

    def _hash_without_grads(self, body: str) -> str:
        return self._hash(body, [replace(spec, needs_grad=False) for spec in self.inputs])

    def _hash(self, body: str, specs: Sequence[InputSpec], *, any_gpu: bool = False) -> str:
        symbols = Symbols()
        inputs = [_signature(spec, symbols, any_gpu) for spec in specs]
        marks = [f"{self.groups} groups"] if self.groups > 1 else []
        marks += [f"{self.again} again"] if self.again != "never" else []
        text = "\n".join([body, *inputs, self.cut, *marks])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@once_for
def body_text(body: fx.GraphModule) -> str:
    """``print_graph`` of a body."""
    return print_graph(body)


@once_for
def _text_of_values(body: fx.GraphModule) -> str:
    """``body_text`` without each ``detach``, and without gradients that are given."""
    graph = fx.Graph()
    places: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: places.get(arg, arg))
        if node.op == "output":
            graph.output(args[0])
        elif is_call(node, torch.ops.aten.detach.default):
            places[node] = args[0]
        elif node.target is WITH_GRADIENT:
            _, inputs, values, *given = args
            places[node] = given[inputs : inputs + values]
        elif is_call(node, operator.getitem) and isinstance(args[0], list):
            places[node] = args[0][args[1]]
        elif node.op != "get_attr":  # of a gradient
            places[node] = graph.create_node(node.op, node.target, args, kwargs)
            places[node].meta = node.meta
    return print_graph(graph)


def mark_grads(graph: fx.Graph, trained: Sequence[bool]) -> None:
    """Mark which values of a region's graph need a gradient, where these inputs do."""
    for node, mark in zip(inputs_of(graph), trained, strict=True):
        node.meta["requires_grad"] = mark
    propagate_requires_grad(graph)


def differentiated(forward: fx.GraphModule) -> list[bool]:
    """For each input of a region, whether any path from an output leads back to it without a
    ``detach`` (which marks what is read under ``no_grad``)."""

    def attached(node: fx.Node) -> Sequence[fx.Node]:
        return () if is_call(node, torch.ops.aten.detach.default) else node.all_input_nodes

    found = {*reached([forward.graph.output_node()], attached)}
    return [node in found for node in inputs_of(forward.graph)]


def _signature(spec: InputSpec, symbols: Symbols, any_gpu: bool) -> str:
    """Everything about an input that compiled code depends on; not the strides of rows, which are
    made contiguous."""
    example = spec.example
    device = example.device.type if any_gpu else example.device
    sizes = [symbols.text(size) for size in example.shape[1 if spec.tiled else 0 :]]
    strides = [] if spec.tiled else [symbols.text(stride) for stride in example.stride()]
    kind = f"{example.dtype} {device} {sizes} {strides}"
    marks = " alive" if spec.alive else ""
    marks += "" if spec.split is None else f" split {spec.split}"
    return f"{kind} {spec.tiled} {spec.needs_grad}{marks}"


# ---------------------------------------------------------------------------- calls in a graph
def call_region(
    graph: fx.Graph, region: Region, inputs: list[fx.Node], tile: int, results: list[Any]
) -> list[fx.Node]:
    """Put a region's call at the graph's insertion point, with ``tile`` rows per tile (0: all at
    once); ``results`` are the fake values of its outputs. Returns a graph value per output."""
    call = graph.call_function(torch.ops.fxrl.region.default, (inputs, region.id, tile, []))
    call.meta["val"] = list(results)
    call.meta["region"] = region
    values = []
    for index, val in enumerate(results):
        item = graph.call_function(operator.getitem, (call, index))
        item.meta["val"] = val
        values.append(item)
    return values


def region_at(node: fx.Node) -> Region | None:
    """The region that a node calls."""
    found: Region | None = node.meta.get("region")
    return found if found is not None and is_call(node, torch.ops.fxrl.region.default) else None


def is_differentiated(call: fx.Node) -> bool:
    """Whether a backward comes to a region's call: of one under ``no_grad`` all that it returns is
    detached, though its region may be that of layers that are trained."""
    return needs_grad(call) and call.meta["region"].num_grads > 0


def set_region(call: fx.Node, region: Region) -> None:
    """Let a call run ``region``, which takes and returns the same as the one it ran."""
    call.meta["region"] = region
    call.update_arg(1, region.id)


def send_to_host(call: fx.Node, inputs: Sequence[int], *, kept: bool) -> None:
    """Let these inputs of a call, and all values that it keeps, wait in host memory."""
    call.update_arg(3, [*inputs, *([-1] if kept else [])])


def set_pace(call: fx.Node, sending: int, fetching: int) -> None:
    """Say how many stores may be on their way to the host behind a call, and how many come back
    while its backward runs."""
    call.args = (*call.args[:4], [sending, fetching], *call.args[5:])


def take_again(call: fx.Node, inputs: Sequence[int]) -> None:
    """Let these inputs of a call, which regions return, wait nowhere: their makers make them again
    for its backward."""
    pace = call.args[4] if len(call.args) > 4 else []
    call.args = (*call.args[:4], pace, list(inputs))


def asked_again(region: Region) -> Region:
    """The region as one whose outputs a backward asks for."""
    return replace(region, again="outputs") if region.again == "never" else region


def region_calls(gm: fx.GraphModule) -> list[fx.Node]:
    """Every region call of a graph and of its checkpointed bodies, in order."""
    return [node for graph in graphs_of(gm) for node in graph.nodes if region_at(node) is not None]


def regions_of(gm: fx.GraphModule) -> dict[str, Region]:
    """The distinct regions of a graph by id."""
    return {node.meta["region"].id: node.meta["region"] for node in region_calls(gm)}


def text_on_any_gpu(gm: fx.GraphModule) -> str:
    """A graph's text as processes with a GPU each have it alike: which one it is shows neither in
    operands (``device=cuda:1``) nor in the ids of regions."""
    text = print_graph(gm, device_numbers=False)
    for own, region in regions_of(gm).items():
        text = text.replace(own, region.id_on_any_gpu)
    return text
