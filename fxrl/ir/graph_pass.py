"""The pass protocol: match says what is legal, decide what is worth it, rewrite obeys the choice.

A pass is a frozen dataclass whose fields are its options. It is pure: its result depends on the
graph, the options and the plan alone. Every site gets exactly one remark, so silence is impossible;
the only silent path is "not this idiom" in ``match``. Any part of a pass says no by ``Refusal``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, ClassVar, Generic, Self, TypeVar, final, get_type_hints

from torch import fx

from fxrl.config import Config
from fxrl.errors import ConfigError, did_you_mean
from fxrl.ir.bodies import graphs_of
from fxrl.ir.graph import eliminate_dead_code, propagate_requires_grad, topological_sort
from fxrl.ir.plan import Choice, Keep, Plan, Rewrite
from fxrl.ir.remark import Refusal, Remark, RemarkKind, Report
from fxrl.ir.site import site_name
from fxrl.ir.source import user_source
from fxrl.options import fit, misfit


class Stage(IntEnum):
    """When a pass runs; the plan is made between ``FIND`` and ``ACT``.

    ``NORMALISE`` and ``CLEAN`` give one spelling to what PyTorch spells in several ways, ``FIND``
    makes heads and layers regions, ``ACT`` sets what the plan chose for them.
    """

    NORMALISE = 0
    FIND = 1
    ACT = 2
    CLEAN = 3


@dataclass(frozen=True, slots=True)
class PassDoc:
    """A pass's line in the README's table."""

    idiom: str
    saves: str
    costs: str
    missed_when: str


@dataclass(frozen=True, slots=True)
class Site:
    """A legal place for a rewrite."""

    anchor: fx.Node  # the graph value that the site is named for
    saved_bytes: int  # predicted bytes that the rewrite takes off the peak

    @property
    def name(self) -> str:
        """The name under which reports and plans know it."""
        return site_name(self.anchor)


@dataclass(frozen=True, slots=True)
class Miss:
    """A recognised place where the rewrite is illegal."""

    anchor: fx.Node
    refusal: Refusal
    loses: bool = True  # whether something is lost by that; else the remark is a fact


@dataclass(frozen=True, slots=True)
class Applied:
    """The description of a rewrite, and the bytes that it saves."""

    what: str
    saved_bytes: int = 0


S = TypeVar("S", bound=Site)
#: Metadata of a field that is no user's option: ``of`` settles it, or ``measured`` finds it out.
SETTLED = {"settled": True}


@dataclass(slots=True)
class Ran:
    """The outcome of one pass on one graph."""

    # One for each site of which something was asked.
    remarks: list[Remark] = field(default_factory=list)
    choices: dict[str, Choice] = field(default_factory=dict)  # site -> what was chosen for it
    rewrites: list[str] = field(default_factory=list)  # sites that were rewritten


class Pass(ABC, Generic[S]):
    """Base of the passes: authors write ``match`` and ``rewrite``, ``decide`` if they weigh."""

    name: ClassVar[str]  # as people write it
    stage: ClassVar[Stage] = Stage.FIND  # when it runs
    doc: ClassVar[PassDoc]  # its line in the README
    # Passes that run before it, also where only this one was asked for.
    requires: ClassVar[tuple[str, ...]] = ()
    # Other passes obey a site's choice too, so it stays in the plan where this one does not apply.
    shares_choice: ClassVar[bool] = False
    # The kinds of its remarks; those of normalising passes, which win and lose nothing, are facts.
    applied: ClassVar[RemarkKind] = RemarkKind.APPLIED
    missed: ClassVar[RemarkKind] = RemarkKind.MISSED

    @classmethod
    def of(cls, config: Config) -> Self:
        """The pass with the options that a configuration asks for."""
        return cls()

    @final
    def told(self, options: Mapping[str, Any]) -> Self:
        """The pass with a user's options."""
        if not options:
            return self
        hints = get_type_hints(type(self))
        known = [f.name for f in fields(self) if not f.metadata.get("settled")]  # type: ignore[arg-type]
        where = f"pass_options: {self.name}"
        for name in options:
            if name not in known:
                near = did_you_mean(name, known) if known else ""
                raise ConfigError(f"{where} has no option {name!r}{near}")
        values = {
            name: _as_option(f"{where}.{name}", hints[name], value)
            for name, value in options.items()
        }
        return replace(self, **values)  # type: ignore[type-var]

    def measured(self, inputs: Sequence[Any]) -> Self:
        """The pass with options that depend on the graph's real inputs and their device; fake ones
        change nothing."""
        return self

    def sparing(self) -> Self:
        """The pass for a step that does not fit, which also rewrites where that costs time."""
        return self

    def rounded(self, gm: fx.GraphModule) -> list[Any]:
        """The weights (``fxrl.ops.rounded``) whose products are rounded in a graph that this pass
        rewrote; ``verify`` rounds them in its reference too."""
        return []

    @abstractmethod
    def match(self, gm: fx.GraphModule) -> Iterator[S | Miss]:
        """Every place of the idiom, legal or not."""

    def planned(self, site: S, plan: Plan) -> Choice | None:
        """The choice that the plan has for a site, if any."""
        return plan.choices.get(site.name)

    def decide(self, site: S) -> Choice:
        """The choice for a site that the plan does not name."""
        return Rewrite(self.name)

    @abstractmethod
    def rewrite(self, gm: fx.GraphModule, site: S, choice: Choice) -> Applied | None:
        """Rewrite one site; None where the choice asks for nothing. Raise ``Refusal`` with the
        graph unchanged but for dead nodes."""

    @final
    def run(self, gm: fx.GraphModule, plan: Plan | None = None) -> Report:
        """Match, choose and rewrite, in place; what happened at each site."""
        return Report(tuple(self.act(gm, list(self.match(gm)), plan or Plan()).remarks))

    @final
    def act(self, gm: fx.GraphModule, found: Iterable[S | Miss], plan: Plan) -> Ran:
        """Choose and rewrite at the sites that ``match`` found."""
        ran = Ran()
        for place in found:
            if (remark := self._visit(gm, place, plan, ran)) is not None:
                ran.remarks.append(remark)
        if ran.remarks:  # what a refused rewrite had begun is dead, too
            tidy(gm)
        return ran

    def _visit(self, gm: fx.GraphModule, found: S | Miss, plan: Plan, ran: Ran) -> Remark | None:
        if isinstance(found, Miss):
            kind = self.missed if found.loses else RemarkKind.ANALYSIS
            return self._refused(found.anchor, site_name(found.anchor), found.refusal, kind)
        name = found.name
        choice = chosen = self.planned(found, plan) or self.decide(found)
        if (self.name, name) in plan.switched_off:
            choice = Keep("it is switched off")
        by = getattr(choice, "by", self.name)
        if by != self.name:
            choice = Keep(f"the plan gives it to {by}", missed=False)
        else:
            ran.choices[name] = chosen if self.shares_choice else choice
        if isinstance(choice, Keep):
            kind = self.missed if choice.missed else RemarkKind.ANALYSIS
            return self._remark(kind, found.anchor, name, choice.reason, choice.cure)
        try:
            did = self.rewrite(gm, found, choice)
        except Refusal as refusal:
            if not self.shares_choice:
                ran.choices[name] = Keep(refusal.reason)
            return self._refused(found.anchor, name, refusal, self.missed)
        if did is None:
            return None
        ran.rewrites.append(name)
        return self._remark(self.applied, found.anchor, name, did.what, "", did.saved_bytes)

    def _refused(self, anchor: fx.Node, name: str, refusal: Refusal, kind: RemarkKind) -> Remark:
        reason, at = refusal.reason, refusal.at
        if at is not None and at is not anchor:
            reason += f" (at %{at})"
        return self._remark(kind, at or anchor, name, reason, refusal.cure)

    def _remark(
        self, kind: RemarkKind, at: fx.Node, name: str, reason: str, cure: str = "", saved: int = 0
    ) -> Remark:
        return Remark(kind, self.name, name, user_source(at), reason, cure, saved)


def _as_option(where: str, hint: Any, value: Any) -> Any:
    """A value of a field's type, which a file may spell otherwise: a list, or 1 for 1.0."""
    try:
        return fit(hint, value)
    except TypeError:
        raise ConfigError(f"{where}={misfit(hint, value)}") from None


class Normalisation(Pass[S]):
    """A pass that gives one spelling to what PyTorch spells in several ways: it runs always, and
    takes no site of a plan."""

    stage = Stage.NORMALISE
    applied = RemarkKind.ANALYSIS
    missed = RemarkKind.ANALYSIS

    @abstractmethod
    def respell(self, gm: fx.GraphModule, site: S) -> Applied:
        """Rewrite one site, which leaves nothing to choose; raises ``Refusal`` as ``rewrite``."""

    @final
    def rewrite(self, gm: fx.GraphModule, site: S, choice: Choice) -> Applied:
        return self.respell(gm, site)


def tidy(gm: fx.GraphModule) -> None:
    """Leave a rewritten graph in order, checkpointed bodies first: sorted, nothing dead."""
    for graph in reversed(list(graphs_of(gm))):
        topological_sort(graph)
        eliminate_dead_code(graph)
        propagate_requires_grad(graph)
        graph.lint()
        if graph.owning_module is not None:
            graph.owning_module.recompile()
