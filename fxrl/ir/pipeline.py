"""Runs passes over a graph and checks each; between finding and acting the plan is made.

The runner knows no pass by name. What ran is kept as data; the graphs before and after each pass
are not: passes are pure, so whoever wants to see them (``dump``) runs the pipeline again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import fx

from fxrl.errors import first_line
from fxrl.ir.graph_pass import Miss, Normalisation, Pass, Site, Stage
from fxrl.ir.plan import Choice, Plan
from fxrl.ir.remark import Remark, RemarkKind, Report
from fxrl.ir.verifier import GraphCheck

#: Called before the first pass and after each: name of the pass ("" before), graph, its remarks.
Watch = Callable[[str, fx.GraphModule, Report], None]
#: Chooses for the sites of a graph in which heads and layers are regions.
Planner = Callable[[fx.GraphModule, Plan], Plan]
Found = list[tuple[Pass[Any], list[Site | Miss]]]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The outcome of a pipeline on a graph."""

    gm: fx.GraphModule
    plan: Plan  # a choice for each site
    given: Plan  # the plan that the acting passes got: the caller's, and what the planner chose
    report: Report  # the passes' remarks, in order
    # ``(pass, site)`` of all that was rewritten, normalising passes included.
    rewrites: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order in which they run."""

    passes: tuple[Pass[Any], ...]  # sorted by stage
    # After each pass, compute every fake value that it changed anew and compare; for tests, since
    # it takes as long as tracing.
    check_values: ClassVar[bool] = False

    def measured(self, inputs: Sequence[Any]) -> Pipeline:
        """The same passes with options that depend on a graph's real inputs."""
        return Pipeline(tuple(one.measured(inputs) for one in self.passes))

    def sparing(self) -> Pipeline:
        """The same passes with options for a step that does not fit otherwise."""
        return Pipeline(tuple(one.sparing() for one in self.passes))

    def run(
        self,
        gm: fx.GraphModule,
        plan: Plan,
        watch: Watch | None = None,
        planner: Planner | None = None,
    ) -> Rewritten:
        """Run all passes over ``gm``, which is the caller's to change.

        ``plan`` decides about the sites that it names, the passes' options about all others, unless
        a ``planner`` makes the plan once all sites are found. ``watch`` sees the graph before the
        first pass and after each.
        """
        run = _Run(gm, plan, watch, GraphCheck(gm, values=self.check_values))
        run.told("", Report())
        stages = [[p for p in self.passes if p.stage == stage] for stage in Stage]
        normalise, find, act, clean = stages
        for one in (*normalise, *find):
            run.act(one, run.match(one))
        if planner is not None:
            run.plan = planner(run.gm, run.plan)
        found: Found = [(one, run.match(one)) for one in act]
        for one, places in found:
            run.act(one, places)
        for one in clean:
            run.act(one, run.match(one))
        return run.result()


@dataclass(slots=True)
class _Run:
    """One run: the graph, and what was said and chosen so far."""

    gm: fx.GraphModule
    plan: Plan
    watch: Watch | None
    check: GraphCheck
    remarks: list[Remark] = field(default_factory=list)
    choices: dict[str, Choice] = field(default_factory=dict)
    rewrites: list[tuple[str, str]] = field(default_factory=list)

    def match(self, one: Pass[Any]) -> list[Any]:
        """The places that a pass finds: none where it fails, which costs no other pass a thing."""
        try:
            return list(one.match(self.gm))
        except Exception as error:
            if self.check.values:
                raise
            reason = f"its search failed: {first_line(error)}"
            names = (str(node.meta["site"]) for node in self.gm.graph.nodes if "site" in node.meta)
            site = f"{next(names, '').partition(':')[0]}:{one.name}"  # of its own: none hides it
            self.remarks.append(Remark(RemarkKind.MISSED, one.name, site, "", reason))
            return []

    def act(self, one: Pass[Any], places: Sequence[Any]) -> None:
        known = replace(self.plan, choices={**self.plan.choices, **self.choices})
        ran = one.act(self.gm, places, known)
        if ran.rewrites:
            self.check.after(one.name, self.gm)
        report = Report(tuple(ran.remarks))
        self.remarks += report.remarks
        if not isinstance(one, Normalisation):
            self.choices |= ran.choices
        self.rewrites += [(one.name, site) for site in ran.rewrites]
        self.told(one.name, report)

    def told(self, name: str, report: Report) -> None:
        if self.watch is not None:
            self.watch(name, self.gm, report)

    def result(self) -> Rewritten:
        plan = replace(self.plan, choices=self.choices)
        return Rewritten(
            self.gm, plan, self.plan, Report(tuple(self.remarks)), tuple(self.rewrites)
        )
