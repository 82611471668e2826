"""Which functions are traced, one called by the other, and where their graph ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch._dynamo.exc import unimplemented


def callers(translator: Any) -> Iterator[Any]:
    """It and those that it was called by."""
    while translator is not None:
        yield translator
        translator = getattr(translator, "parent", None)


def in_body(translator: Any) -> bool:
    """Whether what is traced is a graph of its own inside of the one at hand."""
    return translator.output.current_tracer.parent is not None or any(
        "_trace_first" in one.f_code.co_name for one in callers(translator)
    )


def end_graph(kind: str, why: str) -> NoReturn:
    """The graph ends at what is traced now, of this kind."""
    unimplemented(gb_type=kind, context="", explanation=why, hints=[])
