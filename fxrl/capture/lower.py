"""From Dynamo's graph to one functional ATen graph whose values are differentiable again.

    Dynamo graph     torch functions, in-place ops, no_grad blocks, higher-order ops
    lowered graph    functional ATen; every op has an autograd formula; no_grad became detach

The passes work on the lowered graph; AOTAutograd differentiates it afterwards. So lowering must
not lose what autograd needs: code under ``no_grad`` becomes a ``detach`` of its results, and what
has a backward of its own (autograd.Function, checkpoint, attention) stays one opaque call.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import fx
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from fxrl.analysis.layers import layer_path, signature
from fxrl.capture._torch import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_INFERENCE,
    SET_GRAD,
    STATIC_INPUT,
    FakeTensor,
    FunctionalTensor,
    GuardOnDataDependentSymNode,
    TorchDispatchMode,
    enable_python_dispatcher,
    equate,
    fake_like,
    get_decompositions,
    has_data_mutation,
    library_op,
    make_fx,
    only_what_is_read,
    without_functionalize_key,
)
from fxrl.capture.checks import check
from fxrl.capture.functions import lower_functions
from fxrl.capture.opaque import (
    OpaqueCalls,
    Recorded,
    ToldAutograd,
    is_opaque,
    is_unseen,
    is_whole,
    under,
)
from fxrl.capture.writes import DATA_GIVEN, Functional, refuse_lost_values, storage_of, unwrap
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    CALL_LAYER,
    RESHAPES,
    as_node,
    body_of,
    bound,
    clone,
    eliminate_dead_code,
    graphs_of,
    has_hint,
    hint,
    is_call,
    needs_grad,
    propagate_requires_grad,
    save_as,
    set_body,
    shape_of,
    val_of,
    what_it_saves,
    wrapper_of,
    writes,
)
from fxrl.ir.remark import Refusal, first_line
from fxrl.ir.site import rename_site
from fxrl.ir.source import user_source

aten = torch.ops.aten

#: Losses that reduce over vocabulary and tokens at once, opened so that rows are visible; constants
#: that read a tensor for its dtype and device alone, which then need not be there.
_OPENED: Any = get_decompositions(
    [
        aten.nll_loss_forward,
        aten.nll_loss2d_forward,
        aten.mse_loss,
        aten.smooth_l1_loss,
        aten.huber_loss,
        aten.binary_cross_entropy,
        aten.binary_cross_entropy_with_logits,
        aten.new_zeros,
        aten.new_ones,
        aten.new_full,
        aten.new_empty,
    ]
)


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> Any:
    """``x[mask]``, and where whole rows of ``x`` are selected or left, by a mask of the rows."""
    x, rows = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call]
    rank = rows.dim()
    while rows.dim() > 1 and rows.stride(-1) == 0:
        rows = rows.select(-1, 0)
    return x[rows].reshape(-1) if rows.dim() < rank else NotImplemented


_OPENED[aten.masked_select.default] = _masked_select


def lower(
    gm: fx.GraphModule, *, grad_enabled: bool = True, known: dict[Any, fx.GraphModule] | None = None
) -> fx.GraphModule:
    """The functional ATen graph of a Dynamo graph, with fake values in ``meta["val"]``.

    The placeholders are Dynamo's, in order. Shapes stay symbolic in Dynamo's own symbols.

    Args:
        known: bodies that were lowered already.

    Raises:
        Refusal: a value is a nested tensor, whose parts functional ATen cannot tell autograd; or
            autograd is switched on inside of a call that is made without it.
    """
    _refuse_nested(gm)
    if not grad_enabled:
        _refuse_autograd(gm)
    inputs = gm.graph.find_nodes(op="placeholder")
    _mark_gradients(inputs)
    examples = [example_of(node) for node in inputs]
    passed = {node for node in inputs if _only_passed(node)}
    with _tracing(gm), fx_traceback.preserve_node_meta(), torch.no_grad():
        try:
            lowered, opaque = _traced(gm, passed, grad_enabled, _as_it_stands)
            if writes(lowered):  # a part of an op that is decomposed
                raise _NotFunctionalError
        except _NotFunctionalError:
            try:
                lowered, opaque = _traced(gm, passed, grad_enabled, _functional)
            except NotImplementedError as error:
                _refuse_wrapped(inputs, error)
                raise
    _add_inputs(lowered, inputs, passed)
    _name_placeholders(gm, lowered, examples)
    opaque.restore(lowered)
    _forget_offsets(lowered.graph)
    with _tracing(gm):
        _spell_numels(lowered.graph)
        _pad_rows_in_order(lowered.graph)
        _settle_slices(lowered.graph)
    _rejoin_rows(lowered.graph)
    eliminate_dead_code(lowered.graph)
    propagate_requires_grad(lowered.graph)
    if not grad_enabled:
        for node in lowered.graph.nodes:
            node.meta["requires_grad"] = False
    else:
        refuse_lost_values(lowered.graph)
        _check_gradients(gm, lowered)
    known = {} if known is None else known
    _lower_bodies(lowered, grad_enabled, known)
    lower_functions(lowered, lower)
    _equate_gathers(lowered.graph)
    lowered.recompile()
    return lowered


def _traced(
    gm: fx.GraphModule, passed: set[fx.Node], grad_enabled: bool, how: Callable[..., Any]
) -> tuple[fx.GraphModule, OpaqueCalls]:
    """The ops that a Dynamo graph comes down to, without its inputs that are only ``passed``."""
    inputs = gm.graph.find_nodes(op="placeholder")
    opaque, mode = OpaqueCalls(gm), Functional(differentiated=grad_enabled)
    interpreter = _Lowering(gm, opaque, mode)

    def run(*values: Any) -> Any:
        given = iter(values)
        return interpreter.run(*(node if node in passed else next(given) for node in inputs))

    examples = [example_of(node) for node in inputs if node not in passed]
    return make_fx(how(run, mode), decomposition_table=_OPENED)(*examples), opaque


def _refuse_nested(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        value = example_of(node)
        if isinstance(value, torch.Tensor) and value.is_nested:
            reason = "a nested tensor is not followed into its parts"
            raise Refusal(reason, "compute the loss from packed or padded logits", node)


def _refuse_wrapped(inputs: list[fx.Node], error: NotImplementedError) -> None:
    """An op that a tensor subclass lacks, in words."""
    for node in inputs:
        if kind := wrapper_of(example_of(node)):
            op = re.search(r"(aten|prims)\.\w+", str(error))
            reason = f"a weight of class {kind} has no {op[0] if op else 'such op'}"
            cure = "quantise by fxrl.models.quantize, whose weights can be captured"
            raise Refusal(reason, cure, node) from error


def _refuse_autograd(gm: fx.GraphModule) -> None:
    """Nothing may get a gradient where a call without autograd switches it on. What needs none gets
    none there either, such as what ``torch.distributions`` computes at first use."""
    for graph in graphs_of(gm):
        on = False
        for node in graph.nodes:
            if is_call(node, SET_GRAD):
                on = bool(node.args[0])
            elif on and node.op in ("call_function", "call_method", "call_module"):
                made = pytree.tree_leaves(example_of(node))
                if any(isinstance(one, torch.Tensor) and one.requires_grad for one in made):
                    reason = "autograd is switched on inside of a call under no_grad"
                    raise Refusal(reason, "call the step where autograd is on", node)


def example_of(node: fx.Node) -> Any:
    """The value Dynamo saw for a node: a fake tensor, a SymInt, a number."""
    return node.meta.get("example_value", node.meta.get("val"))


def _mark_gradients(inputs: list[fx.Node]) -> None:
    """Let each input need a gradient that Dynamo saw with one: from torch 2.15 on, one that is
    given other data (``x.data = y``) is described by a copy that needs none."""
    for node in inputs:
        seen = getattr(node.meta.get("grapharg"), "fake_tensor", None)
        if seen is not None and seen.requires_grad:
            example_of(node).requires_grad_()


def _only_passed(node: fx.Node) -> bool:
    """Whether an input goes into calls that stay whole, and nowhere else: a layer's weight.

    Such inputs are no part of the trace, in which each costs as much as an op does: a fifth of the
    lowering of 36 layers with LoRA. While it is made, their nodes stand for their values.
    """
    whole = all(user.op == "call_function" and is_whole(user) for user in node.users)
    value = example_of(node)
    return whole and type(value) is FakeTensor and value.layout == torch.strided


def _add_inputs(lowered: fx.GraphModule, inputs: list[fx.Node], passed: set[fx.Node]) -> None:
    """Give a traced graph the inputs that were left out, each in its place."""
    traced = iter(lowered.graph.find_nodes(op="placeholder"))
    last: fx.Node | None = None
    for node in inputs:
        if node not in passed:
            last = next(traced)
            continue
        at = lowered.graph.inserting_before if last is None else lowered.graph.inserting_after
        with at(last):
            last = lowered.graph.placeholder(node.name)
        last.meta["val"] = fake_like(example_of(node))


@contextmanager
def _tracing(gm: fx.GraphModule) -> Iterator[None]:
    """Trace in Dynamo's own fake mode; new data-dependent sizes belong to this trace alone."""
    examples = map(example_of, gm.graph.nodes)  # its inputs may be sizes alone
    mode = next((x.fake_mode for x in examples if isinstance(x, FakeTensor)), None)
    with ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(enable_python_dispatcher())
        yield


def _as_it_stands(function: Callable[..., Any], mode: Functional) -> Callable[..., Any]:
    """``function`` up to its first write; most graphs have none.

    NOTE [Why not functional at once]: each value is wrapped then, and its sizes are compared and
    multiplied for the wrapper: a third of the time that lowering takes.
    """

    def run(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        twice = len({*map(id, tensors)}) < len(tensors)  # a mode traces one tensor as one value
        if twice or any(type(tensor) is not FakeTensor for tensor in tensors):
            raise _NotFunctionalError
        with _NoWrites(), only_what_is_read():  # type: ignore[no-untyped-call]
            return function(*args)

    return run


class _NotFunctionalError(Exception):
    """A trace that has to be made with functional tensors."""


class _NoWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends a trace at an op that writes, whatever it is called, as parts of ``rms_norm`` do; and
    at a library's own views, of which functional tensors know whether they can be followed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable or (func.is_view and func.namespace not in ("aten", "prims")):
            raise _NotFunctionalError
        return func(*args, **(kwargs or {}))


def _functional(function: Callable[..., Any], mode: Functional) -> Callable[..., Any]:
    """``function`` with in-place ops made functional; writes into inputs become final copies."""

    def run(*args: Any) -> Any:
        with without_functionalize_key(), mode, only_what_is_read():
            wrapped = pytree.tree_map_only(torch.Tensor, FunctionalTensor.to_functional, args)
            results = function(*wrapped)
            itself = dict(zip(map(id, wrapped), args, strict=True))  # written into, and returned
            results = pytree.tree_map_only(
                FunctionalTensor,
                lambda x: itself[id(x)] if id(x) in itself else unwrap(x),
                results,
            )
        for arg, wrapper in zip(args, wrapped, strict=True):
            if isinstance(wrapper, FunctionalTensor) and has_data_mutation(wrapper.elem):
                value = unwrap(wrapper)
                if arg.requires_grad:  # autograd lets a parameter be written detached alone
                    arg, value = arg.detach(), value.detach()
                arg.copy_(value)
        return results

    return run


class _Lowering(fx.Interpreter):
    """Runs a Dynamo graph under tracing, keeping what ATen alone would lose.

    NOTE [Why no_grad becomes detach]: below autograd nothing tells that code ran under no_grad,
    and AOTAutograd would differentiate it. A detach on every result says the same as data flow.
    """

    def __init__(self, gm: fx.GraphModule, opaque: OpaqueCalls, mode: Functional) -> None:
        super().__init__(gm, garbage_collect_values=False)  # what shares memory is looked up
        self._opaque = opaque
        self._mode = mode

    def run_node(self, n: fx.Node) -> Any:
        mode = self._mode
        if is_call(n, SET_GRAD):
            mode.recording = bool(n.args[0])
            return None
        if is_call(n, ENTER_INFERENCE, EXIT_INFERENCE):
            return self._infer(n)
        if self._detaches_nothing(n):
            return self.env[as_node(n.args[0])]
        result = self._computed(n)
        if is_call(n, ENTER_AUTOCAST):  # what is cached of weights is no value of this trace
            torch.set_autocast_cache_enabled(False)
        if not mode.differentiated or n.op not in ("call_function", "call_method"):
            return result
        if n.target in ("detach_", torch.detach_):  # no op of ATen tells
            if not isinstance(result, FunctionalTensor):
                raise _NotFunctionalError
            mode.detach(result)
        if n.target in DATA_GIVEN:
            self._check_other_views(n, self.env[as_node(n.args[0])])
        if mode.written_apart:
            self._check_written(n)
        return result if mode.recording else self._detached(n, result)

    def _computed(self, n: fx.Node) -> Any:
        """A call's result; as one op of the graph where autograd would be told of its inside."""
        if is_opaque(n):
            return self._whole(n)
        op = library_op(n.target)
        if n.op != "call_function" or (op is None and not is_unseen(n)):
            return super().run_node(n)
        leaves = pytree.tree_leaves(self.fetch_args_kwargs_from_env(n))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in given]
        recording = torch.set_grad_enabled(self._mode.recording)
        with recording, ToldAutograd() as told, Recorded() as inside:
            result = super().run_node(n)
        # An op's own kernel for autograd runs again with the graph; what other ops one is made of,
        # and whether it asks autograd for something, is not seen from here.
        if inside.ops == [op] if op is not None else not told.met:
            return result
        if [tensor._version for tensor in given] != versions:
            name = getattr(n.target, "__name__", n.target)
            reason = f"{name}, which is not looked into, writes into what it is given"
            raise Refusal(reason, "return a new tensor from it", n)
        return self._whole(n)

    def _detaches_nothing(self, n: fx.Node) -> bool:
        """Whether ``x.detach()`` is x: it has no gradient, and nobody else reads its memory again.
        So a write may give it one."""
        calls = ("call_method", "detach"), ("call_function", torch.detach)
        if (n.op, n.target) not in calls or not n.args:  # an input may be called "detach", too
            return False
        detached = as_node(n.args[0])
        given, example = self.env[detached], example_of(detached)
        if not isinstance(given, FunctionalTensor) or example is None or example.requires_grad:
            return False
        for node, value in self.env.items():
            if isinstance(value, FunctionalTensor) and storage_of(value) == storage_of(given):
                made_here = node.op in ("call_function", "call_method")
                if not made_here or any(user > n for user in node.users):
                    return False
        return True

    def _whole(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        with self._set_current_node(n), fx_traceback.set_current_meta(n):
            return self._opaque.call(n, args, kwargs)

    def _infer(self, n: fx.Node) -> bool:
        """``torch.inference_mode`` is no_grad; entering gives what leaving gets and puts back."""
        (given,), _ = self.fetch_args_kwargs_from_env(n)
        before = self._mode.recording
        self._mode.recording = bool(given) != (n.target is ENTER_INFERENCE)
        return before

    def _detached(self, n: fx.Node, result: Any) -> Any:
        """A result without gradient; what the call was given, and wrote into, keeps its own."""
        given = {id(x) for node in n.all_input_nodes for x in pytree.tree_leaves(self.env[node])}

        def detached(value: Any) -> Any:
            known = id(value) in given or not isinstance(value, torch.Tensor)
            return value if known or not value.is_floating_point() else value.detach()

        return pytree.tree_map(detached, result)

    def _check_written(self, n: fx.Node) -> None:
        """Refuse a write into ``x.detach()`` that gives it a gradient: x shares the new values, and
        not their gradient, which one functional value cannot say of both."""
        written = {storage_of(tensor) for tensor in self._mode.written_apart}
        self._mode.written_apart.clear()
        for node in n.all_input_nodes:
            value, example = self.env[node], example_of(node)
            if not self._mode.is_apart(value) or storage_of(value) not in written:
                continue
            if example.requires_grad:
                reason = "a detached tensor gets a gradient by a write, and shares its memory"
                raise Refusal(reason, "clone what is detached before it is written into", n)

    def _check_other_views(self, n: fx.Node, given: Any) -> None:
        """Refuse ``x.data = y`` where what x leaves, which keeps its values, is still read."""
        for node, value in self.env.items():
            if not isinstance(value, FunctionalTensor) or value is given:
                continue
            if storage_of(value) == storage_of(given) and any(user > n for user in node.users):
                reason = "a tensor is given other data while views of what it had are in use"
                raise Refusal(reason, "write into it instead, by copy_()", n)


def _name_placeholders(gm: fx.GraphModule, lowered: fx.GraphModule, examples: list[Any]) -> None:
    """Give the lowered graph Dynamo's input names, and mark what needs a gradient and what is a
    parameter or buffer."""
    theirs = gm.graph.find_nodes(op="placeholder")
    ours = lowered.graph.find_nodes(op="placeholder")
    taken = {source.name for source in theirs}
    for node in lowered.graph.nodes:
        if node.name in taken and node.op != "placeholder":  # an input of a body is some op's value
            node._rename(f"{node.name}_here")
    for source, node, example in zip(theirs, ours, examples, strict=True):
        node.name = node.target = source.name
        node.meta["requires_grad"] = isinstance(example, torch.Tensor) and example.requires_grad
        node.meta["of_model"] = STATIC_INPUT in source.meta.get("tensor_dict", {})
        for key in ("stack_trace", "tensor_dict", "grapharg"):
            if key in source.meta:
                node.meta[key] = source.meta[key]


def _check_gradients(gm: fx.GraphModule, lowered: fx.GraphModule) -> None:
    """What needs a gradient in Dynamo's graph must need one here: training would not notice."""
    theirs, ours = (g.graph.output_node().args[0] for g in (gm, lowered))
    for source, node in zip(pytree.tree_leaves(theirs), pytree.tree_leaves(ours), strict=True):
        value = example_of(source) if isinstance(source, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.requires_grad and not needs_grad(node):
            raise Refusal("a result would lose its gradient", at=source)


def _forget_offsets(graph: fx.Graph) -> None:
    """Erase the checks that a slice between numbers of a tensor begins at no negative place: no
    slice does, and each keeps all that it was taken from."""
    for offset in graph.find_nodes(op="call_function", target=aten.sym_storage_offset.default):
        for compared in list(offset.users):
            if set(compared.users) and all(
                is_call(u, aten._assert_scalar.default) for u in compared.users
            ):
                for asserted in list(compared.users):
                    graph.erase_node(asserted)


def _pad_rows_in_order(graph: fx.Graph) -> None:
    """A pad whose width varies is traced as contiguous. By nothing it is a clone, which lies as its
    input does, and what views it would fail: a length that fills the last chunk as it is."""
    for pad in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        source, widths = cast(tuple[fx.Node, list[Any]], pad.args[:2])
        strides = [hint(stride) for stride in val_of(source).stride()]
        if any(isinstance(one, fx.Node) for one in widths) and strides != sorted(strides)[::-1]:
            builder = Builder(graph)
            with builder.before(pad):
                dense = {"memory_format": torch.contiguous_format}
                rows = builder.call(aten.clone.default, source, **dense)
            pad.replace_input_with(source, rows)


def _spell_numels(graph: fx.Graph) -> None:
    """Let how many entries a tensor has be the product of its sizes, which rows can follow."""
    builder = Builder(graph)
    for node in graph.find_nodes(op="call_function", target=aten.sym_numel.default):
        with builder.before(node):
            node.replace_all_uses_with(_numel(builder, as_node(node.args[0])))
        graph.erase_node(node)


def _numel(builder: Builder, tensor: fx.Node) -> fx.Node:
    sizes = (builder.call(aten.sym_size.int, tensor, dim) for dim in range(len(shape_of(tensor))))
    return reduce(partial(builder.call, operator.mul), sizes)


def _settle_slices(graph: fx.Graph) -> None:
    """Let ``x[:-1]`` and ``x[1:]`` of a sequence as long as data says have ``u - 1`` entries.

    Fake tensors have ``Max(0, u - 1)`` and ``Max(0, u - Min(1, u))``, which nothing shows to be
    equal. All are ``u - 1`` where there is an entry to leave out, which is checked: a call with an
    empty sequence runs as it was written.
    """
    builder = Builder(graph)
    was: dict[fx.Node, Any] = {}
    checked: set[str] = set()
    numbers: dict[str, fx.Node] = {}  # sizes that the graph holds; a tensor that is asked stays
    for node in list(graph.nodes):
        if isinstance(node.meta.get("val"), torch.SymInt):
            numbers.setdefault(str(node.meta["val"]), node)
        if (left_out := _left_out(node)) is not None:
            dim, count = left_out
            source = cast(fx.Node, node.args[0])
            sizes = list(shape_of(node))
            sizes[dim] = shape_of(source)[dim] - count
            with builder.before(node):
                if (told := str(sizes[dim])) not in checked:
                    size = numbers.get(str(shape_of(source)[dim]))
                    size = size or builder.call(aten.sym_size.int, source, dim)
                    enough = builder.call(operator.ge, size, count)
                    _check_size(builder, enough, node)
                    checked.add(told)
            was[node] = val_of(node)
            node.meta["val"] = val_of(node).new_empty_strided(sizes, val_of(node).stride())
        elif node.op == "call_function" and not was.keys().isdisjoint(node.all_input_nodes):
            was[node] = node.meta.get("val")
            try:
                builder.update(node)
            except GuardOnDataDependentSymNode:  # it wants a size as it was spelled
                for changed, val in was.items():
                    changed.meta["val"] = val
                return


def _rejoin_rows(graph: fx.Graph) -> None:
    """Let ``x.view(-1).view(n, V)`` look at ``x``: what was laid flat between had rows before."""
    builder = Builder(graph)
    for node in list(graph.nodes):
        flat = node.args[0] if is_call(node, *RESHAPES) else None
        if not is_call(flat, *RESHAPES) or len(shape_of(flat)) != 1:
            continue
        source = as_node(flat.args[0])
        node.update_arg(0, source)
        for reader in [user for user in flat.users if is_call(user, aten.sym_size.int)]:
            with builder.before(reader):
                reader.replace_all_uses_with(_numel(builder, source))


def _check_size(builder: Builder, holds: fx.Node, node: fx.Node) -> None:
    """Run the call as written where what ``node`` takes for granted does not hold."""
    builder.call(check, builder.call(aten.scalar_tensor.default, holds), None, user_source(node))


def _left_out(node: fx.Node) -> tuple[int, int] | None:
    """The dim and how many entries of it a slice leaves out, of as many as data says."""
    if not is_call(node, aten.slice.Tensor):
        return None
    given = bound(node)
    sizes, start, end = shape_of(given["self"]), given["start"] or 0, given["end"]
    end = sys.maxsize if end is None else end
    dim = given["dim"] % len(sizes)
    if has_hint(sizes[dim]) or given["step"] != 1:
        return None
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    count = start - min(end, 0)
    goes_on = start >= 0 and (end < 0 or end == sys.maxsize)
    return (dim, count) if goes_on and count else None


def _equate_gathers(graph: fx.Graph) -> None:
    """Let a gather's index have exactly the tokens of what it reads, where it does now.

    NOTE [Why a guard]: gather accepts a shorter index, so ``[s0, s1, V]`` gathered by ``[s2, s3,
    1]`` says nothing about the sizes. Row programs need to know; the comparison becomes one of
    Dynamo's guards, and a batch that breaks it is captured anew. Sizes that are read off tensors,
    such as those of ``logits[start : end - 1]`` and ``ids[start + 1 : end]``, are known at each
    call alone: there a check compares them, and where it fails the call runs as it was written.
    """
    builder = Builder(graph)
    for node in graph.nodes:
        if not is_call(node, aten.gather.default):
            continue
        source, dim, index = cast(tuple[fx.Node, int, fx.Node], node.args)
        sizes, others = shape_of(source), shape_of(index)
        for d, (left, right) in enumerate(zip(sizes, others, strict=True)):
            if d == dim % len(sizes):
                continue
            if has_hint(left, right):
                bool(left == right)
            elif str(left) != str(right) and equate(left, right):
                with builder.before(node):
                    parts = (builder.call(aten.sym_size.int, one, d) for one in (source, index))
                    same = builder.call(operator.eq, *parts)
                    _check_size(builder, same, node)


# ---------------------------------------------------------------------------- bodies of calls
def _lower_bodies(gm: fx.GraphModule, grad_enabled: bool, known: dict[Any, fx.GraphModule]) -> None:
    """Lower the body of each call of a lowered graph, in place, so that passes see into it.

    Dynamo's graph holds one body per checkpointed call, and one for all layers that are equal
    (``repeated``). Bodies that are alike are lowered once. Checkpointed calls get a copy each, so
    that a pass may treat each on its own; calls of a layer share a body where they need the same
    gradients.

    Args:
        known: bodies that were lowered already, by what they were.

    Raises:
        Exception: a layer cannot be lowered. A checkpointed body then stays as it is.
    """
    for call in list(gm.graph.nodes):
        if (body := body_of(gm, call)) is None:
            continue
        is_layer = is_call(call, CALL_LAYER)
        casts, path = call.meta["autocasts"], _path(body, call)
        key = "lowered", body if is_layer else _key(body), casts
        if key not in known:
            with under(casts):
                known[key] = _lowered(body, grad_enabled, known, must=is_layer)
            known[key].meta["layer_path"] = path
        own = _give_body(gm, call, known[key], known)
        if not is_layer:
            _move(own, path)


def _give_body(
    gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule, known: dict[Any, fx.GraphModule]
) -> fx.GraphModule:
    """Let a call run a copy of ``body`` that knows which inputs need a gradient here."""
    marks = tuple(map(needs_grad, call.args[1:]))
    if not is_call(call, CALL_LAYER):
        own = _marked(body, marks, known)
        setattr(gm, str(as_node(call.args[0]).target), own)
        return own
    if (body, marks) not in known:
        known[body, marks] = _marked(body, marks, known)
    set_body(gm, call, known[body, marks])
    return known[body, marks]


def _marked(
    body: fx.GraphModule, marks: tuple[bool, ...], known: dict[Any, fx.GraphModule]
) -> fx.GraphModule:
    """A copy with these marks; the calls inside get theirs."""
    inside = (body_of(body, call) for call in body.graph.nodes)
    own = clone(body, {inner: inner for inner in inside if inner is not None})
    for node, mark in zip(own.graph.find_nodes(op="placeholder"), marks, strict=True):
        node.meta["requires_grad"] = mark
    propagate_requires_grad(own.graph)
    for call in list(own.graph.nodes):
        if (inner := body_of(own, call)) is not None:
            _give_body(own, call, inner, known)
    return own


def _lowered(
    body: fx.GraphModule, grad_enabled: bool, known: dict[Any, fx.GraphModule], *, must: bool
) -> fx.GraphModule:
    try:
        lowered = lower(body, grad_enabled=grad_enabled, known=known)
    except Exception as error:
        if must:
            raise
        # The body can hold anything that PyTorch can; it then runs as the user wrote it.
        body.meta["not_lowered"] = first_line(error)
        return body
    save_as(lowered, body)
    return lowered


def _key(body: fx.GraphModule) -> Any:
    """Equal for checkpointed bodies that compute and save the same."""
    return signature(body.graph.nodes), what_it_saves(body)


def _path(body: fx.GraphModule, call: fx.Node) -> str:
    """The layer that a body is of."""
    inside = (found for node in body.graph.nodes if (found := layer_path(node)))
    return str(body.meta.get("layer_path") or next(inside, call.name))


def _move(own: fx.GraphModule, path: str) -> None:
    """Let a copy of a checkpointed body be the one of the layer at ``path``."""
    theirs = str(own.meta["layer_path"])
    if theirs != path:
        own.meta["layer_path"] = path
        for node in own.graph.nodes:
            rename_site(node, theirs, path)
