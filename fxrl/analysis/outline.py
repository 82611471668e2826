"""Outline a part of a lowered graph as a Region: one opaque call that owns its backward.

    %a = ...(%x, %w)                       %out = fxrl.region([%x, %w])
    %b = ...(%a)              becomes
    %out = ...(%b, %a)

Autograd then saves what the region's cut says, and nothing else of its inside.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from fxrl.ir.bodies import HALVES, WITH_GRADIENT, body_of, graph_module
from fxrl.ir.graph import (
    EXCHANGES,
    PIECEWISE_PRODUCTS,
    HigherOrderOperator,
    OpOverload,
    ancestors,
    as_node,
    draws_random,
    held,
    is_call,
    is_tensor,
    needs_grad,
    replace_by,
    tensor_val,
    topological_sort,
)
from fxrl.ir.region import (
    Cut,
    InputSpec,
    Region,
    call_region,
    differentiated,
    set_region,
)
from fxrl.ir.remark import Refusal
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten
#: fxrl's ops that may be in a region like any kernel, each with a backward of its own.
_KERNELS = (
    "fxrl.masked_attention.default",
    "fxrl.mask_blocks.default",
    "fxrl.shard_tokens.default",
    *EXCHANGES,
    *PIECEWISE_PRODUCTS,
)


@dataclass(frozen=True, slots=True)
class Outline:
    """A part of a graph that can become a region."""

    nodes: tuple[fx.Node, ...]  # all values inside, in graph order
    inputs: tuple[fx.Node, ...]  # tensors from outside that they read, in the order of first use
    outputs: tuple[fx.Node, ...]  # values inside that are read from outside, in graph order


def illegal(node: fx.Node) -> str | None:
    """Why a node cannot stand inside a region; None where it can.

    A region holds functional ATen whose result depends on its operands alone, and values whose
    gradient is a graph of such.
    """
    if node.target is WITH_GRADIENT:
        return None
    if isinstance(why := node.meta.get(HALVES), str):
        return f"is an autograd.Function that could not be lowered: {why}"
    if isinstance(node.target, HigherOrderOperator):
        return f"calls {node.target}, which has a graph for a body"
    if not isinstance(node.target, OpOverload):
        return None if node.target is operator.getitem else f"calls {node.target}, no ATen op"
    if node.target.namespace == "fxrl" and str(node.target) not in _KERNELS:
        return f"is {node.target} already"
    if node.target._schema.is_mutable:
        return f"({node.target}) writes into its input"
    if draws_random(node):
        return f"({node.target}) draws random numbers, which a recompute would draw again"
    if torch.Tag.data_dependent_output in node.target.tags:
        return f"({node.target}) gives a number to the host"
    if torch.Tag.dynamic_output_shape in node.target.tags and not _takes_rows(node):
        return f"({node.target}) gives a tensor whose size depends on data"
    return None


def _takes_rows(node: fx.Node) -> bool:
    """Whether a call indexes by numbers, so that the result's size is that of the index:
    ``x[order]``, and not ``x[x > 0]``."""
    if not is_call(node, aten.index.Tensor):
        return False
    vals = [tensor_val(as_node(at)) for at in cast(list[Any], node.args[1]) if at is not None]
    return all(val is not None and val.dtype in (torch.int64, torch.int32) for val in vals)


def find_outline(graph: fx.Graph, nodes: Collection[fx.Node]) -> Outline:
    """The smallest part of the graph around ``nodes`` that one call can replace.

    It includes everything on a path between two of the nodes, and all elements of a result that is
    a tuple. Sizes never count as inputs: they are read off the input tensors. Raises ``Refusal`` if
    the part draws random numbers, writes, or calls an op that has a graph for a body.
    """
    order = list(graph.nodes)
    inside = _closed(order, {node for node in nodes if computes(node)})
    if not inside:
        raise Refusal("none of the nodes computes a tensor")
    ordered = tuple(n for n in order if n in inside)
    for node in ordered:
        if (reason := illegal(node)) is not None:
            raise Refusal(f"%{node} {reason}", at=node)
    inputs = _first_reads(ordered)
    return Outline(
        ordered,
        tuple(n for n in inputs if n not in inside and _example(n) is not None),
        tuple(n for n in ordered if is_tensor(n) and not inside.issuperset(_readers(n))),
    )


def _first_reads(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """What nodes read, in the order of first use: it is the same for equal parts, wherever their
    inputs come from and whatever is detached."""
    detached = {node: node.args[0] for node in nodes if is_call(node, aten.detach.default)}
    readers = (node for node in nodes if node not in detached)
    read: list[Any] = [detached.get(n, n) for node in readers for n in node.all_input_nodes]
    return dict.fromkeys([*read, *detached.values()])


def outline(
    gm: fx.GraphModule, nodes: Collection[fx.Node], *, cut: Cut = "inputs", layer: str = ""
) -> fx.Node:
    """Replace ``nodes``, and what ``find_outline`` adds to them, by a region call, in place, and
    return it; ``tidy`` the graph afterwards. Raises ``Refusal``, leaving only dead nodes behind, if
    they cannot be outlined."""
    found = find_outline(gm.graph, nodes)
    body = _body(gm, found)
    specs = []
    for node, back in zip(found.inputs, differentiated(body), strict=True):
        val = _example(node)
        assert val is not None
        alive = node.op in ("placeholder", "get_attr")
        specs.append(InputSpec(val, False, back and needs_grad(node), alive))
    return _replace(gm, found, Region(body, tuple(specs), cut, layer))


# ---------------------------------------------------------------------------- one body for many
#: One call in so many may compute gradients that nobody reads: so the first of two layers, too.
_RARE = 2


def share_widest(gm: fx.GraphModule, calls: Iterable[fx.Node]) -> None:
    """Let those of a graph's region calls share one body that differ only in which inputs need a
    gradient; and where no backward comes, any body with the same values.

    The first layer's input needs no gradient if the embeddings are frozen. A body of its own would
    cost its compile time; an unread gradient costs a few products of one layer. Under ``no_grad``
    no gradient is computed at all, and with the body of what is trained a reference has its bits: a
    ratio of log-probs begins at exactly 1.
    """
    runs = _backward_runs(gm)
    alike: dict[str, dict[str, list[fx.Node]]] = {}
    for call in calls:
        region = call.meta["region"]
        alike.setdefault(region.id_of_values, {}).setdefault(region.id, []).append(call)
    for groups in alike.values():
        _share(list(groups.values()), runs)


def _share(groups: list[list[fx.Node]], runs: Counter[fx.Graph]) -> None:
    """Share bodies among regions with the same values, of which ``groups`` has the calls; ``runs``
    is how often a backward comes to a graph."""

    def region_of(group: list[fx.Node]) -> Region:
        region: Region = group[0].meta["region"]
        return region

    def reached(group: list[fx.Node]) -> int:
        """How often a gradient comes to what these calls return."""
        return sum(runs[call.graph] for call in filter(needs_grad, group))

    total: Counter[str] = Counter()
    for group in groups:
        total[region_of(group).id_without_grads] += reached(group)
    widest: dict[str, Region] = {}
    for group in sorted(groups, key=lambda group: -region_of(group).num_grads):
        region, key = region_of(group), region_of(group).id_without_grads
        wide = widest.setdefault(key, region)
        if not reached(group):
            wide = next(iter(widest.values()))
        if _RARE * reached(group) <= total[key] and _covers(wide, region):
            for call in group:
                set_region(call, replace(wide, layer=call.meta["region"].layer))


def _backward_runs(gm: fx.GraphModule) -> Counter[fx.Graph]:
    """How often the backward of a graph comes to that of each graph in it."""
    found = Counter([gm.graph])
    for call in filter(needs_grad, gm.graph.nodes):
        if (body := body_of(gm, call)) is not None:
            found += _backward_runs(body)
    return found


def _covers(wide: Region, narrow: Region) -> bool:
    pairs = zip(wide.inputs, narrow.inputs, strict=True)
    return all(w.needs_grad or not n.needs_grad for w, n in pairs)


# ---------------------------------------------------------------------------- what is inside
def computes(node: fx.Node) -> bool:
    """Whether the node is a tensor computation (and no input, constant, size or check).

    ``lift_fresh_copy`` is a constant: when the graph is traced again, only this op may read a real
    tensor.
    """
    if node.op != "call_function" or "assert" in str(node.target):
        return False
    if is_call(node, aten.lift_fresh_copy.default):
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
        inside |= {n for n in reached & ancestors(inside, reached) if computes(n)}
        if len(inside) <= before:
            return inside


def _example(node: fx.Node) -> torch.Tensor | None:
    """The (fake) tensor of an input; that of a constant is held by the graph's module."""
    if node.op == "get_attr" and tensor_val(node) is None:
        constant = held(node)
        return constant if isinstance(constant, torch.Tensor) else None
    return tensor_val(node)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read its values, and not just a size."""
    return (user for user in node.users if not _is_size(user))


def _is_size(node: fx.Node) -> bool:
    return is_call(node, aten.sym_size.int, aten.sym_stride.int)


# ---------------------------------------------------------------------------- the body
def _body(gm: fx.GraphModule, found: Outline) -> fx.GraphModule:
    """The part as a graph of its own; equal parts give equal text, whatever their names were."""
    graph = fx.Graph()
    places: dict[fx.Node, Any] = {}
    backwards: dict[str, fx.GraphModule] = {}
    for index, node in enumerate(found.inputs):
        places[node] = graph.placeholder(f"arg{index}")
        places[node].meta["val"] = _example(node)
    sizes = SizeTable(graph, list(places.values()))

    def place(node: fx.Node) -> Any:
        return places[node] if node in places else sizes.arg(node.meta.get("val"), node)

    for node in found.nodes:
        if node.target is WITH_GRADIENT:
            name = f"backward_{len(backwards)}"
            backwards[name] = held(as_node(node.args[0]))
            places[as_node(node.args[0])] = graph.get_attr(name)
        target: Any = node.target
        copy = graph.call_function(
            target, fx.map_arg(node.args, place), fx.map_arg(node.kwargs, place)
        )
        copy.meta |= {key: node.meta[key] for key in ("val", "site") if key in node.meta}
        places[node] = copy
    graph.output(tuple(places[node] for node in found.outputs))
    topological_sort(graph)
    graph.lint()
    return graph_module(gm, graph, held=backwards)


# ---------------------------------------------------------------------------- the call
def _replace(gm: fx.GraphModule, found: Outline, region: Region) -> fx.Node:
    # Looking at all of the graph for each of many outlines adds up; most need no sizes, and fit in.
    inside = set(found.nodes)
    readers = [u for n in found.nodes for u in n.users if _is_size(u) and u.users]
    known = (n for n in gm.graph.nodes if inside.isdisjoint((n, *n.all_input_nodes)))
    sizes = SizeTable(gm.graph, [*known] if readers else [])
    fits = not readers and all(node < found.outputs[0] for node in found.inputs)
    with gm.graph.inserting_before(found.outputs[0]):
        for reader in readers:
            replace_by(reader, sizes.arg(reader.meta["val"], reader))
        vals = [tensor_val(node) for node in found.outputs]
        values = call_region(gm.graph, region, list(found.inputs), 0, vals)
    call: Any = values[0].args[0]
    call.meta = {**found.nodes[0].meta, **call.meta}
    for node, value in zip(found.outputs, values, strict=True):
        value.meta = {**node.meta, "val": value.meta["val"]}
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in inside)
    for node in reversed(found.nodes):
        if not node.users:
            gm.graph.erase_node(node)
    if not fits:
        topological_sort(gm.graph)
    return as_node(call)
