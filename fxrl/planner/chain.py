"""A step as a chain of layers: what each may do, and when how many bytes are alive.

    forward     layer 1, ..., layer L      what a layer keeps stays, on the GPU or on the host
    head        the loss and its gradient
    backward    layer L, ..., layer 1      what it kept is gone behind it; at a segment's last layer
                                           all of the segment is there again
    end         the embeddings' gradients

A loss that runs the layers in several forwards has them one behind the other, with what it computes
between two of them; the backward goes the same way back.

Peak memory is a maximum over these moments, never a sum of what was saved: of what the layers keep
at that moment, and what the one that runs needs while it runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fxrl.ir.plan import CutLayer, Moment

#: What the GPU's bytes are for at any moment.
_PARTS = (
    "weights and states",
    "kept for the backward",
    "on the way to or from the host",
    "gradients",
    "the running layer",
)


@dataclass(frozen=True, slots=True)
class Option:
    """One choice for one layer in one forward, and what it costs."""

    choice: CutLayer | None  # None for what runs between two forwards: there is nothing to choose
    gpu_bytes: int  # kept on the GPU between the layer's forward and its backward
    host_bytes: int  # kept in host memory meanwhile
    forward_s: float  # seconds of computation
    backward_s: float
    # GPU peaks while the layer runs, on top of what all layers keep. The forward's includes its
    # input and what it keeps itself, the backward's the gradients of its weights and
    # ``handed_bytes``.
    forward_bytes: int
    backward_bytes: int
    # Whether it waits for what is on its way, and lets others set out: what has no gradient, or is
    # no layer, does not.
    takes_turn: bool = True
    handed_bytes: int = 0  # what layers of its segment, up to it, have made again at its backward
    # How many layers ahead of it its segment begins; what these keep is there at its backward.
    reach: int = 0
    # Of layers in segments: what all of them have in common, for their choices differ by place.
    segments: tuple[CutLayer, int] | None = None

    @property
    def way(self) -> CutLayer | tuple[CutLayer, int] | None:
        """What is chosen for a run of layers."""
        return self.segments or self.choice


@dataclass(frozen=True, slots=True)
class Chain:
    """A step as a sequence of layers between the embeddings and the loss head."""

    # The options of each, in order of the forward: of a layer in each forward, and the one of what
    # runs between two forwards.
    layers: tuple[tuple[Option, ...], ...]
    # Which layer each of ``layers`` is, by number: what is one layer gets one choice. What runs
    # between two forwards has that of the layer before.
    numbers: tuple[int, ...]
    # Bytes of the gradients of the weights ahead of the layers, of each layer's, and of those
    # behind them; they stay when they are made. Below 0 where a gradient that waited is added to
    # one that was there.
    gradients: tuple[int, ...]
    # Alive through the whole step: weights, the optimizer's states, gradients of earlier backward
    # passes, all else.
    base_bytes: int
    # Of the loss head, its gradient included.
    head_bytes: int
    head_s: float
    link: float  # bytes a second between GPU and host, each way
    held_bytes: int = 0  # of the bytes that are alive all through, gradients
    start_s: float = 0.0  # ahead of the first layer, in which the GPU waits

    @property
    def count(self) -> int:
        """How many layers there are to choose for."""
        return max(self.numbers, default=-1) + 1


def moments(chain: Chain, options: Sequence[Option]) -> Iterator[Moment]:
    """The memory at every moment of a step in which each layer has one of these options."""
    kept = [0, *accumulate(option.gpu_bytes for option in options)]
    moved, end = [option.host_bytes for option in options], len(options)
    number = [*chain.numbers, chain.count]
    sent, back = on_their_way(options)

    def moment(phase: str, place: int, keeps: int, moves: int, made: int, runs: int) -> Moment:
        rest = chain.base_bytes - chain.held_bytes
        sizes = (rest, keeps, moves, chain.held_bytes + made, runs)
        between = place < end and options[place].choice is None
        name, layer = ("between", 0) if between else (phase, number[place])
        return Moment(name, layer, dict(zip(_PARTS, sizes, strict=True)))

    arrived = [0, *sent]
    for i, option in enumerate(options):
        yield moment("forward", i, kept[i], sum(moved[arrived[i] : i]), 0, option.forward_bytes)
    made = gradients_made(chain)
    going = sum(moved[arrived[end] :])
    yield moment("head", end, kept[end], going, made[end + 1], chain.head_bytes)
    for i, option in reversed(list(enumerate(options))):
        coming, handed = sum(moved[back[i] : i + 1]), option.handed_bytes
        runs = option.backward_bytes - handed
        yield moment("backward", i, kept[i + 1] + handed, coming, made[i + 2], runs)
    yield moment("end", 0, 0, 0, made[0], 0)


def on_their_way(options: Sequence[Option]) -> tuple[list[int], list[int]]:
    """How many layers' transfers may be pending at each layer, as its choice says: for each layer
    the first whose bytes may still be on their way to the host after its forward, and the first
    whose bytes are back, or on their way back, before its backward."""
    moves = [i for i, option in enumerate(options) if option.host_bytes]
    sent, back = [], []
    for i, option in enumerate(options):
        if option.choice is None or not option.takes_turn:  # as it was before
            sent.append(0)
            back.append(len(options))
            continue
        own, ahead = bisect_right(moves, i), bisect_left(moves, i)
        going, coming = option.choice.sending or 0, option.choice.fetching or 0
        sent.append(moves[max(0, own - going)] if own and going else i + 1)
        first = moves[max(0, ahead - coming)] if ahead and coming else i
        back.append(min(first, i - option.reach))
    # what has arrived, or set out, stays so
    return [*accumulate(sent, max)], [*accumulate(reversed(back), min)][::-1]


def gradients_made(chain: Chain) -> list[int]:
    """Bytes of all gradients that exist after the backward of the embeddings, of each layer, and of
    the head."""
    return list(accumulate(reversed(chain.gradients)))[::-1]


def peak_bytes(chain: Chain, options: Sequence[Option]) -> int:
    """Most bytes on the GPU at any moment."""
    return max(moment.bytes for moment in moments(chain, options))


def host_bytes(options: Sequence[Option]) -> int:
    """Bytes on the host when the forward has ended."""
    return sum(option.host_bytes for option in options)
