"""When what waits on the host moves, and what a step's computation waits for.

    forward     layer i has run     what it sends joins a queue; the next layer runs when no more
                                    is in it than that one leaves of the budget
    backward    layer i will run    what it kept is waited for, at a segment's last layer what all
                                    of it kept; then what layers ahead kept sets out, as far as
                                    memory has room all the way

Both ways go over one link, one copy after the other, while layers compute. How many copies may be
on their way at a layer is a part of the plan (``CutLayer.sending``, ``CutLayer.fetching``): as many
as the budget has room for, since waiting later is never slower. So peaks hold whatever the link
does; seconds are those of a link as fast as the target says.

All is computed for many plans at once: arrays are [plan, layer], or [plan, layers before].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fxrl.planner.chain import Chain, Option, gradients_made, on_their_way, peak_bytes

Array = np.ndarray[Any, Any]
Plan = tuple[Option, ...]
COSTS = (
    "gpu_bytes", "host_bytes", "forward_s", "backward_s", "forward_bytes", "backward_bytes",
    "reach",
)  # fmt: skip


def costs_of(options: Sequence[Option]) -> dict[str, Array]:
    """The ``COSTS`` of one plan, as arrays [1, layer]."""
    return {n: np.array([[getattr(o, n) for o in options]], dtype=float) for n in COSTS}


@dataclass(frozen=True, slots=True)
class Pace:
    """How many transfers may be pending at each layer: arrays are [plan, layer]."""

    sent: Array  # of the layers before this one, what they sent has arrived when a layer has run
    # Of the layers from this one on, what they kept is here, or on its way, when a layer's backward
    # runs.
    back: Array
    fits: Array  # whether the budget suffices: [plan]


def widest(chain: Chain, costs: dict[str, Array], gpu_bytes: float) -> Pace:
    """The pace with as many transfers pending as the budget has room for."""
    made, count = gradients_made(chain), len(chain.layers)
    free = gpu_bytes - chain.base_bytes
    kept, sent = _before(costs["gpu_bytes"]), _before(costs["host_bytes"])
    forward = np.empty_like(kept)  # what each layer, and the head, leaves
    forward[:, :count] = free - kept[:, :count] - costs["forward_bytes"]
    forward[:, count] = free - kept[:, count] - made[-1] - chain.head_bytes
    backward = free - kept[:, 1:] - np.array(made[2:]) - costs["backward_bytes"]
    first = first_read(costs)
    arrived, begun = np.empty(backward.shape, dtype=int), np.empty(backward.shape, dtype=int)
    # What takes no turn runs beside what the layers around it leave on its way.
    idle = [i for i, (option, *_) in enumerate(chain.layers) if not option.takes_turn]
    left = forward[:, count]
    for i in reversed(range(count)):
        total, known = sent[:, i + 1, None], sent[:, : i + 1]
        arrived[:, i] = (known < total - left[:, None]).sum(1)
        begun[:, i] = np.minimum((known < total - backward[:, i, None]).sum(1), first[:, i])
        left = np.minimum(forward[:, i], left) if i in idle else forward[:, i]
    read = sent[:, 1:] - np.take_along_axis(sent, first, 1)
    fits = (forward >= 0).all(1) & (backward >= read).all(1) & (free >= made[0])
    # what has arrived, or set out, stays so
    arrived, begun = np.maximum.accumulate(arrived, 1), np.maximum.accumulate(begun, 1)
    for i in idle:
        arrived[:, i] = arrived[:, i - 1] if i else 0
    for i in reversed(idle):
        begun[:, i] = begun[:, i + 1] if i + 1 < count else count
    return Pace(arrived, begun, fits)


def first_read(costs: dict[str, Array]) -> Array:
    """[plan, layer]: the first layer of which each backward reads what it kept."""
    found: Array = np.arange(costs["reach"].shape[1]) - costs["reach"].astype(int)
    return found


def seconds_at(chain: Chain, costs: dict[str, Array], pace: Pace) -> Array:
    """Seconds of a step at a pace: [plan]."""
    lasts = costs["host_bytes"] / chain.link
    moves, plans = lasts > 0, np.arange(len(lasts))
    layers = range(lasts.shape[1])
    now = busy = np.zeros(len(lasts))
    arrivals = np.zeros((len(layers) + 1, len(lasts)))  # of all that the layers before each sent
    for i in layers:
        now = now + costs["forward_s"][:, i]
        busy = np.where(moves[:, i], np.maximum(busy, now) + lasts[:, i], busy)
        arrivals[i + 1] = busy
        now = np.maximum(now, arrivals[pace.sent[:, i], plans])
    now = np.maximum(now + chain.head_s, busy)
    turns = np.zeros((len(layers), len(lasts)))  # when each backward begins
    first, here = first_read(costs), np.full(len(lasts), len(layers))  # all behind ``here`` is back
    for i in reversed(layers):
        waits = np.zeros(len(lasts), dtype=bool)
        for place in range(i, min(first[:, i]) - 1, -1):
            begins = (pace.back <= place).sum(1) - 1  # whose turn lets it set out
            start = np.where(begins > i, turns[begins, plans], now)
            comes = moves[:, place] & (place < here) & (place >= first[:, i])
            busy = np.where(comes, np.maximum(busy, start) + lasts[:, place], busy)
            waits |= comes
        here = np.minimum(here, first[:, i])
        turns[i] = np.where(waits, np.maximum(now, busy), now)
        now = turns[i] + costs["backward_s"][:, i]
    return np.where(pace.fits, now, np.inf)


def paced(chain: Chain, options: Sequence[Option], gpu_bytes: int) -> Plan | None:
    """The options with their pending transfers filled in; None if the budget does not suffice."""
    if not options:
        return () if peak_bytes(chain, ()) <= gpu_bytes else None
    pace = widest(chain, costs_of(options), gpu_bytes)
    if not pace.fits[0]:
        return None
    moved = [option.host_bytes > 0 for option in options]
    if not any(moved):
        return tuple(options)
    counts: dict[int, tuple[int, int]] = {}  # a layer's are the least of its forwards
    for i, (number, option) in enumerate(zip(chain.numbers, options, strict=True)):
        if option.takes_turn:
            found = sum(moved[pace.sent[0, i] : i + 1]), sum(moved[pace.back[0, i] : i])
            least = counts.get(number, found)
            counts[number] = min(found[0], least[0]), min(found[1], least[1])
    return tuple(
        _with_pace(option, counts.get(number, (0, 0)))
        for number, option in zip(chain.numbers, options, strict=True)
    )


def _with_pace(option: Option, counts: tuple[int, int]) -> Option:
    if option.choice is None:
        return option
    sending, fetching = counts
    return replace(option, choice=replace(option.choice, sending=sending, fetching=fetching))


def step_seconds(chain: Chain, options: Sequence[Option]) -> float:
    """Seconds of a step: its start, computation, and waiting for the link."""
    sent, back = (np.array([one], dtype=int) for one in on_their_way(options))
    return chain.start_s + float(
        seconds_at(chain, costs_of(options), Pace(sent, back, np.array([True])))[0]
    )


def _before(values: Array) -> Array:
    """Sums over the layers before each layer, and over all of them."""
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, 1)], 1)
