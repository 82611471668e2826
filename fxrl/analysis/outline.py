"""Outline any part of a lowered graph as a Region: one opaque call that owns its backward.

    %a = ...(%x, %w)                       %out = fxrl.region([%x, %w])
    %b = ...(%a)              becomes
    %out = ...(%b, %a)

Autograd then saves the call's inputs and nothing inside, for the region's vjp recomputes. Given
which inputs hold tokens, the region runs tile by tile over them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.legality import illegal
from fxrl.analysis.tile_body import TileLayout, TileRefusal
from fxrl.errors import FxrlError
from fxrl.ir.graph import (
    ancestors,
    eliminate_dead_code,
    is_call,
    is_tensor,
    needs_grad,
    propagate_requires_grad,
    tensor_val,
    topological_sort,
)
from fxrl.ir.region import InputSpec, Region, call_region
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten


class OutlineError(FxrlError, ValueError):
    """These nodes cannot become one region."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A part of a graph that can become a region.

    Attributes:
        nodes: all values inside, in graph order.
        inputs: tensors from outside that they read, in the order of first use.
        outputs: values inside that are read from outside, in graph order.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def find_outline(graph: fx.Graph, nodes: Collection[fx.Node]) -> Outline:
    """The smallest part of the graph around ``nodes`` that one call can stand for.

    Whatever lies on a path between two of the nodes belongs to it, and so do all parts of a result
    of several tensors. Sizes never count as inputs: they are read off the input tensors.

    Raises:
        OutlineError: the part holds random numbers, writes, or calls with a graph for a body.
    """
    order = list(graph.nodes)
    inside = _closed(order, {node for node in nodes if _computes(node)})
    if not inside:
        raise OutlineError("none of the nodes computes a tensor")
    ordered = tuple(n for n in order if n in inside)
    for node in ordered:
        if (reason := illegal(node)) is not None:
            raise OutlineError(f"%{node} {reason}")
    # In the order of first use, which is the same for equal parts wherever their inputs come from.
    inputs = dict.fromkeys(arg for node in ordered for arg in node.all_input_nodes)
    return Outline(
        ordered,
        tuple(n for n in inputs if n not in inside and _example(n) is not None),
        tuple(n for n in ordered if _read_outside(n, inside)),
    )


def outline(
    gm: fx.GraphModule,
    nodes: Collection[fx.Node],
    *,
    token_dims: Mapping[fx.Node, int] | None = None,
    tile: int = 0,
    keep: bool = False,
    finish: bool = True,
) -> Region:
    """Replace a part of the graph by a region call, in place.

    Args:
        gm: a lowered graph, with ``meta["val"]`` and ``meta["requires_grad"]``.
        nodes: what to outline; see ``find_outline`` for what is added.
        token_dims: input -> how many of its leading dims are tokens (``[B, T, H]`` has 2), for a
            region that runs in tiles; the other inputs are shared by all tiles. Each token's
            result must depend on that token's row alone, which is not checked here.
        tile: tokens per tile, 0 for all at once.
        keep: the backward gets what it needs from the forward; by default it recomputes.
        finish: clean the graph up afterwards; False where more follows (``finish_outlines``).

    Raises:
        OutlineError: it cannot be outlined; the graph is unchanged.
    """
    found = find_outline(gm.graph, nodes)
    layout = None
    if token_dims:
        try:
            layout = TileLayout.of(found.inputs, found.outputs, token_dims)
        except TileRefusal as refusal:
            raise OutlineError(str(refusal)) from refusal
    body = _body(gm, found, layout)
    specs = []
    for node in found.inputs:
        tiled = layout is not None and node in layout.token_dims
        val = _example(node)
        assert val is not None
        example = layout.rows_val(node) if layout is not None and tiled else val
        alive = node.op in ("placeholder", "get_attr")
        specs.append(InputSpec(example, tiled, needs_grad(node), alive and keep))
    region = Region(body, tuple(specs), keep)
    _replace(gm, found, region, layout, tile)
    if finish:
        finish_outlines(gm)
    return region


def finish_outlines(gm: fx.GraphModule) -> None:
    """Leave a graph in order from which parts were outlined."""
    topological_sort(gm.graph)
    eliminate_dead_code(gm.graph)
    propagate_requires_grad(gm.graph)
    gm.graph.lint()
    gm.recompile()


# ---------------------------------------------------------------------------- what is inside
def _computes(node: fx.Node) -> bool:
    """Whether the node is a tensor computation (and no input, constant, size or check)."""
    if node.op != "call_function" or "assert" in str(node.target):
        return False
    val = node.meta.get("val")
    return isinstance(val, (torch.Tensor, tuple, list))


def _closed(order: list[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    """``inside`` and all that lies between, until nothing is added."""
    places = [place for place, node in enumerate(order) if node in inside]
    if places:  # what lies between two nodes has its place between theirs
        order = order[places[0] : places[-1] + 1]
    while True:
        before = len(inside)
        inside = {n for n in inside if not is_call(n, operator.getitem) or n.args[0] in inside}
        inside |= {user for n in inside for user in n.users if is_call(user, operator.getitem)}
        reached: set[fx.Node] = set()
        for node in order:
            if node in inside or any(arg in reached for arg in node.all_input_nodes):
                reached.add(node)
        inside |= {n for n in reached & ancestors(inside, reached) if _computes(n)}
        if len(inside) <= before:
            return inside


def _example(node: fx.Node) -> torch.Tensor | None:
    """What an input looks like; constants of the graph are tensors of its module."""
    if node.op == "get_attr" and tensor_val(node) is None:
        held = getattr(node.graph.owning_module, str(node.target), None)
        return held if isinstance(held, torch.Tensor) else None
    return tensor_val(node)


def _read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a tensor is read outside; reading its size does not count."""
    return is_tensor(node) and any(u not in inside and not _is_size(u) for u in node.users)


def _is_size(node: fx.Node) -> bool:
    return is_call(node, aten.sym_size.int, aten.sym_stride.int)


# ---------------------------------------------------------------------------- the body
def _body(gm: fx.GraphModule, found: Outline, layout: TileLayout | None) -> fx.GraphModule:
    """The part as a graph of its own; equal parts give equal text, whatever their names were."""
    graph = fx.Graph()
    places: dict[fx.Node, Any] = {}
    for index, node in enumerate(found.inputs):
        places[node] = graph.placeholder(f"arg{index}")
        if layout is None or node not in layout.token_dims:
            places[node].meta["val"] = _example(node)
    sizes = SizeTable(graph, list(places.values()))
    if layout is not None:
        places.update(layout.unflatten(graph, places, sizes))

    def place(node: fx.Node) -> Any:
        if node in places:
            return places[node]
        size = node.meta.get("val")
        value = sizes.arg(size) if isinstance(size, (int, torch.SymInt)) else None
        if value is None:
            raise OutlineError(f"%{node} = {size} cannot be read off the input tensors")
        return value

    for node in found.nodes:
        target: Any = node.target
        copy = graph.call_function(
            target, fx.map_arg(node.args, place), fx.map_arg(node.kwargs, place)
        )
        if layout is None:
            copy.meta["val"] = node.meta["val"]
        places[node] = copy
    results = tuple(places[node] for node in found.outputs)
    if layout is not None:
        results = layout.flatten_outputs(graph, found.outputs, results, sizes)
    graph.output(results)
    topological_sort(graph)
    graph.lint()
    return fx.GraphModule(gm, graph)


# ---------------------------------------------------------------------------- the call
def _replace(
    gm: fx.GraphModule, found: Outline, region: Region, layout: TileLayout | None, tile: int
) -> None:
    # Looking at all of the graph for each of many outlines adds up; most need no sizes, and fit in.
    inside = set(found.nodes)
    readers = [u for n in found.nodes for u in n.users if _is_size(u) and u.users]
    looks = layout is not None or bool(readers)
    known = [n for n in gm.graph.nodes if not _hangs_on(n, inside)] if looks else []
    sizes = SizeTable(gm.graph, known)
    fits = not looks and all(node < found.outputs[0] for node in found.inputs)
    with gm.graph.inserting_before(found.outputs[0]):
        _detach_sizes(readers, sizes)
        if layout is None:
            feeds = list(found.inputs)
            vals = [tensor_val(node) for node in found.outputs]
            values = call_region(gm, region, feeds, tile, vals)
        else:
            feeds = layout.flatten_inputs(gm.graph, found.inputs, sizes)
            vals = [layout.rows_val(node) for node in found.outputs]
            values = call_region(gm, region, feeds, tile, vals)
            values = layout.restore(gm.graph, found.outputs, values, sizes)
    for node, value in zip(found.outputs, values, strict=True):
        value.meta = {**node.meta, "val": value.meta["val"]}
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in inside)
    for node in reversed(found.nodes):
        if not node.users:
            gm.graph.erase_node(node)
    if not fits:
        topological_sort(gm.graph)


def _hangs_on(node: fx.Node, inside: set[fx.Node]) -> bool:
    return node in inside or any(arg in inside for arg in node.all_input_nodes)


def _detach_sizes(readers: Iterable[fx.Node], sizes: SizeTable) -> None:
    """Let sizes that were read off inner values come from elsewhere."""
    for reader in readers:
        value = sizes.arg(reader.meta["val"])
        if value is None:
            raise OutlineError(f"%{reader} is known from inside only")
        _substitute(reader, value)


def _substitute(node: fx.Node, value: fx.Node | int) -> None:
    if isinstance(value, fx.Node):
        node.replace_all_uses_with(value)
        return
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)
