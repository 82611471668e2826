"""What code keeps: lists and deques from outside that grow, and what is stored back.

A list that is only appended to is not looked into: that is done by code behind the graph.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import dis
import operator
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, ChainedSource, GlobalSource
from torch._dynamo.variables import (
    CellVariable,
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.lists import DequeVariable, ListVariable, SizeVariable
from torch._dynamo.variables.misc import StringFormatVariable

from fxrl.capture._dynamo.counters import counted, place_of_source
from fxrl.capture._dynamo.frames import end_graph, in_body
from fxrl.capture._dynamo.guarding import guard_by
from fxrl.capture._dynamo.later import Later
from fxrl.capture._torch import STEP, variations

_TRANSLATOR: Any = torch._dynamo.symbolic_convert.InstructionTranslatorBase
_load = _TRANSLATOR._load_attr
_wrap = VariableBuilder._wrap
_call_builtin = BuiltinVariable.call_function
_LISTS = (list, deque)
_GROW = ("append", "extend", "insert", "appendleft", "extendleft")
_LENGTHS = 3  # one that a step clears and fills has two or three
_INDICES = 12  # where sizes vary, those that differ in length are captured a few times each
_CHANGES = 3  # eight combinations of bools
_TOLD = (bool, str, type(None))
_HOLDS = (Mapping, list, tuple, *_TOLD)
_PLACE = re.compile(r"\[\d+\]")
_TOLD_BY_ROW = (
    "Python decides by what the batch says of each row, which is another at each step; torch.where "
    "of a bool tensor is captured once"
)
_EVER_LONGER = "the loss reads a list that was as long, or of these numbers, in no step before"
PRINTED = (TensorVariable, SymNodeVariable, SizeVariable, ConstantVariable, StringFormatVariable)
"""Values that code behind the graph can be given as they are."""


def _attribute(self: Any, name: Any) -> None:
    """``seen.append``, where it is called and nothing is known of ``seen`` yet."""
    owner, called = self.stack[-1], self.current_instruction
    method = called.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and called.arg % 2)
    if name in _GROW and method and _is_unseen_list(owner):
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
    if not made_here or not in_body(tx) or tensor.requires_grad or tensor.has_grad_fn:
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


def _store_in_global(translator: Any, instruction: Any) -> None:
    name, value = instruction.argval, translator.stack[-1]
    if _is_unseen_list(value) and name not in translator.symbolic_globals:
        named = isinstance(value.source, GlobalSource) and value.source.global_name == name
        of_module = place_of_source(value.source) or ("", None)
        if value.peek_value() is translator.f_globals.get(name) and (named or of_module[1] == name):
            translator.pop()
            return
    translator.STORE_GLOBAL(instruction)


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
    """``append`` and its like of a list from outside, by code behind the graph.

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
        return not known and not in_body(tx) and all(map(_is_made_here, args))

    def wait(self, tx: Any, args: Any) -> None:
        install_guard(self.owner.source.make_guard(GuardBuilder.TYPE_MATCH))
        tx.output.root_tx.debug_locals.append((self, [*args]))


def _is_made_here(item: Any) -> bool:
    """Whether it is a value, or a list, tuple or dict of values that the graph's code makes."""
    if isinstance(item, Later):
        return True
    item = item.realize()
    if type(item) not in (ListVariable, TupleVariable, ConstDictVariable):
        return isinstance(item, PRINTED)
    parts = item.items.values() if isinstance(item, ConstDictVariable) else item.items
    return not item.source and all(map(_is_made_here, parts))


def _built(self: Any, value: Any) -> Any:
    """A list is looked into after all: what waits to be appended to it has been by now."""
    if (number := counted(self, value)) is not None:
        return number
    if type(value) is GeneratorType:  # torch 2.15 would look into copies of what it holds
        return self.wrap_user_defined(value)
    is_traced = hasattr(self.tx.output, "is_traced")
    if (why := _ever_another(self.tx.output.root_tx, self.source, value)) is not None:
        if is_traced:
            return VariableTracker(source=self.source)  # code behind the graph is handed it
        end_graph("left to Python", why)
    built = _wrap(self, value)
    if type(value) not in _LISTS or is_traced:
        return built
    if type(value) is deque:
        built.maxlen = ConstantVariable.create(value.maxlen)  # which Dynamo forgets
        guard_by(lambda own: f"{own}.maxlen == {value.maxlen}", self.source)
    end = getattr(self.tx.output.root_tx, "debug_locals", [])
    for entry in [entry for entry in end if getattr(entry[0], "value", None) is value]:
        end.remove(entry)
        if (source := entry[0].owner.source) != self.source:  # one list, as long as it is one
            self.install_guards(partial(GuardBuilder.DUPLICATE_INPUT, source_b=source))
        built.call_method(self.tx, entry[0].name, entry[1], {})
    return built


def _ever_another(root: Any, source: Any, value: Any) -> str | None:
    """Why a value is not captured as it is: it would be at each step. Where the graph ends instead,
    Python reads it.

    Such are a list that is no batch's and had another length in each capture so far, and what a
    batch says of each row otherwise than in tensors: a list of bools, or texts.
    """
    if not variations or root is None:
        return None
    if type(value) in _TOLD:
        told = _is_told(root, source) and _is_other_each_time(source, value)
        return _TOLD_BY_ROW if told else None
    if type(value) not in _LISTS or source.name.startswith("L['batch']") or _is_of_frames(source):
        return None
    known = variations[-1].lengths[source.name]
    known.add(len(value))
    if not _is_first(root) and all(type(one) is int for one in value):
        known.add(tuple(value))  # such as the rows that Python found, of which an index is made
    lengths = sum(type(one) is int for one in known)
    many = lengths > _LENGTHS or len(known) - lengths > _INDICES
    return _EVER_LONGER if many else None


def _is_of_frames(source: Any) -> bool:
    """Whether it is a list of Dynamo's own, of the functions that go on behind a break, or of what
    one of them goes on with: as many as there are, and no graph may end where they are read."""
    name = getattr(getattr(source, "base", source), "local_name", "")
    return bool(name.startswith("__nested_"))


def _is_told(root: Any, source: Any) -> bool:
    """Whether it is of the batch; behind a break, of any mapping or sequence there."""
    base = source.get_base() if isinstance(source, ChainedSource) else source
    local = getattr(base, "local_name", None)
    return local == "batch" or (
        not _is_first(root) and local in root.f_locals and isinstance(root.f_locals[local], _HOLDS)
    )


def _is_first(root: Any) -> bool:
    """Whether the trace began with the step's own function, and not behind a break."""
    return bool(root.f_code.co_name == STEP)


def _is_other_each_time(source: Any, value: Any) -> bool:
    """Whether the rows of a batch have had more values than one each, in the captures so far, in
    so many places that all of their combinations would be captures."""
    found = variations[-1].found[_PLACE.sub("[]", source.name)]
    found.add((source.name, value))
    return len(found) - len({place for place, _ in found}) > _CHANGES


def forget_bounds(effects: Any) -> None:
    """What older deques hold now is no more than they may, and is put into them as it is: Dynamo
    refuses to where a deque says how many that are."""
    for held in effects.id_to_variable.values():
        if isinstance(held, DequeVariable) and held.source is not None:
            held.maxlen = ConstantVariable.create(None)


HANDLERS = {dis.opmap[name]: _store(name) for name in ("STORE_ATTR", "STORE_SUBSCR")}
HANDLERS[dis.opmap["STORE_DEREF"]] = _store_in_cell
HANDLERS[dis.opmap["STORE_GLOBAL"]] = _store_in_global
REPLACED: list[tuple[Any, str, Any]] = [
    (BuiltinVariable, "call_function", _in_place),
    (_TRANSLATOR, "_load_attr", _attribute),
    (VariableBuilder, "_wrap", _built),
]
