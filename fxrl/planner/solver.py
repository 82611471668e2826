"""The fastest plan within two budgets, of those that treat layers in at most three ways.

    layers 0 ... a     one choice          ... or the first two are mixed: what goes to the host
    layers a ... b     another             does so all through the forward, while layers between
    layers b ... end   a third             that send little give the link time

A choice may be one of layers in segments (``Option.segments``): these are one run of the three at
most, of whole segments.

All choices and all places a and b are looked at: sums say what a plan takes at least, and those
that may be the fastest are played, layer by layer and copy by copy (``planner.pace``).

Layers that a loss runs in several forwards have one choice in all of them: what is chosen is
[plan, layer], what it costs [plan, layer of each forward].

NOTE [Why three]: layers of a model are nearly alike, so a plan is how many of them get which
choice, in which order. With two budgets and a link, a linear programme over such counts has an
optimum with three choices or four (a basic solution has as many as there are constraints). For 12
and 36 layers of Qwen3-8B's shape a random search that began at the plan found here and changed
whatever it liked won nothing, and 0.2 %. Which plans there are does not depend on the budgets, so
more of one is never slower. People can read such a plan, too.

Sources: H. Beaumont et al., "Optimal checkpointing for heterogeneous chains" (Rotor, 2019) and
"Efficient combination of rematerialization and offloading" (POFO, 2021), whose programmes run
sub-chains again at any depth, where here a segment runs again once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxrl.errors import PlanError
from fxrl.ir.plan import CutLayer
from fxrl.ir.remark import format_bytes
from fxrl.planner.chain import Chain, Option, gradients_made, peak_bytes
from fxrl.planner.pace import COSTS, Array, Plan, first_read, paced, seconds_at, widest


def fastest(chain: Chain, gpu_bytes: int, host_bytes: int) -> Plan | None:
    """The fastest options that fit, one per layer; None if nothing fits. If anything goes to the
    host, the choices say how much may be on its way.

    Layers may differ in the costs of an option and in which options they have. A choice applies to
    a run of layers that all have it, or have only one option.
    """
    if not chain.layers:
        return () if peak_bytes(chain, ()) <= gpu_bytes else None
    return _Plans(_unbeaten(chain, COSTS)).fastest(gpu_bytes, host_bytes)


def least_peak(chain: Chain, host_bytes: int) -> tuple[Plan, int]:
    """The plan with the lowest peak within the host's budget, and that peak. Raises ``PlanError``
    if choices that the user gave need more host memory."""
    if not chain.layers:
        return (), peak_bytes(chain, ())
    return _Plans(_unbeaten(chain, _BYTES)).least_peak(host_bytes)


def least_host_bytes(chain: Chain) -> int:
    """What any plan keeps in host memory at least."""
    return sum(min(option.host_bytes for option in layer) for layer in chain.layers)


Way = CutLayer | tuple[CutLayer, int] | None  # see ``Option.way``
_BYTES = ("gpu_bytes", "host_bytes", "forward_bytes", "backward_bytes", "reach")
#: Plans that are played at once.
_BLOCK = 1024
#: Bytes that no GPU has: of a choice that a layer lacks.
_TOO_MANY = 2.0**60
#: Of all places, one in so many says which choices are promising.
_SAMPLE = 7


def _unbeaten(chain: Chain, costs: Sequence[str]) -> Chain:
    """The chain without dominated choices: those for which every layer has another choice that
    costs no more in any respect, and may begin wherever they do. No plan gets better by having
    them."""
    ways = list(dict.fromkeys(o.way for layer in chain.layers for o in layer))
    place = {way: index for index, way in enumerate(ways)}
    table = np.full((len(ways), len(chain.layers), len(costs)), np.inf)
    for number, layer in enumerate(chain.layers):
        for option in layer:
            table[place[option.way], number] = [getattr(option, name) for name in costs]
    no_worse = (table[:, None] <= table[None]).all((2, 3))  # [one, other]
    ahead = np.triu(np.ones_like(no_worse), 1)  # of two alike the first stays
    counts = np.array([_segment(way) for way in ways])
    anywhere = (counts[:, None] == 1) | (counts[:, None] == counts)
    beaten = (no_worse & (~no_worse.T | ahead) & anywhere).any(0)
    layers = tuple(tuple(o for o in layer if not beaten[place[o.way]]) for layer in chain.layers)
    return replace(chain, layers=layers)


def _segment(way: Way) -> int:
    """How many layers make a segment; 1 where there are none."""
    return way[1] if isinstance(way, tuple) else 1


def runs(count: int) -> Iterator[tuple[int, int]]:
    """All pairs of places where the second and the third of three runs of layers begin."""
    return itertools.combinations_with_replacement(range(count + 1), 2)


def mixture(share: int, count: int) -> list[int]:
    """An even mixture of two choices over ``count`` layers, 1 for the ``share`` layers with the
    first."""
    return [int(-(-(i + 1) * share // count) == -(-i * share // count)) for i in range(count)]


@dataclass(frozen=True)
class _Plans:
    """A chain's plans of at most three choices, in numbers.

    Every plan is (first, second, third choice, place), a place being who gets which of them: first
    all runs, where a choice may get no layer, then all mixtures of the first two ahead of a run.
    Arrays over layers have one for each forward that it runs in, in order (``Chain.layers``).
    """

    chain: Chain

    def fastest(self, gpu_bytes: int, host_bytes: int) -> Plan | None:
        best, found = np.inf, None
        limits = gpu_bytes, host_bytes
        for first, second in self._by_promise(*limits):
            table = self._least_seconds(first, second, *limits)
            bounds = table.ravel()
            promising = np.flatnonzero(bounds < best)
            promising = promising[np.argsort(bounds[promising], kind="stable")]
            for start in range(0, len(promising), _BLOCK):
                block = promising[start : start + _BLOCK]
                if bounds[block[0]] >= best:
                    break
                plans = self._plans(first, second, *np.unravel_index(block, table.shape))
                costs = {name: self._costs[name][plans, self._layers] for name in COSTS}
                seconds = seconds_at(self.chain, costs, widest(self.chain, costs, gpu_bytes))
                if seconds.min() < best:
                    best, found = seconds.min(), plans[seconds.argmin()]
        return None if found is None else paced(self.chain, self._named(found), gpu_bytes)

    def least_peak(self, host_bytes: int) -> tuple[Plan, int]:
        best, found = np.inf, None
        for first, second in self._pairs():
            peak, host = self._peaks(first, second)
            peak = np.where(host <= host_bytes, peak, np.inf)
            if peak.min() < best:
                where = np.unravel_index([peak.argmin()], peak.shape)
                best, found = peak.min(), self._plans(first, second, *where)
        if found is None:
            asked = least_host_bytes(self.chain)
            raise PlanError(
                f"the choices that are given keep {format_bytes(asked)} in host memory, and "
                f"{format_bytes(host_bytes)} may be used; cure: a larger host_memory, or "
                "inputs_on='gpu' and kept_on='gpu' in some of them"
            )
        plan = paced(self.chain, self._named(found[0]), int(best))
        assert plan is not None, "the peak is that of a plan with nothing on its way"
        return plan, int(best)

    # -- what there is to choose
    @cached_property
    def _choices(self) -> list[Way]:
        """All that any layer has a choice of; those of layers in segments last."""
        layers = [layer for layer in self.chain.layers if len(layer) > 1] or self.chain.layers
        found = dict.fromkeys(option.way for layer in layers for option in layer)
        return sorted(found, key=lambda way: _segment(way) > 1)

    @cached_property
    def _options(self) -> list[list[Option | None]]:
        """Each choice's option for every layer, None if a layer lacks it. A layer with a single
        option, because the user chose it, has that one under every choice."""
        by_layer = [{option.way: option for option in layer} for layer in self.chain.layers]
        only = [layer[0] if len(layer) == 1 else None for layer in self.chain.layers]
        pairs = list(zip(by_layer, only, strict=True))
        return [[options.get(choice, one) for options, one in pairs] for choice in self._choices]

    @cached_property
    def _costs(self) -> dict[str, Array]:
        """[choice, layer]: each of ``COSTS``."""
        lacks = dict.fromkeys(COSTS, 0.0) | {"gpu_bytes": _TOO_MANY}

        def cost(name: str, option: Option | None) -> float:
            return lacks[name] if option is None else float(getattr(option, name))

        return {n: np.array([[cost(n, o) for o in row] for row in self._options]) for n in COSTS}

    @cached_property
    def _layers(self) -> Array:
        return np.arange(len(self.chain.layers))

    @cached_property
    def _numbers(self) -> Array:
        """[layer]: the number of each."""
        return np.array(self.chain.numbers)

    @cached_property
    def _runs(self) -> Array:
        """[2, run]: see ``runs``."""
        return np.array(list(runs(self.chain.count))).T

    @cached_property
    def _places(self) -> Array:
        """[place, layer]: 0, 1 or 2 for the first, second or third choice."""
        count = self.chain.count
        a, b = self._runs[..., None]
        apart = (self._numbers >= a).astype(int) + (self._numbers >= b)
        mixed = [
            [*mixture(share, ahead), *[2] * (count - ahead)]
            for ahead in range(2, count + 1)
            for share in range(1, ahead)
        ]
        choices = np.array(mixed, dtype=int).reshape(-1, count)
        return np.concatenate([apart, choices[:, self._numbers]])

    @cached_property
    def _plain(self) -> int:
        """How many choices are not of layers in segments."""
        return sum(_segment(way) == 1 for way in self._choices)

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """All first and second choices."""
        count = range(len(self._choices))
        for first, second in itertools.product(count, count):
            if min(first, second) < self._plain:
                yield first, second

    def _scope(self, first: int, second: int, every: int = 1) -> tuple[slice, slice]:
        """Which third choices and places there are with these first and second ones; of one place
        in so many."""
        alone = max(first, second) >= self._plain
        thirds, places = (self._plain, self._runs.shape[1]) if alone else (None, None)
        return slice(thirds), slice(None, places, every)

    @cached_property
    def _allowed(self) -> tuple[Array, Array, Array]:
        """[choice, place]: whether it may be the first, the second, the third choice there: of
        layers in segments a run is whole ones."""
        count = self.chain.count
        begins = np.ones((len(self._choices), count + 1), dtype=bool)
        for number in range(count):  # in whichever of its forwards
            begins[:, number] = (self._costs["reach"][:, self._numbers == number] == 0).all(1)
        (a, b), ahead = self._runs, [n for n in range(2, count + 1) for _ in range(1, n)]
        mixed = np.ones((len(self._choices), len(ahead)), dtype=bool)  # by whoever may be in them
        both = (a == b) | (begins[:, a] & begins[:, b])
        halves = (begins[:, a], mixed), (both, mixed), (begins[:, b], begins[:, ahead])
        first, second, third = (np.concatenate(pair, axis=1) for pair in halves)
        return first, second, third

    def _plans(self, first: int, second: int, third: Array, place: Array) -> Array:
        """[plan, layer]: choices of plans with these third choices and places."""
        ways = np.stack([np.full_like(third, first), np.full_like(third, second), third])
        found: Array = ways[self._places[place], np.arange(len(third))[:, None]]
        return found

    def _named(self, plan: Array) -> list[Option]:
        found = [self._options[choice][layer] for layer, choice in enumerate(plan)]
        return [option for option in found if option is not None]

    # -- what plans take at least
    @cached_property
    def _sums(self) -> dict[str, tuple[Array, ...]]:
        """[choice, place]: each cost, of the layers with the first, second and third choice."""
        ways = [(self._places == way).T.astype(float) for way in range(3)]
        return {name: tuple(table @ way for way in ways) for name, table in self._costs.items()}

    def _total(self, name: str, first: int, second: int, every: int = 1) -> Array:
        """[third choice, place]: a cost of all layers; of one place in so many."""
        (thirds, places), (one, two, three) = self._scope(first, second, every), self._sums[name]
        total: Array = one[first, places] + two[second, places] + three[thirds, places]
        return total

    def _by_promise(self, gpu_bytes: int, host_bytes: int) -> list[tuple[int, int]]:
        """All first and second choices, those that may be fastest ahead."""
        least = {
            pair: float(self._least_seconds(*pair, gpu_bytes, host_bytes, _SAMPLE).min())
            for pair in self._pairs()
        }
        return sorted(least, key=least.__getitem__)

    def _least_seconds(
        self, first: int, second: int, gpu_bytes: int, host_bytes: int, every: int = 1
    ) -> Array:
        """[third choice, place]: what a plan takes at least, infinite where it cannot fit.

        All that was sent has arrived before the first backward, but for what memory holds before
        the head; all comes back behind it.
        """
        chain, made = self.chain, gradients_made(self.chain)
        kept, moved, forward, backward = (
            self._total(name, first, second, every)
            for name in ("gpu_bytes", "host_bytes", "forward_s", "backward_s")
        )
        free = gpu_bytes - chain.base_bytes - kept
        at_head = free - made[-1] - chain.head_bytes
        thirds, places = self._scope(first, second, every)
        behind = self._costs["backward_bytes"][thirds, -1:] * (self._places[places, -1] == 2)
        link, held = moved / chain.link, np.maximum(at_head, 0) / chain.link
        until = np.maximum(np.maximum(forward, link - held) + chain.head_s, link)
        seconds = until + np.maximum(backward, link)
        fits = (at_head >= 0) & (free - made[-1] >= behind) & (moved <= host_bytes)
        one, two, three = self._allowed
        fits &= one[first, places] & two[second, places] & three[thirds, places]
        return np.where(fits, seconds, np.inf)

    # -- peaks of runs
    @cached_property
    def _of_runs(self) -> tuple[Array, Array]:
        """[choice, start, end]: most bytes while a run's layers run, with nothing else on its way,
        besides what those before it keep; and what it keeps itself."""
        count, made = len(self._layers), gradients_made(self.chain)
        peaks = np.zeros((len(self._choices), count + 1, count + 1))
        keeps = np.zeros_like(peaks)
        sent = np.concatenate([np.zeros((len(peaks), 1)), self._costs["host_bytes"].cumsum(1)], 1)
        read = sent[:, 1:] - np.take_along_axis(sent, first_read(self._costs), 1)
        needs = np.maximum(
            self._costs["forward_bytes"],
            self._costs["gpu_bytes"] + read + self._costs["backward_bytes"] + np.array(made[2:]),
        )
        for start in range(count):
            kept = keeps[:, start, start + 1 :] = np.cumsum(self._costs["gpu_bytes"][:, start:], 1)
            before = kept - self._costs["gpu_bytes"][:, start:]
            peaks[:, start, start + 1 :] = np.maximum.accumulate(before + needs[:, start:], 1)
        return peaks, keeps

    def _peaks(self, first: int, second: int) -> tuple[Array, Array]:
        """[third choice, place]: peak bytes of every plan in runs with nothing on its way but what
        a layer is about to read, infinite for mixtures; and host bytes of all plans.

        No mixture of equal layers has a lower peak: those that need most go first, whatever else.
        """
        made, (most, keeps) = gradients_made(self.chain), self._of_runs
        thirds, places = self._scope(first, second)
        ways = slice(first, first + 1), slice(second, second + 1), thirds
        kept, peak = np.zeros((1, 1)), np.full((1, 1), float(made[0]))  # [third choice, run]
        for bounds in self._forwards:
            for way, (start, end) in zip(ways, itertools.pairwise(bounds), strict=True):
                peak = np.maximum(peak, kept + most[way, start, end])
                kept = kept + keeps[way, start, end]
        peak = np.maximum(peak, kept + made[-1] + self.chain.head_bytes)
        host = self._total("host_bytes", first, second)
        peaks = np.full_like(host, np.inf)
        peaks[:, : peak.shape[1]] = self.chain.base_bytes + peak
        one, two, three = self._allowed
        allowed = one[first, places] & two[second, places] & three[thirds, places]
        return np.where(allowed, peaks, np.inf), host

    @cached_property
    def _forwards(self) -> list[tuple[Array, ...]]:
        """For each forward, where its layers with the first, second and third choice begin, and
        where they end: of all runs."""
        (a, b), numbers = self._runs, self._numbers
        begins = [0, *np.flatnonzero(np.diff(numbers) < 0) + 1, len(numbers)]
        found = []
        for start, end in itertools.pairwise(begins):
            inner = (start + np.searchsorted(numbers[start:end], place) for place in (a, b))
            found.append((np.full_like(a, start), *inner, np.full_like(a, end)))
        return found
