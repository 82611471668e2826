"""How per-token losses [B, C] become one number: the normalisations of the GRPO family.

Each is linear in the losses, so that a sum of terms may be reduced term by term. Each gives 0,
with gradient 0, where every token is masked. B sequences, C completion tokens, |o_i| tokens of
sequence i that count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fxrl.losses.batch import Batch

Reduction = Callable[[Tensor, Tensor, Batch], Tensor]
Over = Literal["update", "sequences", "tokens"]


def mean_over(over: Over) -> Callable[[Reduction], Reduction]:
    """Says of a reduction what it is a mean over, and so how those of several batches add up.

    ``"update"``: the tokens of the whole update, so they just add up; ``"sequences"`` or
    ``"tokens"``: this batch's, so each weighs by its share of them.
    """

    def mark(reduction: Reduction) -> Reduction:
        reduction.mean_over = over  # type: ignore[attr-defined]
        return reduction

    return mark


def is_mean_over(reduction: Reduction) -> Over:
    """What ``mean_over`` said of it; sequences where nothing did."""
    over: Over = getattr(reduction, "mean_over", "sequences")
    return over


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens that count, per sequence: [B, C] -> [B]."""
    return torch.where(mask, values, 0.0).sum(-1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens that count, per sequence: [B, C] -> [B]; 0 for an empty sequence."""
    return masked_sum(values, mask) / mask.sum(-1).clamp(min=1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all tokens that count; 0 where there is none."""
    return masked_sum(values, mask).sum() / mask.sum().clamp(min=1)


def masked_min(values: Tensor, mask: Tensor) -> Tensor:
    """The least of all that count; 0 where there is none."""
    return torch.where(mask.any(), torch.where(mask, values, torch.inf).amin(), 0.0)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """The largest of all that count; 0 where there is none."""
    return torch.where(mask.any(), torch.where(mask, values, -torch.inf).amax(), 0.0)


@mean_over("sequences")
def sequence_mean_token_mean(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """``1/B sum_i 1/|o_i| sum_t x_it`` (GRPO)."""
    return row_mean(values, mask).mean()


@mean_over("sequences")
def sequence_mean_token_sum(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """``1/B sum_i sum_t x_it`` (REINFORCE, LUSPO)."""
    return masked_sum(values, mask).mean()


@mean_over("tokens")
def token_mean(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """``sum_it x_it / sum_i |o_i|`` over this batch (BNPO, PPO)."""
    return masked_mean(values, mask)


@mean_over("update")
def token_mean_of_update(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """``sum_it x_it / N``, N = ``batch["num_items_in_batch"]``, else this batch's tokens (DAPO).

    With N over all batches of one update, gradients of accumulated batches just add up.
    """
    count = batch.get("num_items_in_batch")
    if count is None:
        return masked_mean(values, mask)
    total = masked_sum(values, mask).sum()
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def fixed_length_mean(max_completion_length: int) -> Reduction:
    """``sum_it x_it / (B L)`` with the constant L = ``max_completion_length`` (Dr. GRPO)."""

    @mean_over("sequences")
    def reduce(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
        return masked_sum(values, mask).mean() / max_completion_length

    return reduce


def share_of_update(over: Over, mask: Tensor, batch: Batch) -> Tensor | float:
    """What makes a mean over this batch's tokens part of a mean over the update's tokens.

    A term that is a mean per token under every loss, multiplied by this, adds up over batches
    that are weighed as the loss's own reduction wants (``mean_over``). 1 where the batch does not
    say what the update has.
    """
    tokens = batch.get("num_items_in_batch")
    if over == "tokens" or tokens is None:
        return 1.0
    share = mask.sum() / (tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1))
    if over == "update":
        return share
    sequences = batch.get("num_sequences_in_batch")
    return 1.0 if sequences is None else share * sequences / mask.shape[0]
