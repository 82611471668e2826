"""A region's two halves as graphs: the forward, and the backward that its cut asks for.

    a layer         forward:  inputs -> outputs, kept values
                    backward: kept values, ..., gradients -> gradients of the inputs
    groups          as a layer, and
                    again:    inputs, kept values -> outputs
    a tile          forward:  inputs -> outputs
                    backward: inputs, gradients -> gradients of the inputs; the forward runs inside

Both are traced over fake tensors in a shape environment of their own, sizes that vary as symbols,
so one body serves every batch. Dead code elimination then keeps only what the gradients need.

NOTE [Why tracing "real" over fakes]: ``make_fx(tracing_mode="symbolic")`` over prepared fakes
re-wraps them and specialises the token dim to its hint on torch 2.11. Tracing over our own fakes
as they are is what AOTAutograd does, and works on every version.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, fx

from fxrl.capture._torch import enable_python_dispatcher, make_fx, only_what_is_read
from fxrl.compile._torch import (
    holds,
    inductor_decompositions,
    marking_roundings,
    new_size,
    symbolic_mode,
    values_of,
    without_autocast,
    without_saved_tensors_hooks,
)
from fxrl.compile.bodies.attention import fastest
from fxrl.compile.bodies.partition import outputs_again, partition
from fxrl.compile.bodies.trace_cache import cached_trace
from fxrl.ir.bodies import clone
from fxrl.ir.graph import Size, equal_shapes, hint, share_repeats, tensor_val, writes
from fxrl.ir.pipeline import Pipeline
from fxrl.ir.plan import Plan
from fxrl.ir.region import InputSpec, Region
from fxrl.ir.site import name_sites
from fxrl.ir.sizes import BoundSizes, measure_by
from fxrl.ops.fp8 import adds_adapters
from fxrl.ops.region.kernels import Later
from fxrl.passes import ADDING_PIPELINE, HALF_PIPELINE, JOINT_PIPELINE

#: The number of rows that tracing sees; any from two on gives the same graph.
_TRACE_ROWS = 64


class TracedBody:
    """A region's two halves, and what they were traced with.

    Attributes:
        mode: the fake mode of both; its shape environment collects what they assume.
        decomposed: they are of Inductor's own ops.
        bound: the sizes that vary.
        forward, backward: the halves; ``backward`` is None without a gradient.
        again: the outputs of what is kept; None where nobody asks for them.
        num_outputs: outputs of the region itself.
        grad_outputs: which outputs have an incoming gradient.
        input_examples, grad_examples: what was traced with.
        rewrites: ``(pass, site)`` of what passes rewrote in the halves.
    """

    def __init__(
        self,
        region: Region,
        forward: fx.GraphModule | None = None,
        sizes: Mapping[str, int] | None = None,
        *,
        decompose: bool = False,
        plan: Plan | None = None,
    ) -> None:
        """Trace a region for ``sizes`` (by name; see ``BoundSizes``) and all like them.

        ``forward`` is its graph if that calls built regions by their keys. With ``decompose``, a
        body whose cut is yet to be found is traced to Inductor's ops, so that the partitioner sees
        what is cheap; otherwise to eager's, with their exact rounding. ``plan`` says which rewrites
        of the halves are switched off.
        """
        self.region, self._run = region, forward or region.forward
        self.rewrites: list[tuple[str, str]] = []
        self.decomposed = decompose and not region.tiled  # a tile's cut is given
        self._plan = plan or Plan()
        self.mode = symbolic_mode()
        self.bound = BoundSizes(region.inputs)
        # An entry for symbolic sizes is dearer than the op itself, one for constants cheaper.
        self.mode.cache_enabled = not self.bound.names
        self._symbols = self._make_symbols(sizes)
        self.input_examples = self._inputs()
        outputs = self._results()
        self.num_outputs = len(outputs)
        self.grad_outputs: tuple[int, ...] = ()  # that autograd sees
        self.grad_examples: list[Tensor] = []
        self.backward: Later | None = None
        self.again: Later | None = None
        self._joint: fx.GraphModule | None = None
        if any(spec.needs_grad for spec in region.inputs):
            self.grad_outputs = tuple(
                i for i, o in enumerate(outputs) if o.is_floating_point() or o.is_complex()
            )
            self._joint = self._joint_of(outputs)
        if self._joint is not None:
            self._cut(self._joint)
        else:
            self.forward = self._joined(self._trace(self._forward, self.input_examples, []))
            self._pass(HALF_PIPELINE, self.forward)

    def with_cut(self, region: Region) -> TracedBody:
        """Split the same traced body again for another cut, without tracing it again."""
        twin = copy.copy(self)
        twin.region = region
        if self._joint is not None:
            twin.rewrites = list(self.rewrites[: self._of_joint])
            twin._cut(self._joint)
        return twin

    # -- the two cuts
    def _cut(self, joint: fx.GraphModule) -> None:
        """Split the joint graph as the region's cut says."""
        self._of_joint = len(self.rewrites)
        alive = [i for i, spec in enumerate(self.region.inputs) if spec.alive]
        joint = clone(joint)  # the partitioner changes it
        with self.mode:
            split = partition(joint, self.num_outputs, alive, cut=self.region.cut)
        self.forward, self.backward = split
        asked = self.region.again == "outputs" or (self.num_kept and self.region.groups > 1)
        self.again = outputs_again(self.forward, self.num_outputs) if asked else None
        for graph in filter(None, self.graphs):
            self._pass(HALF_PIPELINE, graph)

    @property
    def graphs(self) -> list[fx.GraphModule | None]:
        """``forward``, ``backward`` and ``again`` as graphs."""
        later = (half and half.function for half in (self.backward, self.again))
        return [self.forward, *cast(Iterator[fx.GraphModule | None], later)]

    @property
    def num_kept(self) -> int:
        """How many values the forward hands to the backward beside its inputs and outputs."""
        results: Any = self.forward.graph.output_node().args[0]
        return len(results) - self.num_outputs

    def _joint_of(self, outputs: Sequence[Tensor]) -> fx.GraphModule | None:
        """The joint graph, if autograd sees an output; which ones it sees is assumed at first."""
        try:
            return self._joined(self._trace_joint(outputs)) if self.grad_outputs else None
        except _OtherOutputsError as error:
            self.grad_outputs = _seen_by_autograd(error.outputs)
            joint = self._trace_joint(error.outputs) if self.grad_outputs else None
            return joint and self._joined(joint)

    def _trace_joint(self, outputs: Sequence[Tensor]) -> fx.GraphModule:
        """Inputs and gradients of these outputs -> outputs and gradients of the inputs."""
        self.grad_examples = [
            self._empty(output, output.shape, None if self._dense(output) else output.stride())
            for output in (outputs[i] for i in self.grad_outputs)
        ]
        self.input_examples = self._inputs()  # a mode traces one tensor as one value
        return self._trace(self._both(), self.input_examples, self.grad_examples)

    def _joined(self, gm: fx.GraphModule) -> fx.GraphModule:
        self._pass(JOINT_PIPELINE, gm)
        if adds_adapters(self.region.inputs[0].example.device):
            self._pass(ADDING_PIPELINE, gm)
        share_repeats(gm.graph)
        return gm

    def _pass(self, pipeline: Pipeline, gm: fx.GraphModule) -> None:
        """Run passes over a graph that is this body's own."""
        name_sites(gm, self.region.id)
        with self.mode:
            self.rewrites += pipeline.run(gm, self._plan).rewrites

    # -- sizes
    def serves(self, sizes: Mapping[str, int]) -> bool:
        """Whether what was traced (and compiled since) holds for these sizes."""
        return holds(self.mode, self._symbols, sizes)

    def measure(self, sizes: Mapping[str, int]) -> Callable[[Any], int]:
        """A function that evaluates sizes of these graphs where the named sizes have these
        values."""
        return measure_by(values_of(self._symbols, sizes))

    def _make_symbols(self, sizes: Mapping[str, int] | None) -> dict[str, Size]:
        """A symbol for each size that varies; a constant if it is 0 or 1, which symbols cannot
        be."""
        seen = self.bound.read([spec.example for spec in self.region.inputs])
        assumed = {n: max(2, hint(s)) for n, s in zip(self.bound.names, seen, strict=True)}
        assumed |= {"rows": _TRACE_ROWS} if self.region.tiled else {}
        values = {name: (sizes or assumed)[name] for name in self.bound.names}
        # Numbered, so that graphs alike are so to the letter, whatever batch their sizes are of.
        numbered = enumerate(values.items())
        return {name: new_size(self.mode, str(n), size) for n, (name, size) in numbered}

    # -- fake inputs; each a tensor of its own, for a mode traces one tensor as one value
    def _inputs(self) -> list[Tensor]:
        return [self._fake(spec) for spec in self.region.inputs]

    def _fake(self, spec: InputSpec) -> Tensor:
        example = spec.example
        sizes: list[Any] = [self.bound.evaluate(size, self._symbols) for size in example.shape]
        if spec.tiled:
            sizes[0] = self._symbols["rows"]
        told = [self.bound.evaluate(stride, self._symbols) for stride in example.stride()]
        strides = [stride for stride in told if stride is not None]
        if not spec.tiled and len(strides) == len(told):
            return self._empty(example, sizes, strides)
        # The call copies an input that has other strides than were traced; dims in the same order,
        # so that a view of it in the body stays one.
        order = sorted(range(len(sizes)), key=lambda d: -hint(example.stride()[d]))
        order = list(range(len(sizes))) if spec.tiled else order
        dense = self._empty(example, [sizes[d] for d in order], None)
        with self.mode:
            return dense.permute([order.index(d) for d in range(len(sizes))])

    def _empty(self, like: Tensor, shape: Sequence[Size], strides: Sequence[Size] | None) -> Tensor:
        with self.mode:
            if strides is None:
                return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
            return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)

    def _results(self) -> list[Tensor]:
        """Fake outputs with the sizes that they have in the outer graph, if these are known there.

        Strides are not (kernels decide them), nor the device of a model on ``meta``. If the traced
        outputs turn out different, the trace begins again with those it has met.
        """
        (results,) = self.region.forward.graph.output_node().args
        made = [self._result(node) for node in cast(tuple[fx.Node, ...], results)]
        told = [result for result in made if result is not None]
        if len(told) == len(made):
            return told
        with self._tracing():
            return self._forward(*self.input_examples)

    def _result(self, node: fx.Node) -> Tensor | None:
        if (val := tensor_val(node)) is None:
            return None
        shape = [self.bound.evaluate(size, self._symbols) for size in val.shape]
        if self.region.tiled:
            shape[0] = self._symbols["rows"]
        told = [size for size in shape if size is not None]
        return self._empty(val, told, None) if len(told) == len(shape) else None

    def _fits(self, grad: Tensor, output: Tensor) -> bool:
        alike = self._dense(output) or equal_shapes(grad.stride(), output.stride())
        return alike and (grad.device, grad.dtype) == (output.device, output.dtype)

    def _dense(self, output: Tensor) -> bool:
        """Whether an output's gradient is dense even if the output is not: outputs of tiles, and
        expanded ones, whose entries get different gradients."""
        return self.region.tiled or any(isinstance(by, int) and by == 0 for by in output.stride())

    # -- the functions that are traced
    def _forward(self, *inputs: Tensor) -> list[Tensor]:
        return list(self._run(*inputs))

    def _both(self) -> Any:
        # The partitioner tells inputs and gradients by these names.
        def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
            with only_what_is_read():
                outputs, grads = self._with_grads(primals, tangents)
                return [*(output.detach() for output in outputs), *grads]

        return joint

    def _with_grads(
        self, inputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs, and the gradients of the inputs that need one."""
        live, outputs = self._recorded(inputs)
        seen = _seen_by_autograd(outputs)
        if seen != self.grad_outputs or not all(
            self._fits(grad, outputs[i]) for grad, i in zip(grads, seen, strict=True)
        ):
            raise _OtherOutputsError(outputs)
        wanted = [x for x in live if x.requires_grad]
        found = torch.autograd.grad([outputs[i] for i in seen], wanted, grads, allow_unused=True)
        return outputs, [
            torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)
        ]

    def _recorded(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs that want the gradients of this region's, and the outputs that autograd sees."""
        with torch.enable_grad():
            live = [
                x.detach().requires_grad_(spec.needs_grad)
                for x, spec in zip(inputs, self.region.inputs, strict=True)
            ]
            return live, list(self._run(*live))

    def _trace(
        self, function: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> fx.GraphModule:
        """A function of inputs, and of gradients where there are any, as a graph of values."""
        given = [inputs, grads] if grads else inputs
        asked = self.region.trained, self.grad_outputs, self.decomposed
        make = partial(self._traced, function, given)
        return cached_trace(self._run, asked, [*inputs, *grads], self.mode, make)

    def _traced(self, function: Any, inputs: Sequence[Any]) -> fx.GraphModule:
        table = inductor_decompositions() if self.decomposed else None
        with self._tracing(), marking_roundings():
            gm = make_fx(function, decomposition_table=table)(*inputs)
            if writes(gm):  # an autograd formula may; the partitioner must see values alone
                values = wraps(function)(torch.func.functionalize(gm))  # arguments keep their names
                gm = make_fx(values, decomposition_table=table)(*inputs)
        gm.graph.eliminate_dead_code()
        share_repeats(gm.graph)  # what is scored goes through what is trained
        _keep_factors(gm.graph)
        _sum_by_aten(gm.graph)
        return clone(gm)  # inputs one by one, and no names of nodes that are gone

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Ops on fake tensors make fake tensors, as on the device; the body already holds the casts
        that autocast asked for where it was captured; and what autograd saves of them is nothing to
        pack: a checkpoint around the step's call would run the step again to unpack it."""
        with (
            self.mode,
            without_saved_tensors_hooks(),
            torch.autograd.set_detect_anomaly(False),  # which looks for NaNs in what has no values
            enable_python_dispatcher(),
            torch.no_grad(),
            without_autocast(),
            fastest(self.region.inputs[0].example.device),
        ):
            yield


def _seen_by_autograd(outputs: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(i for i, output in enumerate(outputs) if output.requires_grad)


class _OtherOutputsError(Exception):
    """Other outputs need gradients than a trace assumed, or they look different."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.outputs = outputs


_HALVES = (torch.bfloat16, torch.float16)


def _keep_factors(graph: fx.Graph) -> None:
    """Multiply bf16 or fp16 by a Python number in fp32, with the result rounded as before.

    NOTE [Why not as traced]: eager multiplies by the number itself. Inductor, told to round as
    eager does, rounds the number to the tensor's dtype first; its C++ kernels do from torch 2.15
    on.
    """
    for name in (torch.ops.aten.mul, torch.ops.aten.div):
        for overload in (name.Tensor, name.Scalar):
            for node in graph.find_nodes(op="call_function", target=overload):
                _keep_factor(graph, node, overload)


def _keep_factor(graph: fx.Graph, node: fx.Node, overload: Any) -> None:
    value, *factor = node.args
    dtype = node.meta["val"].dtype
    if dtype not in _HALVES or not isinstance(factor[0], float):
        return
    if torch.tensor(factor[0], dtype=dtype).item() == factor[0]:
        return
    assert isinstance(value, fx.Node)
    wide, convert = torch.float32, torch.ops.prims.convert_element_type.default
    with graph.inserting_before(node):
        up = graph.call_function(convert, (value, wide))
        product = graph.call_function(overload, (up, factor[0]))
        rounded = graph.call_function(convert, (product, dtype))
    for made, like in ((up, value), (product, node)):
        made.meta["val"] = like.meta["val"].to(wide)
    rounded.meta = dict(node.meta)
    node.replace_all_uses_with(rounded)
    graph.erase_node(node)


def _sum_by_aten(graph: fx.Graph) -> None:
    """Sum rows of bf16 or fp16 that are added to one place by ATen's own kernel.

    NOTE [Why not by Inductor's]: the gradient of ``table[places]`` adds all rows that were read
    from one place. Inductor adds them one by one in the tensor's dtype, in which a bf16 sum of ones
    ends at 256, and in no fixed order. ATen's GPU kernel sorts them and sums in fp32, always in one
    order; Inductor has no lowering for ATen's inner op, and so calls it. For experts' tokens no
    such sum is left: see ``gather-by-inverse``.
    """
    for put in (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default):
        for node in graph.find_nodes(op="call_function", target=put):
            if node.args[3:] == (True,) and node.meta["val"].dtype in _HALVES:
                node.target = torch.ops.aten._index_put_impl.default
