"""How Dynamo traces the Python that models, losses and libraries write, while fxrl captures.

A second door to private names of torch: here Dynamo is taught, for the time of a capture, what it
would end the graph at. ``_HANDLERS`` has instructions of Python that are traced otherwise,
``_REPLACED`` methods of Dynamo; both are put back behind each capture.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import dis
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from types import CodeType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch._dynamo.bytecode_analysis import JUMP_OPNAMES
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.exc import (
    raise_observed_exception,  # what traced code would raise here, for it to catch
    unimplemented,  # ends the graph
)
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    NNModuleVariable,
    SkipFunctionVariable,
    SymNodeVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import (
    FunctoolsPartialVariable,
    PolyfilledFunctionVariable,
    UserMethodVariable,
)
from torch._dynamo.variables.lists import BaseListVariable, ListVariable, SizeVariable
from torch._dynamo.variables.misc import (
    DebuggingVariable,
    IgnoredFunctionVariable,
    LoggingLoggerVariable,
    NumpyVariable,
    StringFormatVariable,
)
from torch._dynamo.variables.nn_module import (
    record_nn_module_stack,
    unpatched_nn_module_call,
    unpatched_nn_module_call_impl,
)
from torch.utils.checkpoint import checkpoint_sequential

from fxrl.capture._torch import dynamo_config, dynamo_settings, global_hooks
from fxrl.capture.branches import Branches
from fxrl.capture.breaks import place_of
from fxrl.capture.checks import check, counted_rounds, counted_rows
from fxrl.capture.clocks import CLOCKS, read_clock
from fxrl.capture.gradient_hooks import hang_on_loss, looks_away
from fxrl.capture.repeated import again, kind_of_cache, only_again
from fxrl.capture.scoped_hooks import LEVELS
from fxrl.capture.segments import in_segments
from fxrl.ir.graph import hint

_tracer: Any = torch._dynamo.symbolic_convert
_IMPORT, _ATTRIBUTE = dis.opmap["IMPORT_NAME"], dis.opmap["LOAD_ATTR"]
_JUMPS = [name for name in dis.opmap if "JUMP" in name and re.search("IF_(TRUE|FALSE)", name)]
_ENDS = {
    code
    for name, code in dis.opmap.items()
    if name.startswith(("RETURN", "RAISE", "JUMP_BACKWARD"))
}
_LEAVES = {
    *dis.hasjrel,
    *dis.hasjabs,
    *(code for name, code in dis.opmap.items() if name.startswith(("RETURN", "YIELD", "RERAISE"))),
}
_TRANSLATORS: tuple[Any, ...] = (
    _tracer.InstructionTranslator,
    _tracer.InliningInstructionTranslator,
    _tracer.InliningGeneratorInstructionTranslator,
)
_make_instance: Any = UserDefinedClassVariable.call_function
_ask_logger = LoggingLoggerVariable.call_method
_GETATTRS = ("var_getattr", "tp_getattro_impl")  # the second from torch 2.15 on
_GETATTR = next((name for name in _GETATTRS if name in vars(UserDefinedObjectVariable)), "")
_attribute: Any = getattr(UserDefinedObjectVariable, _GETATTR, None)
_call_module = UnspecializedNNModuleVariable.call_function
_AROUND = unpatched_nn_module_call, unpatched_nn_module_call_impl
_call_numpy = NumpyVariable.call_function
_call_skipped = SkipFunctionVariable.call_function
_is_instance = BuiltinVariable.call_isinstance
_call_polyfill = PolyfilledFunctionVariable.call_function
_make_range: Any = BuiltinVariable.call_range
_print = DebuggingVariable.call_function
_end_graph = torch._dynamo.output_graph.OutputGraph.compile_subgraph
_could_end = _tracer.InliningInstructionTranslator.should_compile_partial_graph
# None in torch 2.11, whose own can be rebuilt.
_DICT_ITERATOR: Any = getattr(torch._dynamo.variables.iter, "DictViewIterator", None)
_unpack, _to_list = TensorVariable.unpack_var_sequence, TensorVariable.method_tolist
_register_hook = TensorVariable._method_register_hook
# Torch 2.15 does.
_KNOWS_NAMESPACES = UserDefinedClassVariable.is_supported_new_method(SimpleNamespace.__new__)


# The function that is captured and the branches that are followed in it, innermost last.
_followed: list[tuple[CodeType, Branches]] = []


@contextmanager
def plain_python_is_traced(root: CodeType, branches: Branches) -> Iterator[None]:
    """What libraries write, and Dynamo ends the graph at, is traced as Python runs it.

    An import that fails raises there: libraries try a faster package inside of a loss's function,
    and go on without it. A class of torch has a name and a module: ``type(weight).__module__`` says
    whose weight it is. A class that says itself what it has for instances is asked. A
    ``SimpleNamespace`` is made: small models return one. A branch on a tensor's value that only
    raises is a check (``fxrl.capture.checks``); in the first graph of ``root`` others are followed,
    and so is a loop over as many rows as were found, or over chunks of them. What is printed waits
    for the graph's end, a clock is read as the graph runs, and a progress bar around a loop is left
    out. Where a graph must end inside of a function that is called, it ends where the rest can
    still be captured (``_may_end``). A hook for a gradient that it never looks at waits for the
    loss.
    """
    tables = [one.dispatch_table for one in _TRANSLATORS]
    before = [list(table) for table in tables]
    for table in tables:
        for opcode, handler in _HANDLERS.items():
            table[opcode] = handler
    _followed.append((root, branches))
    with (
        ExitStack() as replaced,
        dynamo_settings({"reorderable_logging_functions": {print, warnings.warn}}),
    ):
        for owner, name, own in _REPLACED:
            replaced.callback(_put_back, owner, name, vars(owner).get(name))
            setattr(owner, name, own)
        try:
            yield
        finally:
            _followed.pop()
            for table, own in zip(tables, before, strict=True):
                table[:] = own


def _put_back(owner: Any, name: str, had: Any) -> None:
    if had is None:
        delattr(owner, name)
    else:
        setattr(owner, name, had)


def is_first_graph() -> bool:
    """Whether what is compiled now begins the call of a step, so that nothing of it has run."""
    root_tx = _tracer.InstructionTranslator.current_tx().output.root_tx
    return bool(_followed) and root_tx.f_code is _followed[-1][0]


def _import_name(translator: Any, instruction: Any) -> None:
    level, names = (value.as_python_constant() for value in translator.stack[-2:])
    try:
        __import__(instruction.argval, translator.f_globals, None, names, level)
    except ImportError as error:
        translator.popn(2)
        known = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
        raise_observed_exception(known, translator, args=[str(error)])
    translator.IMPORT_NAME(instruction)


def _load_attribute(translator: Any, instruction: Any) -> None:
    if instruction.argval in ("__module__", "__name__", "__qualname__"):
        owner = translator.stack[-1].realize()
        if isinstance(owner, TorchInGraphFunctionVariable) and isinstance(owner.value, type):
            translator.pop()
            translator.push(ConstantVariable.create(getattr(owner.value, instruction.argval)))
            return
    translator.LOAD_ATTR(instruction)


def _jump(name: str) -> Callable[[Any, Any], None]:
    jumps_if, keeps = "IF_TRUE" in name, name.endswith("OR_POP")

    def jump(translator: Any, instruction: Any) -> None:
        value = translator.stack[-1].realize()
        taken = _taken(translator, instruction, jumps_if) if _known_when_run(value) else None
        if taken is None:
            getattr(translator, name)(instruction)
            return
        truth, branch = taken
        call = translator.output.create_proxy
        passes = value.as_proxy()
        if isinstance(value, SymNodeVariable):
            passes = call("call_function", torch.scalar_tensor, (passes,), {})
        if not truth:
            passes = call("call_function", torch.logical_not, (passes,), {})
        call("call_function", check, (passes, *(branch or (None, _user_line()))), {})
        if truth == jumps_if:
            translator.jump(instruction)
        if truth != jumps_if or not keeps:
            translator.pop()

    return jump


def _user_line() -> str:
    """File and line that are traced."""
    return place_of(torch._guards.TracingContext.extract_stack())[0]


def _taken(
    translator: Any, instruction: Any, jumps_if: bool
) -> tuple[bool, tuple[int, ...]] | None:
    """What to take a jump's value for, and the number of its branch: none where it only raises."""
    target, following = translator.indexof[instruction.target], translator.instruction_pointer
    jump_raises, next_raises = (
        _only_raises(translator.instructions[start:]) for start in (target, following)
    )
    if jump_raises != next_raises:
        return jumps_if != jump_raises, ()
    back = target < following  # of a loop
    jumps = not back and _length(translator.instructions[target:]) > _length(
        translator.instructions[following:]
    )
    found = _follow(translator.output, (translator.f_code, instruction.offset), jumps == jumps_if)
    return None if found is None else (bool(found[1]), found[:1])


def _follow(output: Any, place: Any, likely: int) -> tuple[int, int] | None:
    """The number of a branch and what its value is taken for, if the trace at hand follows any."""
    root, branches = _followed[-1] if _followed else (None, None)
    if branches is None or output.root_tx.f_code is not root:
        return None
    return branches.follow(output, place, likely, torch._guards.TracingContext.extract_stack)


def _length(instructions: list[Any]) -> int:
    """How far code that begins so goes on: a way that leaves early is the rarer one."""
    return next((n for n, one in enumerate(instructions) if one.opcode in _ENDS), len(instructions))


def _known_when_run(value: Any) -> bool:
    """Whether a value that Python decides by is a tensor's, or was read off one."""
    return isinstance(value, TensorVariable) or (
        isinstance(value, SymNodeVariable) and not value.sym_num.node.has_hint()
    )


def _only_raises(instructions: list[Any]) -> bool:
    """Whether code that begins so raises, and decides nothing before."""
    for one in instructions:
        if one.opname == "RAISE_VARARGS":
            return True
        if one.opcode in _LEAVES:
            return False
    return False


def _subscript(translator: Any, instruction: Any) -> None:
    """``x[index]`` with a tensor of one integer: Python reads the number, and so does the graph."""
    indexed, index = (value.realize() for value in translator.stack[-2:])
    if (
        all(isinstance(value, TensorVariable) for value in (indexed, index))
        and dynamo_config.capture_scalar_outputs
    ):
        value = index.as_proxy().node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in _INTEGERS:
            translator.pop()
            translator.push(index.call_method(translator, "item", [], {}))
    getattr(translator, instruction.opname)(instruction)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_SUBSCRIPT = dis.opmap.get("BINARY_SUBSCR")
_HANDLERS = {_IMPORT: _import_name, _ATTRIBUTE: _load_attribute} | {
    dis.opmap[name]: _jump(name) for name in _JUMPS
}
if _SUBSCRIPT is not None:  # a case of BINARY_OP from Python 3.14 on
    _HANDLERS[_SUBSCRIPT] = _subscript


def _unpacked(self: Any, tx: Any, idxes: Any = None) -> Any:
    return _unpack(_of_known_length(self, tx), tx, idxes)


def _listed(self: Any, tx: Any) -> Any:
    return _to_list(_of_known_length(self, tx), tx)


def _of_known_length(rows: Any, tx: Any) -> Any:
    """``rows`` as Python can go through them: of a number that depends on data a check is left."""
    value = rows.as_proxy().node.meta.get("example_value")
    likely = _likely_length(value) if isinstance(value, torch.Tensor) else None
    if likely is None:
        return rows
    *_, frame = torch._guards.TracingContext.extract_stack()
    found = _follow(tx.output, (frame.filename, frame.lineno or 0), likely)
    if found is None:
        return rows
    branch, length = found
    return wrap_fx_proxy(
        tx,
        tx.output.create_proxy(
            "call_function", counted_rows, (rows.as_proxy(), length, branch), {}
        ),
    )


def _likely_length(rows: torch.Tensor) -> int | None:
    """How many there are if all are that may be, or no more than must: of indices, which nobody
    writes into."""
    size = rows.shape[0] if rows.dim() else 0
    if rows.is_floating_point() or not isinstance(size, torch.SymInt) or size.node.has_hint():
        return None
    bounds = size.node.shape_env.var_to_range.get(size.node.expr)
    known = () if bounds is None else (bounds.upper, bounds.lower)
    return next(
        (int(bound) for bound in known if bound.is_Integer and 0 < bound < _MANY_ROWS), None
    )


_MANY_ROWS = 1000  # each round of a loop is traced


def _range(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """``range(0, n, 512)`` over as many rows as data says: of so many rounds, which is checked."""
    zero, one = ConstantVariable.create(0), ConstantVariable.create(1)
    given = [arg.realize() for arg in args]
    if len(given) not in (1, 2, 3):
        return _make_range(self, tx, *args, **kwargs)
    start, stop, step = (zero, *given, one) if len(given) == 1 else (*given, one)[:3]
    fixed = start.is_python_constant() and step.is_python_constant()
    unknown = isinstance(stop, SymNodeVariable) and _known_when_run(stop)
    *_, frame = torch._guards.TracingContext.extract_stack()
    place = (frame.filename, frame.lineno or 0)
    branch, rounds = (fixed and unknown and _follow(tx.output, place, 1)) or (0, _MANY_ROWS)
    if rounds >= _MANY_ROWS:
        return _make_range(self, tx, *args, **kwargs)
    first, by = start.as_python_constant(), step.as_python_constant()
    call = tx.output.create_proxy
    end = call("call_function", torch.scalar_tensor, (stop.as_proxy(),), {"dtype": torch.int64})
    call("call_function", counted_rounds, (end, first, by, rounds, branch), {})
    ends = (first, first + rounds * by, by)
    return _make_range(self, tx, *map(ConstantVariable.create, ends))


def _any_or_all(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """``if any(x.isnan().view(-1)):`` is a branch on ``x.any()``, not one on each entry."""
    decides = self.fn in (any, all) and tx.next_instruction.opname in (*_JUMPS, "TO_BOOL")
    given = args[0].realize() if decides and len(args) == 1 else None
    if isinstance(given, TensorVariable) and given.ndim == 1:
        return given.call_method(tx, self.fn.__name__, [], {})
    return _call_polyfill(self, tx, args, kwargs)


def _instance(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if tx.next_instruction.opname == "GET_ITER" and _is_progress_bar(self.value) and len(args) == 1:
        return args[0]  # ``for row in tqdm(rows)``: the loop has run before a bar could be drawn
    if self.value is not SimpleNamespace or args or _KNOWS_NAMESPACES:
        return _make_instance(self, tx, args, kwargs)
    kind = UserDefinedClassVariable(_Namespace, source=self.source)
    made = tx.output.side_effects.track_new_user_defined_object(kind, kind, [])
    for name, value in kwargs.items():
        made.call_method(tx, "__setattr__", [ConstantVariable.create(name), value], {})
    return made


def _is_progress_bar(kind: Any) -> bool:
    tqdm: Any = sys.modules.get("tqdm.std")  # where it is not loaded, nothing is one
    return tqdm is not None and isinstance(kind, type) and issubclass(kind, tqdm.tqdm)


def _isinstance(self: Any, tx: Any, arg: Any, kind: Any) -> Any:
    """Classes that say themselves what they have for instances are asked: ``Float[Tensor, "b t"]``.

    Dynamo knows subclasses alone, and takes every tensor for none of theirs. Asked are the symbolic
    tensor, so that what is read of its sizes is guarded, and one on ``meta`` of the real one's
    class; the graph ends where they differ, or where values are read, which neither has.
    """
    kinds = kind.as_python_constant() if isinstance(arg, TensorVariable) else ()
    if not any(map(_says_itself, kinds if isinstance(kinds, tuple) else (kinds,))):
        return _is_instance(self, tx, arg, kind)
    symbolic, own = arg.as_proxy().node.meta["example_value"], arg.python_type()
    try:
        sizes, strides = (list(map(hint, found)) for found in (symbolic.shape, symbolic.stride()))
        like = torch.empty_strided(sizes, strides, dtype=symbolic.dtype, device="meta")
        if own is torch.nn.Parameter:
            like = own(like, symbolic.requires_grad)
        answers = {isinstance(one, kinds) for one in (symbolic, like)}
    except Exception as error:  # whatever a class asks of tensors
        _end_here(f"{kinds} asks a tensor for what is known when it runs ({error})")
    if len(answers) > 1 or own not in (torch.Tensor, torch.nn.Parameter):
        _end_here(f"whether {own.__name__} is one of {kinds} is known when it runs")
    return ConstantVariable.create(answers.pop())


def _end_here(why: str) -> NoReturn:
    unimplemented(
        gb_type="isinstance() of a class that says itself what it has for instances",
        context="",
        explanation=why,
        hints=[],
    )


def _says_itself(kind: Any) -> bool:
    return isinstance(kind, type) and type(kind).__instancecheck__ not in _BY_CLASS


_BY_CLASS = {
    type(kind).__instancecheck__
    for kind in (object, Callable, torch.Tensor, torch.nn.Parameter, torch.FloatTensor)
}


def _print_later(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Told to the graph's end, unless it is in a body of its own: a checkpoint's, or the one of
    equal layers, which would print once for all of them."""
    named = {
        name: value.realize()
        for name, value in kwargs.items()
        if name not in ("flush", "stacklevel")
    }
    told = [_as_it_is(arg) for arg in args]
    known = all(_may_wait(name, value) for name, value in named.items())
    if _in_body(tx) or not known or None in told:
        return _print(self, tx, args, kwargs)
    names = ConstantVariable.create(tuple(named))
    tx.output.root_tx.debug_locals.append(
        (_Teller(self.value), [self, names, *named.values(), *told])
    )
    return ConstantVariable.create(None)


def _as_it_is(printed: Any) -> Any:
    """A printed value, of a list or dict a copy as it is now; None where it cannot wait."""
    printed = printed.realize()
    if isinstance(printed, ConstDictVariable):
        items = {key: _as_it_is(value) for key, value in printed.items.items()}
        return None if None in items.values() else ConstDictVariable(items)
    if type(printed) in (ListVariable, TupleVariable):
        parts = [_as_it_is(one) for one in printed.items]
        return None if None in parts else type(printed)(parts)
    return printed if isinstance(printed, _PRINTED) else None


def _may_wait(name: str, value: Any) -> bool:
    return isinstance(value, ConstantVariable) or (name == "file" and value.source is not None)


class _Teller(DebuggingVariable):
    """Calls a function that tells with its keywords, which Dynamo leaves out."""

    def reconstruct(self, codegen: Any) -> None:
        codegen.load_import_from(__name__, tell.__name__)


def tell(function: Callable[..., None], names: tuple[str, ...], *values: Any) -> None:
    """``function``, by captured code: with keywords of these names, whose values come first."""
    function(*values[len(names) :], **dict(zip(names, values, strict=False)))


def _hooked(self: Any, tx: Any, name: str, hook: Any) -> Any:
    """A hook that looks away from its gradient is hung on the loss, by code behind the graph."""
    ignored = tx.next_instruction.opname == "POP_TOP"  # the handle, which would remove the hook
    may_wait = name == "register_hook" and ignored and not self.source and not _in_body(tx)
    if not may_wait or not _looks_away(hook):
        return _register_hook(self, tx, name, hook)
    tx.output.root_tx.debug_locals.append((_HookHanger(hang_on_loss), [hook]))
    return ConstantVariable.create(None)


def _looks_away(hook: Any) -> bool:
    given, hook = 0, hook.realize()
    while isinstance(hook, FunctoolsPartialVariable):
        given, hook = given + len(hook.args), hook.func.realize()
    bound = isinstance(hook, UserMethodVariable)  # its self is given
    return hasattr(hook, "get_code") and looks_away(hook.get_code(), given + bound)


class _HookHanger(DebuggingVariable):
    """Calls ``hang_on_loss``."""

    def reconstruct(self, codegen: Any) -> None:
        codegen.load_import_from(hang_on_loss.__module__, hang_on_loss.__name__)


def _in_body(tx: Any) -> bool:
    """Whether what is traced is a graph of its own inside of the one at hand."""
    return tx.output.current_tracer.parent is not None or any(
        "_trace_first" in one.f_code.co_name for one in _callers(tx)
    )


def _skipped(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A clock's time, read where the graph runs, and layers that are checkpointed in segments; at
    other functions that Dynamo skips the graph ends."""
    if self.value is checkpoint_sequential:
        return VariableTracker.build(tx, in_segments).call_function(tx, args, kwargs)
    if args or kwargs or self.value not in CLOCKS or _in_body(tx):
        return _call_skipped(self, tx, args, kwargs)
    which = (CLOCKS.index(self.value), len(tx.output.graph.nodes))
    time = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", read_clock, which, {}))
    return time.call_method(tx, "item", [], {})


def _averaged(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``np.mean(metrics)`` of numbers that were read off tensors, which no array is made of. One
    number is told as one, which JSON can write, where no method of an array is asked for."""
    given = [_of_numbers(tx, one.realize()) for one in args]
    made = _call_numpy(self, tx, given, kwargs)
    read_off = any(one is not own.realize() for one, own in zip(given, args, strict=True))
    is_one = read_off and getattr(made, "ndim", None) == 0
    if is_one and tx.next_instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
        return made.call_method(tx, "item", [], {})
    return made


def _of_numbers(tx: Any, given: Any) -> Any:
    """A list of numbers, some of them known when the graph runs, as a tensor; all else as it is."""
    items = [one.realize() for one in given.items] if isinstance(given, BaseListVariable) else []
    numbers = all(isinstance(one, (ConstantVariable, SymNodeVariable)) for one in items)
    if not numbers or not any(map(_known_when_run, items)):
        return given
    call = tx.output.create_proxy
    dtype = torch.int64 if all(one.python_type() is int for one in items) else torch.float64
    made = [
        call("call_function", torch.scalar_tensor, (one.as_proxy(),), {"dtype": dtype})
        for one in items
    ]
    return wrap_fx_proxy(tx, call("call_function", torch.stack, (made,), {}))


def _asked(self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Whether a logger would tell something: by levels that are guarded."""
    logger, root = self.value, logging.root
    known = logger is root or root.manager.loggerDict.get(logger.name) is logger
    if name not in ("isEnabledFor", "getEffectiveLevel") or not known or kwargs:
        return _ask_logger(self, tx, name, args, kwargs)
    source: Any = AttrSource(tx.import_source("logging"), "root")
    if logger is not root:
        source = reduce(AttrSource, ("manager", "loggerDict"), source)
        source = DictGetItemSource(source, logger.name)
    names, above = ["disabled", "manager.disable", "level"], logger
    while above.parent is not None:
        above = above.parent
        names.append(f"{names[-1].removesuffix('level')}parent.level")
    for path in names:
        level = reduce(AttrSource, path.split("."), source)
        install_guard(level.make_guard(GuardBuilder.CONSTANT_MATCH))
    given = (one.as_python_constant() for one in args)
    return ConstantVariable.create(getattr(logger, name)(*given))


def _attribute_of(self: Any, tx: Any, name: str) -> Any:
    """A ``LoggerAdapter``'s log methods are its logger's, which are left out; keys are attributes
    where a dictionary's class says so: ``__getattr__ = dict.__getitem__``."""
    if isinstance(self.value, logging.LoggerAdapter) and name.startswith(LEVELS):
        method = getattr(self.value, name)
        if callable(method):
            return IgnoredFunctionVariable(method)
    kind = type(self.value)
    found: Any = getattr(kind, "__getattr__", None)
    is_key = found in (dict.__getitem__, dict.get) and not hasattr(kind, name)
    if is_key and name not in vars(self.value):
        return self.call_method(tx, found.__name__, [ConstantVariable.create(name)], {})
    return _attribute(self, tx, name)


def _compile_subgraph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    tx.debug_locals = self.root_tx.debug_locals  # a function that is called has a list of its own
    return _end_graph(self, tx, *args, **kwargs)


def _name_nothing(self: Any, module: Any, source: Any) -> None:
    """Names of parameters for a graph that holds them are not asked for: here all are inputs. Each
    module that is read would have all those inside of it named, at every level: 4 ms a layer."""


_PRINTED = (TensorVariable, SymNodeVariable, SizeVariable, ConstantVariable, StringFormatVariable)


def _callers(translator: Any) -> Iterator[Any]:
    """It and those that it was called by."""
    while translator is not None:
        yield translator
        translator = getattr(translator, "parent", None)


def _may_end(self: Any) -> bool:
    """Whether a graph may end here in a function that is called.

    Not in a comprehension, which cannot be resumed; not where torch's backward hooks look for what
    autograd noted, which no trace holds; nor in a loop, whose function would be left out with all
    of its callers.
    """
    name, file = self.f_code.co_name, self.f_code.co_filename
    whole = (name.startswith("<") and name != "<lambda>") or file == torch.utils.hooks.__file__
    return _could_end(self) and not whole and not _in_loop(self)


def _in_loop(self: Any) -> bool:
    return any(map(_loops, _callers(self)))


def _loops(translator: Any) -> bool:
    """Whether what it traces is in a loop; one over a few modules, of layers, may go on behind a
    break."""
    offset, following = (
        translator.current_instruction.offset,
        translator.instructions[translator.instruction_pointer :],
    )
    ends = next(
        (n for n, one in enumerate(following) if one.opname.startswith("RETURN")), len(following)
    )
    if not any(one.opname in JUMP_OPNAMES and one.argval < offset for one in following[:ends]):
        return False
    iterated = [
        _left_in(value.realize())
        for value in translator.stack
        if "Iterator" in type(value.realize()).__name__
    ]
    return not iterated or not all(map(_few_modules, iterated))


def _few_modules(left: list[Any]) -> bool:
    return len(left) < _MANY_LAYERS and all(
        isinstance(one.realize(), (NNModuleVariable, UnspecializedNNModuleVariable)) for one in left
    )


def _left_in(iterator: Any) -> list[Any]:
    """What a loop has yet to come to: of a list, or of a dict's values, keys or items."""
    if not hasattr(iterator, "view_type"):
        return list(getattr(iterator, "items", ()))[getattr(iterator, "index", 0) :]
    _, (left,) = iterator._iter.__reduce__()[:2]
    made = {"keys": lambda key: key.vt, "items": lambda item: TupleVariable([item[0].vt, item[1]])}
    return [made.get(iterator.view_type, lambda value: value)(one) for one in left]


_MANY_LAYERS = 32  # each is captured on its own then


def _rebuild_iterator(self: Any, codegen: Any) -> None:
    """Code that makes what is left of a loop over a dict, such as ``for layer in self.layers``: a
    graph that ends inside of the loop goes on behind its break, and is not left with its caller."""
    codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_python_module(iter)))
    codegen(TupleVariable(_left_in(self)))
    codegen.extend_output(create_call_function(1, False))


class _Namespace(SimpleNamespace):
    """What Dynamo sees for a ``SimpleNamespace``: of one whose attributes C code reads it would
    take what traced code has set for absent."""

    __getattribute__ = object.__getattribute__
    __setattr__ = object.__setattr__


def _call_layer(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A layer that equals an earlier one is one call of the graph, while it has its place. What a
    module does around its forward is nothing without hooks, which are watched, and tracing it takes
    4 ms a layer."""
    token = only_again(self.value) if self.source and not global_hooks() else None
    around = type(self.value).__call__, type(self.value)._call_impl
    if token is None or around != _AROUND or any(map(_is_cache, kwargs.values())):
        return _call_module(self, tx, args, kwargs)
    named = {ConstantVariable.create(name): value for name, value in kwargs.items()}
    given = [ConstantVariable.create(token), TupleVariable([*args]), ConstDictVariable(named)]
    install_guard(AttrSource(self.source, "forward").make_guard(GuardBuilder.ID_MATCH))
    place = str(id(self.value)), self.get_nn_module_stack_source(), tx, self.value
    with record_nn_module_stack(*place):
        return TorchInGraphFunctionVariable(again).call_function(tx, given, {})


def _is_cache(value: Any) -> bool:
    known = value.realize()
    return isinstance(known, UserDefinedObjectVariable) and isinstance(known.value, kind_of_cache())


_REPLACED: list[tuple[Any, str, Any]] = [
    (UnspecializedNNModuleVariable, "call_function", _call_layer),
    (TensorVariable, "unpack_var_sequence", _unpacked),
    (TensorVariable, "method_tolist", _listed),
    (TensorVariable, "_method_register_hook", _hooked),
    (UserDefinedClassVariable, "call_function", _instance),
    (NumpyVariable, "call_function", _averaged),
    (LoggingLoggerVariable, "call_method", _asked),
    (logging.getLogger, "_dynamo_marked_constant", True),
    (SkipFunctionVariable, "call_function", _skipped),
    (BuiltinVariable, "call_isinstance", _isinstance),
    (BuiltinVariable, "call_range", _range),
    (PolyfilledFunctionVariable, "call_function", _any_or_all),
    (DebuggingVariable, "call_function", _print_later),
    (torch._dynamo.output_graph.OutputGraph, "compile_subgraph", _compile_subgraph),
    (torch._dynamo.output_graph.OutputGraph, "add_fqn_info_for_inlined_modules", _name_nothing),
    (_tracer.InliningInstructionTranslator, "should_compile_partial_graph", _may_end),
    (_tracer.InstructionTranslatorBase, "maybe_has_backedge", _in_loop),
]
if _GETATTR:
    _REPLACED.append((UserDefinedObjectVariable, _GETATTR, _attribute_of))
if _DICT_ITERATOR is not None and "reconstruct" not in vars(_DICT_ITERATOR):
    _REPLACED.append((_DICT_ITERATOR, "reconstruct", _rebuild_iterator))
if not _KNOWS_NAMESPACES:
    UserDefinedClassVariable.supported_c_new_functions().add(SimpleNamespace.__new__)
