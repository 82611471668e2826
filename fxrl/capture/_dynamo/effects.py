"""What does something besides computing: prints, logs, kept metrics, hooks for gradients, clocks.

What is printed, or appended to a list from outside, waits for the graph's end, a hook that never
looks at its gradient for the loss, and a clock is read as the graph runs. Loggers are asked at
once, under guards.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import dis
import logging
import operator
import sys
from collections import deque
from collections.abc import Callable
from functools import partial, reduce
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any

import torch
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource
from torch._dynamo.variables import (
    CellVariable,
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    SkipFunctionVariable,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import FunctoolsPartialVariable, UserMethodVariable
from torch._dynamo.variables.lists import ListVariable, SizeVariable
from torch._dynamo.variables.misc import (
    DebuggingVariable,
    DeletedVariable,
    LoggingLoggerVariable,
    StringFormatVariable,
)
from torch.utils.checkpoint import checkpoint_sequential

from fxrl.capture._dynamo.counters import counted, note_written, place_of_source
from fxrl.capture._dynamo.ends import callers
from fxrl.capture._dynamo.guarding import guard_that
from fxrl.capture._torch import functions_stay
from fxrl.capture.clocks import CLOCKS, read_clock
from fxrl.capture.gradient_hooks import hang_on_loss, looks_away
from fxrl.capture.segments import in_segments

_TRANSLATOR: Any = torch._dynamo.symbolic_convert.InstructionTranslatorBase
_tracing: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx
_is_constant_dict = ConstDictVariable.is_python_constant
_end_graph = torch._dynamo.output_graph.OutputGraph.compile_subgraph
_print = DebuggingVariable.call_function
_load = _TRANSLATOR._load_attr
_wrap = VariableBuilder._wrap
_isinstance = LazyVariableTracker.lazy_isinstance
_ask_logger = LoggingLoggerVariable.call_method
_register_hook = TensorVariable._method_register_hook
_call_builtin = BuiltinVariable.call_function
_call_skipped = SkipFunctionVariable.call_function
_LISTS = (list, deque)
_PRINTED = (TensorVariable, SymNodeVariable, SizeVariable, ConstantVariable, StringFormatVariable)


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
    tx.output.root_tx.debug_locals.append((_AtEnd(tell), [self, names, *named.values(), *told]))
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
    return printed if isinstance(printed, _PRINTED) or _is_category(printed) else None


def _may_wait(name: str, value: Any) -> bool:
    from_outside = name == "file" and value.source is not None
    return isinstance(value, ConstantVariable) or from_outside or _is_category(value)


def _is_category(value: Any) -> bool:
    """A class from outside: ``warnings.warn("...", FutureWarning)``."""
    kinds = BuiltinVariable, UserDefinedClassVariable
    return isinstance(value, kinds) and value.source is not None


class _AtEnd(DebuggingVariable):
    """Behind the graph, code calls this function of fxrl's."""

    def reconstruct(self, codegen: Any) -> None:
        codegen.load_import_from(self.value.__module__, self.value.__name__)


def tell(function: Callable[..., None], names: tuple[str, ...], *values: Any) -> None:
    """``function``, by captured code: with keywords of these names, which Dynamo leaves out, and
    whose values come first."""
    function(*values[len(names) :], **dict(zip(names, values, strict=False)))


def _compile_subgraph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    tx.debug_locals = self.root_tx.debug_locals  # a function that is called has a list of its own
    self.is_traced = True
    guard_that(tx, functions_stay())
    note_written(self.side_effects)
    return _end_graph(self, tx, *args, **kwargs)


def _is_constant(self: Any) -> bool:
    """A dict that was written to is asked whether all of it is constant, to make its code: what the
    trace did not look into is not for that."""
    entries = self.items.values()
    untouched = any(type(one) is LazyVariableTracker and not one.is_realized() for one in entries)
    skipped = untouched and hasattr(_tracing().output, "is_traced")
    return not skipped and bool(_is_constant_dict(self))


def _attribute(self: Any, name: Any) -> None:
    """``seen.append``, where it is called and nothing is known of ``seen`` yet."""
    owner, called = self.stack[-1], self.current_instruction
    method = called.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and called.arg % 2)
    if name in ("append", "extend") and method and _is_unseen_list(owner):
        self.pop()
        self.push(_Grow(owner, name))
    else:
        _load(self, name)


def _in_place(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``seen += [x]`` likewise."""
    if self.fn is operator.iadd and _is_unseen_list(args[0]):
        grow = _Grow(args[0], "extend")
        if grow.may_wait(tx, args[1:]):
            grow.wait(tx, args[1:])
            return args[0]
    return _call_builtin(self, tx, args, kwargs)


def _is_unseen_list(value: Any) -> bool:
    return (
        type(value) is LazyVariableTracker
        and not value.is_realized()
        and value.peek_type() in _LISTS
    )


def _store(name: str) -> Callable[[Any, Any], None]:
    """What is read off an object, grown, and put back there was there all the time; storing it
    would look into it."""

    def store(translator: Any, instruction: Any) -> None:
        stack, of_item = translator.stack, name == "STORE_SUBSCR"
        value, owner = stack[-3:-1] if of_item else stack[-2:]
        if instruction.argval == "requires_grad" and _told_to_require_grad(
            translator, owner, value
        ):
            translator.popn(2)
            return
        if not _is_unseen_list(value):
            getattr(translator, name)(instruction)
            return
        owner, place = owner.realize(), stack[-1].realize() if of_item else instruction.argval
        if _is_place_of(value.source, owner, place):
            translator.popn(3 if of_item else 2)
        else:
            getattr(translator, name)(instruction)

    return store


def _told_to_require_grad(tx: Any, tensor: Any, told: Any) -> bool:
    """Let a tensor that a checkpointed function makes require a gradient, as T5 tells a bias of
    zeros: code sees that it does, and nobody can ask for the gradient. False for all else, which
    Dynamo sees to."""
    tensor, told = tensor.realize(), told.realize()
    made_here = isinstance(tensor, TensorVariable) and tensor.source is None
    if not made_here or not _in_body(tx) or tensor.requires_grad or tensor.has_grad_fn:
        return False
    if not told.is_python_constant() or told.as_python_constant() is not True:
        return False
    tensor.requires_grad = True
    tensor.as_proxy().node.meta["example_value"].requires_grad_()
    return True


def _store_in_cell(translator: Any, instruction: Any) -> None:
    cell, value = translator.symbolic_locals.get(instruction.argval), translator.stack[-1]
    if isinstance(cell, CellVariable) and cell.pre_existing_contents is value:
        written = translator.output.side_effects.store_attr_mutations.get(cell)
        if _is_unseen_list(value) and not written:
            translator.pop()
            return
    translator.STORE_DEREF(instruction)


def _is_place_of(source: Any, owner: Any, place: Any) -> bool:
    if owner.source is None or place_of_source(source) is None:
        return False
    if isinstance(place, VariableTracker):
        known = isinstance(owner, ConstDictVariable) and place.is_python_constant()
        place = place.as_python_constant() if known else None
    else:
        kind: Any = type(getattr(owner, "value", None))
        plain = kind.__setattr__ in (object.__setattr__, torch.nn.Module.__setattr__)
        place = place if plain and not hasattr(kind, place) else None
    return place_of_source(source) == (owner.source.name, place)


class _Grow(VariableTracker):
    """``append`` or ``extend`` of a list from outside, by code behind the graph.

    NOTE [Why the list is not looked into]: it would be guarded to be as long as it is. Where a
    trainer keeps its metrics (``self.metrics["kl"].append(kl.item())``) each of its steps would be
    captured anew.
    """

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__(source=AttrSource(owner.source, name))
        self.owner, self.value, self.name = owner, owner.peek_value(), name

    def call_function(self, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        ignored = tx.next_instruction.opname == "POP_TOP"
        if kwargs or not ignored or not self.may_wait(tx, args):
            return self.owner.realize().call_method(tx, self.name, args, kwargs)
        self.wait(tx, args)
        return ConstantVariable.create(None)

    def may_wait(self, tx: Any, args: Any) -> bool:
        known = self.owner.is_realized() or self.value in tx.output.side_effects
        return not known and len(args) == 1 and not _in_body(tx) and _is_made_here(args[0])

    def wait(self, tx: Any, args: Any) -> None:
        install_guard(self.owner.source.make_guard(GuardBuilder.TYPE_MATCH))
        tx.output.root_tx.debug_locals.append((self, [*args]))


def _is_made_here(item: Any) -> bool:
    """Whether it is a value, or a list, tuple or dict of values that the graph's code makes."""
    item = item.realize()
    if type(item) not in (ListVariable, TupleVariable, ConstDictVariable):
        return isinstance(item, _PRINTED)
    parts = item.items.values() if isinstance(item, ConstDictVariable) else item.items
    return not item.source and all(map(_is_made_here, parts))


def _built(self: Any, value: Any) -> Any:
    """A list is looked into after all: what waits to be appended to it has been by now."""
    if (number := counted(self, value)) is not None:
        return number
    built = _wrap(self, value)
    if type(value) not in _LISTS or hasattr(self.tx.output, "is_traced"):
        return built
    end = getattr(self.tx.output.root_tx, "debug_locals", [])
    for entry in [entry for entry in end if getattr(entry[0], "value", None) is value]:
        end.remove(entry)
        if (source := entry[0].owner.source) != self.source:  # one list, as long as it is one
            self.install_guards(partial(GuardBuilder.DUPLICATE_INPUT, source_b=source))
        built.call_method(self.tx, entry[0].name, entry[1], {})
    return built


def _is_instance(self: Any, kind: type) -> bool:
    """Whether an entry is still in its dict is asked of the entry, which is not looked into for
    that: one from outside was not deleted."""
    return kind is not DeletedVariable and _isinstance(self, kind)


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


def _hooked(self: Any, tx: Any, name: str, hook: Any) -> Any:
    """A hook that looks away from its gradient is hung on the loss, by code behind the graph."""
    ignored = tx.next_instruction.opname == "POP_TOP"  # the handle, which would remove the hook
    may_wait = name == "register_hook" and ignored and not self.source and not _in_body(tx)
    if not may_wait or not _looks_away(hook):
        return _register_hook(self, tx, name, hook)
    tx.output.root_tx.debug_locals.append((_AtEnd(hang_on_loss), [hook]))
    return ConstantVariable.create(None)


def _looks_away(hook: Any) -> bool:
    given, hook = 0, hook.realize()
    while isinstance(hook, FunctoolsPartialVariable):
        given, hook = given + len(hook.args), hook.func.realize()
    bound = isinstance(hook, UserMethodVariable)  # its self is given
    return hasattr(hook, "get_code") and looks_away(hook.get_code(), given + bound)


def _skipped(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A clock's time, read where the graph runs, layers that are checkpointed in segments, and what
    is installed, which is asked at once; at other functions that Dynamo skips the graph ends."""
    if self.value is checkpoint_sequential:
        return VariableTracker.build(tx, in_segments).call_function(tx, args, kwargs)
    if self.value is metadata and all(arg.is_python_constant() for arg in args):
        try:
            return UserDefinedObjectVariable(metadata(*(arg.as_python_constant() for arg in args)))
        except PackageNotFoundError as error:
            raise_observed_exception(PackageNotFoundError, tx, args=[*error.args])
    if args or kwargs or self.value not in CLOCKS or _in_body(tx):
        return _call_skipped(self, tx, args, kwargs)
    which = (CLOCKS.index(self.value), len(tx.output.graph.nodes))
    time = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", read_clock, which, {}))
    return time.call_method(tx, "item", [], {})


def _in_body(tx: Any) -> bool:
    """Whether what is traced is a graph of its own inside of the one at hand."""
    return tx.output.current_tracer.parent is not None or any(
        "_trace_first" in one.f_code.co_name for one in callers(tx)
    )


HANDLERS = {dis.opmap[name]: _store(name) for name in ("STORE_ATTR", "STORE_SUBSCR")}
HANDLERS[dis.opmap["STORE_DEREF"]] = _store_in_cell
REPLACED: list[tuple[Any, str, Any]] = [
    (BuiltinVariable, "call_function", _in_place),
    (DebuggingVariable, "call_function", _print_later),
    (LoggingLoggerVariable, "call_method", _asked),
    (logging.getLogger, "_dynamo_marked_constant", True),
    (TensorVariable, "_method_register_hook", _hooked),
    (SkipFunctionVariable, "call_function", _skipped),
    (torch._dynamo.output_graph.OutputGraph, "compile_subgraph", _compile_subgraph),
    (ConstDictVariable, "is_python_constant", _is_constant),
    (_TRANSLATOR, "_load_attr", _attribute),
    (VariableBuilder, "_wrap", _built),
    (LazyVariableTracker, "lazy_isinstance", _is_instance),
]
