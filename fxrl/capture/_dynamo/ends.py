"""Where a graph must end inside of a function that is called, it ends where the rest can still be
captured."""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.bytecode_analysis import JUMP_OPNAMES
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.decorators import mark_dynamic, mark_unbacked, maybe_mark_dynamic
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import (
    CellVariable,
    ConstantVariable,
    GetAttrVariable,
    LazyVariableTracker,
    ListVariable,
    NNModuleVariable,
    TensorVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
    script_object,
)

from fxrl.capture._dynamo import data
from fxrl.capture._dynamo.data import is_subscript
from fxrl.capture._dynamo.frames import callers, end_graph
from fxrl.capture._dynamo.loops import turns_left
from fxrl.capture._torch import (
    RestartAnalysis,
    cache_entries,
    is_never_captured,
    run_as_written,
    try_again,
)
from fxrl.capture.branches import Branches
from fxrl.ir.remark import Refusal

_tracer: Any = torch._dynamo.symbolic_convert
_TRANSLATOR: Any = _tracer.InstructionTranslatorBase
_may_end_outside = _TRANSLATOR.should_compile_partial_graph
_call_function = _TRANSLATOR.call_function
_leave_rest_out = _TRANSLATOR.step_graph_break
_inline_function = _tracer.InliningInstructionTranslator.inline_call_
#: Instructions that the next one is not run behind.
_LEAVE = ("RETURN", "RERAISE", "RAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_MANY_TURNS = 32  # each is captured on its own then
_NAMES_PART = ("LOAD_ATTR", "LOAD_METHOD")
_FEW_ENDS = 2  # of graphs in one loop, where no more are needed
#: By code, at how many turns left it went on in a loop.
_WENT_ON: WeakKeyDictionary[CodeType, set[float]] = WeakKeyDictionary()
#: By the branches of a step, which functions it leaves out for a loop; whether with all they call.
_LEFT_OUT: WeakKeyDictionary[Branches, WeakKeyDictionary[CodeType, bool]] = WeakKeyDictionary()


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
    what goes on behind the break has that too. It is not run where code at the break raises, nor a
    caller's where what goes on in the function that it called does."""
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
    self.called, self.given = function, args[:1]  # for a graph that may end inside of it
    if _differentiates_again(function, args, kwargs):
        raise Refusal(
            "the loss differentiates its gradient again: rewrites have no second derivative",
            "take what is differentiated again in a step of its own, without fxrl",
        )
    if isinstance(getattr(function, "value", None), torch.nn.RNNBase):
        why = "traced, it would be a graph for each length of sequences"
        end_graph("a recurrent layer runs as one call", why)
    if getattr(function, "fn", getattr(function, "value", None)) in _MARKS:
        self.push(ConstantVariable.create(None))  # a batch's sizes vary anyway
        return
    _call_function(self, function, args, kwargs)


#: Which sizes torch is to take for those that vary: forbidden where a function is traced.
_MARKS = (mark_dynamic, maybe_mark_dynamic, mark_unbacked)


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
    """Whether what it traces is in a loop that no graph may end in.

    It may in one of few turns, or of turns that nobody can count, until it was captured for as
    many; and only where modules are named, which would be left out with the function. Of all others
    the caller goes on behind the call. Where that is another part of a model, such as the loss head
    behind its layers, nothing is lost by then: a loop that a third graph ends in, or will, is left
    to it.
    """
    lowest = _lowest_jumps(translator)[translator.instruction_pointer]
    if lowest >= translator.current_instruction.offset:
        return False
    turns = [left for value in translator.stack if (left := turns_left(value)) is not None]
    captured = len(cache_entries(translator.output.root_tx.f_code))
    many = max([captured, *turns]) >= _MANY_TURNS
    if isinstance(sys.exception(), Unsupported):  # asked for where a graph must end, not ahead
        _leave_out(translator, turns)
    return many or not _names_modules(translator)


def _leave_out(translator: Any, turns: list[float]) -> None:
    """A function in whose loop many graphs end is left to its caller, which goes on with the model
    behind it."""
    code = translator.f_code
    known = _WENT_ON.setdefault(code, set())
    if not hasattr(translator, "went_on"):
        translator.went_on = sum(turns)
        known.add(translator.went_on)
    alone = any(map(is_never_captured, _modules_called(translator)))
    ends = len(known) + (translator.went_on if alone else 0)
    if ends > _FEW_ENDS and any(map(_goes_on, [*callers(translator)][1:])):
        _LEFT_OUT.setdefault(data.followed[-1][1], WeakKeyDictionary())[code] = alone
        run_as_written(code, all_inside=alone)
        raise RestartAnalysis(restart_reason="a function is left out")


def _inline(self: Any) -> Any:
    if self.f_code in _LEFT_OUT.get(data.followed[-1][1], ()):
        end_graph("a function with a loop", "graphs end in each turn of a loop of it")
    return _inline_function(self)


@contextmanager
def loops_left_out(step: Branches) -> Iterator[None]:
    """Inside, functions that a step leaves out for a loop run as eager code; also all that they
    call where that are modules that capture themselves: it may look at values then, such as whether
    a mask hides anything, or need not be made."""
    for code, alone in _LEFT_OUT.get(step, {}).items():
        run_as_written(code, all_inside=alone)
    try:
        yield
    finally:  # other steps, and other compilers, may capture it
        for code in _LEFT_OUT.get(step, ()):
            try_again(code)


def _modules_called(caller: Any) -> Iterator[torch.nn.Module]:
    """The module that a function calls now, itself or by what is given it, such as a checkpoint."""
    called = [getattr(caller, "called", None), *getattr(caller, "given", ())]
    for value in called:  # a bound method's object has another name from torch 2.15 on
        module = _held(caller, getattr(value, "obj", getattr(value, "im_self", value)))
        if isinstance(module, torch.nn.Module):
            yield module


def _goes_on(caller: Any) -> bool:
    """Whether a function holds a module for behind what it calls, or names a part of its own."""
    if any(isinstance(_held(caller, value), torch.nn.Module) for value in caller.stack):
        return True
    module = _held(caller, caller.symbolic_locals.get("self"))
    parts = module._modules if isinstance(module, torch.nn.Module) else {}
    behind = caller.instructions[caller.instruction_pointer :] if parts else ()
    return any(one.opname in _NAMES_PART and one.argval in parts for one in behind)


def _names_modules(translator: Any) -> bool:
    """Whether a function's variables are modules, or the attributes that it names of them are."""
    names, found = translator.f_code.co_names, translator.f_globals
    if any(isinstance(found.get(name), torch.nn.Module) for name in names):
        return True
    for local, value in translator.symbolic_locals.items():
        held = _held(translator, value)
        if isinstance(held, torch.nn.Module) and local != "self":
            return True
        attributes = getattr(held, "__dict__", {})
        attributes = {**attributes, **attributes.get("_modules", {})}
        if any(isinstance(attributes.get(name), torch.nn.Module) for name in names):
            return True
    return False


def _held(translator: Any, value: Any) -> Any:
    """The object that a variable of Dynamo's, or a cell of one, is of, if there is one."""
    if type(value) is CellVariable:
        written = translator.output.side_effects.store_attr_mutations.get(value, {})
        value = written.get("cell_contents", value.pre_existing_contents)
    if type(value) is LazyVariableTracker and not value.is_realized():
        return value.peek_value()
    found = None if value is None else value.realize()
    if isinstance(found, NNModuleVariable):
        return translator.output.get_submodule(found.module_key)
    return found.value if isinstance(found, UserDefinedObjectVariable) else None


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
    (_tracer.InliningInstructionTranslator, "inline_call_", _inline),
    (_TRANSLATOR, "call_function", _call),
    (_TRANSLATOR, "maybe_has_backedge", _in_loop),
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
