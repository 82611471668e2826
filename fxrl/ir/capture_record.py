"""One captured graph and what became of it; report, dump and verify read it.

The backend fills it while it compiles. It holds graphs, not text: whoever wants to read renders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxrl.ir.pipeline import Pipeline, Rewritten
from fxrl.ir.plan import Plan
from fxrl.ir.remark import Remark, RemarkKind, Report


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where Dynamo stopped a graph: the reason in its words and the user's ``file:line``."""

    reason: str
    source: str


@dataclass(slots=True)
class Capture:
    """One captured graph and what became of it.

    Attributes:
        index: running number, from 0.
        dynamo: the graph as Dynamo delivered it.
        lowered: the graph that the passes got; None where it could not be lowered.
        pipeline: the passes that ran, or will.
        given: the plan that the passes were given, before sites were decided.
        planner: where memory is bounded, the planner that made the plan; else None.
        found: the graph that the planner saw: after the passes of ``FIND``.
        rewritten: what the passes made of ``lowered``; None where they did not run.
        kernels: what runs for each region, by the region's id; owned here.
        running: whether the rewritten graph runs; otherwise the user's own does.
        body_rewrites: ``(pass, site)`` of what was rewritten inside regions.
        remarks: of the capture itself; the passes' are in ``rewritten``.
        graph_breaks: why the graph ended, if Dynamo broke it.
    """

    index: int
    dynamo: fx.GraphModule
    lowered: fx.GraphModule | None = None
    pipeline: Pipeline | None = None
    given: Plan = field(default_factory=Plan)
    planner: Any = None
    found: Any = None
    rewritten: Rewritten | None = None
    kernels: dict[str, Any] = field(default_factory=dict)
    running: bool = False
    body_rewrites: Sequence[tuple[str, str]] = ()
    remarks: Report = field(default_factory=Report)
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
        """Say something of the capture that is no pass's word, once.

        Args:
            about: ``"capture"``, ``"plan"`` or ``"kernels"``.
            site: a layer's name; or what of this capture it is about.
        """
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
            self.pipeline.run(self.lowered, self.given, watch)


def plan_of(captures: Sequence[Capture]) -> Plan:
    """One plan over all captures; sites name their capture. What is predicted is of the capture and
    the batch that need most."""
    made = [(one.rewritten.plan, one.given) for one in captures if one.rewritten is not None]
    plans = [plan for plan, _ in made]
    predicted = [given for _, given in made if given.peak_gpu_bytes is not None]
    highest = max(predicted, key=lambda plan: plan.peak_gpu_bytes or 0, default=Plan())
    choices = {site: choice for plan in plans for site, choice in plan.choices.items()}
    return replace(highest, choices=choices, switched_off=frozenset())
