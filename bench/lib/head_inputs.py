"""What the head benchmark computes on: random peaked heads, or a model reading text.

A source makes one input set for each seed. How probabilities are spread decides what a peer that
leaves out small ones can save; an exact head does not care.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PEAK = 14.0  # the largest lift of a target's logit, in nats: beyond ln(262144) = 12.5
_ROW_TOKENS = 512  # of text that a model reads at once
_TEXTS = ("*.md", "LICENSE", "fxrl/**/*.py", "passes/*.py", "bench/*.py", "examples/*")
_ROOT = Path(__file__).resolve().parents[2]


class Shape(NamedTuple):
    """N tokens, H channels, V vocabulary entries."""

    tokens: int
    hidden: int
    vocab: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


@dataclass(frozen=True)
class Inputs:
    """``hidden`` [N, H], ``weight`` [V, H], ``target`` [N], and what flows into each output."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    grad_logprob: Tensor
    grad_entropy: Tensor


@dataclass(frozen=True)
class Source:
    """Where inputs come from.

    Attributes:
        name: as it was asked for.
        about: a note for the table.
        make: (shape, dtype, device, seed) -> an input set.
        shape: (H, V) if the source has its own, else None.
    """

    name: str
    about: str
    make: Callable[[Shape, torch.dtype, str, int], Inputs]
    shape: Callable[[], tuple[int, int]] | None = None


def peaked(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    """Random and peaked: each token's logit is lifted over the noise by up to ``PEAK`` nats.

    weight ~ 0.02 N(0, 1), hidden ~ N(0, 1) plus the multiple of the target's row of the head that
    adds U(0, PEAK) to its logit. So log-probs run from about -ln V to nearly 0, as a policy's do;
    without the lift all of them would be -ln V and every probability tiny.
    """
    gen = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(shape.vocab, shape.hidden, generator=gen, device=device)
    weight = weight.mul_(0.02).to(dtype)
    target = torch.randint(0, shape.vocab, (shape.tokens,), generator=gen, device=device)
    rows = weight[target].float()
    lift = PEAK * torch.rand(shape.tokens, 1, generator=gen, device=device)
    hidden = torch.randn(shape.tokens, shape.hidden, generator=gen, device=device)
    hidden.add_(lift * rows / rows.square().sum(-1, True))
    return _with_gradients(hidden.to(dtype), weight, target, gen)


def from_model(folder: str, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    """Hidden states of a model that reads this repository's prose and source.

    Rows of 512 tokens, each from another place of the text; seeds begin at other places. A target
    is the token that follows.
    """
    model, tokens = _reader(folder, dtype, device)
    rows = -(-shape.tokens // (_ROW_TOKENS - 1))
    stride = max(1, (len(tokens) - _ROW_TOKENS) // rows)
    starts = [(row * stride + 97 * seed) % (len(tokens) - _ROW_TOKENS) for row in range(rows)]
    ids = torch.stack([tokens[start : start + _ROW_TOKENS] for start in starts]).to(device)
    with torch.no_grad():
        states = [model.model(input_ids=part).last_hidden_state for part in ids.split(16)]
    hidden = torch.cat(states)[:, :-1].flatten(0, 1)[: shape.tokens].to(dtype).contiguous()
    target = ids[:, 1:].flatten()[: shape.tokens].contiguous()
    weight = model.get_output_embeddings().weight.detach().to(dtype).clone()
    return _with_gradients(hidden, weight, target, torch.Generator(device).manual_seed(seed))


def parse_source(text: str) -> Source:
    """``peaked`` or ``model:FOLDER``, as an argument's type."""
    if text == "peaked":
        about = (
            "head 0.02 N(0, 1); hidden N(0, 1) plus the multiple of the target's row that lifts "
            f"its logit by U(0, {PEAK:g})"
        )
        return Source(text, about, peaked)
    kind, _, folder = text.partition(":")
    if kind != "model" or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is neither peaked nor model:FOLDER")
    about = f"hidden states and head of {Path(folder).name}, reading this repository's files"
    return Source(
        text,
        about,
        lambda *given: from_model(folder, *given),
        lambda: _head_shape(folder),
    )


def _with_gradients(hidden: Tensor, weight: Tensor, target: Tensor, gen: torch.Generator) -> Inputs:
    incoming = torch.randn(2, len(hidden), generator=gen, device=hidden.device)
    return Inputs(hidden, weight, target, incoming[0], 0.01 * incoming[1])


@cache
def _reader(folder: str, dtype: torch.dtype, device: str) -> tuple[Any, Tensor]:
    """The model and the tokens of the text it reads."""
    from fxrl.models import load_model

    model, tokenizer = load_model(folder, dtype, device)
    files = sorted({file for pattern in _TEXTS for file in _ROOT.glob(pattern) if file.is_file()})
    text = "\n\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return model, tokens


@cache
def _head_shape(folder: str) -> tuple[int, int]:
    from fxrl.models import load_model

    model, _ = load_model(folder)
    vocab, hidden = model.get_output_embeddings().weight.shape
    return hidden, vocab
