"""What Python decides by data, followed: branches, loops over rows, numbers read off tensors.

A branch on a tensor's value that only raises is a check (``fxrl.capture.checks``). In the first
graph of a step others are taken for what they likely are, and so are numbers of rows and of rounds;
the graph checks it (``fxrl.capture.branches``).
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import dis
import math
import operator
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import (
    ConstantVariable,
    NumpyVariable,
    SliceVariable,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
    UnspecializedPythonVariable,
)
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import PolyfilledFunctionVariable
from torch._dynamo.variables.lists import BaseListVariable, ListVariable
from torch._dynamo.variables.misc import NullVariable
from torch._dynamo.variables.torch import TorchCtxManagerClassVariable, TorchInGraphFunctionVariable
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxrl.capture._dynamo.frames import end_graph, in_body
from fxrl.capture._dynamo.later import Later, Listed
from fxrl.capture._dynamo.objects import told_apart
from fxrl.capture._torch import dynamo_config
from fxrl.capture.branches import Branches
from fxrl.capture.breaks import place_of
from fxrl.capture.checks import check, counted_rounds, counted_rows
from fxrl.capture.repeated import again, begins
from fxrl.capture.sized import SIZED
from fxrl.ir.graph import has_hint, hint

_JUMPS = [  # without those of Python's that Dynamo never meets: a compiler's, a debugger's
    name
    for name in dis.opmap
    if re.search("JUMP.*IF_(TRUE|FALSE)", name) and hasattr(InstructionTranslator, name)
]
# ``a[b]``: an instruction of its own, or one of BINARY_OP's from Python 3.14 on.
_SUBSCRIPT = next(
    one for one in dis.get_instructions(compile("a[b]", "", "eval")) if "BINARY" in one.opname
)
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
# The module: the package has its function by that name.
_COND: Any = import_module("torch._higher_order_ops.cond")
_merge = _COND._merge_output
_opt_einsum = torch.backends.opt_einsum.get_opt_einsum
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_MANY_ROWS = 1000  # each round of a loop is traced
_unpack, _to_list = TensorVariable.unpack_var_sequence, TensorVariable.method_tolist
# From torch 2.15 on Dynamo looks methods of tensors up here, and no more by name on the class.
_TABLE: Any = vars(TensorVariable).get("tp_methods")
_call_tensor = TensorVariable.call_method
_call_number = SymNodeVariable.call_method
_make_range: Any = BuiltinVariable.call_range
_call = TorchInGraphFunctionVariable.call_function
_call_context = TorchCtxManagerClassVariable.call_function
_METHODS = {torch.split: "split", torch.functional.split: "split", torch.chunk: "chunk"}
# Of any object, which torch takes for a tensor's method where code has it under a name of its own.
_OF_OBJECTS = {
    getattr(object, name): name
    for name in ("__init__", "__setattr__", "__delattr__", "__getattribute__")
}
_ASKS = (torch.isnan, torch.isinf, torch.isfinite)
_MATH: dict[Any, Any] = {getattr(math, one.__name__): one for one in _ASKS} | {
    getattr(math, name): getattr(torch, name)
    for name in ("exp", "expm1", "log", "log2", "log10", "log1p", "tanh")
}
_call_numpy = NumpyVariable.call_function
_call_polyfill = PolyfilledFunctionVariable.call_function
# The function that is captured and the branches that are followed in it, innermost last.
followed: list[tuple[CodeType, Branches]] = []
# By the sizes of a graph: for what numbers are taken that were read off tensors, asked for a truth.
_TRUTHS: WeakKeyDictionary[Any, dict[Any, bool]] = WeakKeyDictionary()


def _jump(name: str) -> Callable[[Any, Any], None]:
    jumps_if, keeps = "IF_TRUE" in name, name.endswith("OR_POP")

    def jump(translator: Any, instruction: Any) -> None:
        value = translator.stack[-1].realize()
        truth = _truth(translator, value, partial(_taken, translator, instruction, jumps_if))
        if truth is None:
            getattr(translator, name)(instruction)
            return
        if truth == jumps_if:
            translator.jump(instruction)
        if truth != jumps_if or not keeps:
            translator.pop()

    return jump


def _truth(tx: Any, value: Any, take: Callable[[], tuple[bool, tuple[int, ...]] | None]) -> Any:
    """What a value is taken for that is known when the graph runs, which checks it; None of others,
    and where the graph ends. A number that was read off is asked once."""
    if not _known_when_run(value):
        return None
    number = value.sym_num.node.expr if isinstance(value, SymNodeVariable) else None
    known = _TRUTHS.setdefault(tx.output.shape_env, {})
    if number in known:
        return known[number]
    if (taken := take()) is None:
        return None
    truth, branch = taken
    call = tx.output.create_proxy
    passes = value.as_proxy()
    if number is not None:
        passes = call("call_function", torch.scalar_tensor, (passes,), {})
        if not in_body(tx):  # which may not run
            known[number] = truth
    if not truth:
        passes = call("call_function", torch.logical_not, (passes,), {})
    call("call_function", check, (passes, *(branch or (None, _user_line()))), {})
    return truth


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
    return _way(translator, (translator.f_code, instruction.offset), jumps == jumps_if)


def _way(tx: Any, place: Any, likely: bool) -> tuple[bool, tuple[int, ...]] | None:
    found = _follow(tx.output, place, likely)
    return None if found is None else (bool(found[1]), found[:1])


def _follow(output: Any, place: Any, likely: int, *, once: bool = False) -> tuple[int, int] | None:
    """The number of a branch and what its value is taken for, if the trace at hand follows any."""
    root, branches = followed[-1] if followed else (None, None)
    if branches is None or output.root_tx.f_code is not root:
        return None
    where = torch._guards.TracingContext.extract_stack
    return branches.follow(output, place, likely, where, once=once)


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


def _user_line() -> str:
    """File and line that are traced, of the user's code."""
    return place_of(torch._guards.TracingContext.extract_stack())[0]


def is_subscript(instruction: Any) -> bool:
    return (instruction.opcode, instruction.arg) == (_SUBSCRIPT.opcode, _SUBSCRIPT.arg)


def _subscript(translator: Any, instruction: Any) -> None:
    """``x[index]`` with a tensor of one integer: Python reads the number, and so does the graph."""
    if not is_subscript(instruction):
        getattr(translator, instruction.opname)(instruction)
        return
    indexed, index = (value.realize() for value in translator.stack[-2:])
    if (
        all(isinstance(value, TensorVariable) for value in (indexed, index))
        and dynamo_config.capture_scalar_outputs
    ):
        value = index.as_proxy().node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in _INTEGERS:
            translator.pop()
            translator.push(index.call_method(translator, "item", [], {}))
    if _is_looped_over(translator, indexed, index):
        listed = VariableTracker.build(translator, list).call_function(translator, [indexed], {})
        translator.popn(2)
        translator.push(TupleVariable(listed.items[index.as_python_constant()]))
        return
    getattr(translator, instruction.opname)(instruction)


def _is_looped_over(translator: Any, indexed: Any, index: Any) -> bool:
    """Whether they are those of ``for layer in self.layers[:n]``, where any sequence of these
    modules does. Dynamo would trace how a module is made to hold them: 2 ms a layer."""
    of_modules = isinstance(indexed, UnspecializedNNModuleVariable)
    if not of_modules or type(indexed.value) is not torch.nn.ModuleList:
        return False
    if not isinstance(index, SliceVariable) or not index.is_python_constant():
        return False
    # Python puts a null before what is called, and behind it from 3.13 on.
    below = [one.realize() for one in translator.stack[-4:-2] if not isinstance(one, NullVariable)]
    called = [one.as_python_constant() for one in below[-1:] if one.is_python_constant()]
    return translator.next_instruction.opname == "GET_ITER" or called == [enumerate]


def _unpacked(self: Any, tx: Any, idxes: Any = None) -> Any:
    return _unpack(_of_known_length(self, tx), tx, idxes)


def _listed(self: Any, tx: Any) -> Any:
    """``x.tolist()``: numbers of the graph where the trace looks into it, else made behind it."""
    value = self.as_proxy().node.meta.get("example_value")
    sizes = getattr(value, "shape", ())
    known = isinstance(value, torch.Tensor) and all(type(size) is int for size in sizes)
    if known and not sizes:
        return self.call_method(tx, "item", [], {})
    counts = getattr(value, "dtype", None) in _INTEGERS
    varies = any(type(size) is not int and size.node.has_hint() for size in sizes)
    if in_body(tx) or (counts and not varies) or not isinstance(value, torch.Tensor):
        return _rows_of(tx, self)
    as_now = self.call_method(tx, "detach", [], {}).call_method(tx, "clone", [], {})
    counted = counts or not known
    look = partial(_rows_of, tx, as_now) if counted else partial(_numbers_of, tx, as_now)
    return Later(Listed(as_now), look)


def _rows_of(tx: Any, tensor: Any) -> Any:
    return _to_list(_of_known_length(tensor, tx), tx)


def _numbers_of(tx: Any, tensor: Any) -> Any:
    """Numbers of the graph in lists, of a tensor whose sizes never vary."""
    if not tensor.as_proxy().node.meta["example_value"].shape:
        return tensor.call_method(tx, "item", [], {})
    return ListVariable(
        [_numbers_of(tx, one) for one in _unpack(tensor, tx)], mutation_type=ValueMutationNew()
    )


def _of_known_length(rows: Any, tx: Any) -> Any:
    """``rows`` as Python can go through them: of a number that depends on data a check is left."""
    value = rows.as_proxy().node.meta.get("example_value")
    likely = _likely_length(value) if isinstance(value, torch.Tensor) else None
    if likely is None:
        return rows
    found = _follow(tx.output, _line(), likely)
    if found is None:
        return rows
    branch, length = found
    return wrap_fx_proxy(
        tx,
        tx.output.create_proxy(
            "call_function", counted_rows, (rows.as_proxy(), length, branch), {}
        ),
    )


def _line() -> tuple[str, int]:
    """File and line that are traced, of whichever code."""
    *_, frame = torch._guards.TracingContext.extract_stack()
    return frame.filename, frame.lineno or 0


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


def _range(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """``range(0, n, 512)`` over as many rows as data says: of so many rounds, which is checked. One
    round of all rows, ``range(0, n, n)``, is one whatever n is."""
    zero, one = ConstantVariable.create(0), ConstantVariable.create(1)
    given = [arg.realize() for arg in args]
    if any(isinstance(arg, UnspecializedPythonVariable) for arg in given):
        end_graph("range by chance", "a random number says how often a loop runs")
    if len(given) not in (1, 2, 3):
        return _make_range(self, tx, *args, **kwargs)
    start, stop, step = (zero, *given, one) if len(given) == 1 else (*given, one)[:3]
    if _is_one_round(start, stop, step):
        return _make_range(
            self, tx, start, ConstantVariable.create(start.as_python_constant() + 1), one
        )
    fixed = start.is_python_constant() and step.is_python_constant()
    unknown = isinstance(stop, SymNodeVariable) and _known_when_run(stop)
    branch, rounds = (fixed and unknown and _follow(tx.output, _line(), 1)) or (0, _MANY_ROWS)
    if rounds >= _MANY_ROWS:
        return _make_range(self, tx, *args, **kwargs)
    first, by = start.as_python_constant(), step.as_python_constant()
    call = tx.output.create_proxy
    end = call("call_function", torch.scalar_tensor, (stop.as_proxy(),), {"dtype": torch.int64})
    call("call_function", counted_rounds, (end, first, by, rounds, branch), {})
    ends = (first, first + rounds * by, by)
    return _make_range(self, tx, *map(ConstantVariable.create, ends))


def _is_one_round(start: Any, stop: Any, step: Any) -> bool:
    if not (start.is_python_constant() and isinstance(step, SymNodeVariable)):
        return False
    end = stop.sym_num if isinstance(stop, SymNodeVariable) else stop.as_python_constant()
    rows = end - start.as_python_constant()
    return statically_known_true(rows > 0) and statically_known_true(rows <= step.sym_num)


def _split(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """``rows.split(512)`` of as many rows as data says: into so many parts, which is checked."""
    each, dim = _bound(args, kwargs, "split_size", "split_size_or_sections")
    return _parts(self, tx, each, dim, lambda size: each.as_python_constant(), 1)


def _chunk(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """``rows.chunk(4)`` likewise; of a few rows there are fewer chunks."""
    count, dim = _bound(args, kwargs, "chunks")

    def width(size: Any) -> Any:
        chunks = count.as_python_constant()
        return _number(tx, operator.floordiv, _number(tx, operator.add, size, chunks - 1), chunks)

    likely = count.as_python_constant() if count.is_python_constant() else 0
    return _parts(self, tx, count, dim, width, likely)


def _call_in_graph(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """``torch.split(x, 8)`` is ``x.split(8)``; marks of layers are told by graph values."""
    if self.value in (begins, again):
        return _call(self, tx, [args[0], *(told_apart(tx, given) for given in args[1:])], kwargs)
    if "is_causal" in kwargs:
        kwargs = kwargs | {"is_causal": _flag(tx, kwargs["is_causal"])}
    if self.value in _MATH and len(args) == 1 and _is_read_off(args[0]):
        return _computed(tx, _MATH[self.value], args[0].realize())
    own = _OF_ROWS_OF_DATA.get(self.value)
    if own is not None and args and _has_rows_of_data(args[0].realize()):
        return VariableTracker.build(tx, own).call_function(tx, args, kwargs)
    if self.value is torch.take_along_dim and "out" not in kwargs:
        return VariableTracker.build(tx, _taken_along).call_function(tx, args, kwargs)
    if self.value in SIZED and _vary([*args, *kwargs.values()]):
        return VariableTracker.build(tx, SIZED[self.value]).call_function(tx, args, kwargs)
    if not args or not isinstance(args[0].realize(), TensorVariable):
        if (name := _OF_OBJECTS.get(self.value)) is not None:
            return BuiltinVariable(object).call_method(tx, name, [*args], kwargs)
        return _call(self, tx, args, kwargs)
    method = _METHODS.get(self.value)
    if method is None:
        return _call(self, tx, args, kwargs)
    return args[0].realize().call_method(tx, method, [*args[1:]], kwargs)


def _flag(tx: Any, given: Any) -> Any:
    """``is_causal=bool((mask == causal).all())``: attention takes a constant, where numbers that
    are computed with may be a graph's."""
    value = given.realize()
    if not isinstance(value, SymNodeVariable) or value.python_type() is not bool:
        return given
    truth = _truth(tx, value, partial(_way, tx, _line(), True))
    return given if truth is None else ConstantVariable.create(truth)


def _vary(given: list[Any]) -> bool:
    """Whether there is a size among numbers and types, and nothing that is a tensor."""
    kinds = {*_kinds(given)}
    return SymNodeVariable in kinds and TensorVariable not in kinds


def _kinds(given: list[Any]) -> Iterator[type]:
    for one in given:
        yield type(value := one.realize())
        yield from _kinds(value.items) if isinstance(value, BaseListVariable) else ()


def _entered(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``torch.set_grad_enabled(len(ids) < 8)``: Dynamo asks for a constant, by position, and would
    give up all of the function. There is a graph for each answer; where data says, it ends."""
    named = {name: _decided(tx, one) for name, one in kwargs.items()}
    given = [_decided(tx, one) for one in args]
    if self.value in (torch.set_grad_enabled, torch.inference_mode) and named.keys() == {"mode"}:
        given.append(named.pop("mode"))
    return _call_context(self, tx, given, named)


def _decided(tx: Any, given: Any) -> Any:
    given = given.realize()
    if not isinstance(given, SymNodeVariable):
        return given
    if _known_when_run(given):
        end_graph("context by data", "data decides which context the step enters")
    return ConstantVariable.create(given.evaluate_expr(tx.output))


def _is_read_off(number: Any) -> bool:
    return isinstance(number.realize(), SymNodeVariable) and _known_when_run(number.realize())


def _computed(tx: Any, function: Any, number: Any) -> Any:
    """``math.exp(loss.item())``, which nothing in a graph takes, of a tensor. Python raises where
    that has no finite result: it is a check of the graph."""
    value = _wide(tx, number)
    made = VariableTracker.build(tx, function).call_function(tx, [value], {})
    if function not in _ASKS:
        passes = VariableTracker.build(tx, _is_defined).call_function(tx, [value, made], {})
        at = passes.as_proxy(), None, _user_line()
        tx.output.create_proxy("call_function", check, at, {})
    return made.call_method(tx, "item", [], {})


def _is_defined(given: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return made.isfinite() | given.isnan() | (given == torch.inf)


def _has_rows_of_data(x: Any) -> bool:
    value = x.as_proxy().node.meta["example_value"]
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in value.shape)


def _difference(
    input: torch.Tensor,  # the names that they have in torch
    n: int = 1,
    dim: int = -1,
    prepend: torch.Tensor | None = None,
    append: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.diff`` of as many as data says; torch's own asks whether there are ``n``."""
    parts = [one for one in (prepend, input, append) if one is not None]
    joined = torch.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(n):
        rest = joined.size(dim) - 1
        later, earlier = joined.narrow(dim, 1, rest), joined.narrow(dim, 0, rest)
        joined = later ^ earlier if input.dtype == torch.bool else later - earlier
    return joined


def _taken_along(
    input: torch.Tensor, indices: torch.Tensor, dim: int | None = None
) -> torch.Tensor:
    """``torch.take_along_dim``; torch's own would be captured anew for each size."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    if indices.dtype != torch.int64 or indices.dim() != input.dim():
        raise RuntimeError  # as torch does, which the loss as written says
    own, wanted = list(input.shape), list(indices.shape)
    own[dim] = wanted[dim]
    shape = torch.broadcast_shapes(own, wanted)
    source = list(shape)
    source[dim] = input.shape[dim]
    from_the_start = indices.expand(shape) % input.shape[dim]
    return input.expand(source).gather(dim, from_the_start)


class _WaysToMultiply:
    """``opt_einsum``, which takes sizes for constants: an ``einsum`` of three values or more would
    be captured anew for each. In which order they are multiplied is chosen by the first ones."""

    @staticmethod
    def contract_path(equation: str, *operands: torch.Tensor, **how: Any) -> Any:
        shapes = [tuple(map(hint, one.shape)) for one in operands]
        return _opt_einsum().contract_path(equation, *shapes, shapes=True, **how)


def _bound(args: Any, kwargs: Any, *names: str) -> tuple[Any, Any]:
    """A size or count, which has one of these names, and the dim that is split."""
    given = dict(zip((names[0], "dim"), args, strict=False)) | kwargs
    each = next(given[name] for name in names if name in given)
    return each.realize(), given.get("dim", ConstantVariable.create(0)).realize()


def _parts(rows: Any, tx: Any, each: Any, dim: Any, width: Any, likely: Any) -> Any:
    """The parts of a split; None where Dynamo knows how many there are."""
    value = rows.as_proxy().node.meta.get("example_value")
    constant = each.is_python_constant() and isinstance(each.as_python_constant(), int)
    if not (constant and dim.is_python_constant() and isinstance(value, torch.Tensor)):
        return None
    at = dim.as_python_constant()
    size = value.shape[at]
    if not isinstance(size, torch.SymInt) or size.node.has_hint():
        return None
    place = f"parts of {each.as_python_constant()}", at  # tokens and their ids go together
    found = _follow(tx.output, place, likely, once=True)
    if found is None or found[1] >= _MANY_ROWS:
        return None
    branch, count = found
    total = rows.call_method(tx, "size", [dim], {}).as_proxy()
    step = width(total)
    ends = _number(tx, operator.floordiv, _number(tx, operator.sub, total, 1), step)
    call = tx.output.create_proxy
    end = call("call_function", torch.scalar_tensor, (ends,), {"dtype": torch.int64})
    call("call_function", counted_rounds, (end, -1, 1, count, branch), {})
    before = max(count - 1, 0)
    rest = _number(tx, operator.sub, total, _number(tx, operator.mul, step, before))
    sizes = ([*(step,) * before, rest], at)
    return wrap_fx_proxy(tx, call("call_method", "split", (rows.as_proxy(), *sizes), {}))


def _number(tx: Any, function: Any, *args: Any) -> Any:
    """A call on numbers of the graph, which is one itself."""
    if not any(isinstance(arg, fx.Proxy) for arg in args):
        return function(*args)
    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", function, args, {})).as_proxy()


def _any_or_all(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """``if any(x.isnan().view(-1)):`` is a branch on ``x.any()``, not one on each entry."""
    decides = self.fn in (any, all) and tx.next_instruction.opname in (*_JUMPS, "TO_BOOL")
    given = args[0].realize() if decides and len(args) == 1 else None
    if isinstance(given, TensorVariable) and given.ndim == 1:
        return given.call_method(tx, self.fn.__name__, [], {})
    return _call_polyfill(self, tx, args, kwargs)


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


def _between(drawn: torch.Tensor, low: Any = 0.0, high: Any = 1.0) -> torch.Tensor:
    if low > high:
        raise RuntimeError
    low, high = torch.as_tensor(low).to(drawn.dtype), torch.as_tensor(high).to(drawn.dtype)
    return drawn.copy_(drawn.uniform_().double() * (high - low) + low)  # as eager rounds


def _around(drawn: torch.Tensor, mean: Any = 0.0, std: Any = 1.0) -> torch.Tensor:
    if std < 0:
        raise RuntimeError
    return drawn.copy_(drawn.normal_().double() * std + mean)


_DRAWS = {"uniform_": _between, "normal_": _around}


def _tensor_method(self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    own = _OF_ROWS_OF_DATA.get(getattr(torch, name, None))
    if own is not None and _has_rows_of_data(self):
        return VariableTracker.build(tx, own).call_function(tx, [self, *args], kwargs)
    if name == "take_along_dim":
        return VariableTracker.build(tx, _taken_along).call_function(tx, [self, *args], kwargs)
    if name == "fill_diagonal_" and len(args) == 1 and not kwargs and self.ndim == 2:
        VariableTracker.build(tx, _filled_diagonal).call_function(tx, [self, *args], {})
        return self
    call = _drawn if name in _DRAWS else _call_tensor
    return call(self, tx, name, args, kwargs)


def _filled_diagonal(matrix: torch.Tensor, value: Any) -> None:
    """``matrix.fill_diagonal_(value)``; torch's own writes through ``as_strided``, which would be
    captured anew for each size."""
    matrix.diagonal().fill_(value)


def _number_method(self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    if name == "is_integer" and not _known_when_run(self):
        return VariableTracker.build(tx, _is_whole).call_function(tx, [self], {})
    return _call_number(self, tx, name, args, kwargs)


def _is_whole(number: float) -> bool:
    """``number.is_integer()``, as those ask who pad to whole windows; Dynamo takes the number that
    it is asked of for a constant."""
    return math.floor(number) == number


def _rolled(input: torch.Tensor, shifts: Any, dims: Any = None) -> torch.Tensor:
    """``torch.roll`` of as many as data says; torch's own asks whether there are any."""
    if dims is None:
        return _rolled(input.flatten(), shifts, 0).view(input.shape)
    shifts = (shifts,) if isinstance(shifts, int) else shifts
    for shift, dim in zip(shifts, (dims,) if isinstance(dims, int) else dims, strict=True):
        places = torch.arange(input.size(dim), device=input.device)
        input = input.index_select(dim, (places - shift) % input.size(dim))
    return input


_OF_ROWS_OF_DATA: dict[Any, Any] = {torch.diff: _difference, torch.roll: _rolled}


def _drawn(self: Any, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """``noise.uniform_(-bound, bound)`` with a tensor for a bound, as NEFTune's hook has it: such
    draws take numbers alone, which are known when the graph runs. As many are drawn of the standard
    distribution and stretched: the same in float32 and wider, in 16 bits but for a rounding. Bounds
    that eager refuses fail a check."""
    given = [_wide(tx, one.realize()) for one in args]
    named = {{"to": "high"}.get(key, key): _wide(tx, one.realize()) for key, one in kwargs.items()}
    unknown = any(isinstance(x, TensorVariable) for x in (*given, *named.values()))
    if not unknown or not named.keys() <= {"high", "mean", "std"}:
        return _call_tensor(self, tx, name, args, kwargs)
    stretched = VariableTracker.build(tx, _DRAWS[name])
    return stretched.call_function(tx, [self, *given], named)


def _wide(tx: Any, number: Any) -> Any:
    """A number that a graph does not know, as a tensor in float64; all else as it is."""
    if isinstance(number, TensorVariable):
        return number.call_method(tx, "double", [], {})
    if not isinstance(number, SymNodeVariable) or not _known_when_run(number):
        return number
    call, options = tx.output.create_proxy, {"dtype": torch.float64}
    given = (number.as_proxy(),)
    return wrap_fx_proxy(tx, call("call_function", torch.scalar_tensor, given, options))


def _methods(own: dict[str, Callable[..., Any]]) -> list[tuple[Any, str, Any]]:
    """How methods of tensors, by name, are traced by these."""
    if _TABLE is None:
        return [(TensorVariable, f"method_{name}", traced) for name, traced in own.items()]
    entry = type(_TABLE["tolist"])
    return [(TensorVariable, "tp_methods", _TABLE | {n: entry(f) for n, f in own.items()})]


def _merged(a: Any, b: Any, *mode: Any) -> Any:
    """What the branches of ``torch.cond`` give, as one: PyTorch looks for their strides among the
    products of their sizes."""
    return _merge(_strided_by_sizes(a), _strided_by_sizes(b), *mode)


def _strided_by_sizes(value: Any) -> Any:
    """It finds none of ``Max(1, s0 - 1)``, the stride of rows that are one token shorter."""
    if not isinstance(value, torch.Tensor) or value.is_sparse:
        return value
    strides, product = [*value.stride()], 1
    known = [hint(one) if has_hint(one) else math.inf for one in strides]
    for dim in sorted(range(value.dim()), key=known.__getitem__):
        if statically_known_true(strides[dim] == product):
            strides[dim] = product
        product = product * value.shape[dim]
    return value.as_strided(value.shape, strides)


HANDLERS = {dis.opmap[name]: _jump(name) for name in _JUMPS} | {_SUBSCRIPT.opcode: _subscript}
REPLACED: list[tuple[Any, str, Any]] = [
    (_COND, "_merge_output", _merged),
    (torch.backends.opt_einsum, "get_opt_einsum", lambda: _WaysToMultiply),
    *_methods({"tolist": _listed, "split": _split, "chunk": _chunk}),
    (TensorVariable, "unpack_var_sequence", _unpacked),
    (TorchInGraphFunctionVariable, "call_function", _call_in_graph),
    (TensorVariable, "call_method", _tensor_method),
    (SymNodeVariable, "call_method", _number_method),
    (BuiltinVariable, "call_range", _range),
    (PolyfilledFunctionVariable, "call_function", _any_or_all),
    (NumpyVariable, "call_function", _averaged),
    (TorchCtxManagerClassVariable, "call_function", _entered),
]
