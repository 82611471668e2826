"""Split a joint graph into forward and backward, by the layer's cut: what the backward may keep.

    joint      inputs, gradients -> outputs, gradients of the inputs
    forward    inputs            -> outputs, kept values
    backward   kept values, ...  -> gradients of the inputs

All cuts but "inputs" and "vectors" are made by PyTorch (``min_cut_rematerialization_partition``):

"products"     as for ``torch.compile``: keep what is costly to compute again, and what computing
               again would write to memory once more
"fewest"       keep as few bytes as possible without running products, attention or reductions again
"attention"    keep what attention returns; the rest runs again, sums over groups of heads too
"inputs"       keep nothing; the backward runs the forward again
"vectors"      keep the products, for the backward runs at once, tile by tile

What runs again does so as late as the gradients allow, so that little is alive at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrl.analysis.layers import is_product
from fxrl.compile._torch import functorch_config, min_cut_rematerialization_partition
from fxrl.ir.bodies import graph_module
from fxrl.ir.graph import (
    PIECEWISE_PRODUCTS,
    SCALED_MM,
    Size,
    ancestors,
    as_node,
    inputs_of,
    is_attention,
    is_call,
    is_view,
    library_weight,
    maker_of,
    reached,
    val_of,
)
from fxrl.ir.region import Cut
from fxrl.ir.sizes import SizeTable
from fxrl.ops.region.kernels import Later, Source, lookup

#: How the partitioner is told what to do with a value: the policy, and one number for all.
_TOLD = ("recompute", "ac_graph_id")
_QUANTIZED_PRODUCTS = (SCALED_MM, *PIECEWISE_PRODUCTS)
#: By cut, PyTorch's reasons not to compute something again that do not count.
_WEIGHED: dict[Cut, dict[str, Any]] = {
    "products": {},
    "fewest": {
        "ban_recompute_materialized_backward": False,
        "ban_recompute_used_far_apart": False,
        "ban_recompute_long_fusible_chains": False,
        "ban_recompute_not_in_allowlist": False,
    },
    "attention": {},
}


def partition(
    joint: fx.GraphModule, num_outputs: int, alive: Sequence[int], *, cut: Cut = "products"
) -> tuple[fx.GraphModule, Later]:
    """Split a joint graph, whose placeholders are named ``primals`` and ``tangents``, into a
    forward with ``num_outputs`` outputs and a backward. The inputs ``alive`` live until the
    backward anyway. It computes nothing twice (``share_repeats``)."""
    if cut in ("inputs", "vectors"):
        again = _run_again(joint, num_outputs, but_products=cut == "vectors")
        return _Settling(*again, num_outputs).settle()
    if cut != "products":
        _keep_attention(joint, rest_again=cut == "attention")
    with functorch_config.patch(cse=False, activation_memory_budget=1.0, **_WEIGHED[cut]):
        found = min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=list(alive)
        )
    pair = [graph_module(joint, half.graph) for half in found]  # of another kind than the joint's
    for node in (node for half in pair for node in half.graph.nodes):
        for told in _TOLD:  # Inductor would take it as said to itself
            node.meta.pop(told, None)
    forward, backward = pair
    grads: Any = backward.graph.output_node().args[0]
    late = _late(backward, grads)
    return _Settling(forward, late, num_outputs, sum_again=cut == "attention").settle()


def outputs_again(forward: fx.GraphModule, num_outputs: int) -> Later:
    """A graph that computes the forward's outputs from what the forward keeps."""
    results: Any = forward.graph.output_node().args[0]
    nodes = set(forward.graph.nodes)
    sizes = {n for n in nodes if isinstance(n.meta.get("val"), torch.SymInt)}
    given = sizes.union(results[num_outputs:], filter(_sums_groups, nodes))
    needed = _needed(results[:num_outputs], nodes, given)
    again = _graph_of(forward, needed, results[:num_outputs], given)
    return _Settling(forward, again, len(results), sum_again=True).settle()[1]


def _sums_groups(node: fx.Node) -> bool:
    """Whether a value is an output of groups of heads, which can be summed again from what they
    keep."""
    call, place = node.args if is_call(node, operator.getitem) else (None, None)
    if not is_call(call, torch.ops.fxrl.region.default):
        return False
    kernels = lookup(str(call.args[1]))
    return kernels.again is not None and place in range(kernels.num_outputs)


def _keep_attention(joint: fx.GraphModule, *, rest_again: bool) -> None:
    """Tell the partitioner to keep what attention returns, and either to compute all else again or
    to keep products, too. (Those that are PyTorch's own it knows by itself.)"""
    late = _backward_of(joint)
    for node in joint.graph.nodes:
        if node.op == "call_function" and node not in late:
            made_by = maker_of(node)
            kept = _makes_attention(made_by) or (not rest_again and _is_unknown_product(made_by))
            policy = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
            if kept or rest_again:
                node.meta |= dict(zip(_TOLD, (policy, 0), strict=True))


def _is_unknown_product(node: fx.Node) -> bool:
    """Whether a call is a product that PyTorch's partitioner takes for any other op."""
    return str(node.target) in _QUANTIZED_PRODUCTS or library_weight(node) is not None


def _makes_attention(node: fx.Node) -> bool:
    """Whether a call is an attention, or all that groups of heads make of one."""
    if is_call(node, torch.ops.fxrl.region.default):
        return lookup(str(node.args[1])).region.groups > 1
    return is_attention(node)


def _run_again(
    joint: fx.GraphModule, num_outputs: int, *, but_products: bool = False
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The halves where nothing but maybe products is kept: the backward computes what it needs of
    the forward again.

    NOTE [Why not the partitioner]: if attention is to be computed again, it wants to replay random
    numbers, though there are none. And here the forward is, kernel by kernel, the one that runs
    without gradients, so scoring and training give the same bits.
    """
    results: Any = joint.graph.output_node().args[0]
    outputs, grads = results[:num_outputs], results[num_outputs:]
    late = _backward_of(joint)
    inputs = [n for n in inputs_of(joint.graph) if n not in late]
    forward = [*inputs, *_needed(outputs, set(joint.graph.nodes) - set(inputs))]
    kept = {node for node in forward if but_products and is_product(node)}
    return _graph_of(joint, forward, outputs), _late(joint, grads, kept)


def _late(
    gm: fx.GraphModule, grads: Sequence[Any], given: Set[fx.Node] = frozenset()
) -> fx.GraphModule:
    """A graph that computes ``grads`` from the values ``given`` and others: what runs again does so
    where a gradient first needs it."""
    late, left = _backward_of(gm), set(gm.graph.nodes)
    wanted = _needed(grads, set(left), given)
    backward = [n for node in wanted if node in late for n in _needed([node], left, given)]
    return _graph_of(gm, [*backward, *_needed(grads, left, given)], grads, given)


def _is_gradient(node: fx.Node) -> bool:
    return str(node.target).startswith("tangents")


def _backward_of(joint: fx.GraphModule) -> set[fx.Node]:
    """The incoming gradients and every node that depends on them."""
    late = set(reached(filter(_is_gradient, joint.graph.nodes), lambda node: node.users))
    return late - {joint.graph.output_node()}


def _needed(
    wanted: Sequence[Any], left: set[fx.Node], given: Set[fx.Node] = frozenset()
) -> list[fx.Node]:
    """These values and what they are computed from, back to those ``given``, in order; all are
    removed from the nodes that are left."""
    among = left - given
    found = ancestors([value for value in wanted if value in among], among)
    read = {arg for node in found for arg in node.all_input_nodes}
    found |= given & left & read.union(wanted)
    left -= found
    return sorted(found)


def _graph_of(
    joint: fx.GraphModule,
    nodes: Sequence[fx.Node],
    results: Sequence[Any],
    given: Set[fx.Node] = frozenset(),
) -> fx.GraphModule:
    """A graph of these nodes in this order, arguments first; those ``given`` are arguments."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in sorted(nodes, key=lambda node: node.op != "placeholder" and node not in given):
        if node in given:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[r] if isinstance(r, fx.Node) else r for r in results])
    return graph_module(joint, graph)


class _Settling:
    """The partitioner's two graphs; ``settle`` says where the backward's arguments are from."""

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        num_outputs: int,
        *,
        sum_again: bool = False,
    ) -> None:
        self.forward, self.backward, self._sum_again = forward, backward, sum_again
        results: Any = forward.graph.output_node().args[0]
        self._results = list(results[:num_outputs])
        self._nodes = {node.name: node for node in forward.graph.nodes}
        self._inputs = inputs_of(forward.graph)
        # Of the backward's graph: what stands for the forward's values, by name; what it computes;
        # its sums over groups, by the forward's call.
        self._places: dict[str, fx.Node] = {}
        self._again: dict[str, fx.Node] = {}
        self._sums: dict[fx.Node, fx.Node] = {}

    def settle(self) -> tuple[fx.GraphModule, Later]:
        """Let the forward return only values with memory of their own. The rest is inputs and views
        of them, and with ``sum_again`` sums over groups of heads, computed from what these keep."""
        self._recompute_views()
        self._take_sizes()
        sources: list[Source] = []
        sizes: list[Size] = []
        grads = 0
        for node in inputs_of(self.backward.graph):
            if _is_gradient(node):
                sources.append(("grad", int(str(node.target).rpartition("_")[2]) - 1))
                grads += 1
            elif isinstance(node.meta.get("val"), torch.SymInt):
                sources.append(("size", len(sizes)))
                sizes.append(node.meta["val"])
            elif (twin := self._nodes[str(node.target)]) in self._inputs:
                sources.append(("input", self._inputs.index(twin)))
            else:
                if twin not in self._results:
                    self._results.append(twin)
                sources.append(("output", self._results.index(twin)))
        self.forward.graph.output_node().args = (list(self._results),)
        for half in (self.forward, self.backward):
            half.graph.eliminate_dead_code()
            half.graph.lint()
            half.recompile()
        return self.forward, Later(self.backward, tuple(sources), tuple(sizes))

    def _recompute_views(self) -> None:
        """Instead of views (a weight's transpose, attention's output as rows, queries, keys and
        values of one product) and of what is summed again, keep the values they are made from.
        """
        graph = self.backward.graph
        given = inputs_of(graph)
        self._again = {node.name: node for node in graph.nodes if node.op != "placeholder"}
        rest = next(iter(self._again.values()))
        views = [n for n in given if n.name in self._nodes and self._is_made(self._nodes[n.name])]
        self._places = {node.name: node for node in given if node not in views}
        for kept in views:
            with graph.inserting_before(rest):
                place = self._place(self._nodes[kept.name])
            kept.replace_all_uses_with(place)
            graph.erase_node(kept)

    def _is_made(self, node: fx.Node) -> bool:
        return is_view(node) or self._is_sum(node)

    def _is_sum(self, node: fx.Node) -> bool:
        return self._sum_again and _sums_groups(node)

    def _sum(self, node: fx.Node) -> fx.Node:
        """The sum over groups in the backward that stands for the forward's ``node``."""
        graph, call = self.backward.graph, as_node(node.args[0])

        def made(value: fx.Node) -> fx.Node:
            """What the sum reads: kept where it is anyway, else (a weight in bf16) made again."""
            kept = value in self._results or value.name in self._places
            if kept or value.op == "placeholder":
                return self._place(value)
            return graph.node_copy(value, made)

        if call not in self._sums:
            kernels = lookup(str(call.args[1]))
            assert kernels.again is not None
            inputs: Any = call.args[0]
            of_kind: dict[str, dict[Any, fx.Node]] = {"input": dict(enumerate(inputs))}
            of_kind["output"] = {n.args[1]: n for n in call.users}
            kept = [made(of_kind[kind][i]) for kind, i in kernels.again]
            sizes = kernels.bound.read([val_of(value) for value in inputs])
            given = (kept, [self._given_size(size) for size in sizes], kernels.key)
            self._sums[call] = graph.call_function(torch.ops.fxrl.region_again.default, given)
            self._sums[call].meta["val"] = call.meta["val"][: kernels.num_outputs]
        return graph.call_function(operator.getitem, (self._sums[call], node.args[1]))

    def _given_size(self, size: Size) -> int | fx.Node:
        """A size as an argument of the backward, to be settled like others."""
        if isinstance(size, int):
            return size
        graph = self.backward.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            given = graph.placeholder(f"size_{len(graph.nodes)}")
        given.meta["val"] = size
        return given

    def _take_sizes(self) -> None:
        """Compute the sizes that the backward takes (``b * s``) from dims of its arguments and from
        plain symbols (``b``), which become arguments if no dim has them.

        NOTE [Why]: Inductor's cache evaluates guards on sizes with the plain symbols only.
        """
        graph = self.backward.graph
        rest = next(node for node in graph.nodes if node.op != "placeholder")
        given = inputs_of(graph)
        made = [n for n in given if isinstance(n.meta.get("val"), torch.SymInt)]
        made = [node for node in made if _symbol(node.meta["val"]) is None]
        told = {_symbol(size) for node in given if node not in made for size in _dims(node)}
        sizes = {_symbol(size): size for node in self._inputs for size in _dims(node)}
        used = (size for node in graph.nodes for size in _dims(node) if not isinstance(size, int))
        read = {symbol for size in used for symbol in size.node.expr.free_symbols}
        for symbol in sorted((read & sizes.keys()) - told, key=str):
            with graph.inserting_before(next(iter(graph.nodes))):
                graph.placeholder(f"size_{symbol}").meta["val"] = sizes[symbol]
        table = SizeTable(graph, [n for n in inputs_of(graph) if n not in made])
        for node in made:
            with graph.inserting_before(rest):
                size = table.find(node.meta["val"])
            if isinstance(size, fx.Node):
                node.replace_all_uses_with(size)
                graph.erase_node(node)

    def _place(self, node: fx.Node) -> fx.Node:
        """The forward's value ``node`` at the beginning of the backward's graph."""
        graph = self.backward.graph
        if node.name in self._places:
            return self._places[node.name]
        if self._is_sum(node):
            place = self._sum(node)
        elif node.op == "placeholder" or not is_view(node):  # an input, or a size
            with graph.inserting_before(next(iter(graph.nodes))):
                place = graph.placeholder(node.name)
            if node.name in self._again:  # it is kept now
                self._again[node.name].replace_all_uses_with(place)
        else:
            place = graph.node_copy(node, self._place)
        place.meta = dict(node.meta)
        self._places[node.name] = place
        return place


def _dims(node: fx.Node) -> tuple[Size, ...]:
    """A value's dims, or the size that it is."""
    val = node.meta.get("val")
    return (val,) if isinstance(val, torch.SymInt) else tuple(getattr(val, "shape", ()))


def _symbol(size: Size) -> Any:
    """The symbol that a size is; None where it is a number, or made of several."""
    return size.node.expr if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol else None
