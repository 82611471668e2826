"""Where a graph must end inside of a function that is called, it ends where the rest can still be
captured."""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch._dynamo.polyfills.builtins
from torch._dynamo.bytecode_analysis import JUMP_OPNAMES
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.variables import (
    ConstantVariable,
    GetAttrVariable,
    ListVariable,
    LocalGeneratorObjectVariable,
    NNModuleVariable,
    TensorVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
    UserDefinedClassVariable,
    ZipVariable,
    script_object,
)

from fxrl.capture._dynamo.data import is_subscript
from fxrl.capture._dynamo.frames import callers, end_graph
from fxrl.ir.remark import Refusal

_tracer: Any = torch._dynamo.symbolic_convert
_TRANSLATOR: Any = _tracer.InstructionTranslatorBase
_may_end_outside = _TRANSLATOR.should_compile_partial_graph
_call_function = _TRANSLATOR.call_function
_leave_rest_out = _TRANSLATOR.step_graph_break
# None in torch 2.11, whose own can be rebuilt.
_DICT_ITERATOR: Any = getattr(torch._dynamo.variables.iter, "DictViewIterator", None)
#: Instructions that the next one is not run behind.
_LEAVE = ("RETURN", "RERAISE", "RAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_MANY_LAYERS = 32  # each is captured on its own then


def _may_end(self: Any) -> bool:
    """Whether a graph may end here in a function that is called.

    Asked at every line that is traced; of the callers, which stand still meanwhile, only once.
    """
    if not _may_end_here(self):  # nowhere, where the whole step is to be one graph
        return False
    if not hasattr(self, "callers_may_end"):
        self.callers_may_end = _may_end_within(self)
    return self.callers_may_end and not _loops(self)


def _may_end_here(self: Any) -> bool:
    """As Dynamo's own, but for a ``finally`` around it, such as each forward of transformers' has:
    what goes on behind the break has that too. It is not run where code at the break raises."""
    instruction = self.current_instruction
    around = instruction.exn_tab_entry
    if around is None or not _is_finally(self, around.target):
        return bool(_may_end_outside(self))
    instruction.exn_tab_entry = None
    try:
        return bool(_may_end_outside(self))
    finally:
        instruction.exn_tab_entry = around


#: By code, of handlers by their offset.
_FINALLY: WeakKeyDictionary[CodeType, dict[int, bool]] = WeakKeyDictionary()


def _is_finally(translator: Any, handler: Any) -> bool:
    """Whether a handler always goes on with its exception: no ``except``, here or around it, whose
    function could return."""
    known = _FINALLY.setdefault(translator.f_code, {})
    if handler.offset not in known:
        behind, reached, left = dict(itertools.pairwise(translator.instructions)), set(), [handler]
        while left:
            one = left.pop()
            if one in reached:
                continue
            reached.add(one)
            handled = one.exn_tab_entry and one.exn_tab_entry.target
            left += [after for after in (one.target, handled) if after]
            if not one.opname.startswith(_LEAVE):
                left.append(behind[one])
        returns = any(one.opname.startswith("RETURN") for one in reached)
        known[handler.offset] = handler.opname == "PUSH_EXC_INFO" and not returns
    return known[handler.offset]


def _may_end_within(called: Any) -> bool:
    """Whether a graph may end in a function that is called here.

    Not in a comprehension, which cannot be resumed; not where the caller goes on with another value
    than the function's; not where torch's backward hooks look for what autograd noted, which no
    trace holds; not where Python binds arguments by a signature, whose parameters no guard can be
    about; not where a hook is registered, which would be in a copy of its module's hooks; nor in a
    loop, whose function would be left out with all of its callers.
    """
    name, file = called.f_code.co_name, called.f_code.co_filename
    whole = (name.startswith("<") and name != "<lambda>") or not _is_result(called.parent)
    whole = whole or file in (torch.utils.hooks.__file__, inspect.__file__)
    whole = whole or (name.startswith("register_") and file == torch.nn.modules.module.__file__)
    allowed = torch._dynamo.config.nested_graph_breaks and not whole
    allowed = allowed and getattr(called, "_allow_nested_graph_breaks", True)  # not in torch 2.11
    allowed = allowed and called.funcvar.should_allow_nested_graph_breaks()
    caller = called.parent
    return bool(allowed and caller.should_compile_partial_graph() and not _in_loop(caller))


def _is_result(caller: Any) -> bool:
    """Whether what a function returns is what the instruction that runs it leaves on the stack.

    It is not where a class is called, and a builtin with a function of the user's (``sorted`` with
    a key), nor where an operator turns it into something else: ``x not in mine``. Dynamo would go
    on with it all the same.
    """
    instruction, called = caller.current_instruction, getattr(caller, "called", None)
    if not instruction.opname.startswith("CALL"):
        return instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") or is_subscript(instruction)
    called = called.realize() if called is not None else None
    builtin = type(called).__name__.endswith("BuiltinVariable")  # torch 2.13 has one for list alone
    of_list = isinstance(called, GetAttrVariable) and isinstance(called.obj, ListVariable)
    return not (builtin or of_list or isinstance(called, UserDefinedClassVariable))


def _call(self: Any, function: Any, args: Any, kwargs: Any) -> None:
    self.called = function  # for a graph that may end inside of it
    if _differentiates_again(function, args, kwargs):
        raise Refusal(
            "the loss differentiates its gradient again: rewrites have no second derivative",
            "take what is differentiated again in a step of its own, without fxrl",
        )
    if isinstance(getattr(function, "value", None), torch.nn.RNNBase):
        why = "traced, it would be a graph for each length of sequences"
        end_graph("a recurrent layer runs as one call", why)
    _call_function(self, function, args, kwargs)


#: Which functions differentiate, by whether they do so twice of themselves.
_DERIVATIVES: dict[Any, bool] = {
    torch.Tensor.backward: False,
    torch.autograd.backward: False,
    torch.autograd.grad: False,
    torch.autograd.functional.vjp: False,
    torch.autograd.functional.jacobian: False,
    torch.autograd.functional.jvp: True,
    torch.autograd.functional.hvp: True,
    torch.autograd.functional.vhp: True,
    torch.autograd.functional.hessian: True,
}
_SIGNATURES = {function: inspect.signature(function) for function in _DERIVATIVES}


def _differentiates_again(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call takes a derivative of a derivative, or one that may be differentiated."""
    function = function.realize()
    called = getattr(function, "value", None)
    if isinstance(function, GetAttrVariable) and isinstance(function.obj, TensorVariable):
        called, args = getattr(torch.Tensor, function.name, None), [function.obj, *args]
    if not isinstance(called, FunctionType) or called not in _DERIVATIVES:
        return False
    if _DERIVATIVES[called]:
        return True
    asked = _SIGNATURES[called].bind_partial(*args, **kwargs).arguments.get("create_graph")
    denied = asked is None or (asked.is_python_constant() and not asked.as_python_constant())
    return not denied


def _in_loop(self: Any) -> bool:
    return any(map(_loops, callers(self)))


def _loops(translator: Any) -> bool:
    """Whether what it traces is in a loop; one over a few modules, of layers, may go on behind a
    break."""
    lowest = _lowest_jumps(translator)[translator.instruction_pointer]
    if lowest >= translator.current_instruction.offset:
        return False
    iterated = [_left_in(value) for value in translator.stack if _iterates(value)]
    return not iterated or not all(map(_few_modules, iterated))


#: By code, for each of its instructions and behind the last.
_LOWEST: WeakKeyDictionary[CodeType, list[float]] = WeakKeyDictionary()


def _lowest_jumps(translator: Any) -> list[float]:
    """The lowest offset that an instruction jumps to, from each one on up to the next return: asked
    for at every line that is traced, of all callers."""
    code, instructions = translator.f_code, translator.instructions
    known = _LOWEST.get(code, [])
    if len(known) != len(instructions) + 1:
        known = [math.inf]
        for one in reversed(instructions):
            ends, jumps = one.opname.startswith("RETURN"), one.opname in JUMP_OPNAMES
            known.append(math.inf if ends else min(known[-1], one.argval) if jumps else known[-1])
        known.reverse()
        _LOWEST[code] = known
    return known


def _few_modules(left: Iterable[Any]) -> bool:
    """Looks at no more than it must: a loop over tokens is asked at each of its lines."""
    first = list(itertools.islice(left, _MANY_LAYERS))
    return len(first) < _MANY_LAYERS and all(any(map(_is_module, _members(one))) for one in first)


def _is_module(value: Any) -> bool:
    return isinstance(value.realize(), (NNModuleVariable, UnspecializedNNModuleVariable))


def _members(one: Any) -> Sequence[Any]:
    """Of one turn of a loop: a module beside its number, its name or what it is zipped with."""
    if not isinstance(one, tuple):
        found = one.realize()
        if not isinstance(found, TupleVariable):
            return (found,)
        one = found.items
    return [member for part in one for member in _members(part)]


def _iterates(value: Any) -> bool:
    return "Iterator" in type(value.realize()).__name__ or _is_listed(value)


def _is_listed(value: Any) -> bool:
    """Whether it is an iterator of which ``_left_in`` tells what is left."""
    found = value.realize()
    if isinstance(found, ZipVariable):
        known = all(isinstance(part, list) or _is_listed(part) for part in _zipped(found))
        return known and not (found.strict and len({len(list(one)) for one in _lefts(found)}) > 1)
    if _is_enumerate(found):
        return any(map(_is_listed, found.inline_tracer.stack))
    return "Iterator" in type(found).__name__ and (
        hasattr(found, "items") or hasattr(found, "view_type")
    )


def _is_enumerate(found: Any) -> bool:
    """Dynamo traces one as a generator of its own."""
    return (
        isinstance(found, LocalGeneratorObjectVariable)
        and found.get_name() == "enumerate"
        and found.get_filename() == torch._dynamo.polyfills.builtins.__file__
    )


def _zipped(found: Any) -> Iterable[Any]:
    held: Iterable[Any] = found.iterables if hasattr(found, "iterables") else found.iterable.items
    return held  # a list in torch 2.11


def _lefts(found: Any) -> Iterable[Iterable[Any]]:
    """What each of those that are zipped has yet to come to."""
    for part in _zipped(found):
        yield part[found.index :] if isinstance(part, list) else _left_in(part)


def _left_in(iterator: Any) -> Iterable[Any]:
    """What a loop has yet to come to: of a list, or of a dict's values, keys or items; tuples of
    what is counted or zipped."""
    found = iterator.realize()
    if _is_enumerate(found):
        tracer = found.inline_tracer
        count = tracer.symbolic_locals["start"].as_python_constant() + 1
        counted = next(filter(_is_listed, reversed(tracer.stack)))
        numbers = map(ConstantVariable.create, itertools.count(count))
        return zip(numbers, _left_in(counted), strict=False)
    if isinstance(found, ZipVariable):
        return zip(*_lefts(found), strict=False)
    if not hasattr(found, "view_type"):
        return list(getattr(found, "items", ()))[getattr(found, "index", 0) :]
    _, (left,) = found._iter.__reduce__()[:2]
    made = {"keys": lambda key: key.vt, "items": lambda item: (item[0].vt, item[1])}
    return [made.get(found.view_type, lambda value: value)(one) for one in left]


def _rebuild_iterator(self: Any, codegen: Any) -> None:
    """Code that makes what is left of a loop such as ``for layer in self.layers``: a graph that
    ends inside of it goes on behind its break, and is not left with its caller."""
    left = _as_tuple(_left_in(self))
    self.remaining_items = left.items  # where a generator is closed before this code is made again
    codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_python_module(iter)))
    codegen(left)
    codegen.extend_output(create_call_function(1, False))


def _as_tuple(left: Iterable[Any]) -> Any:
    """Tuples of Dynamo's of Python's."""
    return TupleVariable([_as_tuple(one) if isinstance(one, tuple) else one for one in left])


def _rebuild(kind: Any) -> Callable[[Any, Any], None]:
    as_ever = kind.reconstruct

    def rebuilt(self: Any, codegen: Any) -> None:
        (_rebuild_iterator if _is_listed(self) else as_ever)(self, codegen)

    return rebuilt


def _with_globals(make: Any) -> Any:
    """What goes on behind a break reads the globals of the function that it is a part of: where it
    has cells torch 2.11 would give it those of the outermost one. So its name is that of what makes
    it of its cells."""

    def made(self: Any, *args: Any) -> tuple[CodeType, str]:
        code, name = make(self, *args)
        if code.co_freevars:
            self.output.global_scope[name] = partial(FunctionType, code, self.f_globals, name, None)
        return code, name

    return made


def _make_function(self: Any, name: str, code: CodeType) -> None:
    """Code that calls the maker of that name with the cells on top of the stack."""
    self.extend_output(self.load_function_name(name, True, 1))
    self.extend_output(create_call_function(1, False))


def _end_at_checkpoint(self: Any, instruction: Any) -> None:
    """The rest of a function that is called is left out, unless its caller is amid an expression:
    torch 2.11 then goes on there with its locals shifted. The graph ends at the call instead."""
    if self.parent is not None and self.parent.stack:
        end_graph("step_unsupported", "")
    _leave_rest_out(self, instruction)


#: Objects of C++, such as a process group: where Dynamo cannot trace a member it would give up all
#: of a function, not end the graph.
_OPAQUE: Any = getattr(script_object, "CustomClassObjectVariable", None)  # before torch 2.15:
_OPAQUE = _OPAQUE or script_object.TorchScriptObjectVariable

REPLACED: list[tuple[Any, str, Any]] = [
    *(
        (_OPAQUE, name, method.__wrapped__)
        for name, method in vars(_OPAQUE).items()
        if inspect.isfunction(method) and hasattr(method, "__wrapped__")
    ),
    (_TRANSLATOR, "should_compile_partial_graph", _may_end_here),
    (_tracer.InliningInstructionTranslator, "should_compile_partial_graph", _may_end),
    (_TRANSLATOR, "call_function", _call),
    (_TRANSLATOR, "maybe_has_backedge", _in_loop),
    (ZipVariable, "reconstruct", _rebuild(ZipVariable)),
    (LocalGeneratorObjectVariable, "reconstruct", _rebuild(LocalGeneratorObjectVariable)),
]
if not hasattr(torch._dynamo.output_graph.OutputGraph, "install_resume_function_global"):  # 2.11
    REPLACED += [
        (_TRANSLATOR, name, _with_globals(getattr(_TRANSLATOR, name)))
        for name in ("create_resume", "_build_comprehension_fn")
    ]
    REPLACED += [
        (_TRANSLATOR, "step_graph_break", _end_at_checkpoint),
        (torch._dynamo.codegen.PyCodegen, "make_function_with_closure", _make_function),
    ]
if _DICT_ITERATOR is not None and "reconstruct" not in vars(_DICT_ITERATOR):
    REPLACED.append((_DICT_ITERATOR, "reconstruct", _rebuild_iterator))
