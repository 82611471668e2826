"""The fastest plan within two budgets, of those that treat layers in at most three runs.

    layers 0 ... a     one choice          what runs do to memory is known from prefix sums, so
    layers a ... b     another             every plan of this kind is looked at: all choices, all
    layers b ... end   a third             places a and b, at once

NOTE [Why runs]: layers of a model are nearly alike, so a plan is how many of them get which choice,
in which order. With two budgets and a link, a linear programme over such counts has an optimum with
three choices or four (a basic solution has as many as there are constraints); the third run takes
what rounding to whole layers leaves. An exact dynamic programme over (layer, GPU bytes, host bytes)
took 1 to 60 s for 36 layers of 18 choices (tens of thousands of states that none dominates) and won
nothing that one can measure. Which plans there are does not depend on the budgets, so more of one
is never slower. People can read such a plan, too.

Sources: H. Beaumont et al., "Optimal checkpointing for heterogeneous chains" (Rotor, 2019) and
"Efficient combination of rematerialization and offloading" (POFO, 2021), whose programmes run
sub-chains again, where here each layer keeps or recomputes for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fxrl.errors import PlanError
from fxrl.ir.plan import CutLayer
from fxrl.ir.remark import format_bytes
from fxrl.planner.chain import ON_THEIR_WAY, Chain, Option, gradients_made, peak_bytes

Array = np.ndarray[Any, Any]
Plan = tuple[Option, ...]


def fastest(chain: Chain, gpu_bytes: int, host_bytes: int) -> Plan | None:
    """An option for each layer with the least time, of those that fit; None where none does.

    Args:
        chain: its layers may differ in what an option costs, and in which they have; a choice is
            for a run of layers that all have it, or have no choice.
    """
    if not chain.layers:
        return () if peak_bytes(chain, ()) <= gpu_bytes else None
    return Runs(_unbeaten(chain, (*_BYTES, *_SECONDS))).fastest(gpu_bytes, host_bytes)


def least_peak(chain: Chain, host_bytes: int) -> tuple[Plan, int]:
    """The plan with the lowest peak that the host has room for, and what it is charged.

    Raises:
        PlanError: there is none: choices that were given ask for more.
    """
    if not chain.layers:
        return (), peak_bytes(chain, ())
    return Runs(_unbeaten(chain, _BYTES)).least_peak(host_bytes)


_BYTES = ("gpu_bytes", "host_bytes", "forward_bytes", "backward_bytes")
_SECONDS = ("forward_s", "backward_s")


def _unbeaten(chain: Chain, costs: Sequence[str]) -> Chain:
    """Without the choices that another, which every layer has too, is below in no cost and equal
    to at best: no plan is better for having them."""
    of = [{o.choice: [getattr(o, n) for n in costs] for o in layer} for layer in chain.layers]
    choices = list(dict.fromkeys(o.choice for layer in chain.layers for o in layer))

    def beats(one: CutLayer, other: CutLayer) -> bool:
        mine = [layer.get(one) for layer in of if other in layer]
        its = [layer[other] for layer in of if other in layer]
        no_worse = all(
            m is not None and all(a <= b for a, b in zip(m, c, strict=True))
            for m, c in zip(mine, its, strict=True)
        )
        return no_worse and (mine != its or choices.index(one) < choices.index(other))

    left = [c for c in choices if not any(beats(one, c) for one in choices if one != c)]
    layers = tuple(tuple(o for o in layer if o.choice in left) for layer in chain.layers)
    return replace(chain, layers=layers)


@dataclass(frozen=True, slots=True)
class _Run:
    """One of the three runs of all plans: [choice, place].

    Attributes:
        seconds: of forward and backward.
        gpu, host: bytes that its layers keep.
        peak: most bytes while they run, besides what those before it keep.
        sent: most that one of them sends to the host.
    """

    seconds: Array
    gpu: Array
    host: Array
    peak: Array
    sent: Array


@dataclass(frozen=True)
class Runs:
    """A chain's plans of at most three runs, in numbers.

    Every plan is (first, second, third choice, a, b) with 0 <= a <= b <= number of layers; runs may
    be empty. Tables are indexed by choice, and by where a run starts and ends.
    """

    chain: Chain

    def fastest(self, gpu_bytes: int, host_bytes: int) -> Plan | None:
        """See ``fastest``."""
        best, found = (np.inf, np.inf), None
        for first in range(len(self._choices)):
            for second in range(len(self._choices)):
                seconds, peak, host = self._plans(first, second)
                fit = (peak <= gpu_bytes) & (host <= host_bytes)
                if not fit.any() or (least := seconds[fit].min()) > best[0]:
                    continue
                at = np.argmin(np.where(fit & (seconds == least), peak, np.inf))
                if (least, peak.flat[at]) < best:
                    best, found = (least, peak.flat[at]), (first, second, int(at))
        return None if found is None else self._plan(*found)

    def least_peak(self, host_bytes: int) -> tuple[Plan, int]:
        """See ``least_peak``."""
        best, found = np.inf, (0, 0, 0)
        for first in range(len(self._choices)):
            for second in range(len(self._choices)):
                _, peak, host = self._plans(first, second)
                peak = np.where(host <= host_bytes, peak, np.inf)
                if peak.min() < best:
                    best, found = peak.min(), (first, second, int(peak.argmin()))
        if best == np.inf:
            asked = sum(min(o.host_bytes for o in layer) for layer in self.chain.layers)
            raise PlanError(
                f"the choices that are given keep {format_bytes(asked)} in host memory, and "
                f"{format_bytes(host_bytes)} may be used; cure: a larger host_memory, or "
                "inputs_on='gpu' and kept_on='gpu' in some of them"
            )
        return self._plan(*found), int(best)

    # -- what there is to choose
    @cached_property
    def _choices(self) -> list[CutLayer]:
        """All that any layer has a choice of."""
        layers = [layer for layer in self.chain.layers if len(layer) > 1] or self.chain.layers
        return list(dict.fromkeys(option.choice for layer in layers for option in layer))

    @cached_property
    def _options(self) -> list[list[Option | None]]:
        """For each choice the layers' options; None where a layer has it not. A layer without a
        choice, because its is given, does its own in any run."""
        by_layer = [{option.choice: option for option in layer} for layer in self.chain.layers]
        only = [layer[0] if len(layer) == 1 else None for layer in self.chain.layers]
        pairs = list(zip(by_layer, only, strict=True))
        return [[options.get(choice, one) for options, one in pairs] for choice in self._choices]

    @cached_property
    def _cuts(self) -> tuple[Array, Array]:
        """Every a and b."""
        count = len(self.chain.layers)
        pairs = [(a, b) for a in range(count + 1) for b in range(a, count + 1)]
        return np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])

    def _plan(self, first: int, second: int, at: int) -> Plan:
        third, place = divmod(at, len(self._cuts[0]))
        a, b = (int(cut[place]) for cut in self._cuts)
        runs = [(first, 0, a), (second, a, b), (third, b, len(self.chain.layers))]
        options = [o for choice, start, end in runs for o in self._options[choice][start:end]]
        return tuple(option for option in options if option is not None)

    # -- sums over runs
    def _sums(self, name: str) -> Array:
        """[choice, layers before]: an attribute summed; nothing where a layer lacks the choice."""
        values = [[0.0 if o is None else getattr(o, name) for o in row] for row in self._options]
        start = np.zeros((len(values), 1))
        return np.concatenate([start, np.cumsum(np.array(values, dtype=float), 1)], 1)

    @cached_property
    def _tables(self) -> dict[str, Array]:
        return {n: self._sums(n) for n in ("gpu_bytes", "host_bytes", "forward_s", "backward_s")}

    @cached_property
    def _most(self) -> tuple[Array, Array]:
        """[choice, start, end]: most bytes while a run's layers run, besides what those before it
        keep, infinite where one lacks the choice; and the most that one sends to the host."""
        count, made = len(self.chain.layers), gradients_made(self.chain)
        peaks = np.zeros((len(self._choices), count + 1, count + 1))
        sends = np.zeros_like(peaks)
        for choice, row in enumerate(self._options):
            for start in range(count):
                kept = peak = sent = 0.0
                for end, option in enumerate(row[start:], start + 1):
                    if option is None:
                        peaks[choice, start, end:] = np.inf
                        break
                    later = option.gpu_bytes + option.backward_bytes + made[end]
                    peak = max(peak, kept + max(option.forward_bytes, later))
                    sent = max(sent, option.host_bytes)
                    kept += option.gpu_bytes
                    peaks[choice, start, end], sends[choice, start, end] = peak, sent
        return peaks, sends

    @cached_property
    def _runs(self) -> tuple[_Run, _Run, _Run]:
        """The first, second and third run of every plan."""
        a, b = self._cuts
        begin, end = np.zeros_like(a), np.full_like(a, len(self.chain.layers))
        return self._run(begin, a), self._run(a, b), self._run(b, end)

    def _run(self, start: Array, end: Array) -> _Run:
        """A step's seconds are counted by runs, as ``chain.step_seconds`` does."""
        over = {name: table[:, end] - table[:, start] for name, table in self._tables.items()}
        moved = over["host_bytes"] / self.chain.link
        seconds = np.maximum(over["forward_s"], moved) + np.maximum(over["backward_s"], moved)
        peaks, sends = self._most
        gpu, host = over["gpu_bytes"], over["host_bytes"]
        return _Run(seconds, gpu, host, peaks[:, start, end], sends[:, start, end])

    def _plans(self, first: int, second: int) -> tuple[Array, Array, Array]:
        """[third choice, place]: seconds, peak bytes and host bytes of every plan that begins with
        these two choices.

        What is on its way to the host or back is charged as if every layer sent as much as the one
        that sends most.
        """
        one, two, three = self._runs
        made = gradients_made(self.chain)
        before = one.gpu[first]
        between = before + two.gpu[second]
        peak = np.maximum(one.peak[first], before + two.peak[second])
        peak = np.maximum(peak, between + three.peak)
        at_head = between + three.gpu + (made[-1] + self.chain.head_bytes)
        peak = np.maximum(np.maximum(peak, at_head), made[0])
        sent = np.maximum(np.maximum(one.sent[first], two.sent[second]), three.sent)
        host = one.host[first] + two.host[second] + three.host
        seconds = self.chain.head_s + one.seconds[first] + two.seconds[second] + three.seconds
        return seconds, self.chain.base_bytes + peak + ON_THEIR_WAY * sent, host
