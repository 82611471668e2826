"""Python's own objects: imports, classes and their instances, layers that equal others.

An import that fails raises there: libraries try a faster package inside of a loss's function, and
go on without it. A class of torch has a name and a module: ``type(weight).__module__`` says whose
weight it is. A class that says itself what it has for instances is asked. A ``SimpleNamespace`` is
made: small models return one. A progress bar around a loop is left out. The graph ends where a
``random.Random`` draws: Dynamo would keep the state that it had while traced. What Dynamo reads
and does not guard is guarded: that two objects are apart, zero's sign, the order of an
``OrderedDict``, keys that are missing, the environment, a class's methods, its ``__getattr__``,
that it does not have what its base has, and what has been registered for an abstract one.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import dis
import logging
import operator
import os
import sys
from abc import ABCMeta, get_cache_token
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from inspect import getattr_static, signature
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import (
    ObservedAttributeError,
    raise_observed_exception,  # what traced code would raise here, for it to catch
)
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import (
    AttrSource,
    CallFunctionNoArgsSource,
    DictGetItemSource,
    GlobalSource,
    TypeDictSource,
)
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    SymNodeVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
    UserMethodVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.ctx_manager import ContextWrappingVariable
from torch._dynamo.variables.functions import (
    FunctoolsPartialVariable,
    NestedUserFunctionVariable,
)
from torch._dynamo.variables.lists import BaseListVariable, RangeVariable
from torch._dynamo.variables.misc import IgnoredFunctionVariable, RandomVariable
from torch._dynamo.variables.nn_module import (
    record_nn_module_stack,
    unpatched_nn_module_call,
    unpatched_nn_module_call_impl,
)
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._guards import Guard, Source
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from typing_extensions import is_typeddict

from fxrl.capture._dynamo.caches import computed_once
from fxrl.capture._dynamo.frames import end_graph
from fxrl.capture._dynamo.guarding import NOT_IN, guard_by, guard_that
from fxrl.capture._dynamo.hooks import is_hooked, make_handle, table_of
from fxrl.capture._torch import GETATTRS, global_hooks, handed_in_trace
from fxrl.capture.repeated import again, feeds, has_read, kind_of_cache, marked
from fxrl.capture.scoped_hooks import LEVELS
from fxrl.ir.graph import hint

_BUILDER: Any = torch._dynamo.variables.builder
_OUTPUT: Any = torch._dynamo.output_graph
_mark_static_address = torch._dynamo.decorators.mark_static_address
_META: Any = torch._subclasses.meta_utils
_read_gradient = _META.safe_grad
_read_address_type = torch._dynamo.utils.get_static_address_type
_method_of_object = UserDefinedObjectVariable.call_method
_make_instance: Any = UserDefinedClassVariable.call_function
_is_instance = BuiltinVariable.call_isinstance
_is_subclass: Any = getattr(BuiltinVariable, "call_issubclass", None)
_call_function = UserFunctionVariable.call_function
_call_module = UnspecializedNNModuleVariable.call_function
_GETATTR = next(name for name in GETATTRS if hasattr(UnspecializedNNModuleVariable, name))
_attribute_of_module: Any = getattr(UnspecializedNNModuleVariable, _GETATTR)
_attribute_of_function: Any = getattr(UserFunctionVariable, _GETATTR)
_attribute_of_object: Any = vars(UserDefinedObjectVariable).get(_GETATTR)
_HASATTR_BY_NAME = "attr" in signature(GuardBuilder.HASATTR).parameters  # not in torch 2.11
_find_getattr: Any = vars(UserDefinedObjectVariable).get("_check_for_getattr")
_build_variable = VariableBuilder.__call__
_tracer: Any = torch._dynamo.symbolic_convert.InstructionTranslator
_is_equal: Any = getattr(UserDefinedObjectVariable, "is_python_equal", None)  # None from 2.15 on
_keys_match = GuardBuilder.DICT_KEYS_MATCH
_inlined: Any = torch._dynamo.symbolic_convert.InliningInstructionTranslator
_find_global = _inlined.get_globals_source_and_value
_look_up = ConstDictVariable.getitem_const_raise_exception_if_absent
# Torch 2.15 does.
_KNOWS_NAMESPACES = UserDefinedClassVariable.is_supported_new_method(SimpleNamespace.__new__)


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


def _compare(translator: Any, instruction: Any) -> None:
    """Two modules that are compared tell layers apart, and so does an argument of one that may be
    what it has found by itself. That two objects are not one holds until they are, which Dynamo
    does not guard."""
    sides = translator.stack[-2:]
    getattr(translator, instruction.opname)(instruction)
    sides = [side.realize() for side in sides]
    if not all(isinstance(side, _OBJECTS) for side in sides):
        return
    if all(isinstance(side, UnspecializedNNModuleVariable) for side in sides):
        has_read(*(side.value for side in sides))
    tensors = [side.as_proxy().node for side in sides if isinstance(side, TensorVariable)]
    asked = len(tensors) == 2 and instruction.opname == "IS_OP"
    of_layer = {node.target is feeds for node in tensors if node.graph is tensors[0].graph}
    if asked and len(of_layer) == 2:
        why = "a layer asks whether its argument is a tensor that it has by itself"
        end_graph("is", why)
    left, right = sides
    if left.source and right.source and left is not right and instruction.opname == "IS_OP":
        guard_by(lambda own, other: f"{other} is not {own}", left.source, right.source)


_OBJECTS = BaseListVariable, ConstDictVariable, TensorVariable, UserDefinedObjectVariable


def _module_attribute(self: Any, tx: Any, name: str) -> Any:
    has_read(self.value)
    read = partial(_attribute_of_module, self, tx, name)
    if (made := table_of(self.value, name, tx, read) or computed_once(self, tx, name)) is not None:
        return made
    with _missing_until_found(self.source, name):
        return _attribute_of_module(self, tx, name)


@contextmanager
def _missing_until_found(source: Source | None, name: str) -> Iterator[None]:
    """An attribute that is missing is guarded to be, where an AttributeError tells so, too."""
    try:
        yield
    except ObservedAttributeError:
        if source is not None and _HASATTR_BY_NAME:
            install_guard(source.make_guard(partial(GuardBuilder.HASATTR, attr=name)))
        elif source is not None:
            install_guard(AttrSource(source, name).make_guard(GuardBuilder.HASATTR))
        raise


def _object_attribute(self: Any, tx: Any, name: str) -> Any:
    """A ``LoggerAdapter``'s log methods are its logger's, which are left out; keys are attributes
    where a dictionary's class says so: ``__getattr__ = dict.__getitem__``; what a model's
    configuration says is asked once."""
    if isinstance(self.value, logging.LoggerAdapter) and name.startswith(LEVELS):
        method = getattr(self.value, name)
        if callable(method):
            return IgnoredFunctionVariable(method)
    kind = type(self.value)
    found: Any = getattr(kind, "__getattr__", None)
    is_key = found in (dict.__getitem__, dict.get) and not hasattr(kind, name)
    if is_key and name not in vars(self.value):
        return self.call_method(tx, found.__name__, [ConstantVariable.create(name)], {})
    if (made := computed_once(self, tx, name)) is not None:
        return made
    configuration = _kind_of_configuration()
    if not isinstance(self.value, configuration):
        with _missing_until_found(self.source, name):
            return _attribute_of_object(self, tx, name)
    return _said_by(self, tx, name, configuration)


def _said_by(self: Any, tx: Any, name: str, configuration: Any) -> Any:
    """Its ``__getattribute__`` is 80 instructions for what each layer asks again. It looks at
    configurations alone, so that the answer is the same until the step writes into one."""
    written = (getattr(one, "value", None) for one in tx.output.side_effects.store_attr_mutations)
    if any(isinstance(value, configuration) for value in written):
        return _attribute_of_object(self, tx, name)
    said = vars(tx.output).setdefault("_said_by_configurations", {})
    if (id(self.value), name) not in said:
        said[id(self.value), name] = _attribute_of_object(self, tx, name)
    return said[id(self.value), name]


def _kind_of_configuration() -> Any:
    found = sys.modules.get("transformers.configuration_utils")
    return getattr(found, "PreTrainedConfig", getattr(found, "PretrainedConfig", ()))


def _build(self: Any, value: Any) -> Any:
    """What is found by two ways is one object as long as it is: Dynamo does not guard that where a
    global is one of them, and takes it for the same when it has become another."""
    effects = self.tx.output.side_effects
    known = effects[value].source if value in effects else None
    if known not in (None, self.source):
        self.install_guards(partial(GuardBuilder.DUPLICATE_INPUT, source_b=known))
        method = isinstance(self.source, AttrSource) and self.source.member == "__self__"
        if isinstance(value, (torch.nn.Module, torch.Tensor)) and not method:
            has_read(value, _holder(self.source, self.tx.output.root_tx))
    if type(value) is float and value == 0 and self.source:  # 0.0 equals -0.0
        guard_by(lambda own: f"repr({own}) == '{value}'", self.source)
    if type(value) is range:  # Dynamo takes its end for a size, which no loop goes up to
        self.install_guards(GuardBuilder.EQUALS_MATCH)
        bounds = map(ConstantVariable.create, (value.start, value.stop, value.step))
        return RangeVariable([*bounds], source=self.source)
    return _build_variable(self, value)


@wraps(_keys_match)
def _keys_in_order(self: Any, guard: Guard) -> None:
    """``OrderedDict.move_to_end`` changes no order that Dynamo guards: that of the dict inside."""
    _keys_match(self, guard)
    found = self.get(guard)
    if isinstance(found, OrderedDict):
        plain = all(map(ConstantVariable.is_literal, found))
        keys, read = ([*found], "[*{}]") if plain else ([*map(id, found)], "[*map(id, {})]")
        code = f"{read.format(self.arg_ref(guard))} == {keys}"
        self.object_aliasing_guard_codes.append((code, code))


def _looked_up(self: Any, tx: Any, key: Any) -> Any:
    """A key that a dict does not have is one until it has, where a KeyError tells so, too: of
    ``os.environ``, or the first of a ``ChainMap``."""
    if key not in self:
        self.install_dict_contains_guard(tx, [key])
    return _look_up(self, tx, key)


class _Scope:
    """Globals as attributes, of code whose module's name finds none or another one: its file was
    loaded twice, or never registered. Dynamo before torch 2.15 would read the other one's."""


def _global_of(self: Any, name: str) -> tuple[Any, Any, Source]:
    """What the standard library has for globals Dynamo takes for constants: ``os.getenv`` reads
    one that is not."""
    own, module = self.f_globals, sys.modules.get(self.f_globals.get("__name__", ""))
    if getattr(module, "__dict__", None) is not own:
        scope = own.setdefault("__fxrl_scope", _Scope())
        scope.__dict__ = own
        place = GlobalSource(self.output.install_global_by_id("fxrl_scope", scope))
        return scope, VariableBuilder(self, place)(scope), AttrSource(place, name)
    *found, source = _find_global(self, name)
    return (*found, source.base if self.f_globals.get(name) is os.environ else source)


def _globals(self: Any, tx: Any) -> Any:
    """``globals()``, to be read: where the graph would end at it in a function that is called, code
    would ask for those of the outermost one. A write ends the graph."""
    return _names_of(tx, tx.f_globals)


def _names_of(tx: Any, namespace: dict[str, Any]) -> Any:
    source = GlobalSource(tx.output.install_global_by_id("fxrl_globals", namespace))
    items = {
        ConstantVariable.create(name): LazyVariableTracker.create(
            value, source=DictGetItemSource(source, name)
        )
        for name, value in namespace.items()
    }
    return ConstDictVariable(items, source=source)


def _function_attribute(self: Any, tx: Any, name: str) -> Any:
    """``__globals__`` as ``globals()`` has it, which ``inspect.signature`` asks for, also of a
    function that Dynamo knows no way to, such as a method of an object that was made here."""
    if name == "__globals__" and not self.source:
        return _names_of(tx, self.get_globals())
    return _attribute_of_function(self, tx, name)


def _call_method(self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """``variable.get()`` of a ``ContextVar``: what it says when the graph runs."""
    if type(self.value) is not ContextVar or name != "get" or not self.source or kwargs:
        return _method_of_object(self, tx, name, args, kwargs)
    if not all(one.is_python_constant() for one in args):
        return _method_of_object(self, tx, name, args, kwargs)
    ask = partial(self.value.get, *(one.as_python_constant() for one in args))
    try:
        value = ask()
    except LookupError:
        return _method_of_object(self, tx, name, args, kwargs)
    install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
    asked: Source = AttrSource(self.source, "get")
    if args:
        asked = GlobalSource(tx.output.install_global("fxrl_context", ask))
    return VariableTracker.build(tx, value, CallFunctionNoArgsSource(asked))


def _equals(self: Any, other: Any) -> bool:
    """Keys of dicts and sets that say themselves what they equal are asked: Dynamo goes by
    identity."""
    others = isinstance(other, UserDefinedObjectVariable) and other.value is not self.value
    if not others or not isinstance(type(self.value).__eq__, FunctionType):
        return bool(_is_equal(self, other))
    tx = _tracer.current_tx()
    same = BuiltinVariable(operator.eq).call_function(tx, [self, other], {}).realize()
    if isinstance(same, SymNodeVariable):
        return bool(same.evaluate_expr(tx.output))  # guarded
    return bool(same.as_python_constant())


def _found_in_class(walk: Callable[..., Source]) -> Callable[..., Source]:
    """A method is what it is until its class has another, and an attribute of a base class is found
    until the class itself has one of that name."""

    def walk_mro(self: Any, *args: Any) -> Source:
        kind, source = (
            (self.value, self.source)
            if isinstance(self.value, type)
            else (type(self.value), self.cls_source)
        )
        name, output = args[-1], _tracer.current_tx().output
        known = vars(output).setdefault("guarded_mro_absent_keys", set())  # torch 2.11 has none
        if name not in vars(kind) and source and (id(kind), name) not in known:
            known.add((id(kind), name))
            absent = TypeDictSource(source).make_guard(partial(NOT_IN, key=name))
            install_guard(absent)
        found = walk(self, *args)
        if isinstance(getattr_static(kind, name, None), (FunctionType, classmethod)):
            install_guard(found.make_guard(GuardBuilder.ID_MATCH))
        return found

    return walk_mro


def _getattr_of_class(self: Any) -> Any:
    """A ``__getattr__`` is the one that it is until the class has another."""
    kind, found = type(self.value), _find_getattr(self)
    output = _tracer.current_tx().output
    known = vars(output).setdefault("_guarded_getattrs", set())
    if (
        isinstance(found, FunctionType)
        and found is not torch.nn.Module.__getattr__
        and kind not in known
    ):
        known.add(kind)
        guard_that(output.root_tx, lambda: getattr_static(kind, "__getattr__", None) is found)
    return found


def _holder(source: Any, root: Any) -> Any:
    """What a source reads an attribute or an item of; none where that is not known before it runs,
    or of a global."""
    scope = {"G": root.f_globals, "L": root.f_locals}
    with suppress(Exception):
        return source.base.get_value(scope, {}, {})
    return None


def _instance(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if tx.next_instruction.opname == "GET_ITER" and _is_progress_bar(self.value) and len(args) == 1:
        return args[0]  # ``for row in tqdm(rows)``: the loop has run before a bar could be drawn
    if self.value is RemovableHandle:
        return make_handle(tx, *args, **kwargs)
    if self.value is torch.nn.CrossEntropyLoss:  # Dynamo calls torch's function, unguarded
        here = AttrSource(tx.import_source(__name__), _CrossEntropyLoss.__name__)
        own = UserDefinedClassVariable(_CrossEntropyLoss, source=here)
        return _make_instance(own, tx, args, kwargs)
    if is_typeddict(self.value):  # Dynamo knows those alone that need all of their keys
        return VariableTracker.build(tx, dict).call_function(tx, args, kwargs)
    if self.value is MethodType and isinstance(args[-1].realize(), ContextWrappingVariable):
        return _Exit(args[-1].realize())  # of which ``entered`` has the first half
    if self.value is not SimpleNamespace or args or _KNOWS_NAMESPACES:
        return _make_instance(self, tx, args, kwargs)
    kind = UserDefinedClassVariable(_Namespace, source=self.source)
    made = tx.output.side_effects.track_new_user_defined_object(kind, kind, [])
    for name, value in kwargs.items():
        made.call_method(tx, "__setattr__", [ConstantVariable.create(name), value], {})
    return made


class _Exit(VariableTracker):
    """What leaves one of torch's contexts; where a graph ends inside, all runs as written."""

    def __init__(self, context: ContextWrappingVariable) -> None:
        super().__init__()
        self.context = context

    def call_function(self, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.context.exit(tx, *args)


def entered(function: Any, tx: Any, args: Any) -> Any:
    """``type(context).__enter__(context)``, as an ``ExitStack`` has it: torch's own contexts and
    ``nullcontext`` are to Dynamo what ``with`` enters, and have no method. None of all else."""
    if not args or getattr(function, "__name__", None) != "__enter__":
        return None
    context = args[0].realize()
    return context.enter(tx) if isinstance(context, ContextWrappingVariable) else None


def _call(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    inside = entered(self.fn, tx, args)
    return _call_function(self, tx, args, kwargs) if inside is None else inside


def _is_progress_bar(kind: Any) -> bool:
    tqdm: Any = sys.modules.get("tqdm.std")  # where it is not loaded, nothing is one
    return tqdm is not None and isinstance(kind, type) and issubclass(kind, tqdm.tqdm)


class _Namespace(SimpleNamespace):
    """What Dynamo sees for a ``SimpleNamespace``: of one whose attributes C code reads it would
    take what traced code has set for absent."""

    __getattribute__ = object.__getattribute__
    __setattr__ = object.__setattr__


class _CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """What Dynamo sees for its base, so that it traces how that is made and called."""


def _isinstance(self: Any, tx: Any, arg: Any, kind: Any) -> Any:
    """Classes that say themselves what they have for instances are asked: ``Float[Tensor, "b t"]``.

    Dynamo knows subclasses alone, and takes every tensor for none of theirs. Asked are the symbolic
    tensor, so that what is read of its sizes is guarded, and one on ``meta`` of the real one's
    class; the graph ends where they differ, or where values are read, which neither has.
    """
    _by_registry(tx, arg, kind)
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


def _issubclass(self: Any, tx: Any, kind: Any, base: Any) -> Any:
    made = _is_subclass(self, tx, kind, base)
    _by_registry(tx, kind, base)
    return made


def _by_registry(tx: Any, given: Any, base: Any) -> None:
    """An abstract base class has for subclasses what has been registered for one by now."""
    with suppress(Exception):  # what is no class raises where it is asked
        kinds = base.as_python_constant()
        if not any(
            isinstance(one, ABCMeta)
            for one in pytree.tree_leaves(getattr(kinds, "__args__", kinds))
        ):
            return
        kind = given.value if isinstance(given, UserDefinedClassVariable) else given.python_type()
        asked = vars(tx.output).setdefault("_asked_of_registries", {})
        if not asked:
            guard_that(tx, partial(_registered_as_then, get_cache_token(), asked))
        asked[kind, kinds] = issubclass(kind, kinds)


def _registered_as_then(token: object, asked: dict[Any, bool]) -> bool:
    return get_cache_token() == token or all(
        issubclass(*pair) is answer for pair, answer in asked.items()
    )


def _end_here(why: str) -> NoReturn:
    end_graph("isinstance() of a class that says itself what it has for instances", why)


def _says_itself(kind: Any) -> bool:
    return isinstance(kind, type) and type(kind).__instancecheck__ not in _BY_CLASS


_BY_CLASS = {
    type(kind).__instancecheck__
    for kind in (object, Callable, torch.Tensor, torch.nn.Parameter, torch.FloatTensor)
}


def _call_layer(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A layer that equals an earlier one is one call of the graph, while it has its place. What a
    module does around its forward is nothing without hooks, which are watched, and tracing it takes
    4 ms a layer; checkpointing that stands there is traced as a part of the layer."""
    layer = marked(self.value) if self.source and not global_hooks() else None
    if layer is None or is_hooked(self.value, tx):
        return _call_module(self, tx, args, kwargs)
    around, checkpointed = _around_forward(self.value)
    inside = hasattr(self.value.forward, "checkpointed")
    through = layer.first is layer or layer.contents.hooked
    whole = around or not (inside if checkpointed else not through)
    if whole or _keeps_cache(args, kwargs, checkpointed):
        return _call_module(self, tx, args, kwargs)
    place = str(id(self.value)), self.get_nn_module_stack_source(), tx, self.value
    forward = AttrSource(self.source, "forward")
    with record_nn_module_stack(*place):
        if through:
            traced = VariableBuilder(tx, AttrSource(forward, "checkpointed"))
            return traced(self.value.forward.checkpointed).call_function(tx, args, kwargs)
        install_guard(forward.make_guard(GuardBuilder.ID_MATCH))
        named = {ConstantVariable.create(name): value for name, value in kwargs.items()}
        token = ConstantVariable.create(layer.token)
        given = [token, TupleVariable([*args]), ConstDictVariable(named)]
        return TorchInGraphFunctionVariable(again).call_function(tx, given, {})


def told_apart(tx: Any, given: Any) -> Any:
    """Arguments of a layer as a graph takes them: of an object that is a mapping what it maps, such
    as the keys and values that some of Gemma's layers make for others; functions and modules, such
    as rotary embeddings that each layer is handed, by what they are.

    NOTE [Why that is enough]: a body is what the first layer's call of one traced. What the call
    read that is no argument of the layer must be an input of the whole graph, which is the same to
    all, and what it wrote is refused, as if the layer had found the function by itself.
    """
    if isinstance(given, ConstDictVariable):
        return given.clone(items={key: _told(tx, value) for key, value in given.items.items()})
    return given.clone(items=[_told(tx, value) for value in given.items])


def _told(tx: Any, value: Any) -> Any:
    value = value.realize()
    if isinstance(value, UserDefinedObjectVariable) and isinstance(value.value, UserDict):
        name = ConstantVariable.create("data")
        return VariableTracker.build(tx, getattr).call_function(tx, [value, name], {})
    made = FunctoolsPartialVariable, NestedUserFunctionVariable
    if isinstance(value, made):  # as the trace made it, and as long as it holds what it held
        handed_in_trace(tx.output).append(value)
        return ConstantVariable.create(str(id(value)))
    if not isinstance(value, (UserFunctionVariable, UnspecializedNNModuleVariable)):
        return value
    parts = (value, value.obj.realize()) if isinstance(value, UserMethodVariable) else (value,)
    owner = parts[-1]
    known = isinstance(owner, (UserFunctionVariable, UserDefinedObjectVariable))
    if not known or owner.source is None:  # made by the trace, and so may be what it closes over
        return value
    install_guard(owner.source.make_guard(GuardBuilder.ID_MATCH))
    held = (one.fn if isinstance(one, UserFunctionVariable) else one.value for one in parts)
    return ConstantVariable.create(" ".join(str(id(one)) for one in held))


def _around_forward(layer: Any) -> tuple[bool, bool]:
    """Whether the class of a layer does something around its forward, other than checkpointing it;
    whether it does that (layers of transformers, up to 5.17)."""
    call, implementation = type(layer).__call__, type(layer)._call_impl
    if implementation is not unpatched_nn_module_call_impl:
        return True, False
    if call is unpatched_nn_module_call:
        return False, False
    layers = sys.modules.get("transformers.modeling_layers")
    if call is not getattr(layers, "GradientCheckpointingLayer", torch.nn.Module).__call__:
        return True, False
    checkpointed = layer.gradient_checkpointing and layer.training
    return getattr(layer, "_can_checkpoint_with_cache", False), checkpointed


def _keeps_cache(args: Any, kwargs: dict[str, Any], checkpointed: bool) -> bool:
    """Whether a layer is given a cache; under a checkpoint, whether it is told to keep one, too."""
    values = {name: value.realize() for name, value in kwargs.items()}
    told = values.get("use_cache") if checkpointed else None
    asked = told is not None and (not told.is_python_constant() or told.as_python_constant())
    given = (*(value.realize() for value in args), *values.values())
    objects = (one.value for one in given if isinstance(one, UserDefinedObjectVariable))
    return asked or any(isinstance(value, kind_of_cache()) for value in objects)


def _is_traced(generator: object) -> bool:
    return False


def _name_nothing(self: Any, module: Any, source: Any) -> None:
    """Names of parameters for a graph that holds them are not asked for: here all are inputs. Each
    module that is read would have all those inside of it named, at every level: 4 ms a layer."""


def _mark_address(tensor: torch.Tensor, guard: bool = True) -> None:
    if not guard:
        _mark_static_address(tensor, guard)


def _address_type(tensor: torch.Tensor) -> str | None:
    """A weight is an input whatever marks it: a constant of the first of equal layers would be all
    of theirs."""
    return _read_address_type(tensor) and "unguarded"


def _fitting_gradient(tensor: Any) -> Any:
    """A tensor's gradient; none where the tensor was resized since it got one, as embeddings are:
    what stands for it in a trace takes no other size."""
    gradient = _read_gradient(tensor)
    return gradient if gradient is None or gradient.shape == tensor.shape else None


HANDLERS = {
    dis.opmap["IMPORT_NAME"]: _import_name,
    dis.opmap["LOAD_ATTR"]: _load_attribute,
    dis.opmap["IS_OP"]: _compare,
    dis.opmap["COMPARE_OP"]: _compare,
}
REPLACED: list[tuple[Any, str, Any]] = [
    (UserDefinedClassVariable, "call_function", _instance),
    (UserFunctionVariable, "call_function", _call),
    (BuiltinVariable, "call_isinstance", _isinstance),
    (BuiltinVariable, "call_globals", _globals),
    (UserFunctionVariable, _GETATTR, _function_attribute),
    # Which method traces a builtin is kept by its arguments: what captures keep is theirs alone.
    (BuiltinVariable, "call_function_handler_cache", {}),
    (UnspecializedNNModuleVariable, "call_function", _call_layer),
    (UnspecializedNNModuleVariable, _GETATTR, _module_attribute),
    (UserDefinedObjectVariable, "call_method", _call_method),
    (VariableBuilder, "__call__", _build),
    (GuardBuilder, "DICT_KEYS_MATCH", _keys_in_order),
    (_inlined, "get_globals_source_and_value", _global_of),
    (ConstDictVariable, "getitem_const_raise_exception_if_absent", _looked_up),
    (RandomVariable, "is_supported_random_obj", staticmethod(_is_traced)),
    *((module, "get_static_address_type", _address_type) for module in (_BUILDER, _OUTPUT)),
    (_BUILDER, "is_parameter_freezing", lambda: False),
    # Who reads a learning rate does not let all weights be marked, nor the optimizer be changed.
    (torch._dynamo.decorators, "mark_static_address", _mark_address),
    (_META, "safe_grad", _fitting_gradient),
    (OptimizerVariable, "_set_capturable", lambda self, tx: None),
    (_OUTPUT.OutputGraph, "add_fqn_info_for_inlined_modules", _name_nothing),
]
for owner in (UserDefinedClassVariable, UserDefinedObjectVariable):
    if (walk := vars(owner).get("get_source_by_walking_mro")) is not None:
        REPLACED.append((owner, walk.__name__, _found_in_class(walk)))
if _is_equal is not None:
    REPLACED.append((UserDefinedObjectVariable, "is_python_equal", _equals))
if _attribute_of_object is not None:
    REPLACED.append((UserDefinedObjectVariable, _GETATTR, _object_attribute))
if _is_subclass is not None:
    REPLACED.append((BuiltinVariable, "call_issubclass", _issubclass))
if _find_getattr is not None:
    REPLACED.append((UserDefinedObjectVariable, "_check_for_getattr", _getattr_of_class))
if not _KNOWS_NAMESPACES:
    UserDefinedClassVariable.supported_c_new_functions().add(SimpleNamespace.__new__)
