"""What a batch holds, and how its tensors are read.

Shapes: B sequences, T tokens of prompt and completion, C tokens of completion.

===================== ============= ==========================================================
key                   shape         meaning
===================== ============= ==========================================================
``input_ids``         [B, T] int    left-padded prompt, then the C tokens of the completion
``attention_mask``    [B, T]        0 on padding
``completion_mask``   [B, C]        non-zero where a completion token counts for the loss
``advantages``        [B] or [B, C] per sequence, or per token
``old_logps``         [B, C]        log-probs at the last policy version; absent: on-policy
``rollout_logps``     [B, C]        log-probs that the sampler reported; absent: no correction
``ref_logps``         [B, C]        log-probs of the reference policy; needed by ``beta != 0``
``num_items_in_batch`` number or 0-d completion tokens of the whole update, for gradient
                                    accumulation; absent: those of this batch
===================== ============= ==========================================================

Further model inputs in ``MODEL_INPUTS`` are handed to the model where the batch has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxrl.losses.errors import BatchError

Batch = Mapping[str, Any]
Metrics = dict[str, Tensor]
LossFn = Callable[[nn.Module, Batch], tuple[Tensor, Metrics]]

MODEL_INPUTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "pixel_values",
    "pixel_attention_mask",
    "image_grid_thw",
    "image_sizes",
)


def need(batch: Batch, key: str, why: str) -> Tensor:
    """``batch[key]``.

    Raises:
        BatchError: the batch has no such key.
    """
    if key not in batch:
        raise BatchError(f"the batch has no {key!r}, which {why}; it has {sorted(batch)}")
    value: Tensor = batch[key]
    return value


def model_inputs(batch: Batch) -> dict[str, Any]:
    """The part of the batch that the model reads."""
    need(batch, "input_ids", "every loss reads")
    return {name: batch[name] for name in MODEL_INPUTS if name in batch}


def completion_mask(batch: Batch) -> Tensor:
    """Which completion tokens count: bool [B, C]."""
    mask = need(batch, "completion_mask", "says which tokens count") != 0
    length = need(batch, "input_ids", "every loss reads").shape[1]
    if mask.shape[1] >= length:
        raise BatchError(
            f"completion_mask has {mask.shape[1]} columns for {length} input_ids; "
            "the first completion token needs at least one token before it"
        )
    return mask


def per_token(value: Tensor, mask: Tensor) -> Tensor:
    """``value`` ([B] or [B, C]) as [B, C] with 0 where masked, so that no padding leaks in."""
    column = value if value.dim() == 2 else value.unsqueeze(-1)
    return torch.where(mask, column, 0.0)


class Tokens(NamedTuple):
    """What a surrogate is made of; all values are 0 where ``mask`` is False.

    Attributes:
        logps: [B, C] log pi(o_t), with gradient.
        old_logps: [B, C] log pi_old(o_t); ``logps`` detached when the batch has none.
        advantages: [B, C].
        mask: bool [B, C].
    """

    logps: Tensor
    old_logps: Tensor
    advantages: Tensor
    mask: Tensor
