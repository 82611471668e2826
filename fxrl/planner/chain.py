"""A step as a chain of layers: what each may do, and when how many bytes are alive.

    forward     layer 1, ..., layer L      what a layer keeps stays, on the GPU or on the host
    head        the loss and its gradient
    backward    layer L, ..., layer 1      what it kept is gone behind it
    end         the embeddings' gradients

Peak memory is a maximum over these moments, never a sum of what was saved: of what the layers keep
at that moment, and what the one that runs needs while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from fxrl.ir.plan import CutLayer, Moment

#: What was sent to the host stays on the GPU until it has arrived: the last stores may be on their
#: way (``ops.host_memory``).
ON_THEIR_WAY = 2
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
    """One choice for one layer, and what it costs.

    Attributes:
        choice: what the plan would say.
        gpu_bytes, host_bytes: what waits for the backward, and where.
        forward_s, backward_s: seconds of computation.
        forward_bytes, backward_bytes: alive on the GPU at most while it runs, besides what is kept;
            what it keeps counts among them while it is made.
    """

    choice: CutLayer
    gpu_bytes: int
    host_bytes: int
    forward_s: float
    backward_s: float
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A step.

    Attributes:
        layers: the options of each, in order of the forward.
        base_bytes: alive through the whole step: weights, the optimizer's states, all else.
        head_bytes, head_s: of the loss head, its gradient included.
        link: bytes a second between GPU and host, each way.
        gradients: bytes of the gradients of the weights ahead of the layers, of each layer's, and
            of those behind them; they stay when they are made. () where there are none.
    """

    layers: tuple[tuple[Option, ...], ...]
    base_bytes: int
    head_bytes: int
    head_s: float
    link: float
    gradients: tuple[int, ...] = ()


def moments(chain: Chain, options: Sequence[Option]) -> Iterator[Moment]:
    """Every moment of a step in which each layer has one of its options."""
    kept = [0, *accumulate(option.gpu_bytes for option in options)]
    sent, count = [option.host_bytes for option in options], len(options)

    def moment(phase: str, layer: int, *sizes: int) -> Moment:
        return Moment(phase, layer, dict(zip(_PARTS, (chain.base_bytes, *sizes), strict=True)))

    for i, option in enumerate(options):
        yield moment("forward", i, kept[i], _going(sent[:i]), 0, option.forward_bytes)
    made = gradients_made(chain)
    yield moment("head", count, kept[count], _going(sent), made[count + 1], chain.head_bytes)
    for i, option in reversed(list(enumerate(options))):
        asked = any(sent[i:])  # a fetch was the first to see what had arrived
        moving = sent[i] + _last(sent[:i], 1) if asked else _going(sent)
        yield moment("backward", i, kept[i + 1], moving, made[i + 1], option.backward_bytes)
    yield moment("end", 0, 0, 0, made[0], 0)


def _going(sent: Sequence[int]) -> int:
    """Bytes of the last stores, which may be on their way."""
    return _last(sent, ON_THEIR_WAY)


def _last(sent: Sequence[int], count: int) -> int:
    return sum([size for size in sent if size][-count:])


def gradients_made(chain: Chain) -> list[int]:
    """Bytes of all gradients that are there when the embeddings' backward ends, when each layer's
    does, and when the head's does."""
    own = chain.gradients or (0,) * (len(chain.layers) + 2)
    return list(accumulate(reversed(own)))[::-1]


def peak_bytes(chain: Chain, options: Sequence[Option]) -> int:
    """Most bytes on the GPU at any moment."""
    return max(moment.bytes for moment in moments(chain, options))


def host_bytes(options: Sequence[Option]) -> int:
    """Bytes on the host when the forward has ended."""
    return sum(option.host_bytes for option in options)


def step_seconds(chain: Chain, options: Sequence[Option]) -> float:
    """Seconds of a step: of computation, or of the link where it has more to do.

    Only the last stores and the next fetches are on their way while a layer runs, so layers of one
    choice wait for the link where they ask more of it than it can do meanwhile.
    """
    runs = [list(run) for _, run in groupby(options, key=lambda option: option.choice)]
    total = chain.head_s
    for run in runs:
        moved = host_bytes(run) / chain.link
        total += max(sum(option.forward_s for option in run), moved)
        total += max(sum(option.backward_s for option in run), moved)
    return total
