"""What is left of a loop where a graph ends is made anew by code, as lazy as it was.

An iterator is made of what it loops over, not of what that holds now: it may be written to before
the loop comes to it. So is a generator that nothing has been asked of; no code makes one amid its
run, and no graph ends while it waits.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call"
from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from operator import length_hint
from typing import Any

import torch
import torch._dynamo.polyfills.builtins
from torch._dynamo.bytecode_transformation import create_call_function, create_call_function_ex
from torch._dynamo.source import GlobalSource
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    ListIteratorVariable,
    ListVariable,
    LocalGeneratorObjectVariable,
    TupleVariable,
    UserDefinedObjectVariable,
    ZipVariable,
)
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.dicts import DictItemsVariable, DictViewVariable
from torch._dynamo.variables.functions import LocalGeneratorFunctionVariable
from torch._dynamo.variables.lists import DequeVariable

from fxrl.capture._dynamo.frames import callers, end_graph
from fxrl.capture.rest import Counted, Rest, Zipped

_call_reversed = BuiltinVariable.call_reversed
_call_generator = LocalGeneratorFunctionVariable.call_function
#: Those of lists, tuples and deques; torch 2.15 has one kind for each.
_LIST_ITERATOR: Any = getattr(
    torch._dynamo.variables.lists, "BaseListIteratorVariable", ListIteratorVariable
)
_rebuild_list = _LIST_ITERATOR.reconstruct
_DICT_ITERATOR: Any = getattr(torch._dynamo.variables.iter, "DictViewIterator", None)
_DICT_ITERATORS = (_DICT_ITERATOR,) if _DICT_ITERATOR else ()  # torch 2.11 has values in a list
_TOLD = (int, str, bool)


def turns_left(value: Any) -> float | None:
    """How often a loop over an iterator goes on, at most; None for what is no iterator."""
    found = value.realize()
    if isinstance(found, ZipVariable):
        return min((turns_left(part) or 0.0 for part in _zipped(found)), default=0.0)
    if _is_enumerate(found) and (counted := _counted(found)) is not None:
        return turns_left(counted)
    if isinstance(found, LocalGeneratorObjectVariable):
        return math.inf
    if isinstance(found, UserDefinedObjectVariable):
        return (
            length_hint(found.value) if isinstance(found.value, (Rest, Counted, Zipped)) else None
        )
    if "Iterator" not in type(found).__name__:
        return None
    if hasattr(found, "items"):
        return float(len(found.items) - found.index)
    if hasattr(found, "view_type"):
        return length_hint(found._iter)
    if hasattr(found, "it_index"):  # backwards, from torch 2.15 on
        return float(found.it_index + 1)
    return float(getattr(found, "len", math.inf))  # a range has it


def _zipped(found: Any) -> list[Any]:
    """The iterators of ``zip``; torch 2.11 has lists in their place."""
    if not hasattr(found, "iterables"):
        return list(found.iterable.items)
    return [
        ListIteratorVariable(part, found.index) if isinstance(part, list) else part
        for part in found.iterables
    ]


def _is_enumerate(found: Any) -> bool:
    """Dynamo traces one as a generator of its own."""
    return (
        isinstance(found, LocalGeneratorObjectVariable)
        and found.get_name() == "enumerate"
        and found.get_filename() == torch._dynamo.polyfills.builtins.__file__
    )


def _counted(found: Any) -> Any:
    """What ``enumerate`` counts, where it has begun to."""
    stack = found.inline_tracer.stack
    return next((one for one in reversed(stack) if turns_left(one) is not None), None)


def _make(codegen: Any, kind: type, given: list[Any]) -> None:
    """Code that calls a class of fxrl's."""
    codegen.add_push_null(lambda: codegen.load_import_from(kind.__module__, kind.__name__))
    codegen.foreach([ConstantVariable.create(one) if type(one) in _TOLD else one for one in given])
    codegen.extend_output(create_call_function(len(given), False))


def find_owners(tx: Any) -> None:
    """Notes which list or dictionary each iterator is of, if it can be written to behind the graph:
    one that no name leads to cannot. Asked where the graph ends, as Dynamo copies items then."""
    cache, owners, iterators = dict[int, Any](), dict[int, Any](), list[Any]()

    def look(value: Any) -> None:
        kind = type(value)  # isinstance would look into what the trace did not
        inside = vars(value).get("_base_vt", vars(value).get("_list_vt"))  # of torch 2.11
        if inside is not None:  # of a class of the user's
            owners[id(getattr(inside, "items", None))] = value
        elif issubclass(kind, (ListVariable, DequeVariable, ConstDictVariable)):
            owners.setdefault(id(value.items), value)
        elif issubclass(kind, (_LIST_ITERATOR, *_DICT_ITERATORS)):
            iterators.append(value)
        elif issubclass(kind, LocalGeneratorObjectVariable):
            tracer = value.inline_tracer
            VariableTracker.visit(look, [tracer.stack, tracer.symbolic_locals], cache)

    effects = tx.output.side_effects
    frames = [[one.stack, one.symbolic_locals] for one in callers(tx)]
    stored = [dict(attributes) for attributes in effects.store_attr_mutations.values()]
    VariableTracker.visit(look, [frames, stored], cache)
    if iterators:
        VariableTracker.visit(look, [*effects.id_to_variable.values()], cache)
    for one in iterators:
        if not hasattr(one, "over"):
            one.over = owners.get(id(_items(one)), getattr(one, "source_deque", None))


def _items(iterator: Any) -> Any:
    """The list or dictionary that an iterator of Dynamo's goes through."""
    if hasattr(iterator, "items"):
        return iterator.items
    return next((one for one in gc.get_referents(iterator._iter) if isinstance(one, dict)), None)


def _viewed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Torch 2.11 has values and items of a dictionary in a list of its own."""

    def call(self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        made = method(self, tx, name, args, kwargs)
        if name == "__iter__" and self.kv != "keys":
            made.over, made.view = self.dv_dict, self.kv
        return made

    return call


def _reversed(self: Any, tx: Any, obj: Any) -> Any:
    """An iterator, where torch 2.11 has a tuple, which is at its first item for ever."""
    made = _call_reversed(self, tx, obj)
    is_tuple = type(made) is TupleVariable
    return ListIteratorVariable(made.items, mutation_type=ValueMutationNew()) if is_tuple else made


def _rebuild_list_iterator(self: Any, codegen: Any) -> None:
    if getattr(self, "over", None) is None or self.is_exhausted:  # nobody can tell
        _rebuild_list(self, codegen)
    else:
        _make(codegen, Rest, [self.over, self.index, getattr(self, "view", "")])


def _rebuild_dict_iterator(self: Any, codegen: Any) -> None:
    _, (left,) = self._iter.__reduce__()[:2]
    if getattr(self, "over", None) is not None and self.view_type != "keys":
        _make(codegen, Rest, [self.over, len(self.over.items) - len(left), self.view_type])
        return
    made: dict[str, Callable[[Any], Any]]
    made = {"keys": lambda key: key.vt, "items": lambda item: TupleVariable([item[0].vt, item[1]])}
    items = [made.get(self.view_type, lambda value: value)(one) for one in left]
    _rebuild_list(ListIteratorVariable(items), codegen)


def _rebuild_zip(self: Any, codegen: Any) -> None:
    _make(codegen, Zipped, [TupleVariable(_zipped(self)), self.strict])


def _rebuild_generator(self: Any, codegen: Any) -> None:
    if not hasattr(self, "rebuild"):  # Dynamo closes it before it makes its code again
        self.rebuild = _as_it_stands(self, codegen)
    self.rebuild(codegen)


def _as_it_stands(self: Any, codegen: Any) -> Callable[[Any], None]:
    """What makes code for a generator."""
    tracer = self.inline_tracer
    finished = getattr(self, "_frame_state_finished", None) or self._is_generator_exhausted
    if finished():
        return ListIteratorVariable([]).reconstruct
    if tracer.instruction_pointer != self.begun_at:
        if not _is_enumerate(self):
            end_graph("started generator", "a generator waits amid its run, where no graph can end")
        count = tracer.symbolic_locals["start"].as_python_constant() + 1
        return partial(_make, kind=Counted, given=[_counted(self), count])
    function, args, kwargs = self.made_by
    if function.source is None and hasattr(function, "fn"):  # as that of ``enumerate``
        function = GlobalSource(codegen.tx.output.install_global("fxrl_generator", function.fn))
    return partial(_make_generator, function, args, kwargs)


def _make_generator(function: Any, args: Any, kwargs: dict[str, Any], codegen: Any) -> None:
    codegen.add_push_null(lambda: codegen(function), call_function_ex=True)
    codegen(TupleVariable([*args]))
    codegen(ConstDictVariable({ConstantVariable.create(k): v for k, v in kwargs.items()}))
    codegen.extend_output(create_call_function_ex(True, False))


def _called(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    made = _call_generator(self, tx, args, kwargs)
    made.made_by, made.begun_at = (self.vt, args, kwargs), made.inline_tracer.instruction_pointer
    return made


REPLACED: list[tuple[Any, str, Any]] = [
    (LocalGeneratorFunctionVariable, "call_function", _called),
    (LocalGeneratorObjectVariable, "reconstruct", _rebuild_generator),
    (_LIST_ITERATOR, "reconstruct", _rebuild_list_iterator),
    (ZipVariable, "reconstruct", _rebuild_zip),
]
REPLACED += [(kind, "reconstruct", _rebuild_dict_iterator) for kind in _DICT_ITERATORS]
if not _DICT_ITERATORS:
    REPLACED += [
        (kind, "call_method", _viewed(kind.call_method))
        for kind in (DictViewVariable, DictItemsVariable)
    ]
    REPLACED.append((BuiltinVariable, "call_reversed", _reversed))
