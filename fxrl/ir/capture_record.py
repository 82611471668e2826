"""One captured graph and what became of it; report, dump and verify read it.

The backend fills it while it compiles. It holds graphs, not text: whoever wants to read renders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxrl.ir.bodies import clone
from fxrl.ir.pipeline import Pipeline, Rewritten
from fxrl.ir.plan import Plan
from fxrl.ir.remark import Remark, RemarkKind, Report


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where Dynamo stopped a graph: the reason in its words, the user's ``file:line``, and what to
    do about it."""

    reason: str
    source: str
    cure: str = "move that code out of the loss, or write it with tensor ops"


@dataclass(slots=True)
class Capture:
    """One captured graph and what became of it."""

    index: int  # running number, from 0
    dynamo: fx.GraphModule  # the graph as Dynamo delivered it
    lowered: fx.GraphModule | None = None  # input of the passes; None if lowering failed
    pipeline: Pipeline | None = None  # the passes that ran, or will
    given: Plan = field(default_factory=Plan)  # the plan that the acting passes obeyed
    planner: Any = None  # the planner that made it, if memory is bounded
    found: Any = None  # the graph that the planner saw: after the passes of ``FIND``
    rewritten: Rewritten | None = None  # output of the passes, if they ran
    kernels: dict[str, Any] = field(default_factory=dict)  # region id -> its kernels, owned here
    # Waits for its heads' kernels (``heads_ahead``).
    heads_called: Callable[[], None] = lambda: None
    running: bool = False  # whether the rewritten graph runs, and not the user's own
    body_rewrites: Sequence[tuple[str, str]] = ()  # ``(pass, site)`` of rewrites inside regions
    remarks: Report = field(default_factory=Report)  # on the capture; the passes' are elsewhere
    graph_breaks: list[GraphBreak] = field(default_factory=list)

    @property
    def report(self) -> Report:
        """All that was said about this capture."""
        passes = Report() if self.rewritten is None else self.rewritten.report
        return self.remarks + passes

    def note(
        self,
        kind: RemarkKind,
        about: str,
        reason: str,
        cure: str = "",
        *,
        site: str = "graph",
        source: str = "",
    ) -> Report:
        """Add a remark that is no pass's, once. ``about`` is ``"capture"``, ``"plan"`` or
        ``"kernels"``; ``site`` is a layer's name, or a part of this capture."""
        where = site if ":" in site else f"{self.index}:{site}"
        said = Report((Remark(kind, about, where, source, reason, cure),))
        if said.remarks[0] not in self.remarks.remarks:
            self.remarks += said
        return said

    @property
    def rewrites(self) -> tuple[tuple[str, str], ...]:
        """``(pass, site)`` of all that was rewritten, inside regions too."""
        outer = () if self.rewritten is None else self.rewritten.rewrites
        return (*outer, *self.body_rewrites)

    def rounded(self) -> list[Any]:
        """The weights whose products this graph rounds (``Pass.rounded``)."""
        if not self.running or self.pipeline is None or self.rewritten is None:
            return []
        return [one for made in self.pipeline.passes for one in made.rounded(self.rewritten.gm)]

    def replay(self, watch: Callable[[str, fx.GraphModule, Report], None]) -> None:
        """Run the passes again and show each one's graph: they are pure, so it is what ran."""
        if self.lowered is not None and self.pipeline is not None:
            self.pipeline.run(clone(self.lowered), self.given, watch)


def plan_of(captures: Sequence[Capture]) -> Plan:
    """One plan over all captures, whose names are in its sites. Its predictions are those of the
    capture and batch with the highest peak."""
    made = [(one.rewritten.plan, one.given) for one in captures if one.rewritten is not None]
    plans = [plan for plan, _ in made]
    predicted = [given for _, given in made if given.peak_gpu_bytes is not None]
    highest = max(predicted, key=lambda plan: plan.peak_gpu_bytes or 0, default=Plan())
    choices = {site: choice for plan in plans for site, choice in plan.choices.items()}
    return replace(highest, choices=choices, switched_off=frozenset())
