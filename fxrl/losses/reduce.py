"""How per-token losses [B, C] become one number: the normalisations of the GRPO family.

Each is linear in the losses, so that a sum of terms may be reduced term by term. Each gives 0,
with gradient 0, where every token is masked. B sequences, C completion tokens, |o_i| tokens of
sequence i that count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxrl.losses.batch import Batch

Reduction = Callable[[Tensor, Tensor, Batch], Tensor]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens that count, per sequence: [B, C] -> [B]."""
    return torch.where(mask, values, 0.0).sum(-1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens that count, per sequence: [B, C] -> [B]; 0 for an empty sequence."""
    return masked_sum(values, mask) / mask.sum(-1).clamp(min=1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all tokens that count; 0 where there is none."""
    return masked_sum(values, mask).sum() / mask.sum().clamp(min=1)


def sequence_mean_token_mean(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """``1/B sum_i 1/|o_i| sum_t x_it`` (GRPO)."""
    return row_mean(values, mask).mean()


def sequence_mean_token_sum(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """``1/B sum_i sum_t x_it`` (REINFORCE, LUSPO)."""
    return masked_sum(values, mask).mean()


def token_mean(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
    """``sum_it x_it / sum_i |o_i|`` over this batch (BNPO, PPO)."""
    return masked_mean(values, mask)


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

    def reduce(values: Tensor, mask: Tensor, batch: Batch) -> Tensor:
        return masked_sum(values, mask).mean() / max_completion_length

    return reduce
