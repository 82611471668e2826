"""The layers of a captured model, found by its structure, and the parts of each layer.

    layers.0: norm, qkv, rope, attention | dropout | o_proj, residual, norm, mlp, residual
              part 0                       stays     part 1

A layer is what one numbered member of a module list or a sequence computes; of nested ones the
outermost counts. What cannot be in a compiled body (random numbers, writes, data-dependent sizes)
stays outside and splits the layer; a part is all that runs between two such calls.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxrl.analysis.outline import illegal
from fxrl.ir.graph import (
    PRODUCTS,
    draws_random,
    example_of,
    held,
    is_call,
    is_quantized_product,
    is_tensor,
    is_view,
    library_weight,
    tensor_val,
)
from fxrl.ir.printer import print_graph
from fxrl.ir.site import plain_path, site_name

aten = torch.ops.aten

_NUMBERED = re.compile(r"(?:.*?\.)?([A-Za-z_]\w*(?:\.\d+)+)$")
_INSIDE = re.compile(r"\.\d+(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Layer:
    path: str  # the end of its module path, such as ``layers.3``
    site: str  # its name as a site, such as ``0:model.layers.3``
    # The nodes between barriers, in order; parts without work are left out.
    parts: tuple[tuple[fx.Node, ...], ...]
    # The calls that split it, as they stay outside of compiled bodies, and why.
    barriers: tuple[tuple[fx.Node, str], ...]

    def at(self, path: str) -> Layer:
        """The same layer with the names of the module at ``path``."""
        match = _NUMBERED.match(path)
        site = f"{self.site.partition(':')[0]}:{path}"
        return replace(self, path=path if match is None else match[1], site=site)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes that can stand in bodies, in order of the parts."""
        return tuple(node for part in self.parts for node in part)


def layer_path(node: fx.Node) -> str | None:
    """Path of the outermost numbered module that made ``node``: ``model.layers.3``."""
    for where, _ in (node.meta.get("nn_module_stack") or {}).values():
        if _NUMBERED.match(path := plain_path(where)) is not None:
            return path
    return None


def is_in_layer(node: fx.Node) -> bool:
    """Whether a numbered module made ``node``, or a module inside one: a graph that begins inside
    a layer knows no outer modules."""
    stack = node.meta.get("nn_module_stack") or {}
    return any(_INSIDE.search(plain_path(where)) for where, _ in stack.values())


def layer_nodes(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The nodes that each layer made, in graph order."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and (path := layer_path(node)) is not None:
            found.setdefault(path, []).append(node)
    return found


def split_layer(path: str, nodes: Sequence[fx.Node]) -> Layer:
    """Split a layer's nodes into parts at the barriers, which cannot be inside a body."""
    stages, barriers, blocked = _stages(nodes)
    _sink_weights(nodes, stages, blocked)
    count = 1 + max(stages.values(), default=-1)
    parts = []
    for stage in range(count):
        part = tuple(n for n in nodes if stages.get(n) == stage and n not in blocked)
        if has_work(part):
            parts.append(part)
    capture = site_name(nodes[0]).partition(":")[0] if nodes else ""
    return Layer("", f"{capture}:", tuple(parts), tuple(barriers.items())).at(path)


def has_work(nodes: Iterable[fx.Node]) -> bool:
    """Whether fusing these ops is worth a call: a product and some other op, or a few ops."""
    work = [n for n in nodes if is_tensor(n) and not is_view(n)]
    return len(work) > 2 or (len(work) == 2 and any(map(is_product, work)))


def is_product(node: fx.Node) -> bool:
    """Whether ``node`` is a matrix product: too dear to be computed twice."""
    own = is_call(node, *PRODUCTS) or is_quantized_product(node)
    return own or library_weight(node) is not None


def is_weight(node: fx.Node) -> bool:
    """Whether ``node`` is a weight, a bias or an adapter's factor, which are kept anyway: an input
    or a constant of as few dims."""
    val = tensor_val(node)
    return node.op in ("placeholder", "get_attr") and val is not None and val.dim() <= 2


# ---------------------------------------------------------------------------- stages
def _stages(
    nodes: Sequence[fx.Node],
) -> tuple[dict[fx.Node, int], dict[fx.Node, str], set[fx.Node]]:
    """Nodes by stage; the barriers, each with its reason; the barriers with their results'
    elements.

    Stage 0 needs no barrier's result, stage 1 needs those of barriers after stage 0, and so on. So
    a part never depends on itself through a barrier, whatever the order of the nodes."""
    stages: dict[fx.Node, int] = {}
    barriers: dict[fx.Node, str] = {}
    blocked: set[fx.Node] = set()
    drawn = 0
    for node in nodes:
        value = node.meta.get("val")
        counts = _is_count(node)
        if not (counts or isinstance(value, (torch.Tensor, tuple, list))):
            continue
        reason = None if counts else illegal(node)
        item = is_call(node, operator.getitem) and node.args[0] in blocked
        if reason is not None:
            barriers[node] = reason
        if reason is not None or item:
            blocked.add(node)
        before = [
            stages[arg] + (arg in blocked and node not in blocked)
            for arg in node.all_input_nodes
            if arg in stages
        ]
        if draws_random(node):  # in the order of the program, so that it draws the same
            before.append(drawn)
            drawn = stages[node] = max(before)
        stages[node] = max(before, default=0)
    held = {node: stage for node, stage in stages.items() if not _is_count(node)}
    return held, barriers, blocked


def _is_count(node: fx.Node) -> bool:
    """Whether it is a number, such as how many rows were selected, which no part may hold."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool))


def _sink_weights(
    nodes: Sequence[fx.Node], stages: dict[fx.Node, int], blocked: set[fx.Node]
) -> None:
    """Move what is computed from weights alone (a transpose, a cast) to where it is read."""
    static: set[fx.Node] = set()
    for node in nodes:
        if node in stages and node not in blocked:
            inputs = [a for a in node.all_input_nodes if tensor_val(a) is not None]
            if inputs and all(a in static or is_weight(a) for a in inputs):
                static.add(node)
    for node in reversed(nodes):
        if node in static and node.users and all(user in stages for user in node.users):
            stages[node] = max(stages[node], min(stages[user] for user in node.users))


# ---------------------------------------------------------------------------- views on the border
def part_views(graph: fx.Graph, parts: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """Give every reader outside of a part its own copy of the part's views; returns the parts.

    A body then returns memory of its own and never a view, which would have to be copied.
    """
    groups: list[list[fx.Node]] = [list(part) for part in parts]
    home = {node: index for index, part in enumerate(groups) for node in part}
    for part in parts:
        for node in reversed(part):
            if is_view(node):
                _copy_for_strangers(graph, node, groups, home)
                if not node.users:
                    graph.erase_node(node)
    order = {node: place for place, node in enumerate(graph.nodes)}
    return [sorted(set(group) & order.keys(), key=order.__getitem__) for group in groups]


def _copy_for_strangers(
    graph: fx.Graph, node: fx.Node, groups: list[list[fx.Node]], home: dict[fx.Node, int]
) -> None:
    strangers: dict[int | None, list[fx.Node]] = {}
    for user in node.users:
        if home.get(user) != home[node] and not is_call(user, aten.sym_size.int):
            strangers.setdefault(home.get(user), []).append(user)
    for group, users in strangers.items():
        with graph.inserting_after(node):
            copy = graph.node_copy(node)
        for user in users:
            user.replace_input_with(node, copy)
        if group is not None:
            groups[group].append(copy)
            home[copy] = group


# ---------------------------------------------------------------------------- equal layers
def signature(nodes: Iterable[fx.Node]) -> tuple[Any, ...]:
    """Equal for nodes that compute the same from inputs of the same types, whatever their names."""
    places: dict[fx.Node, int] = {}
    lines: list[Any] = []

    def place(node: fx.Node) -> str:
        if isinstance(example_of(node), torch.SymInt):
            return f"<{example_of(node)}>"  # one size may have several names
        if node not in places:
            places[node] = len(places)
            inner = held(node) if node.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):  # such as the gradient of a value
                lines.append((places[node], "graph", print_graph(inner)))
            else:
                lines.append((places[node], "in", type_of(example_of(node))))
        return f"%{places[node]}"

    for node in nodes:
        if node.op == "placeholder":
            places[node] = len(places)
            lines.append((places[node], "in", type_of(example_of(node))))
            continue
        args = repr(fx.map_arg((node.args, node.kwargs), lambda n: _Text(place(n))))
        places[node] = len(places)
        lines.append((places[node], str(node.target), args, type_of(example_of(node))))
    return tuple(lines)


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else value.layout
        return f"{value.dtype} {tuple(value.shape)} {strides} {value.device}"
    return " ".join(map(type_of, value)) if isinstance(value, (tuple, list)) else str(value)
