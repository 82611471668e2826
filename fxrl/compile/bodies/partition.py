"""The cut "products": a joint graph, split where little is kept for the backward.

    joint      inputs, gradients -> outputs, gradients of the inputs
    forward    inputs            -> outputs, kept values
    backward   kept values, ...  -> gradients of the inputs

The cut is PyTorch's own (``min_cut_rematerialization_partition``): matrix products are kept,
elementwise ops and norms are computed again where that is less memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fxrl.ir.graph import Size, is_view

Source = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Halves:
    """The two graphs, and where the backward's arguments are from (see ``ops.region.Body``)."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    sources: tuple[Source, ...]
    sizes: tuple[Size, ...]


def partition(joint: fx.GraphModule, num_outputs: int, alive: Sequence[int]) -> Halves:
    """Split a joint graph whose placeholders are named ``primals`` and ``tangents``.

    Args:
        num_outputs: outputs of the forward, before the gradients.
        alive: inputs that live until the backward in any case.
    """
    with functorch_config.patch(activation_memory_budget=1.0):
        pair = min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=list(alive)
        )
    return _Settling(*pair, num_outputs).settle()


class _Settling:
    """The partitioner's two graphs; ``settle`` says where the backward's arguments are from."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
        self.forward, self.backward = forward, backward
        (self._output,) = forward.graph.find_nodes(op="output")
        self._nodes = {node.name: node for node in forward.graph.nodes}
        self._inputs = forward.graph.find_nodes(op="placeholder")
        self._results: list[Any] = list(self._output.args[0])[:num_outputs]

    def settle(self) -> Halves:
        """Return only what is the forward's own memory; the rest is an input, or a look at one."""
        self._recompute_views()
        sources: list[Source] = []
        sizes: list[Size] = []
        grads = 0
        for node in self.backward.graph.find_nodes(op="placeholder"):
            if str(node.target).startswith("tangents"):
                sources.append(("grad", int(str(node.target).rpartition("_")[2]) - 1))
                grads += 1
            elif isinstance(node.meta.get("val"), torch.SymInt):
                sources.append(("size", len(sizes)))
                sizes.append(node.meta["val"])
            elif (twin := self._nodes[node.name]) in self._inputs:
                sources.append(("input", self._inputs.index(twin)))
            else:
                if twin not in self._results:
                    self._results.append(twin)
                sources.append(("output", self._results.index(twin)))
        self._output.args = (list(self._results),)
        for half in (self.forward, self.backward):
            half.graph.eliminate_dead_code()
            half.graph.lint()
            half.recompile()
        return Halves(self.forward, self.backward, tuple(sources), tuple(sizes))

    def _recompute_views(self) -> None:
        """A kept value that is a view of an input (a weight's transpose): keep the input."""
        graph = self.backward.graph
        places = {node.name: node for node in graph.nodes}
        for kept in graph.find_nodes(op="placeholder"):
            twin = self._nodes.get(kept.name)
            if twin is None or not self._is_view_of_input(twin):
                continue
            rest = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(rest):
                kept.replace_all_uses_with(self._place(graph, twin, places, anew=True))
            graph.erase_node(kept)

    def _is_view_of_input(self, node: fx.Node) -> bool:
        steps = 0
        while is_view(node) and isinstance(node.args[0], fx.Node):
            node, steps = node.args[0], steps + 1
        return node.op == "placeholder" and steps > 0

    def _place(
        self, graph: fx.Graph, node: fx.Node, places: dict[str, fx.Node], *, anew: bool = False
    ) -> fx.Node:
        """The forward's value ``node`` in the backward's graph."""
        if node.name in places and not anew:
            return places[node.name]
        if node.op == "placeholder" or not is_view(node):  # an input, or a size
            with graph.inserting_before(next(iter(graph.nodes))):
                place = graph.placeholder(node.name)
        else:
            place = graph.node_copy(node, lambda n: self._place(graph, n, places))
        place.meta = dict(node.meta)
        places[node.name] = place
        return place


def writes(gm: fx.GraphModule) -> bool:
    """Whether a traced graph writes into a value (an autograd formula may)."""
    return any(
        node.op == "call_function"
        and node.target is not operator.getitem
        and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        for node in gm.graph.nodes
    )
