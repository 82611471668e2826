"""Values that code behind the graph makes, unless the trace looks into them: ``x.tolist()`` of
metrics, and texts that tell sizes, which would be compiled in."""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import create_call_method
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, SymNodeVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.lazy import LazyCache
from torch._dynamo.variables.misc import StringFormatVariable

_TRANSLATOR: Any = torch._dynamo.symbolic_convert.InstructionTranslatorBase
_tracing: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx
_format = _TRANSLATOR._format_value
_to_text = BuiltinVariable.call_str


class Later(LazyVariableTracker):
    """``behind`` tells how code behind the graph makes it; ``look()`` gives what the trace has of
    it, if it is asked for that."""

    def __init__(self, behind: VariableTracker, look: Callable[[], Any]) -> None:
        super().__init__(_Look(behind, look))


class _Look(LazyCache):
    def __init__(self, behind: VariableTracker, look: Callable[[], Any]) -> None:
        super().__init__("", "later")
        self.behind, self.look = behind, look

    def realize(self) -> None:
        self.vt = self.behind if hasattr(_tracing().output, "is_traced") else self.look()


class Listed(VariableTracker):
    """Code behind the graph calls ``tolist``."""

    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self.tensor = tensor

    def reconstruct(self, codegen: Any) -> None:
        codegen(self.tensor)
        codegen.load_method("tolist")
        codegen.extend_output(create_call_method(0))


class _Text(Later):
    """A format and the sizes, or constants, that it is of."""

    def __init__(self, text: str, told: list[Any]) -> None:
        super().__init__(StringFormatVariable(text, told, {}), self._as_known)
        self.text, self.told = text, told

    def _as_known(self) -> Any:
        known = (
            one.evaluate_expr() if isinstance(one, SymNodeVariable) else one.as_python_constant()
            for one in self.told
        )
        return ConstantVariable.create(self.text.format(*known))


def _is_size(value: Any) -> bool:
    """Whether it is a number that varies from call to call, known before the graph runs."""
    return isinstance(value, SymNodeVariable) and value.sym_num.node.has_hint()


def _formatted(self: Any, how: Any, flags: int) -> None:
    if _is_size(self.stack[-1].realize()):
        self.push(_Text("{:" + how.as_python_constant() + "}", [self.pop().realize()]))
    else:
        _format(self, how, flags)


def _joined(translator: Any, instruction: Any) -> None:
    """``f"{n} tokens"``."""
    parts = translator.stack[len(translator.stack) - instruction.arg :]
    if not any(isinstance(one, _Text) and not one.is_realized() for one in parts):
        translator.BUILD_STRING(instruction)
        return
    text, told, known = "", list[Any](), True
    for part in translator.popn(instruction.arg):
        if isinstance(part, _Text) and not part.is_realized():
            more, of = part.text, part.told
        elif part.is_python_constant():
            more, of = "{}", [part]
        else:
            known, more, of = False, part.format_string, part.sym_args
        text, told = text + more, [*told, *of]
    translator.push(_Text(text, told) if known else StringFormatVariable(text, told, {}))


def _as_text(self: Any, tx: Any, value: Any) -> Any:
    """``str(n)``."""
    size = value.realize()
    return _Text("{}", [size]) if _is_size(size) else _to_text(self, tx, value)


HANDLERS = {dis.opmap["BUILD_STRING"]: _joined}
REPLACED: list[tuple[Any, str, Any]] = [
    (_TRANSLATOR, "_format_value", _formatted),
    (BuiltinVariable, "call_str", _as_text),
]
