"""The fastest plan within two budgets, by an exact dynamic programme over the layers.

With ``p`` and ``h`` the bytes that layers up to ``i`` keep on the GPU and on the host, the least
time of their computation is

    least(i, p, h) = min over options o of layer i    least(i - 1, p - o.gpu, h - o.host)
                                                      + o.forward_s + o.backward_s

over states in which every moment of layer ``i`` fits: all that is alive then was kept by layers up
to ``i``, so a state says it. What is on its way to the host or back is charged as if every layer
sent as much as the one that sends most; that amount is fixed from outside, one programme for each.

Two things keep the number of states small and the answer exact. A state that is no better in ``p``,
``h`` and time than another leads nowhere better (what the link costs is a function of time and
``h`` that never falls with either). And for prices ``a, b >= 0`` of a byte on the GPU and on the
host, and ``0 <= c <= 1`` of a second of the link, no way on from a state takes less than

    its time + sum over layers to come (min over o (o.time + a o.gpu + (b + c / link) o.host))
             - a (what the GPU has left) - b (what the host has left)
             + c (seconds that the link needs for h, less those that it has behind the forward)

so a state whose bound is not below a plan that is known is dropped (Lagrangian relaxation; A.
Geoffrion, 1974). A narrow run finds that plan.

Sources: H. Beaumont et al., "Optimal checkpointing for heterogeneous chains" (Rotor, 2019) and
"Efficient combination of rematerialization and offloading" (POFO, 2021). Theirs run sub-chains
again; here each layer keeps or recomputes for itself, so states need no interval.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from fxrl.planner.chain import (
    ON_THEIR_WAY,
    Chain,
    Option,
    gradients_behind,
    seconds,
    step_seconds,
)

#: States that the narrow run keeps after each layer.
_NARROW = 256
_STEPS = 400  # of the search for multipliers
_BOUNDS = 4  # of those found, how many are used: each is looked at for every state


def fastest(chain: Chain, gpu_bytes: int, host_bytes: int) -> tuple[Option, ...] | None:
    """An option for each layer with the least time, of those that fit; None where none does."""
    if not chain.layers:
        return () if chain.base_bytes + chain.head_bytes <= gpu_bytes else None
    sizes = {option.host_bytes for layer in chain.layers for option in layer}
    least = max(min(option.host_bytes for option in layer) for layer in chain.layers)
    programmes = [_Programme(chain, s, gpu_bytes, host_bytes) for s in sorted(sizes) if s >= least]
    best: tuple[Option, ...] | None = None
    for width in (_NARROW, None):
        for programme in sorted(programmes, key=lambda one: one.least):
            known = inf if best is None else step_seconds(chain, best)
            best = programme.solve(known, width) or best
    return best


def fits(chain: Chain, options: Sequence[Option], gpu_bytes: int, host_bytes: int) -> bool:
    """Whether a plan is within the budgets, transfers charged as ``fastest`` does."""
    sent, kept = max(option.host_bytes for option in options), 0
    for option, made in zip(options, gradients_behind(chain), strict=True):
        if _needed(chain, option, kept, sent, made) > gpu_bytes:
            return False
        kept += option.gpu_bytes
    at_head = chain.base_bytes + kept + ON_THEIR_WAY * sent + chain.head_bytes
    return at_head <= gpu_bytes and sum(option.host_bytes for option in options) <= host_bytes


def _needed(chain: Chain, option: Option, kept: int, sent: int, made: int) -> int:
    """Bytes on the GPU while a layer runs; those before it keep ``kept``, and ``made`` are
    gradients."""
    running = max(option.forward_bytes, option.gpu_bytes + option.backward_bytes + made)
    return chain.base_bytes + kept + ON_THEIR_WAY * sent + running


@dataclass(frozen=True, slots=True)
class _State:
    """Layers up to one of them, with an option each; ``before`` leads back to theirs."""

    gpu: int
    host: int
    time: float
    option: Option | None = None
    before: _State | None = None

    def then(self, option: Option) -> _State:
        """With one layer more."""
        time = self.time + _time(option)
        gpu, host = self.gpu + option.gpu_bytes, self.host + option.host_bytes
        return _State(gpu, host, time, option, self)

    def options(self) -> tuple[Option, ...]:
        """Of all its layers, in order."""
        found: list[Option] = []
        state = self
        while state.option is not None and state.before is not None:
            found.append(state.option)
            state = state.before
        return tuple(reversed(found))


_Prices = tuple[float, float, float]
_Bound = tuple[_Prices, list[float]]


class _Programme:
    """The dynamic programme where no layer sends more than ``sent`` bytes.

    Attributes:
        least: seconds that no plan of it is faster than.
    """

    def __init__(self, chain: Chain, sent: int, gpu: int, host: int) -> None:
        self._chain, self._sent, self._gpu, self._host = chain, sent, gpu, host
        self._gradients = gradients_behind(chain)
        self._layers = [[o for o in layer if o.host_bytes <= sent] for layer in chain.layers]
        always = chain.base_bytes + ON_THEIR_WAY * sent
        behind = max(chain.head_bytes, min(o.backward_bytes for o in self._layers[-1]))
        self._room = gpu - always - behind  # for what all layers keep
        forward = sum(min(option.forward_s for option in layer) for layer in chain.layers)
        self._hidden = forward + chain.head_s  # seconds of the link behind which they hide
        empty = _State(0, 0, 0.0)
        found = [self._bound(prices) for prices in self._prices()]
        ranked = sorted(found, key=lambda bound: -self._under(bound, empty, 0))
        self._bounds = [found[0], *ranked[:_BOUNDS]]
        self.least = self._least(empty, 0)

    def solve(self, known: float, width: int | None) -> tuple[Option, ...] | None:
        """A faster plan than one that takes ``known`` seconds, of ``width`` states a layer."""
        states = [_State(0, 0, 0.0)]
        for number, layer in enumerate(self._layers):
            made = self._gradients[number]
            steps = ((s, o) for s in states for o in layer)
            reached = (r for s, o in steps if (r := self._next(s, o, made)) is not None)
            states = _frontier(s for s in reached if self._least(s, number + 1) < known)
            if width is not None and len(states) > width:
                states = sorted(states, key=lambda s: self._least(s, number + 1))[:width]
        ended = [s for s in states if s.gpu <= self._room]  # the head too
        if not ended:
            return None
        return min(ended, key=lambda s: (self._seconds(s.time, s.host), s.gpu, s.host)).options()

    def _next(self, state: _State, option: Option, made: int) -> _State | None:
        too_much = _needed(self._chain, option, state.gpu, self._sent, made) > self._gpu
        reached = state.then(option)
        return None if too_much or reached.host > self._host else reached

    def _seconds(self, computed: float, host: int) -> float:
        return seconds(self._chain, computed, host)

    # -- what no way on from a state can beat
    def _least(self, state: _State, number: int) -> float:
        """Seconds of a step that has this state behind its first ``number`` layers, at least."""
        layers = max(self._under(bound, state, number) for bound in self._bounds)
        return state.time + layers + self._chain.head_s

    def _under(self, bound: _Bound, state: _State, number: int) -> float:
        (a, b, c), rest = bound
        over = state.host / self._chain.link - self._hidden
        left = a * (self._room - state.gpu) + b * (self._host - state.host)
        return rest[number] - left + c * over

    def _bound(self, prices: _Prices) -> _Bound:
        """The prices, and the relaxed time of the layers behind each number of layers."""
        rest = [0.0]
        for layer in reversed(self._layers):
            rest.append(rest[-1] + min(self._priced(option, prices) for option in layer))
        return prices, rest[::-1]

    def _priced(self, option: Option, prices: _Prices) -> float:
        a, b, c = prices
        host = (b + c / self._chain.link) * option.host_bytes
        return _time(option) + a * option.gpu_bytes + host

    def _prices(self) -> Iterator[_Prices]:
        """None, and those of a subgradient ascent; each gives a bound that holds."""
        a = b = c = 0.0
        times = [_time(option) for layer in self._layers for option in layer]
        scale = (max(times) - min(times)) / max(1, self._largest())
        for step in range(1, _STEPS):
            yield a, b, c
            prices = a, b, c
            chosen = [
                min(layer, key=lambda option: self._priced(option, prices))
                for layer in self._layers
            ]
            gpu, host = (sum(o.gpu_bytes for o in chosen), sum(o.host_bytes for o in chosen))
            over = [gpu - self._room, host - self._host, host - self._hidden * self._chain.link]
            size = max(1.0, *map(abs, over)) * step**0.5
            a = max(0.0, a + scale * over[0] / size)
            b = max(0.0, b + scale * over[1] / size)
            c = min(1.0, max(0.0, c + over[2] / size))

    def _largest(self) -> int:
        return max(max(o.gpu_bytes, o.host_bytes) for layer in self._layers for o in layer)


def _time(option: Option) -> float:
    return option.forward_s + option.backward_s


def _frontier(states: Iterable[_State]) -> list[_State]:
    """The states that no other is as good as in ``gpu``, ``host`` and time."""
    hosts: list[int] = []  # a stair: host bytes rise, times fall; of states with less on the GPU
    times: list[float] = []
    kept = []
    for state in sorted(states, key=lambda s: (s.gpu, s.host, s.time)):
        place = bisect_right(hosts, state.host)
        if place and times[place - 1] <= state.time:
            continue
        kept.append(state)
        end = place
        while end < len(times) and times[end] >= state.time:
            end += 1
        start = place - 1 if place and hosts[place - 1] == state.host else place
        hosts[start:end], times[start:end] = [state.host], [state.time]
    return kept
