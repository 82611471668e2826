"""A region's two halves where the backward keeps: the joint graph, cut where little is saved.

    joint      inputs, gradients -> outputs, gradients of the inputs
    forward    inputs            -> outputs, kept values
    backward   kept values, ...  -> gradients of the inputs

The cut is PyTorch's own (``min_cut_rematerialization_partition``): matrix products are kept,
elementwise ops and norms are computed again where that is less memory.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fxrl.compile.trace_region import TracedRegion
from fxrl.ir.graph import Size, is_call, is_view, tensor_val
from fxrl.ir.region import Region
from fxrl.passes.merge_adapter_products import tidy_products

aten = torch.ops.aten
Source = tuple[str, int]


class TracedKept(TracedRegion):
    """A kept region's graphs for sizes alike.

    Attributes:
        forward: inputs -> outputs, then the kept values.
        vjp: arguments by ``sources`` -> gradients of the inputs that need one.
        sources: see ``fxrl.ops.kept_region.KeptBody``; ``("size", i)`` is ``self.sizes[i]``.
        sizes: the sizes that ``vjp`` takes, in this region's symbols.
        num_outputs: outputs of the region itself.
        input_examples, grad_examples: what the graphs were traced with.
    """

    sources: tuple[Source, ...] = ()
    sizes: tuple[Size, ...] = ()
    num_outputs: int = 0
    input_examples: Sequence[Tensor] = ()
    grad_examples: Sequence[Tensor] = ()

    def __init__(
        self, region: Region, sizes: Mapping[str, int] | None = None, *, decompose: bool = False
    ) -> None:
        super().__init__(region, sizes, decompose=decompose)
        if self.vjp is None:
            self.num_outputs = self._count_outputs()
            self.input_examples = self._inputs()
        for half in filter(None, (self.forward, self.vjp)):
            with self.mode:
                tidy_products(half.graph)
            half.graph.lint()
            half.recompile()

    def _count_outputs(self) -> int:
        (output,) = self.forward.graph.find_nodes(op="output")
        return len(output.args[0])

    def _trace_backward(self, outputs: Sequence[Tensor]) -> None:
        from torch._inductor.decomposition import select_decomp_table

        self.num_outputs = self._count_outputs()
        self.input_examples = self._inputs()
        self.grad_examples = [self._like_strided(output) for output in outputs]
        values = [self.input_examples, self.grad_examples]
        table = select_decomp_table() if self.decompose else None
        joint = self._trace(self._joint(), values, table)
        if is_mutating(joint):
            joint = self._trace(_functional(joint), values)
        _drop_detaches(joint.graph)
        _drop_round_trips(joint.graph)
        alive = [i for i, spec in enumerate(self.region.inputs) if spec.alive]
        with self.mode, functorch_config.patch(activation_memory_budget=1.0):
            pair = min_cut_rematerialization_partition(
                joint,
                None,
                num_fwd_outputs=self.num_outputs,
                static_lifetime_input_indices=alive,
            )
        halves = _Halves(*pair, self.num_outputs)
        self.sources, self.sizes = halves.settle()
        self.forward, self.vjp = halves.forward, halves.backward

    def _joint(self) -> Any:
        # The partitioner tells inputs and gradients by these names.
        def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
            outputs, grads = self._with_grads(primals, tangents)
            return [*(output.detach() for output in outputs), *grads]

        return joint

    def _like_strided(self, value: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(
                tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device
            )


def _drop_detaches(graph: fx.Graph) -> None:
    """Detaches told autograd something; it is done."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _drop_round_trips(graph: fx.Graph) -> None:
    """``x`` for ``x`` cast to a wider dtype and back, as adapters in fp32 ask for under autocast.

    Here and not in the compiler, for the cut and the products should see one value, not three.
    """
    for node in graph.nodes:
        cast = _cast_of(node)
        source = _cast_of(cast)
        value, wide = tensor_val(source), tensor_val(cast)
        if source is None or value is None or wide is None or node.meta["val"].dtype != value.dtype:
            continue
        if value.is_floating_point() and torch.promote_types(value.dtype, wide.dtype) == wide.dtype:
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


def _cast_of(node: object) -> fx.Node | None:
    """What ``node`` casts, if it does nothing else."""
    if is_call(node, torch.ops.prims.convert_element_type.default):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    if is_call(node, aten._to_copy.default) and set(node.kwargs) == {"dtype"}:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    return None


def _functional(joint: fx.GraphModule) -> Any:
    """An autograd formula may write into its own result; the partitioner must see values alone."""
    function = torch.func.functionalize(joint)

    def run(primals: list[Tensor], tangents: list[Tensor]) -> Any:
        return function(primals, tangents)

    return run


class _Halves:
    """The partitioner's two graphs; ``settle`` says where the backward's arguments are from."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
        self.forward, self.backward = forward, backward
        (self._output,) = forward.graph.find_nodes(op="output")
        self._nodes = {node.name: node for node in forward.graph.nodes}
        self._inputs = forward.graph.find_nodes(op="placeholder")
        self._results: list[Any] = list(self._output.args[0])[:num_outputs]

    def settle(self) -> tuple[tuple[Source, ...], tuple[Size, ...]]:
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
        return tuple(sources), tuple(sizes)

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


def is_mutating(gm: fx.GraphModule) -> bool:
    """Whether a traced graph writes into a value (an autograd formula may)."""
    return any(
        node.op == "call_function"
        and node.target is not operator.getitem
        and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        for node in gm.graph.nodes
    )
