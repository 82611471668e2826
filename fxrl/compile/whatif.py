"""How a planned step would change with more of some resource, or at other sizes.

Every answer comes from the solver, for the chain that was built already: nothing is traced again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxrl.compile.planning import StepChain
from fxrl.errors import PlanError
from fxrl.ir.capture_record import Capture, plan_of
from fxrl.ir.plan import Plan
from fxrl.ir.remark import format_bytes
from fxrl.planner.budget import FRAGMENTS, Budget
from fxrl.planner.chain import Chain, host_bytes, peak_bytes
from fxrl.planner.pace import step_seconds
from fxrl.planner.solver import fastest

#: How much more of one resource is tried, as a share of what there is.
_MORE = 0.25
#: A resource binds where more of it saves this share of a step.
_MATTERS = 0.005
#: Contexts of the frontier reach down to this part of the longest.
_SHORTEST = 32


@dataclass(frozen=True, slots=True)
class Change:
    """A step where something is different."""

    what: str  # that, in words
    seconds: float  # for as many tokens as the step has now


@dataclass(frozen=True, slots=True)
class Advice:
    """What makes a step slower than it could be, and what would help."""

    # Resources of which more would save time, the most effective first; () if everything is kept.
    binds: tuple[str, ...]
    changes: tuple[Change, ...]  # the fastest first; with them the memory to keep everything


@dataclass(frozen=True, slots=True)
class Fit:
    """Sizes that fit: as many rows as do at this context, or the longest context for these rows."""

    # Of a batch.
    tokens: int
    rows: int
    seconds: float  # of its step
    host_bytes: int  # what waits there


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Questions about a captured step."""

    step: StepChain  # what it planned, or the same at other sizes
    captured: Plan  # what it found

    @classmethod
    def of(cls, captures: Sequence[Capture], given: Plan, *, rows: int | None = None) -> WhatIf:
        """For the captured graph that needs most memory; at least one of the captures has a
        planner. ``given`` is the plan that the captures had to obey, ``rows`` the number of rows to
        ask about if it is not the captured one."""
        planned = [one for one in captures if one.planner is not None and one.found is not None]
        if not planned:
            said = [r for one in captures for r in one.report.of_kind("missed")]
            raise PlanError("; ".join(r.reason for r in said) or "no graph was captured")
        most = max(planned, key=lambda one: one.given.peak_gpu_bytes or 0)
        step = most.planner.step(most.found, given)
        step = step if rows in (None, step.size(0)) else step.at(rows=rows)
        return cls(step, plan_of(captures))

    @property
    def budget(self) -> Budget:
        """The memory that the planner may use."""
        return self.step.planner.budget

    def plan(self) -> Plan:
        """See ``Planner``."""
        if not self.step.values:
            return self.captured
        found = self.step.planned()
        return replace(found, choices={**self.captured.choices, **found.choices})

    def advice(self) -> Advice | None:
        """The resources that limit the step, and what more of each would gain; None if no plan
        fits."""
        gpu, host = self.budget.gpu_bytes, self.budget.host_bytes
        chain, plain = self.step.plain()
        whole, least = peak_bytes(chain, plain), step_seconds(chain, plain)
        if whole <= gpu:
            return Advice((), ())
        chain = self.step.chain()
        if (now := _seconds(chain, gpu, host)) is None:
            return None
        found = {name: (what, seconds) for name, what, seconds in self._more(chain)}
        won = {name: now - seconds for name, (_, seconds) in found.items()}
        binds = [n for n in sorted(won, key=lambda n: -won[n]) if won[n] > _MATTERS * now]
        changes = [Change(what, seconds) for what, seconds in found.values()]
        changes += [*self._shorter(), *self._tables(chain)]
        changes = [change for change in changes if now - change.seconds > _MATTERS * now]
        changes.append(Change(f"{_of_gpu(whole)}, where all is kept", least))
        return Advice(tuple(binds), tuple(sorted(changes, key=lambda change: change.seconds)))

    def fits(self) -> Iterator[Fit]:
        """How many rows fit at each of several context lengths; among these are the longest that
        fits for one row and for as many rows as the batch has."""
        for tokens, rows in sorted(self._sizes()):
            step = self.step.at(tokens=tokens, rows=rows)
            if (best := step.fastest()) is not None:
                seconds = step_seconds(step.chain_of(best), best)
                yield Fit(tokens, rows, seconds, host_bytes(best))

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Tokens and rows on the frontier."""
        rows, tokens = self.step.size(0), self.step.size(-1)
        alone = self.step.at(rows=1).longest()
        if rows is None or tokens is None or alone is None:
            return
        yield alone, 1
        if rows > 1 and (longest := self.step.longest()) is not None:
            yield longest, rows
        lengths = {2**k for k in range(8, 25) if alone / _SHORTEST < 2**k < 0.9 * alone}
        for length in lengths | ({tokens} if tokens <= alone else set()):
            start = self.step.at(tokens=length, rows=max(1, alone // length))
            if (most := start.most_rows()) is not None:
                yield length, most

    def _more(self, chain: Chain) -> Iterator[tuple[str, str, float]]:
        """For each resource its name, a larger amount of it, and the seconds of a step with
        that."""
        gpu, host = self.budget.gpu_bytes, self.budget.host_bytes
        more_gpu, more_host = (int(size * (1 + _MORE)) for size in (gpu, host))
        link = chain.link * (1 + _MORE)
        tried = (
            ("GPU memory", _of_gpu(more_gpu), (chain, more_gpu, host)),
            ("host memory", f"{format_bytes(more_host)} of host memory", (chain, gpu, more_host)),
            (
                "the link to the host",
                f"a link to the host of {link / 1e9:.0f} GB/s",
                (replace(chain, link=link), gpu, host),
            ),
        )
        for name, what, asked in tried:
            seconds = _seconds(*asked)
            assert seconds is not None, "what fits does so with more, too"
            yield name, what, seconds

    def _shorter(self) -> Iterator[Change]:
        tokens = self.step.size(-1)
        if tokens is None or tokens < 4:
            return
        step = self.step.at(tokens=tokens // 2)
        if (best := step.fastest()) is not None:
            seconds = 2 * step_seconds(step.chain_of(best), best)
            yield Change("half the context, in two steps", seconds)

    def _tables(self, chain: Chain) -> Iterator[Change]:
        """The tables of frozen embeddings in host memory."""
        outside = self.step.outside
        if moved := outside.table_bytes:
            head_s = chain.head_s + outside.looked_up_seconds
            rest = replace(chain, base_bytes=chain.base_bytes - moved, head_s=head_s)
            seconds = _seconds(rest, self.budget.gpu_bytes, self.budget.host_bytes)
            assert seconds is not None, "what fits does so with more memory, too"
            what = f"{format_bytes(moved)} of embeddings in host memory (offload_embeddings)"
            yield Change(what, seconds)


def _seconds(chain: Chain, gpu: int, host: int) -> float | None:
    best = fastest(chain, gpu, host)
    return None if best is None else step_seconds(chain, best)


def _of_gpu(alive: int) -> str:
    """GPU memory in words, with the fragments that a budget leaves room for."""
    return f"{format_bytes(int(alive / (1 - FRAGMENTS)))} of GPU memory"
