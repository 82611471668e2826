"""Calls that lowering must not open: they carry a backward, a policy or a kernel of their own.

While the graph is traced, each such call is stood in for by one traceable op; afterwards the
original call is put back in its place, its submodules included.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxrl.capture._torch import (
    SET_GRAD,
    TRAMPOLINES,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    library_op,
    saved_tensors_hooks,
    without_dispatch_modes,
)
from fxrl.ir.graph import HigherOrderOperator, example_of, hint, inputs_of, is_view, memory_like

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


@torch.library.custom_op(
    "fxrl::stand_in",
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt[] sizes, int key) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),  # else torch runs it where tensors are constants
)
def _stand_in(tensors: list[torch.Tensor], sizes: list[int], key: int) -> list[torch.Tensor]:
    raise AssertionError("a stand-in is replaced before anything runs")


_EXAMPLES: dict[int, Any] = {}


@_stand_in.register_fake
def _(tensors: list[torch.Tensor], sizes: list[int], key: int) -> list[torch.Tensor]:
    return [memory_like(output) for output in _EXAMPLES[key]]


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
    known = {value.grad_fn for arg in node.all_input_nodes for value in _tensors_of(arg)}
    waiting = [value.grad_fn for value in _tensors_of(node)]
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
            made = pytree.tree_leaves(op(*args, **kwargs))
            found = [one for one in made if isinstance(one, torch.Tensor) and one.requires_grad]
            torch.autograd.backward(found, [*map(torch.ones_like, found)])
        except (DataDependentOutputException, DynamicOutputShapeException):
            return True
        except Exception:  # whatever it lacks, the body that holds it says
            return False
    return False


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(example_of(node))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


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


class OpaqueCalls:
    """The opaque calls of one graph: stand-ins while tracing, originals afterwards.

    An argument that is a node is an input of the graph that was left out of the trace.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._calls: dict[int, tuple[fx.Node, Any, list[Any], Autocasts]] = {}
        self._inputs: dict[str, fx.Node] = {}  # of the lowered graph

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Trace the stand-in of ``node`` and return values of the original's structure."""
        key = id(node)
        if node.target is _SDPA:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _autocast, (args, kwargs))
            # A scale that was another one before is a symbol; here it is a guarded constant.
            args, kwargs = pytree.tree_map_only(torch.SymFloat, float, (args, kwargs))
        flat, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        sizes = [leaf for leaf in flat if isinstance(leaf, torch.SymInt)]
        self._calls[key] = (node, spec, flat, autocasts())
        outputs, out_spec = pytree.tree_flatten(self._example(node))
        _EXAMPLES[key] = [output for output in outputs if isinstance(output, torch.Tensor)]
        try:
            results = list(torch.ops.fxrl.stand_in(tensors, sizes, key))
        finally:
            del _EXAMPLES[key]
        filled = [results.pop(0) if isinstance(o, torch.Tensor) else o for o in outputs]
        return pytree.tree_unflatten(filled, out_spec)

    def _example(self, node: fx.Node) -> Any:
        value = example_of(node)
        if value is None:
            values = {u.args[1]: example_of(u) for u in node.users}
            value = tuple(values.get(i) for i in range(1 + max(values, default=0)))  # type: ignore[type-var, operator, arg-type]
        return value

    def restore(self, lowered: fx.GraphModule) -> None:
        """Put the original calls back into the lowered graph."""
        graph = lowered.graph
        self._inputs = {node.name: node for node in inputs_of(graph)}
        for call in list(graph.nodes):
            if call.op == "call_function" and call.target is torch.ops.fxrl.stand_in.default:
                with graph.inserting_before(call):
                    _allow_any_strides(self._restore_one(lowered, call))
        graph.lint()

    def _restore_one(self, lowered: fx.GraphModule, call: fx.Node) -> fx.Node:
        tensors, sizes, key = call.args
        node, spec, flat, casts = self._calls[key]  # type: ignore[index]
        tensor_queue, size_queue = list(tensors), list(sizes)  # type: ignore[arg-type]

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return tensor_queue.pop(0)
            if isinstance(value, torch.SymInt):
                return size_queue.pop(0)
            if isinstance(value, fx.Node):
                return self._inputs[value.name]
            if isinstance(value, torch.nn.Module):
                return self._submodule(lowered, value)
            return value

        target: Any = node.target
        if target is _SDPA or is_whole(node):
            args, kwargs = pytree.tree_unflatten([leaf(value) for value in flat], spec)
        else:
            args, kwargs = [leaf(value) for value in flat if isinstance(value, _VALUES)], {}
            target = _Bound(target, spec, flat, casts)
        if target is _SDPA:
            target = torch.ops.aten.scaled_dot_product_attention.default
            named = ("query", "key", "value")[len(args) :]  # passes read operands by their place
            args = [*args, *(kwargs[name] for name in named)]
            kwargs = {name: value for name, value in kwargs.items() if name not in named}
        original = lowered.graph.call_function(target, tuple(args), kwargs)
        original.meta = {k: v for k, v in call.meta.items() if k != "val"}
        original.meta["autocasts"] = casts  # a body is lowered later, outside of the user's block
        self._rewire(call, original, self._example(node))
        return original

    def _submodule(self, lowered: fx.GraphModule, module: torch.nn.Module) -> fx.Node:
        name = next(n for n, m in self._gm.named_modules() if m is module)
        flat_name = name.replace(".", "_")
        if not hasattr(lowered, flat_name):
            lowered.add_module(flat_name, module)
        return lowered.graph.get_attr(flat_name)

    @staticmethod
    def _rewire(call: fx.Node, original: fx.Node, example: Any) -> None:
        """Point the stand-in's outputs at the original's (one tensor, or a flat tuple)."""
        vals = call.meta["val"]
        single = isinstance(example, torch.Tensor)
        original.meta["val"] = vals[0] if single else tuple(vals)
        positions = [
            i for i, o in enumerate([example] if single else example) if isinstance(o, torch.Tensor)
        ]
        for item in list(call.users):
            assert item.target is operator.getitem
            index: Any = item.args[1]
            if single:
                item.replace_all_uses_with(original)
            else:
                picked = call.graph.call_function(operator.getitem, (original, positions[index]))
                picked.meta = dict(item.meta)
                item.replace_all_uses_with(picked)
            call.graph.erase_node(item)
        call.graph.erase_node(call)


def _allow_any_strides(call: fx.Node) -> None:
    """Let what views an opaque result copy it where it must.

    NOTE [Why]: how attention lays out its result depends on the kernel, which is chosen anew at run
    time, by other flags and, where a pass took its mask away, by other operands. A view that holds
    for the layout that was traced may not hold for that one, and ``contiguous`` may have left no
    trace; ``reshape`` is a view where it can be.
    """
    for user in call.users:
        if is_view(user):
            if user.target is torch.ops.aten.view.default:
                user.target = torch.ops.aten.reshape.default
            _allow_any_strides(user)


def _autocast(operand: torch.Tensor) -> torch.Tensor:
    """As autocast hands it to an op of its lower-precision list, such as attention.

    The stand-in is no such op, and the lowered graph runs with autocast off.
    """
    narrow = operand.is_floating_point() and operand.dtype != torch.float64
    return (
        operand.to(dict(autocasts()).get(operand.device.type, operand.dtype)) if narrow else operand
    )
