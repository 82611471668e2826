"""What the head benchmark asks for: shapes, modes, the truth in float64, errors against it."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.lib.head_inputs import Inputs, Shape

SOFTCAP = 30.0
CHECKED_VOCAB = 8192  # rows of dW that are compared; all of them in float64 would be 10 GiB
_TILE_BYTES = 2**30


SHAPES = {
    "issue": [
        Shape(16384, 4096, 151936),
        Shape(4096, 4096, 151936),
        Shape(32768, 2048, 151936),
        Shape(8192, 896, 151936),
        Shape(16384, 2880, 201088),
        Shape(8192, 5120, 262144),
        Shape(65536, 576, 49152),
    ]
}


def parse_shapes(text: str) -> list[Shape]:
    """``N,H,V;N,H,V`` or a name of ``SHAPES``, as an argument's type."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        shapes = [Shape(*map(int, part.split(","))) for part in text.split(";")]
    except (TypeError, ValueError):
        shapes = []
    if not shapes or min(map(min, shapes)) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither N,H,V;N,H,V in positive numbers nor one of {', '.join(SHAPES)}"
        )
    return shapes


@dataclass(frozen=True)
class Mode:
    """What is computed of the head, and what of it is differentiated.

    Attributes:
        hidden_grad: dH is wanted (never without it: dW).
        entropy: the entropy is returned as well, as a figure to log.
        entropy_grad: and it is differentiated (an entropy bonus).
        softcap: 0 is none.
    """

    name: str
    hidden_grad: bool = True
    weight_grad: bool = False
    entropy: bool = False
    entropy_grad: bool = False
    softcap: float = 0.0

    @property
    def recomputes(self) -> bool:
        """Whether the logits must be made twice.

        A frozen head's gradient can be taken while the logits exist, times a scalar that comes
        later. dW mixes tokens and a second differentiated output a second scalar: then they are
        made again (or, at the same cost, a second product is taken at once).
        """
        return self.weight_grad or self.entropy_grad

    @property
    def products(self) -> tuple[int, int, int]:
        """How often logits, dH and dW, 2NHV FLOPs each, are unavoidable without kept logits."""
        return 1 + self.recomputes, int(self.hidden_grad), int(self.weight_grad)


MODES = {
    mode.name: mode
    for mode in (
        Mode("no_grad", hidden_grad=False),
        Mode("frozen"),
        Mode("trainable", weight_grad=True),
        Mode("frozen+entropy", entropy=True),
        Mode("frozen+softcap", softcap=SOFTCAP),
        Mode("frozen+entropy_grad", entropy=True, entropy_grad=True),
    )
}


@dataclass(frozen=True)
class Outcome:
    """``logprob`` [N], ``entropy`` [N], ``dh`` [N, H], ``dw`` [V, H] or rows of them."""

    logprob: Tensor
    entropy: Tensor | None = None
    dh: Tensor | None = None
    dw: Tensor | None = None


@dataclass(frozen=True)
class Truth:
    """The outcome in float64 at ``rows`` of the tokens and, for dw, at ``vocab`` of the head."""

    outcome: Outcome
    rows: Tensor
    vocab: Tensor


def require(inputs: Inputs, mode: Mode) -> None:
    """Marks what ``mode`` differentiates."""
    inputs.hidden.requires_grad_(mode.hidden_grad)
    inputs.weight.requires_grad_(mode.weight_grad)


def truth(inputs: Inputs, mode: Mode, checked_rows: int = 0) -> Truth:
    """Everything in float64, a tile of tokens at a time.

    Args:
        inputs: what the variants get.
        mode: its softcap and what flows into the entropy.
        checked_rows: so many evenly spread tokens only (0: all); then ``dw`` is None, for it is a
            sum over all tokens.
    """
    num_tokens, num_vocab = inputs.hidden.shape[0], inputs.weight.shape[0]
    rows = _spread(num_tokens, checked_rows or num_tokens, inputs.target)
    vocab = _spread(num_vocab, CHECKED_VOCAB, inputs.target)
    with torch.no_grad():
        weight = inputs.weight.double()
        logprob = weight.new_empty(len(rows))
        entropy, dh = torch.empty_like(logprob), weight.new_empty(len(rows), weight.shape[1])
        dw = weight.new_zeros(len(vocab), weight.shape[1])
        step = max(1, _TILE_BYTES // (8 * num_vocab))
        for start in range(0, len(rows), step):
            tile, at = slice(start, start + step), rows[start : start + step]
            hidden, target = inputs.hidden[at].double(), inputs.target[at, None]
            logits = hidden @ weight.t()
            bent = torch.tanh(logits / mode.softcap) if mode.softcap else None
            logps = (logits if bent is None else bent * mode.softcap).log_softmax(-1)
            probs = logps.exp()
            logprob[tile] = logps.gather(-1, target).squeeze(-1)
            entropy[tile] = -(probs * logps).sum(-1)
            incoming = inputs.grad_logprob[at, None].double()
            grad = -incoming * probs
            grad.scatter_add_(-1, target, incoming)
            if mode.entropy_grad:
                bonus = inputs.grad_entropy[at, None].double()
                grad -= bonus * probs * (logps + entropy[tile, None])
            if bent is not None:
                grad *= 1 - bent.square()
            dh[tile] = grad @ weight
            dw += grad[:, vocab].t() @ hidden
    whole = len(rows) == num_tokens
    return Truth(Outcome(logprob, entropy, dh, dw if whole else None), rows, vocab)


def errors(got: Outcome, want: Truth) -> dict[str, float]:
    """Largest absolute error of log-prob and entropy, relative L2 distance of dH and dW."""
    found = {"logprob_error": _furthest(got.logprob[want.rows], want.outcome.logprob)}
    if got.entropy is not None and want.outcome.entropy is not None:
        found["entropy_error"] = _furthest(got.entropy[want.rows], want.outcome.entropy)
    if got.dh is not None and want.outcome.dh is not None:
        found["dh_error"] = _distance(got.dh[want.rows], want.outcome.dh)
    if got.dw is not None and want.outcome.dw is not None:
        found["dw_error"] = _distance(got.dw[want.vocab], want.outcome.dw)
    if bad := [name for name, value in found.items() if not math.isfinite(value)]:
        raise ArithmeticError(f"not finite: {', '.join(bad)}")
    return found


def _spread(length: int, count: int, like: Tensor) -> Tensor:
    """At most ``count`` indices of ``range(length)``, evenly spread."""
    count = min(length, count)
    return torch.arange(count, device=like.device) * length // count


def _furthest(got: Tensor, want: Tensor) -> float:
    return (got.detach().double() - want).abs().max().item()


def _distance(got: Tensor, want: Tensor) -> float:
    return ((got.detach().double() - want).norm() / want.norm()).item()
