"""The pass protocol: match says what is legal, the plan what is worth it, rewrite obeys.

A pass is pure: its result depends on the graph and the plan alone. ``run`` mints exactly one
remark per site, so silence is impossible; the only silent path is "not this idiom" in ``match``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar, final

from torch import fx

from fxrl.ir.graph import eliminate_dead_code, propagate_requires_grad, topological_sort
from fxrl.ir.plan import Choice, Keep, Plan
from fxrl.ir.remark import Refusal, Remark, RemarkKind, Report
from fxrl.ir.source import user_source


@dataclass(frozen=True, slots=True)
class Site:
    """A legal place for a rewrite.

    Attributes:
        anchor: the graph value that names the site.
        saved_bytes: predicted bytes that the rewrite takes off the peak.
    """

    anchor: fx.Node
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Miss:
    """A recognised place where the rewrite is illegal: the node at fault, the reason, the cure."""

    anchor: fx.Node
    reason: str
    cure: str = ""
    at: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """What a rewrite did, in words, and what it saves."""

    what: str
    saved_bytes: int


S = TypeVar("S", bound=Site)


class RewritePass(ABC, Generic[S]):
    """Base of the passes; authors write ``match`` and ``rewrite``.

    Attributes:
        saves_memory: whether the plan weighs a site by the bytes it saves.
    """

    name: ClassVar[str]
    saves_memory: ClassVar[bool] = True

    @abstractmethod
    def match(self, gm: fx.GraphModule) -> Iterator[S | Miss]:
        """Every place of the idiom, legal or not."""

    @abstractmethod
    def rewrite(self, gm: fx.GraphModule, site: S, choice: Choice) -> Applied:
        """Rewrite one site; raise ``Refusal`` (with the graph unchanged but for dead nodes)."""

    def decline(self, site: S, plan: Plan) -> str | None:
        """Why a legal site is better left alone, which is no miss; None where it is not."""
        return None

    @final
    def run(self, gm: fx.GraphModule, plan: Plan) -> Report:
        """Match, ask the plan, rewrite, and say what happened at each site."""
        remarks = [self._visit(gm, found, plan) for found in list(self.match(gm))]
        topological_sort(gm.graph)
        eliminate_dead_code(gm.graph)
        propagate_requires_grad(gm.graph)
        gm.graph.lint()
        gm.recompile()
        return Report(tuple(remarks))

    def _visit(self, gm: fx.GraphModule, found: S | Miss, plan: Plan) -> Remark:
        anchor = found.anchor
        name, source = anchor.name, user_source(anchor)
        if isinstance(found, Miss):
            source = user_source(found.at) if found.at is not None else source
            reason = found.reason
            if found.at is not None and found.at is not anchor:
                reason += f" (at %{found.at})"
            return Remark(RemarkKind.MISSED, self.name, name, source, reason, found.cure)
        if (declined := self.decline(found, plan)) is not None:
            return Remark(RemarkKind.ANALYSIS, self.name, name, source, declined)
        weight = found.saved_bytes if self.saves_memory else None
        choice = plan.choice_for(self.name, name, weight)
        if isinstance(choice, Keep):
            return Remark(RemarkKind.MISSED, self.name, name, source, choice.reason)
        try:
            did = self.rewrite(gm, found, choice)
        except Refusal as refusal:
            return Remark(RemarkKind.MISSED, self.name, name, source, refusal.reason, refusal.cure)
        return Remark(RemarkKind.APPLIED, self.name, name, source, did.what, "", did.saved_bytes)
