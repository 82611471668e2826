"""Calls that lowering must not open: they carry a backward, a policy or a kernel of their own.

Each goes into the traced graph as one call, its submodules included; its results are known by what
Dynamo had for them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxrl.capture._torch import (
    SET_GRAD,
    TRAMPOLINES,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    FunctionalTensor,
    TorchDispatchMode,
    fake_like,
    functional_mode,
    library_op,
    saved_tensors_hooks,
    tensors_in,
    trace_call,
    without_dispatch_modes,
)
from fxrl.capture.writes import unwrap
from fxrl.ir.graph import HigherOrderOperator, example_of, hint, is_view, reached

_SDPA = torch.nn.functional.scaled_dot_product_attention
_T: Any = torch.Tensor
#: Calls by which code asks or tells autograd more than its ops do: ``no_grad``, a hook on a tensor.
_TELLING = (
    *(SET_GRAD, _T.register_hook),
    *(_T.requires_grad.__get__, _T.grad_fn.__get__, _T.is_leaf.__get__),
)

Autocasts = tuple[tuple[str, torch.dtype], ...]
"""The kinds of devices that autocast is on for, and to what."""


def autocasts() -> Autocasts:
    """The autocast settings in force."""
    kinds = (kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@contextmanager
def under(casts: Autocasts) -> Iterator[None]:
    """Run with exactly these autocast settings in force."""
    wanted = dict(casts)
    with ExitStack() as stack:
        for kind in {*wanted, *dict(autocasts())}:
            cast = torch.autocast(kind, wanted.get(kind), enabled=kind in wanted)
            stack.enter_context(cast)
        yield


def is_opaque(node: fx.Node) -> bool:
    """Whether a Dynamo node stays one call.

    Attention stays whole because which kernel it becomes depends on whether gradients are needed,
    which AOTAutograd decides; higher-order ops because their bodies have their own backward; what
    ``allow_in_graph`` has kept from Dynamo where it calls an ``autograd.Function``.
    """
    if node.op != "call_function":
        return False
    return node.target is _SDPA or is_whole(node) or (is_unseen(node) and _has_own_backward(node))


def is_whole(node: fx.Node) -> bool:
    """Whether an opaque call gets its tensors as they are; autocast changes those of attention."""
    return isinstance(node.target, HigherOrderOperator)


def is_unseen(node: fx.Node) -> bool:
    """Whether a Dynamo node is a call that Dynamo did not look into: of a function or a class that
    ``allow_in_graph`` or ``nonstrict_trace`` marks."""
    home = getattr(node.target, "__module__", None) or ""
    known = home.startswith("torch.") and not home.startswith(TRAMPOLINES)
    return isinstance(node.target, types.FunctionType) and not known


def _has_own_backward(node: fx.Node) -> bool:
    """Whether an ``autograd.Function`` has recorded the call."""
    read = [example_of(arg) for arg in node.all_input_nodes]
    known = {value.grad_fn for value in tensors_in(read)}
    waiting = [value.grad_fn for value in tensors_in(example_of(node))]
    for recorded in waiting:  # which grows meanwhile
        if recorded is None or recorded in known:
            continue
        if isinstance(recorded, torch.autograd.function.BackwardCFunction):
            return True
        known.add(recorded)
        waiting += [earlier for earlier, _ in recorded.next_functions]
    return False


class ToldAutograd(TorchFunctionMode):
    """Notes whether what runs inside asks or tells autograd more than its ops do."""

    def __init__(self) -> None:
        super().__init__()
        self.met, self._hooks = False, saved_tensors_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooked = saved_tensors_hooks() != self._hooks
        self.met = self.met or hooked or func in _TELLING
        return func(*args, **(kwargs or {}))


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which ops of libraries autograd would record; None for any other op, where it is of
    tensors: a fake kernel asks for devices and sizes, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":
            self.ops.append(library_op(func))
        return func(*args, **(kwargs or {}))


def gradient_reads_data(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether the gradient of a library's op asks what tensors hold, and so cannot be traced.

    As ``offsets.tolist()`` does in the backward that ``torch.library.register_autograd`` is given.
    It is run for tensors of these sizes that hold nothing.
    """

    def empty(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return hint(leaf) if isinstance(leaf, torch.SymInt) else leaf
        sizes = [hint(size) for size in leaf.shape]
        grad = leaf.is_floating_point()
        return torch.empty(sizes, dtype=leaf.dtype, device=leaf.device, requires_grad=grad)

    with without_dispatch_modes(), FakeTensorMode(), torch.enable_grad():
        args, kwargs = pytree.tree_map(empty, (args, kwargs))
        try:
            found = [one for one in tensors_in(op(*args, **kwargs)) if one.requires_grad]
            torch.autograd.backward(found, [*map(torch.ones_like, found)])
        except (DataDependentOutputException, DynamicOutputShapeException):
            return True
        except Exception:  # whatever it lacks, the body that holds it says
            return False
    return False


class _Bound:
    """A function with all of its arguments but the tensors and sizes, which an FX graph may not be
    able to hold, under the autocast settings that it was called under."""

    def __init__(
        self, function: Callable[..., Any], spec: Any, flat: list[Any], casts: Autocasts
    ) -> None:
        self._function, self._spec, self._casts = function, spec, casts
        self._flat = [_GIVEN if isinstance(leaf, _VALUES) else leaf for leaf in flat]
        self.__name__ = function.__name__  # its own module: fx looks up all that torch has by name

    def __call__(self, *given: Any) -> Any:
        values = iter(given)
        flat = [next(values) if leaf is _GIVEN else leaf for leaf in self._flat]
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        with under(self._casts):
            return self._function(*args, **kwargs)


_GIVEN = object()
_VALUES = (torch.Tensor, torch.SymInt, fx.Node)


def call_whole(node: fx.Node, args: Any, kwargs: Any, modules: Mapping[str, nn.Module]) -> Any:
    """Put an opaque call into the graph that is traced; what looks like its result.

    Args:
        args, kwargs: what the trace has of its arguments: values, or inputs of its graph.
        modules: those of its graph, by their paths.
    """
    target: Any = node.target
    casts = autocasts()
    if target is _SDPA:
        target = torch.ops.aten.scaled_dot_product_attention.default
        args, kwargs = pytree.tree_map_only(torch.Tensor, _autocast, (args, kwargs))
        # A scale that was another one before is a symbol; here it is a guarded constant.
        args, kwargs = pytree.tree_map_only(torch.SymFloat, float, (args, kwargs))
        named = ("query", "key", "value")[len(args) :]  # passes read operands by their place
        args = (*args, *(kwargs[name] for name in named))
        kwargs = {name: value for name, value in kwargs.items() if name not in named}
    elif not is_whole(node):
        flat, spec = pytree.tree_flatten((args, kwargs))
        target = _Bound(target, spec, flat, casts)
        args, kwargs = tuple(leaf for leaf in flat if isinstance(leaf, _VALUES)), {}
    args, kwargs = pytree.tree_map_only(FunctionalTensor, unwrap, (args, kwargs))
    with without_dispatch_modes():
        result = pytree.tree_map_only(torch.Tensor, fake_like, _result_of(node))
    call = trace_call(target, args, kwargs, result, modules)
    call.meta["autocasts"] = casts  # a body is lowered later, outside of the user's block
    if functional_mode() is None:
        return result
    return pytree.tree_map_only(torch.Tensor, FunctionalTensor.to_functional, result)


def _result_of(node: fx.Node) -> Any:
    value = example_of(node)
    if value is None:
        values = {u.args[1]: example_of(u) for u in node.users}
        value = tuple(values.get(i) for i in range(1 + max(values, default=0)))  # type: ignore[type-var, operator, arg-type]
    return value


def allow_any_strides(graph: fx.Graph) -> None:
    """Let what views an opaque result copy it where it must.

    NOTE [Why]: how attention lays out its result depends on the kernel, which is chosen anew at run
    time, by other flags and, where a pass took its mask away, by other operands. A view that holds
    for the layout that was traced may not hold for that one, and ``contiguous`` may have left no
    trace; ``reshape`` is a view where it can be.
    """

    def views(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if is_view(user)]

    for node in reached([node for node in graph.nodes if "autocasts" in node.meta], views):
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default


def _autocast(operand: torch.Tensor) -> torch.Tensor:
    """As autocast hands it to an op of its lower-precision list, such as attention.

    A call that goes into the graph as it is asks nobody, and the lowered graph runs with autocast
    off.
    """
    narrow = operand.is_floating_point() and operand.dtype != torch.float64
    return (
        operand.to(dict(autocasts()).get(operand.device.type, operand.dtype)) if narrow else operand
    )
