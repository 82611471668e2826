"""The one door to private names of torch for capture and inspection: what each is for.

All were seen in torch 2.11, 2.13 and 2.15. To read another version's sources: ``pip download
--no-deps --platform macosx_11_0_arm64 --only-binary=:all: torch==VERSION``, unzip.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
# ruff: noqa: E501, I001  # a name and its purpose stand on one line
from __future__ import annotations

import gc
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import isroutine
from operator import itemgetter
from types import CodeType, FunctionType
from typing import Any, TypeVar

# fmt: off
import torch
import torch._dynamo
from torch import fx
from torch._dynamo import pgo  # which values varied, to be symbols
from torch._decomp import get_decompositions as get_decompositions  # losses opened into their parts
from torch._decomp import decomposition_table  # what ops of sizes that vary are computed by
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher  # composite ops over symbols
from torch._dynamo.callback import callback_handler  # called when a compilation begins and ends
from torch._dynamo import OptimizedModule as OptimizedModule  # what torch.compile makes of a module
from torch._dynamo import mark_static_address as mark_static_address  # says of a tensor that it is a module's
from torch._dynamo import maybe_mark_dynamic as maybe_mark_dynamic  # a size that varies; a constant stays legal
from torch._dynamo import graph_break as graph_break  # ends the graph where it is traced
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis  # a backend's demand for another trace
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException  # base of what capture raises on purpose
from torch._dynamo.exc import TorchRuntimeError as TorchRuntimeError  # what an op says of fake tensors, in Dynamo's words
from torch._dynamo.utils import graph_break_reasons as graph_break_reasons  # every break so far, in order; reset() clears
from torch._dynamo.variables import ConstantVariable, ConstDictVariable, SetVariable
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable
from torch._dynamo.variables.base import AttributeMutationExisting, AttributeMutationNew, ValueMutationExisting, VariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND
from torch._prims_common.wrappers import elementwise_type_promotion_wrapper as type_promotion
from torch._higher_order_ops.effects import has_effects as has_effects  # ops that print, or raise by what a tensor holds
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException  # a fake tensor is asked what it holds
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException  # or for as much as it holds
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # the values of Dynamo's graphs
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # under which tensors are made that have no storage
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor  # a tensor whose writes are noted
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx as make_fx  # tracing, over the fake values as they are
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every op below autograd

from fxrl.ir.graph import fake_mode_of, inputs_of, memory_like
from fxrl.scoped import swapped

SET_GRAD = torch._C._set_grad_enabled  # what a Dynamo graph calls where torch.no_grad begins and ends
saved_tensors_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)  # the pair in force, if any
ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode  # and where torch.inference_mode does
EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast  # and where torch.autocast does
STATIC_SIZES = "_dynamo_static_indices"  # of a tensor: the dims that torch._dynamo.mark_static names
STATIC_INPUT = "_dynamo_static_input_type"  # in an input's "tensor_dict": a module's parameter or buffer
cache_entries = torch._dynamo.eval_frame._debug_get_cache_entry_list  # what was compiled of a function
DYNAMO_LOG = torch._dynamo.convert_frame.log  # of a function's captures
TooOftenError = torch._dynamo.exc.FailOnRecompileLimitHit  # a function was captured so often already
compile_counters = torch._dynamo.utils.counters  # ["frames"]["total"]: functions that capture was tried on
COMPILES = torch._dynamo.convert_frame.__name__  # the module that every compilation runs through
made_by_dynamo: Any = torch._dynamo.convert_frame.output_codes  # code that runs graphs, and what is around them
dynamo_config: Any = torch._dynamo.config
as_written = torch._dynamo.eval_frame.innermost_fn  # a function without what torch.compile put around it
reset_code = torch._C._dynamo.eval_frame.reset_code  # forgets what was compiled of a function, which Dynamo keeps for ever
in_dispatch_mode = torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals  # where Dynamo captures nothing
functorch_level = torch._C._functorch.peek_interpreter_stack  # None outside of torch.func's transforms
functorch_depth = torch._C._functorch.get_dynamic_layer_stack_depth  # how many one is inside of
functional_mode: Callable[[], Any] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FUNCTIONAL)  # of functional tensors, the one in force

# Python's side of functionalisation: pending writes applied; whether there were any; the value.
sync: Callable[[Any], None] = torch._sync
has_data_mutation: Callable[[Any], bool] = torch._functionalize_has_data_mutation
from_functional: Callable[[Any], torch.Tensor] = torch._from_functional_tensor

# Hooks on every module there is, which Dynamo traces and does not guard.
_GLOBAL_HOOKS = [hooks for name, hooks in vars(torch.nn.modules.module).items() if name.startswith("_global_") and isinstance(hooks, dict)]

#: How Dynamo reads an attribute of a traced object; the second from torch 2.15 on.
GETATTRS = ("var_getattr", "tp_getattro_impl")
# fmt: on


def try_again(code: CodeType) -> None:
    """Dynamo looks again at a function that it has left out, which it does for good; what was
    compiled of it stays."""
    _set_strategy(code, FrameAction.DEFAULT, FrameAction.DEFAULT)


def run_as_written(code: CodeType, *, all_inside: bool = True) -> None:
    """Dynamo does not look at a function, nor, with ``all_inside``, at those that it calls."""
    inside = FrameAction.SKIP if all_inside else FrameAction.DEFAULT
    _set_strategy(code, FrameAction.SKIP, inside)


def capture_no_more(code: CodeType) -> None:
    """Dynamo runs what it has compiled of a function where that fits, else the function."""
    _set_strategy(code, FrameAction.RUN_ONLY, FrameAction.DEFAULT)


def _set_strategy(code: CodeType, own: FrameAction, inside: FrameAction) -> None:
    torch._C._dynamo.eval_frame.set_code_exec_strategy(code, FrameExecStrategy(own, inside))


def keeps_by_op() -> bool:
    """Whether a checkpoint around what runs now looks at each op to decide what it keeps."""
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    return isinstance(mode, _CHOOSING)


def in_checkpoint() -> bool:
    """Whether a checkpoint around what runs now keeps nothing of it, and will run it again."""
    pack, _ = saved_tensors_hooks() or (None, None)
    return getattr(pack, "__qualname__", "").startswith(_CHECKPOINTS)


@contextmanager
def outside_of_checkpoint() -> Iterator[None]:
    """Inside, what is saved for the backward is kept in spite of a checkpoint, which then need not
    run anything again."""
    hooks = saved_tensors_hooks()
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


_CHOOSING = (
    torch.utils.checkpoint._CachingTorchDispatchMode,
    torch.utils.checkpoint._CachedTorchDispatchMode,
)
_CHECKPOINTS = torch.utils.checkpoint._checkpoint_hook.__qualname__  # whose hooks these are


def storage_of(tensor: torch.Tensor) -> int:
    """What a tensor's memory is known by, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def fake_like(fake: FakeTensor) -> FakeTensor:
    """A value that looks like another one, and that nothing was computed for.

    NOTE [Why made directly]: its mode, asked for a tensor, takes 20 times as long: 0.2 s for the
    weights of 35 layers with LoRA.
    """
    return FakeTensor(fake.fake_mode, memory_like(fake, "meta"), fake.device)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in a structure of values."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def traced_inputs() -> list[fx.Node]:
    """The inputs of the graph that ``make_fx`` traces now."""
    tracer: Any = proxy_tensor.get_proxy_mode().tracer  # type: ignore[union-attr]
    return inputs_of(tracer.graph)


def trace_call(
    target: Any, args: Any, kwargs: Any, result: Any, modules: Mapping[str, torch.nn.Module]
) -> fx.Node:
    """Put a call into the graph that ``make_fx`` traces now, as it stands.

    Args:
        args, kwargs: values of the trace, modules, and what is in ``traced_inputs``.
        result: what looks like its result, and is that from here on.
        modules: those among its arguments, and others, by their paths.
    """
    tracer: Any = proxy_tensor.get_proxy_mode().tracer  # type: ignore[union-attr]

    def place(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module):
            name = next(path for path, one in modules.items() if one is leaf).replace(".", "_")
            setattr(tracer.root, name, leaf)
            return tracer.create_node("get_attr", name, (), {})
        if isinstance(leaf, torch.SymInt):
            return tracer.create_arg(proxy_tensor.fetch_sym_proxy(tracer)(leaf))
        if isinstance(leaf, torch.Tensor):
            return tracer.create_arg(tracer.unwrap_proxy(leaf))
        return leaf

    args, kwargs = pytree.tree_map(place, (args, kwargs))
    call: fx.Node = tracer.create_node("call_function", target, args, kwargs)
    tensors = pytree.tree_map(lambda x: x if isinstance(x, torch.Tensor) else None, result)
    proxy_tensor.track_tensor_tree(tensors, tracer.proxy(call), constant=None, tracer=tracer)
    return call


TO_FLOAT = ELEMENTWISE_TYPE_PROMOTION_KIND.INT_TO_FLOAT


_describe = proxy_tensor._extract_tensor_metadata


@contextmanager
def only_what_is_read() -> Iterator[None]:
    """Inside, a trace holds nothing that no reader of its graph asks for.

    NOTE [Why]: sizes are compared and multiplied all the time while tensors are traced (20 times
    for each op), and each result would become a node of the graph, to be erased as dead. As a thunk
    it becomes one only where a call takes it; AOTAutograd traces so too. And for each value it is
    asked whether its strides are those of a memory format, symbol by symbol.
    """
    proxy_tensor._extract_tensor_metadata = partial(_describe, include_contiguity=False)
    try:
        with proxy_tensor.maybe_enable_thunkify():
            yield
    finally:
        proxy_tensor._extract_tensor_metadata = _describe


def global_hooks() -> tuple[int, ...]:
    """Which of them there are now."""
    return tuple(id(hook) for hooks in _GLOBAL_HOOKS for hook in hooks.values())


def forget_inputs(gm: fx.GraphModule) -> None:
    """Let what a graph was traced with be swapped for other tensors (``torch.utils.swap_tensors``):
    torch refuses while anything refers to them weakly, as the numbers do by which the fake mode of
    the graph knows them, and its inputs, which Dynamo lets go of in its own graph alone."""
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta.pop("grapharg", None)
    if (mode := fake_mode_of(gm.graph)) is not None:
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


#: Where code of the user's, and torch's own, finds functions of torch by their names.
_FUNCTIONS = [
    (vars(home), itemgetter(*(name for name, found in vars(home).items() if isroutine(found))))
    for home in (torch, torch.nn.functional)
]


def functions_stay() -> Callable[[], bool]:
    """Says later whether torch still has the functions and methods that it has now.

    A graph is made of what they were: Dynamo guards those alone that traced code reads off a module,
    no method of a tensor, and nothing that a function which it does not look into calls.
    """
    functions, methods = [found(home) for home, found in _FUNCTIONS], _methods()

    def stay() -> bool:
        try:
            same = [found(home) for home, found in _FUNCTIONS] == functions
            return same and _methods() == methods
        except Exception:  # one is missing, or in its place is what cannot be compared
            return False

    return stay


def _methods() -> dict[str, Any]:
    """Not all of a class: pickling a tensor leaves a list there."""
    return {name: one for name, one in vars(torch.Tensor).items() if hasattr(one, "__get__")}


def _is_torchs(method: Any) -> bool:
    """Or of C; what a library added to the class is its own."""
    if not isinstance(method, FunctionType):
        return True
    return str(method.__globals__["__name__"]).startswith("torch.")


_TOLD_BY = ("__repr__", "__str__", "__format__", "__dir__")
_OWN = (name for name, method in vars(torch.Tensor).items() if _is_torchs(method))
_METHODS = {*dir(torch._C.TensorBase), *_OWN}.difference(_TOLD_BY)


def method_replaced() -> str | None:
    """The name of a method of tensors in whose place the user has put another, if there is one."""
    methods = vars(torch.Tensor).items()
    return next((n for n, one in methods if not _is_torchs(one) and n in _METHODS), None)


_F = TypeVar("_F", bound=Callable[..., Any])


def leave_transforms(depth: int = 0) -> None:
    """Closes the levels of ``torch.func``'s transforms beyond ``depth``, and the one that
    forward-mode AD has, which stay open where a trace inside of them has failed."""
    torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
    if torch.autograd.forward_ad._current_level < 0:  # else somebody outside is in it
        with suppress(RuntimeError):  # there is none
            torch._C._exit_dual_level(level=0)


def never_captured(reason: str) -> Callable[[_F], _F]:
    """``torch.compiler.disable``, which is public and untyped: another's graph ends at the call."""
    disabled: Callable[[_F], _F] = torch.compiler.disable(reason=reason)
    return disabled


def is_never_captured(module: torch.nn.Module) -> bool:
    """Whether a graph ends at each call of a module."""
    return hasattr(type(module).__call__, "_torchdynamo_disable")


#: What calls a marked class or function.
TRAMPOLINES = ("torch._dynamo.variables.misc", "torch._dynamo.variables.torch")


def library_op(target: Any) -> Any:
    """The op, whichever overload, if it is one that a library defines; else None."""
    packet = getattr(target, "overloadpacket", target)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    return None if packet._qualified_op_name.startswith(("aten::", "prim", "fxrl::")) else packet


def in_graph(function: _F) -> _F:
    """``torch.compiler.allow_in_graph``, which is public and untyped: one call, not looked into."""
    allowed: _F = torch.compiler.allow_in_graph(function)
    return allowed


def without_functionalize_key() -> Any:
    """A context without C++'s functionalisation, in whose place the Python one stands."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    return torch._C._ExcludeDispatchKeyGuard(key)


def without_dispatch_modes() -> Any:
    """A context in which ops run as they do outside of a trace, and no mode sees them."""
    return _python_dispatch._disable_current_modes()


def without_function_modes() -> Any:
    """A context in which functions of torch run by themselves, and tell no mode of it."""
    return torch._C.DisableTorchFunction()


def equate(left: int | torch.SymInt, right: int | torch.SymInt) -> bool:
    """Let two sizes be known as equal from here on, which is for the graph to check; whether one of
    them tells a symbol that data decides, for which what is left can stand: of ``u0 - 8`` and
    ``u1 - 8`` u0."""
    if isinstance(left, int) or isinstance(right, int):
        return False
    env, apart = left.node.shape_env, (left.node.expr - right.node.expr).expand()
    for symbol in sorted(apart.free_symbols, key=str):
        times = apart.coeff(symbol)
        rest = (apart - times * symbol).expand()
        alone = times in (1, -1) and symbol not in rest.free_symbols
        if alone and env.is_unbacked_symint(symbol):
            env._set_replacement(symbol, -times * rest, "checked")
            return True
    return False


@type_promotion(type_promoting_args=("x",), type_promotion_kind=TO_FLOAT)
def _logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    dims = dim if isinstance(dim, Iterable) else (dim,)
    if any(x.shape[d] == 0 for d in dims):
        return torch.sum(torch.exp(x), dim, keepdim).log()
    most = torch.amax(x, dim, keepdim=True)
    most = torch.masked_fill(most, most.abs() == float("inf"), 0)
    total = torch.sum(torch.exp(x - most), dim, keepdim)
    return total.log().add(most if keepdim else torch.squeeze(most, dim))


@contextmanager
def sizes_from_data() -> Iterator[None]:
    """Inside, a log-sum-exp may be taken of as many rows as data says. What torch makes of one for
    sizes that vary asks whether there is any entry at all; here it asks that of ``dim`` alone."""
    op = torch.ops.aten.logsumexp.default
    own = decomposition_table[op]
    decomposition_table[op] = _logsumexp
    try:
        yield
    finally:
        decomposition_table[op] = own


def guarded_names() -> dict[str, list[Any]]:
    """Last names of all that the trace at hand has read and compiled in (``layer_idx``), and where
    each was read of (``value_at``)."""
    found: dict[str, list[Any]] = {}
    for guard in torch._guards.TracingContext.get().guards_context.dynamo_guards:
        name = re.split(r"[.\[]", _name_of(guard.originating_source))[-1].strip("'\"]")
        found.setdefault(name, []).append(getattr(guard.originating_source, "base", None))
    return found


def value_at(place: Any) -> Any:
    """What traced code finds at a place where it reads; None if that cannot be told."""
    frame = _traced().root_tx
    scope = {"L": frame.f_locals, "G": frame.f_globals}
    try:
        return eval(_name_of(place), scope)
    except Exception:
        return None


def _name_of(source: Any) -> str:
    return str(source.name() if callable(source.name) else source.name)


def _traced() -> Any:
    """What Dynamo has of the code that it traces now."""
    return torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output


def written_by_trace(besides: Any, runs_inside: Callable[[int], bool]) -> dict[int, Any]:
    """What traced code has written into Python objects that are older than the trace (``besides``
    one), by the objects' ids, the hooks that it has registered, by the ids of their tables, and what
    is in objects that it made and that are reached from there, or by hooks that run inside of a
    layer (``runs_inside``); equal where the same has been written. Python's random generator is one
    of them, which moves on with each number that is drawn. What layers are handed is as hooks are."""
    output = _traced()
    effects, drawn = output.side_effects, output.random_calls
    older = {
        key: held
        for key, held in list(effects.id_to_variable.items())  # torch 2.11 adds some where asked
        if isinstance(held.mutation_type, _OLDER) and effects.is_modified(held)
        if key != id(besides) and not _is_still_empty(held)
    }
    written: dict[int, Any] = {id(drawn): len(drawn)}
    written |= {key: _contents(effects, held) for key, held in older.items()}
    tables = [table for table in hooks_of_trace(output).values() if table.changed]
    hooks = {id(table.of_module): [*table.own.items.values()] for table in tables}
    written |= {key: [*map(_as_held, held)] for key, held in hooks.items()}
    seen: dict[int, Any] = {}
    inside = [hook for key, held in hooks.items() if runs_inside(key) for hook in held]
    waiting = [*older.values(), *inside, *handed_in_trace(output)]

    def look(value: Any) -> None:
        if value.mutation_type is None or not effects.is_modified(value):
            return
        if not isinstance(value.mutation_type, _OLDER):
            written.setdefault(id(value), (_same(value), _contents(effects, value)))
        waiting.extend(effects.store_attr_mutations.get(value, {}).values())

    for held in waiting:  # which grows
        VariableTracker.visit(look, held, seen)
    return written


_OLDER = (ValueMutationExisting, AttributeMutationExisting)


@dataclass(frozen=True)
class TableOfHooks:
    """Hooks of a module while it is traced.

    Attributes:
        module: whose they are.
        of_module: its own table, which is as it was.
        own: the trace's.
        before: its keys as it was made, in order.
    """

    module: torch.nn.Module
    of_module: Any
    own: Any
    before: list[Any]

    @property
    def changed(self) -> bool:
        """Whether traced code has registered or removed hooks and not undone it."""
        return [*self.own.items] != self.before


def handed_in_trace(output: Any) -> list[Any]:
    """Functions that layers were handed, and that the trace knows by what it made of them."""
    found: list[Any] = vars(output).setdefault("_fxrl_handed", [])
    return found


def hooks_of_trace(output: Any) -> dict[tuple[int, str], TableOfHooks]:
    """The tables of modules that traced code registers hooks on, by id and by name."""
    found: dict[tuple[int, str], TableOfHooks] = vars(output).setdefault("_fxrl_hooks", {})
    return found


def _is_still_empty(held: Any) -> bool:
    """Whether it is a dict that was empty and is, such as a cache that a training step clears."""
    return type(held) is ConstDictVariable and not held.items and not held.original_items


def _contents(effects: Any, held: Any) -> Any:
    """What an object holds that traced code wrote into; equal to nothing if that is not known.
    The modes that torch functions are called under are one, whoever enters any."""
    if isinstance(held, TorchFunctionModeStackVariable):
        return [_same(mode) for mode in held.symbolic_stack]
    attributes = effects.store_attr_mutations.get(held, {})
    found = [(name, _told(value)) for name, value in attributes.items()]
    if isinstance(held, (ConstDictVariable, BaseListVariable, SetVariable)):
        items = getattr(held, "set_items", None)  # of a set, in torch 2.15
        items = held.items if items is None else items
        pairs = items.items() if isinstance(items, dict) else enumerate(items)
        return found, [(key, _told(value)) for key, value in pairs]
    known = isinstance(held.mutation_type, (AttributeMutationExisting, AttributeMutationNew))
    return found if known else object()


def _told(value: Any) -> Any:
    value = getattr(value, "vt", value).unwrap()  # a key of a dict, or an item of a set
    return repr(value.as_python_constant()) if value.is_python_constant() else _same(value)


def _as_held(value: Any) -> Any:
    """A hook; or a constant, which torch 2.11 makes anew each time."""
    return repr(value) if isinstance(value, ConstantVariable) else _same(value)


def _same(value: Any) -> tuple[int, Any]:
    """Equal for itself alone; it lives on, so that no other has its id."""
    return id(value), value


def looked_up_by(ids: Container[int]) -> bool:
    """Whether traced code has read a dictionary, set or list that holds modules of these ids, or
    the ids themselves, as its keys or items."""
    found = (
        one
        for one in _traced().side_effects.keepalive
        if isinstance(one, (dict, set, frozenset, list))
    )
    return any(
        key in ids if type(key) is int else isinstance(key, torch.nn.Module) and id(key) in ids
        for one in found
        for key in one
    )


# Dynamo says of every cached function that it traces through; whose it is nobody can change here.
_CACHED_BY_LIBRARIES = (
    r'(?s)Dynamo detected a call to a .functools.lru_cache.*File "[^"]*(site|dist)-packages'
)
# Said of a builtin that ends a graph, which is told as a remark, with its line.
_UNTRACED_BUILTIN = r"(?s)Dynamo does not know how to trace the builtin"

# By which Dynamo's log of calls says the class that a line is of.
_tracer: Any = torch._dynamo.symbolic_convert
_name_of_line = _tracer.get_funcname


@contextmanager
def uncollected(before_more: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Pause garbage collection while objects are made by the thousand, and kept. ``before_more`` is
    called before it resumes, if it was on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            before_more()
            gc.enable()


@contextmanager
def _undisturbed() -> Iterator[None]:
    _tracer.get_funcname = lambda filename, lineno: None
    with uncollected(_age):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", _CACHED_BY_LIBRARIES, UserWarning)
                warnings.filterwarnings("ignore", _UNTRACED_BUILTIN, UserWarning)
                yield
        finally:
            _tracer.get_funcname = _name_of_line


_AGED: list[bool] = []  # holds one where the objects of a first step were made old, or looked at


def _age() -> None:
    """Let the collector count all objects among the old ones, which it looks at last.

    NOTE [Why without a look]: what a step was compiled to is kept, and is a million objects. The
    collector would look at them three times before it knew (0.9 s of the first step of 36 layers).
    Frozen and set free again they are old. So only once: cycles among them stay until the next full
    collection, and those of many captures would pile up. Only once, too, is it asked whether some
    are frozen on purpose: it counts them one by one, for which a million take 0.1 s.

    Exceptions that Dynamo traced are such cycles, and by their frames hold those of the caller: with
    the loss, its nodes know the weights' sizes, and a vocabulary that grew had no gradient.
    """
    if _AGED or gc.get_freeze_count():
        gc.collect(1)
    else:
        for one in gc.get_objects(generation=0):
            if issubclass(type(one), torch._dynamo.exc.ObservedException):
                one.__traceback__ = None
        gc.freeze()
        gc.unfreeze()
    _AGED[:] = [True]


@contextmanager
def compiles_undisturbed() -> Iterator[list[None]]:
    """While something is compiled no garbage is collected, and no warning is of a library's code.

    Compiling makes objects by the million, and each collection looks at all of them: 29 % of the
    first step of 36 layers (20.5 s, 14.6 s). Nor are files tokenized for the class that a line is
    of, which only Dynamo's log says (``TORCH_LOGS=trace_call``): 0.25 s.

    Yields:
        One entry for each compilation that has begun inside.
    """
    held, begun = ExitStack(), list[None]()

    def begin() -> None:
        begun.append(None)
        held.enter_context(_undisturbed())

    try:
        with around_compiles(begin, held.close):
            yield begun
    finally:
        held.close()  # a compilation of another thread may have begun here and end behind this


@contextmanager
def around_compiles(
    begin: Callable[[], object], end: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """``begin()`` runs before anything is traced and compiled inside, ``end()`` behind it."""

    def begins(_: Any) -> None:
        begin()

    def ends(_: Any) -> None:
        end()

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch._dynamo.reset() has removed them
            callback_handler.remove_start_callback(begins)
            callback_handler.remove_end_callback(ends)


def dynamo_settings(changes: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Dynamo with these settings.

    NOTE [Why not its config.patch]: from torch 2.13 on each leaves a context variable behind, which
    the thread's context holds for ever: a kilobyte for each call of a step.
    """
    return swapped(dynamo_config, **changes)


class Variation:
    """What has varied between the calls of one step, or what a step writes: Dynamo makes symbols of
    it.

    NOTE [Why not Dynamo's own account]: it is the process's, and kept by the code that is traced. A
    float of a library's layer that differs between two models (an ``eps``, a scale) would be a
    symbol in the second one's layers, which then are no regions.

    Attributes:
        written: where the step's graphs write numbers: objects' sources, and names or keys.
        lengths: how long the lists were, or of which ints, by their sources, that its graphs read.
        found: what bools and texts of the batch its graphs read, and where; by the list, or place.
    """

    def __init__(self) -> None:
        self._seen: Any = defaultdict(pgo.CodeState)
        self.written: set[tuple[str, Any]] = set()
        self.lengths: defaultdict[str, set[Any]] = defaultdict(set)
        self.found: defaultdict[str, set[tuple[str, Any]]] = defaultdict(set)

    @contextmanager
    def accounted(self) -> Iterator[None]:
        with swapped(pgo, _CODE_STATE=self._seen):
            variations.append(self)
            try:
                yield
            finally:
                variations.pop()


def why_anew() -> str:
    """What was otherwise than in all captures before of the function that was captured last."""
    known = torch._dynamo.utils.get_compilation_metrics()  # may have been cleared
    _, _, why = ((known[-1].recompile_reason if known else "") or "").partition(": ")
    return " ".join(why.partition("\n")[0].split())


#: The name of the function that is captured, which calls the loss.
STEP = "loss_step"
#: Of the steps that run, the innermost last.
variations: list[Variation] = []
