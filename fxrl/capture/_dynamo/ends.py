"""Where a graph must end inside of a function that is called, it ends where the rest can still be
captured."""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import math
from collections.abc import Iterator
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.bytecode_analysis import JUMP_OPNAMES
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.variables import (
    NNModuleVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
)

_tracer: Any = torch._dynamo.symbolic_convert
_end_graph = torch._dynamo.output_graph.OutputGraph.compile_subgraph
_could_end = _tracer.InliningInstructionTranslator.should_compile_partial_graph
# None in torch 2.11, whose own can be rebuilt.
_DICT_ITERATOR: Any = getattr(torch._dynamo.variables.iter, "DictViewIterator", None)
_MANY_LAYERS = 32  # each is captured on its own then


def _compile_subgraph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    tx.debug_locals = self.root_tx.debug_locals  # a function that is called has a list of its own
    return _end_graph(self, tx, *args, **kwargs)


def _may_end(self: Any) -> bool:
    """Whether a graph may end here in a function that is called.

    Not in a comprehension, which cannot be resumed; not where torch's backward hooks look for what
    autograd noted, which no trace holds; not where a hook is registered, which would be in a copy
    of its module's hooks; nor in a loop, whose function would be left out with all of its callers.
    """
    name, file = self.f_code.co_name, self.f_code.co_filename
    whole = (name.startswith("<") and name != "<lambda>") or file == torch.utils.hooks.__file__
    whole = whole or (name.startswith("register_") and file == torch.nn.modules.module.__file__)
    return _could_end(self) and not whole and not _in_loop(self)


def _in_loop(self: Any) -> bool:
    return any(map(_loops, callers(self)))


def _loops(translator: Any) -> bool:
    """Whether what it traces is in a loop; one over a few modules, of layers, may go on behind a
    break."""
    lowest = _lowest_jumps(translator)[translator.instruction_pointer]
    if lowest >= translator.current_instruction.offset:
        return False
    iterated = [
        _left_in(value.realize())
        for value in translator.stack
        if "Iterator" in type(value.realize()).__name__
    ]
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


def _rebuild_iterator(self: Any, codegen: Any) -> None:
    """Code that makes what is left of a loop over a dict, such as ``for layer in self.layers``: a
    graph that ends inside of the loop goes on behind its break, and is not left with its caller."""
    codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_python_module(iter)))
    codegen(TupleVariable(_left_in(self)))
    codegen.extend_output(create_call_function(1, False))


def callers(translator: Any) -> Iterator[Any]:
    """It and those that it was called by."""
    while translator is not None:
        yield translator
        translator = getattr(translator, "parent", None)


REPLACED: list[tuple[Any, str, Any]] = [
    (torch._dynamo.output_graph.OutputGraph, "compile_subgraph", _compile_subgraph),
    (_tracer.InliningInstructionTranslator, "should_compile_partial_graph", _may_end),
    (_tracer.InstructionTranslatorBase, "maybe_has_backedge", _in_loop),
]
if _DICT_ITERATOR is not None and "reconstruct" not in vars(_DICT_ITERATOR):
    REPLACED.append((_DICT_ITERATOR, "reconstruct", _rebuild_iterator))
