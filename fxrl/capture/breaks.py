"""Where Dynamo gave up on the user's code: each graph break once, with its line and its reason.

A break that ends a graph is told by the graph. One before the first op, or inside of a loop, ends
none, and still the rest runs as other graphs, which the logits leave. So breaks are read from
Dynamo's own list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from traceback import FrameSummary
from typing import Any

import torch
from torch import fx

from fxrl.capture._torch import graph_break_reasons
from fxrl.ir.capture_record import GraphBreak
from fxrl.ir.remark import Remark, RemarkKind, Report
from fxrl.ir.source import is_library, source_of_trace

_EXPLANATION = re.compile(r"Explanation: (.+)")
#: How Dynamo tells of a refusal by one of fxrl's own calls that it traces.
_REFUSAL = re.compile(r"got Refusal\((['\"])(.+)\1\)")
_BRANCHING = "data-dependent branching: Python decides by a tensor's value"
#: Words of Dynamo's that name its own parts, and what they mean to who wrote the code.
_PLAIN = {
    "generic_jump": _BRANCHING,
    "Data-dependent branching": _BRANCHING,
    "data-dependent expression": "data-dependent size: Python counts by a tensor's value",
    "Graph break under": "it cannot be traced, and no graph can end inside of a `with` block",
    "step_unsupported": "something in it cannot be traced, and no graph can end there",
    "Module-level backwards hooks": "a backward hook gets the gradient of what a module returns",
}
_BREAK = "graph break"
_TRIES = 4  # a break is met again as Dynamo backs out of one function after another
#: Where wrappers of a model live: their own miss (``wrappers.py``) has the cure of a break in them.
_WRAPPERS = tuple(
    os.path.join(os.path.dirname(torch.__file__), *parts, "")
    for parts in (("distributed",), ("nn", "parallel"))
)
#: What to do about a break whose words have these in them; its line is none of the user's to move.
_CURES = {
    "torch.compiler.disable": "take that mark off the function, or do without the option that "
    "calls it",
    "is a classmethod": "make it a staticmethod",
    "BackwardHook": "register the hook on modules that return no logits, such as layers",
}


class SizesFromDataError(Exception):
    """A graph that ends at a break hands on values as long as data says, and with them its logits.

    What comes next cannot loop over such sizes, nor ask whether they are 0 or 1. In a graph that
    begins behind the tensor that says them they are sizes like others.
    """

    def __init__(self, source: str) -> None:
        super().__init__(f"data-dependent sizes of values that leave the graph at {source}")


@contextmanager
def breaks_inside() -> Iterator[list[GraphBreak]]:
    """The breaks of what is captured inside, one for each line; the list is filled at the end."""
    before = len(graph_break_reasons)
    found: list[GraphBreak] = []
    yield found
    by_source: dict[str, GraphBreak] = {}
    for reason in graph_break_reasons[before:]:
        met = _graph_break(reason)
        by_source.setdefault(met.source, met)  # the first one says why, later ones that it was
    found.extend(by_source.values())


def break_of(gm: fx.GraphModule) -> list[GraphBreak]:
    """Why Dynamo ended this graph, if it was a break."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return []
    ended = _graph_break(reason)
    met = [_graph_break(found) for found in graph_break_reasons[-_TRIES:]]
    return [next(found for found in (*met, ended) if found.source == ended.source)]


def break_remarks(
    breaks: Iterable[GraphBreak], site: str, kind: RemarkKind = RemarkKind.MISSED
) -> Report:
    """One remark for each break; as facts, of those that cost no head."""
    free = kind == RemarkKind.ANALYSIS
    end = ", which costs no loss head" if free else ""
    return Report.of(
        Remark(
            kind,
            "capture",
            site,
            found.source,
            f"{_BREAK}: {found.reason}{end}",
            "" if free else found.cure,
        )
        for found in breaks
    )


def without_breaks(report: Report, sources: Container[str]) -> Report:
    """The report without what ``break_remarks`` said of these lines."""
    return Report.of(
        said
        for said in report.remarks
        if not (said.reason.startswith(_BREAK) and said.source in sources)
    )


def place_of(frames: Iterable[FrameSummary]) -> tuple[str, str]:
    """The user's ``file:line``; the innermost line of code, with its place if that is another."""
    stack = list(frames)
    trace = "".join(f'File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in stack)
    source = source_of_trace(trace)
    if not stack:
        return source, ""
    place = f"{stack[-1].filename}:{stack[-1].lineno}"
    code = f"`{stack[-1].line}`"
    return source, code if place.endswith(source) else f"{code} at {place}"


def in_one_line(message: str) -> str:
    """Dynamo's many lines as its title and explanation, or as the refusal that they are about."""
    if refused := _REFUSAL.search(message):
        return refused[2]
    title, *_ = message.strip().splitlines() or [""]
    known = next((plain for words, plain in _PLAIN.items() if words in title), None)
    if known is not None:
        return known
    explanation = _EXPLANATION.search(message)
    return (f"{title}: {explanation[1]}" if explanation else title)[:300].rstrip(".")


def _graph_break(reason: Any) -> GraphBreak:
    source, code = place_of(reason.user_stack)
    words = f"{in_one_line(str(reason.reason))}, in {code}"
    files = [frame.filename for frame in reason.user_stack]
    if files[-1].startswith(_WRAPPERS):
        return GraphBreak(words, source, "")
    for told, cure in _CURES.items():
        if told in words:
            return GraphBreak(words, source, cure)
    if all(map(is_library, files)):  # no line to be moved
        return GraphBreak(words, source, "")
    return GraphBreak(words, source)
