"""Sampling mathematics: logits and uniform numbers in, tokens and log-probabilities out.

Pure functions on tensors of R rows and V tokens; no model, no generator, no state. Everything is
computed in float32, or in the logits' dtype where that is wider.

NOTE [Why inverse CDF]
A token is drawn as the first one whose cumulative probability exceeds u * total, u uniform in
[0, 1). One number per token drawn (not V of Gumbel noise) means that the caller can make all of
them beforehand, on the CPU: what a row draws then depends neither on the device's generator nor on
which other rows share its batch. Cumulative sums are float64, because in float32 their rounding
(6e-8 of the total) is more than the whole probability of a tail token. They are taken over sums of
256 tokens and then inside one such block: over all of V they cost a quarter of a decoding step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fxrl.dtypes import at_least_float32
from fxrl.engines.engine import EngineError, SamplingParams

BLOCK = 256


class SamplingError(EngineError, ArithmeticError):
    """The logits of a row are no distribution."""


def sample(
    logits: Tensor, uniforms: Tensor | None, params: SamplingParams, banned: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Draws one token for each row.

    Args:
        logits: [R, V], any float dtype.
        uniforms: [R] float64 in [0, 1); may be ``None`` for greedy decoding.
        params: temperature and filters; the rest is not read.
        banned: token ids that cannot be drawn now. Reported log-probabilities do not know of it.

    Returns:
        Tokens [R] int64, and log softmax(logits / temperature) at them, [R], unfiltered (NOTE
        [Which log-probability] in ``fxrl/engines/engine.py``).

    Raises:
        SamplingError: a row holds NaN or +inf, or nothing above -inf, or all of it is banned.
    """
    logprobs = log_probs(logits, params.temperature)
    allowed = logprobs
    if banned:
        allowed = logprobs.index_fill(1, torch.tensor(banned, device=logits.device), -torch.inf)
    _check_rows(logprobs, allowed)
    if params.temperature == 0:
        tokens = allowed.argmax(-1)
    else:
        assert uniforms is not None, "only greedy decoding needs no random numbers"
        kept = filter_tokens(allowed, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        tokens = inverse_cdf(kept, uniforms)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), [R, V]; temperature 0 counts as 1."""
    logits = at_least_float32(logits)
    if temperature not in (0, 1):
        logits = logits / temperature
    return logits.log_softmax(-1)


def filter_tokens(
    logprobs: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Sets cut tokens of log-probs [R, V] to -inf and leaves the others as they are (not
    renormalised); any constant may be added to a row.

    Top-k keeps the k most likely tokens (Fan et al. 2018). Top-p keeps the smallest set of most
    likely tokens whose share of what top-k kept is >= top_p (Holtzman et al. 2020). Min-p keeps p
    >= min_p * max p (Nguyen et al. 2024). Of equally likely tokens the lower ids are kept, so the
    sets are exactly as small as asked. At least one token of a row always stays.
    """
    if 0 < top_k < logprobs.shape[1]:
        kth = logprobs.topk(top_k, dim=-1).values[:, -1:]
        count = torch.full_like(kth, top_k, dtype=torch.int64)
        logprobs = _keep_largest(logprobs, kth, count)
    if top_p < 1:
        logprobs = _keep_largest(logprobs, *_nucleus(logprobs, top_p))
    if min_p > 0:
        floor = logprobs.amax(-1, keepdim=True) + math.log(min_p)
        logprobs = logprobs.masked_fill(logprobs < floor, -torch.inf)
    return logprobs


def inverse_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [R] int64 drawn from softmax(``logprobs``) [R, V], by one uniform number in [0, 1)
    each. ``logprobs`` need not be normalised; -inf is probability 0.

    A token of probability 0 is never drawn: it does not move the cumulative sum, and the token
    drawn is the first at which the sum exceeds ``uniforms * total`` (< total).
    """
    probs = nn.functional.pad(logprobs.softmax(-1), (0, -logprobs.shape[1] % BLOCK))
    blocks = probs.view(len(probs), -1, BLOCK)
    block, rest = _pick(blocks.sum(-1), uniforms)
    token, _ = _pick(blocks[torch.arange(len(blocks), device=block.device), block], rest)
    return block * BLOCK + token


def _pick(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The entry of each row where ``uniforms`` falls, and how far into that entry, in [0, 1]."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    level = uniforms.to(cumulative) * total
    level = torch.minimum(level, total.nextafter(torch.zeros_like(total)))  # u * total may round up
    index = torch.searchsorted(cumulative, level[:, None], right=True)
    weight = weights.to(torch.float64).gather(1, index)
    below = cumulative.gather(1, index) - weight
    return index[:, 0], ((level[:, None] - below) / weight)[:, 0].clamp(0, 1)


def _nucleus(logprobs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The least log-probability in the nucleus and the number of tokens in it, [R, 1] each.

    Sorting a whole vocabulary is slow on a CPU and a nucleus is mostly small, so look at the most
    likely 1024 first and go on only where they do not reach top_p.
    """
    num_tokens = logprobs.shape[1]
    total = logprobs.logsumexp(-1, keepdim=True)
    width = 1024
    while True:
        largest = logprobs.topk(min(width, num_tokens), dim=-1).values
        mass = (largest - total).exp().cumsum(-1, dtype=torch.float64)
        if width >= num_tokens or bool((mass[:, -1] >= top_p).all()):
            break
        width *= 8
    # A token belongs to the nucleus if the mass before it is still below top_p.
    count = 1 + (mass[:, :-1] < top_p).sum(-1, keepdim=True)
    return largest.gather(1, count - 1), count


def _keep_largest(values: Tensor, threshold: Tensor, count: Tensor) -> Tensor:
    """Keeps ``count`` entries of each row: those above ``threshold``, then equal ones by id."""
    above = values > threshold
    equal = values == threshold
    room = count - above.sum(-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(-1) <= room))
    return values.masked_fill(~keep, -torch.inf)


def _check_rows(logprobs: Tensor, allowed: Tensor) -> None:
    # log_softmax makes every entry of a bad row NaN, so one column shows all bad rows.
    bad = logprobs[:, 0].isnan()
    if bool(bad.any()):
        rows = bad.nonzero()[:, 0].tolist()
        raise SamplingError(
            f"logits of batch rows {rows[:8]} hold NaN or +inf, or are all -inf: the weights have "
            "probably diverged; look at the last gradient norms and go back to a checkpoint"
        )
    if allowed is not logprobs and bool(allowed.isneginf().all(-1).any()):
        raise SamplingError(
            "every token that could be drawn is banned until min_tokens is reached; lower "
            "min_tokens or shorten stop_token_ids"
        )
