"""A step as a chain of layers: what each may do, and when how many bytes are alive.

    forward     layer 1, ..., layer L      what a layer keeps stays, on the GPU or on the host
    head        the loss and its gradient
    backward    layer L, ..., layer 1      what it kept is gone behind it
    end         the embeddings' gradients

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
    """One choice for one layer, and what it costs."""

    choice: CutLayer
    gpu_bytes: int  # kept on the GPU between the layer's forward and its backward
    host_bytes: int  # kept in host memory meanwhile
    forward_s: float  # seconds of computation
    backward_s: float
    # GPU peaks while the layer runs, on top of what all layers keep. The forward's includes its
    # input and what it keeps itself, the backward's the gradients of its weights.
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A step as a sequence of layers between the embeddings and the loss head."""

    layers: tuple[tuple[Option, ...], ...]  # the options of each, in order of the forward
    # Alive through the whole step: weights, the optimizer's states, gradients of earlier backward
    # passes, all else.
    base_bytes: int
    # Of the loss head, its gradient included.
    head_bytes: int
    head_s: float
    link: float  # bytes a second between GPU and host, each way
    # Bytes of the gradients of the weights ahead of the layers, of each layer's, and of those
    # behind them; they stay when they are made. () where there are none.
    gradients: tuple[int, ...] = ()
    held_bytes: int = 0  # of the bytes that are alive all through, gradients


def moments(chain: Chain, options: Sequence[Option]) -> Iterator[Moment]:
    """The memory at every moment of a step in which each layer has one of these options."""
    kept = [0, *accumulate(option.gpu_bytes for option in options)]
    moved, count = [option.host_bytes for option in options], len(options)
    sent, back = on_their_way(options)

    def moment(phase: str, layer: int, keeps: int, moves: int, made: int, runs: int) -> Moment:
        rest = chain.base_bytes - chain.held_bytes
        sizes = (rest, keeps, moves, chain.held_bytes + made, runs)
        return Moment(phase, layer, dict(zip(_PARTS, sizes, strict=True)))

    arrived = [0, *sent]
    for i, option in enumerate(options):
        yield moment("forward", i, kept[i], sum(moved[arrived[i] : i]), 0, option.forward_bytes)
    made = gradients_made(chain)
    going = sum(moved[arrived[count] :])
    yield moment("head", count, kept[count], going, made[count + 1], chain.head_bytes)
    for i, option in reversed(list(enumerate(options))):
        coming = sum(moved[back[i] : i + 1])
        yield moment("backward", i, kept[i + 1], coming, made[i + 2], option.backward_bytes)
    yield moment("end", 0, 0, 0, made[0], 0)


def on_their_way(options: Sequence[Option]) -> tuple[list[int], list[int]]:
    """How many layers' transfers may be pending at each layer, as its choice says: for each layer
    the first whose bytes may still be on their way to the host after its forward, and the first
    whose bytes are back, or on their way back, before its backward."""
    moves = [i for i, option in enumerate(options) if option.host_bytes]
    sent, back = [], []
    for i, option in enumerate(options):
        own, ahead = bisect_right(moves, i), bisect_left(moves, i)
        going, coming = option.choice.sending or 0, option.choice.fetching or 0
        sent.append(moves[max(0, own - going)] if own and going else i + 1)
        back.append(moves[max(0, ahead - coming)] if ahead and coming else i)
    # what has arrived, or set out, stays so
    return [*accumulate(sent, max)], [*accumulate(reversed(back), min)][::-1]


def gradients_made(chain: Chain) -> list[int]:
    """Bytes of all gradients that exist after the backward of the embeddings, of each layer, and of
    the head."""
    own = chain.gradients or (0,) * (len(chain.layers) + 2)
    return list(accumulate(reversed(own)))[::-1]


def peak_bytes(chain: Chain, options: Sequence[Option]) -> int:
    """Most bytes on the GPU at any moment."""
    return max(moment.bytes for moment in moments(chain, options))


def host_bytes(options: Sequence[Option]) -> int:
    """Bytes on the host when the forward has ended."""
    return sum(option.host_bytes for option in options)
