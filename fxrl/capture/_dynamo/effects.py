"""What does something besides computing: prints, logs, kept metrics, hooks for gradients, clocks.

What is printed, or appended to a list from outside, waits for the graph's end, a hook that never
looks at its gradient for the loss, and a clock is read as the graph runs. Loggers are asked at
once, under guards.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import logging
from collections.abc import Callable
from functools import reduce
from importlib.metadata import PackageNotFoundError, metadata
from types import FunctionType, MethodType
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource, DictGetItemSource, GlobalSource
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    SkipFunctionVariable,
    TensorVariable,
    TupleVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    dicts,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import FunctoolsPartialVariable, UserMethodVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.misc import (
    AutogradFunctionContextVariable,
    AutogradFunctionVariable,
    DebuggingVariable,
    DeletedVariable,
    LoggingLoggerVariable,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint_sequential

from fxrl.capture._dynamo.counters import note_written
from fxrl.capture._dynamo.frames import end_graph, in_body
from fxrl.capture._dynamo.guarding import guard_that
from fxrl.capture._dynamo.hooks import end_of_graph
from fxrl.capture._dynamo.kept import PRINTED, forget_bounds
from fxrl.capture._dynamo.later import Later
from fxrl.capture._dynamo.loops import find_owners
from fxrl.capture._dynamo.objects import entered
from fxrl.capture._torch import functions_stay, functorch_level, run_as_written
from fxrl.capture.clocks import CLOCKS, read_clock
from fxrl.capture.gradient_hooks import hang_on_loss, looks_away
from fxrl.capture.recorded import (
    checkpoint_filled,
    checkpoint_recorded,
    in_segments,
    may_be_filled,
    recorder_of_outputs,
    with_own_lists,
    with_own_mappings,
)

_Graph: Any = torch._dynamo.output_graph.OutputGraph
_tracing: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx
_is_constant_dict = ConstDictVariable.is_python_constant
_end_graph = _Graph.compile_subgraph
_call_checkpoint = CheckpointHigherOrderVariable._call_function
_erase_numbers = _Graph.remove_tensorify_specialized_graphargs
_check_effect = SideEffects.check_allowed_side_effect
_print = DebuggingVariable.call_function
_isinstance = LazyVariableTracker.lazy_isinstance
_ask_logger = LoggingLoggerVariable.call_method
_register_hook = TensorVariable._method_register_hook
_call_skipped = SkipFunctionVariable.call_function
_call_applied = AutogradFunctionVariable.call_apply


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
    if in_body(tx) or not known or None in told:
        return _print(self, tx, args, kwargs)
    names = ConstantVariable.create(tuple(named))
    tx.output.root_tx.debug_locals.append((_AtEnd(tell), [self, names, *named.values(), *told]))
    return ConstantVariable.create(None)


def _as_it_is(printed: Any) -> Any:
    """A printed value, of a list or dict a copy as it is now; None where it cannot wait."""
    if isinstance(printed, Later):
        return printed
    printed = printed.realize()
    if isinstance(printed, ConstDictVariable):
        items = {key: _as_it_is(value) for key, value in printed.items.items()}
        return None if None in items.values() else ConstDictVariable(items)
    if type(printed) in (ListVariable, TupleVariable):
        parts = [_as_it_is(one) for one in printed.items]
        return None if None in parts else type(printed)(parts)
    if (warning := _made_anew(printed)) is not None:
        return warning
    return printed if isinstance(printed, PRINTED) or _is_category(printed) else None


def _made_anew(printed: Any) -> Any:
    """``warnings.warn(OldWarning("..."))``, whose warning code behind the graph makes; None of all
    else, and of a class that makes its objects in a way of its own."""
    kind = getattr(printed, "exc_type", None) or getattr(printed, "value_type", None)
    if printed.source or not isinstance(kind, type) or not issubclass(kind, BaseException):
        return None
    own = any(isinstance(one, FunctionType) for one in (kind.__init__, kind.__new__))
    given = getattr(getattr(printed, "exc_vt", printed), "args", [])
    told = [_as_it_is(one) for one in given]
    return None if own or None in told else _Made(kind, told)


class _Made(VariableTracker):
    """An object of a class, made by code behind the graph."""

    def __init__(self, kind: type, given: list[Any]) -> None:
        super().__init__()
        self.kind, self.given = kind, given

    def reconstruct(self, codegen: Any) -> None:
        name = codegen.tx.output.install_global("fxrl_class", self.kind)
        codegen.add_push_null(lambda: codegen(GlobalSource(name)))
        codegen.foreach(self.given)
        codegen.extend_output(create_call_function(len(self.given), False))


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
    end_of_graph(self)
    find_owners(tx)
    tx.debug_locals = self.root_tx.debug_locals  # a function that is called has a list of its own
    self.is_traced = True
    guard_that(tx, functions_stay())
    note_written(self.side_effects)
    forget_bounds(self.side_effects)
    return _end_graph(self, tx, *args, **kwargs)


def _is_constant(self: Any) -> bool:
    """A dict that was written to is asked whether all of it is constant, to make its code: what the
    trace did not look into is not for that."""
    entries = self.items.values()
    untouched = any(type(one) is LazyVariableTracker and not one.is_realized() for one in entries)
    skipped = untouched and hasattr(_tracing().output, "is_traced")
    return not skipped and bool(_is_constant_dict(self))


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
    may_wait = name == "register_hook" and ignored and not self.source and not in_body(tx)
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
    if (inside := entered(self.value, tx, args)) is not None:
        return inside
    if self.value is checkpoint_sequential:
        return VariableTracker.build(tx, in_segments).call_function(tx, args, kwargs)
    if self.value is metadata and all(arg.is_python_constant() for arg in args):
        try:
            return UserDefinedObjectVariable(metadata(*(arg.as_python_constant() for arg in args)))
        except PackageNotFoundError as error:
            raise_observed_exception(PackageNotFoundError, tx, args=[*error.args])
    if args or kwargs or self.value not in CLOCKS or in_body(tx):
        return _call_skipped(self, tx, args, kwargs)
    which = (CLOCKS.index(self.value), len(tx.output.graph.nodes))
    time = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", read_clock, which, {}))
    return time.call_method(tx, "item", [], {})


def _applied(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An ``autograd.Function`` ends the graph inside of ``torch.func``'s transforms, as of what
    Dynamo makes of its backward the derivative is another one, and where its backward is told which
    of its outputs have no gradient, which are zeros in a graph."""
    if functorch_level() is not None:
        end_graph("call_apply", "an autograd.Function is inside of torch.func's transforms")
    if isinstance(forward := self.fn_cls.forward, MethodType):
        run_as_written(forward.__func__.__code__)
        end_graph("call_apply", "the forward of an autograd.Function is a classmethod")
    made = _call_applied(self, tx, args, kwargs)
    if isinstance(made, TupleVariable) and len(made.items) > 1:
        for kept, written in tx.output.side_effects.store_attr_mutations.items():
            if isinstance(kept, AutogradFunctionContextVariable) and "materialize_grads" in written:
                end_graph("call_apply", "the backward of an autograd.Function may get None")
    return made


def _is_allowed(self: Any, item: Any) -> bool:
    """What is checkpointed gives its hooks lists of its own, and takes them back."""
    own = isinstance(item, UserDefinedObjectVariable) and item.value is recorder_of_outputs()
    return own or bool(_check_effect(self, item))


def _checkpointed(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What is put into mappings inside of a checkpoint, and what hooks record there, leaves it with
    its result."""
    inside = getattr(getattr(args[0].realize(), "func", None), "fn", None)
    if inside not in (with_own_lists, with_own_mappings) and _fills_mappings(tx, args, kwargs):
        return VariableTracker.build(tx, checkpoint_filled).call_function(tx, args, kwargs)
    effects = tx.output.side_effects
    recorder = effects.id_to_variable.get(id(recorder_of_outputs()))
    lists = effects.store_attr_mutations.get(recorder, {}).get("global_var")
    none = not isinstance(lists, ConstDictVariable) or not lists.items
    if none or inside is with_own_lists:
        return _call_checkpoint(self, tx, args, kwargs)
    made = VariableTracker.build(tx, checkpoint_recorded)
    return made.call_function(tx, [recorder, *args], kwargs)


def _fills_mappings(tx: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether what is checkpointed may, and finds them as its arguments alone: another way to one,
    such as an attribute, would not lead to the copy. In a reentrant one what it fills has a
    gradient or none, by whether it was computed inside. Elsewhere a write ends the graph."""
    function, said = args[0].realize(), kwargs.get("use_reentrant")
    if said is None or not said.is_python_constant() or said.as_python_constant():
        return False
    handed = [*args[1:], *kwargs.values(), *getattr(function, "args", ())]
    handed += getattr(function, "keywords", {}).values()
    mappings = [one for one in (value.realize() for value in handed) if _may_be_filled(one)]
    written = tx.output.side_effects.store_attr_mutations.values()
    kept = [id(value.realize()) for attributes in written for value in attributes.values()]
    ways = [*map(id, mappings), *kept]
    return bool(mappings) and all(
        one.source is None and ways.count(id(one)) == 1 for one in mappings
    )


def _may_be_filled(value: Any) -> bool:
    kinds = (ConstDictVariable, UserDefinedObjectVariable)
    return isinstance(value, kinds) and may_be_filled(value.python_type())


def _as_text(tensor: Any, *, tensor_contents: str | None = None) -> str:
    """A tensor in an error's text. PyTorch leaves its guard of the dispatcher's keys to a frame,
    and where no text can be made, as of a fake tensor inside of ``torch.func``'s transforms, the
    exception keeps that: keys of another time would come back when it is collected."""
    with torch.no_grad(), _disable_current_modes(), torch._C._DisableFuncTorch():
        text: str = torch._tensor_str._str_intern(tensor, tensor_contents=tensor_contents)
    return text


def _without_numbers(self: Any) -> None:
    """Erases inputs that became constants. Dynamo asks this of all nodes that nobody but
    ``item()`` reads, and so of a write into a tensor of one number, which stays."""
    made = [node for node in self.graph.nodes if node.op != "placeholder"]
    values = {node: node.meta.pop("example_value") for node in made if "example_value" in node.meta}
    _erase_numbers(self)
    for node, value in values.items():
        node.meta["example_value"] = value


def _effects_now(_: Any) -> Any:
    """What an object's ``__dict__`` looks at. Once a hook's body was traced it is another one, and
    what is written into the one of before is lost (torch 2.13)."""
    return _tracing().output.side_effects


_LOOKS = [one for name, one in vars(dicts).items() if name == "SideEffectsProxyDict"]  # 2.12 on
REPLACED: list[tuple[Any, str, Any]] = [
    *((look, "side_effects", property(_effects_now, lambda *_: None)) for look in _LOOKS),
    (torch._tensor_str, "_str", _as_text),
    (CheckpointHigherOrderVariable, "_call_function", _checkpointed),
    (SideEffects, "check_allowed_side_effect", _is_allowed),
    (DebuggingVariable, "call_function", _print_later),
    (LoggingLoggerVariable, "call_method", _asked),
    (logging.getLogger, "_dynamo_marked_constant", True),
    (TensorVariable, "_method_register_hook", _hooked),
    (SkipFunctionVariable, "call_function", _skipped),
    (AutogradFunctionVariable, "call_apply", _applied),
    (_Graph, "compile_subgraph", _compile_subgraph),
    (_Graph, "remove_tensorify_specialized_graphargs", _without_numbers),
    (ConstDictVariable, "is_python_constant", _is_constant),
    (LazyVariableTracker, "lazy_isinstance", _is_instance),
]
