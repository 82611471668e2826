"""The trace that lowers a Dynamo graph: its calls run once more, down to functional ATen.

A trace is made with the tensors as they are, and anew with functional ones where something writes.
Beside it go what ATen alone would lose: what no autograd sees (``_Lowering``), which writes it does
not see (``capture.writes``), and the calls that are not opened (``capture.opaque``).
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from fxrl.capture._torch import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_INFERENCE,
    SET_GRAD,
    FakeTensor,
    FunctionalTensor,
    TorchDispatchMode,
    enable_python_dispatcher,
    equate,
    functorch_depth,
    functorch_level,
    get_decompositions,
    has_data_mutation,
    leave_transforms,
    library_op,
    make_fx,
    only_what_is_read,
    storage_of,
    tensors_in,
    traced_inputs,
    without_function_modes,
    without_functionalize_key,
)
from fxrl.capture.opaque import (
    Recorded,
    ToldAutograd,
    call_whole,
    gradient_reads_data,
    is_opaque,
    is_unseen,
    is_whole,
)
from fxrl.capture.writes import DATA_GIVEN, Functional, unwrap
from fxrl.ir.graph import as_node, example_of, fake_mode_of, inputs_of, is_call, wrapper_of, writes
from fxrl.ir.remark import Refusal

aten = torch.ops.aten

#: Losses and sums that reduce over vocabulary and tokens at once, opened so that rows are visible;
#: constants that read a tensor for its dtype and device alone, which then need not be there.
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
        aten.nansum,
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


def trace(gm: fx.GraphModule, grad_enabled: bool) -> fx.GraphModule:
    """The ops that a Dynamo graph comes down to, and the calls that stay whole."""
    with tracing(gm), fx_traceback.preserve_node_meta(), torch.no_grad():
        try:
            lowered = _traced(gm, grad_enabled, _as_it_stands)
            if not writes(lowered):  # as a part of an op that is decomposed may
                return lowered
        except _NotFunctionalError:
            pass
        try:
            return _traced(gm, grad_enabled, _functional)
        except NotImplementedError as error:
            _refuse_wrapped(inputs_of(gm.graph), error)
            raise


def _traced(gm: fx.GraphModule, grad_enabled: bool, how: Callable[..., Any]) -> fx.GraphModule:
    mode = Functional(differentiated=grad_enabled)
    interpreter = _Lowering(gm, mode)

    def run(*values: Any) -> Any:
        pairs = zip(values, traced_inputs(), strict=True)
        return interpreter.run(*(place if value is _PASSED else value for value, place in pairs))

    inputs = inputs_of(gm.graph)
    examples = [_PASSED if _only_passed(node) else example_of(node) for node in inputs]
    depth = functorch_depth()
    try:
        return make_fx(how(run, mode), decomposition_table=_OPENED)(*examples)
    except Exception:
        leave_transforms(depth)
        raise


#: In the place of an input's value.
_PASSED = object()


def _only_passed(node: fx.Node) -> bool:
    """Whether an input goes into calls that stay whole, and nowhere else: a layer's weight.

    Such inputs are no part of the trace, in which each costs as much as an op does: a fifth of the
    lowering of 36 layers with LoRA. While it is made, their nodes stand for their values.
    """
    whole = all(user.op == "call_function" and is_whole(user) for user in node.users)
    value = example_of(node)
    return whole and type(value) is FakeTensor and value.layout == torch.strided


@contextmanager
def tracing(gm: fx.GraphModule) -> Iterator[None]:
    """Trace in Dynamo's own fake mode; new data-dependent sizes belong to this trace alone."""
    mode = fake_mode_of(gm.graph)  # its inputs may be sizes alone
    with ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(enable_python_dispatcher())
        yield


def _refuse_wrapped(inputs: list[fx.Node], error: NotImplementedError) -> None:
    """An op that a tensor subclass lacks, in words."""
    for node in inputs:
        if kind := wrapper_of(example_of(node)):
            op = re.search(r"(aten|prims)\.\w+", str(error))
            reason = f"a weight of class {kind} has no {op[0] if op else 'such op'}"
            cure = "quantise by fxrl.models.quantize, whose weights can be captured"
            raise Refusal(reason, cure, node) from error


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
                if arg.is_leaf and arg.requires_grad:  # autograd lets it be written detached alone
                    arg, value = arg.detach(), value.detach()
                arg.copy_(value)
        return results

    return run


def _is_replaced(function: Any) -> bool:
    """Whether it is a function of torch in whose place the user has put another, as in
    ``F.cross_entropy = mine``, or that other one, which Dynamo takes for torch's.

    Under the modes of a trace the former calls, by its name, whatever stands there: a wrapper would
    be applied twice.
    """
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if getattr(home, getattr(function, "__name__", ""), function) is not function:
        return True
    own = isinstance(function, types.FunctionType) and not function.__module__.startswith("torch.")
    return own and any(function is one for one in vars(torch.nn.functional).values())


class _Lowering(fx.Interpreter):
    """Runs a Dynamo graph under tracing, keeping what ATen alone would lose.

    NOTE [Why no_grad becomes detach]: below autograd nothing tells that code ran under no_grad,
    and AOTAutograd would differentiate it. A detach on every result says the same as data flow.
    """

    def __init__(self, gm: fx.GraphModule, mode: Functional) -> None:
        super().__init__(gm, garbage_collect_values=False)  # what shares memory is looked up
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
        depth = functorch_depth()
        result = self._computed(n)
        if functorch_depth() > depth and mode.differentiated and not mode.recording:
            reason = "torch.func takes a derivative under no_grad, of which none is taken"
            raise Refusal(reason, "take it with gradients, and detach it", n)
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
        if functorch_level() is not None:
            return self._transformed(n)
        if is_opaque(n):
            return self._whole(n)
        op = library_op(n.target)
        if n.op == "call_function" and _is_replaced(n.target):
            with without_function_modes():
                return super().run_node(n)
        if n.op != "call_function" or (op is None and not is_unseen(n)):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        given = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in given]
        recording = torch.set_grad_enabled(self._mode.recording)
        with recording, ToldAutograd() as told, Recorded() as inside:
            result = super().run_node(n)
        # An op's own kernel for autograd runs again with the graph; what other ops one is made of,
        # and whether it asks autograd for something, is not seen from here.
        if op is None:
            opened = not told.met
        else:
            opened = inside.ops == [op] and not gradient_reads_data(n.target, args, kwargs)
        if opened:
            return result
        if [tensor._version for tensor in given] != versions:
            name = getattr(n.target, "__name__", n.target)
            reason = f"{name}, which is not looked into, writes into what it is given"
            raise Refusal(reason, "return a new tensor from it", n)
        return self._whole(n)

    def _transformed(self, n: fx.Node) -> Any:
        """A call inside of ``torch.func``'s transforms, for whose levels autograd records it here
        and now: the graph gets the ops of its derivative, and the next one is taken of those."""
        if is_whole(n) or is_unseen(n):
            reason = "a call with a backward of its own is inside of torch.func's transforms"
            raise Refusal(reason, "differentiate what it is made of, or the loss outside of it", n)
        given = tensors_in([self.env[node] for node in n.all_input_nodes])
        versions = [tensor._version for tensor in given]
        with torch.set_grad_enabled(self._mode.recording):
            result = super().run_node(n)
        if [tensor._version for tensor in given] != versions:
            reason = "a tensor is written into inside of torch.func's transforms"
            raise Refusal(reason, "return a new tensor from it", n)
        return result

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
        """A call that is not opened. Its results are known by Dynamo's sizes: those that data says
        have symbols of this trace's own, so what both were given tells that they are one."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        for node in n.all_input_nodes:
            theirs, ours = example_of(node), self.env[node]
            if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
                for their, our in zip(theirs.shape, ours.shape, strict=True):
                    equate(their, our)
        with self._set_current_node(n), fx_traceback.set_current_meta(n):
            return call_whole(n, args, kwargs, self.submodules)

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

        with self._set_current_node(n), fx_traceback.set_current_meta(n):  # the module is n's
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
