"""What a batch holds, and how its tensors are read.

Shapes: B sequences, T tokens of prompt and completion, C tokens of completion.

===================== ============= ==========================================================
key                   shape         meaning
===================== ============= ==========================================================
``input_ids``         [B, T] int    prompt and completion; the last C are the loss's columns
``attention_mask``    [B, T]        0 on padding
``right_padded``      bool          True: all padding is at the end of the rows; absent: it may
                                    be anywhere, such as left of the prompt
``completion_mask``   [B, C]        non-zero where a completion token counts for the loss
``advantages``        [B] or [B, C] per sequence, or per token
``old_logps``         [B, C]        log-probs at the last policy version; absent: on-policy
``rollout_logps``     [B, C]        log-probs that the sampler reported; absent: no correction
``ref_logps``         [B, C]        log-probs of the reference policy; needed by ``beta != 0``
``desirable``         [B]           non-zero for a good answer; read by ``kto``
``kl``                0-d           an estimate of KL(policy || reference); read by ``kto``
``num_items_in_batch`` number or 0-d completion tokens of the whole update, for gradient
                                    accumulation; absent: those of this batch
``num_sequences_in_batch`` likewise sequences of the whole update; read where a loss that is a mean
                                    over sequences has an entropy bonus
===================== ============= ==========================================================

Column c is ``input_ids[:, T - C + c]``. Which columns are a row's completion is said by
``completion_mask`` alone: with prompts padded on the left they start at 0, with rows padded on the
right they start where the row's prompt ends (C is then T less the shortest prompt). Every loss
gives the same number for both layouts of the same sequences.

Further model inputs in ``MODEL_INPUTS`` are handed to the model where the batch has them.

NOTE [Padding on the right]
Where the batch says ``right_padded``, ``attention_mask`` is not handed to the model. No token of a
causal model sees what comes after it, so padding at the end changes nothing that a loss reads, and
positions are 0, 1, 2, ... from the row's first token, as they are when nothing is padded. Without
a mask attention runs its causal kernels; with one, it works through a dense [T, T] mask. This
holds for full and windowed attention and for recurrent layers alike. It does not hold for models
that look ahead (encoders, prefix attention), and it changes what a model computes over all tokens
at once besides its logits: a mixture of experts' balancing loss and capacity count padding tokens,
and rotary scaling that switches by the longest position sees the padded length. ``fxrl.rl`` pads
so; for such a model write a loss that passes ``attention_mask=batch["attention_mask"]``, which is
always there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from fxrl.errors import ConfigError, FxrlError, check_one_of


class LossConfigError(ConfigError):
    """A loss name, keyword or value is unknown or out of range."""


class BatchError(FxrlError, ValueError):
    """The batch (or the model) lacks what the loss reads, or has it in the wrong shape."""


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise unless ``value`` is one of those of ``choices``, a ``Literal``."""
    check_one_of(name, value, get_args(choices), LossConfigError)


FLOAT32_MAX = torch.finfo(torch.float32).max
BEYOND = "is beyond float32, in which losses are computed"


def check_positive(name: str, value: float, *, or_zero: bool = False) -> None:
    """Raise unless ``value`` is a number above 0 (or at 0, with ``or_zero``)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value >= 0 if or_zero else value > 0):
        bound = "at least 0" if or_zero else "above 0"
        raise LossConfigError(f"{name}={value!r} must be a number {bound}")
    if FLOAT32_MAX < value < math.inf:
        raise LossConfigError(f"{name}={value!r} {BEYOND}")


def check_number(name: str, value: float) -> None:
    """Raise unless ``value`` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise LossConfigError(f"{name}={value!r} must be a finite number")
    if abs(value) > FLOAT32_MAX:
        raise LossConfigError(f"{name}={value!r} {BEYOND}")


def check_flag(name: str, value: bool) -> None:
    """Raise unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise LossConfigError(f"{name}={value!r} must be true or false")


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
    """``batch[key]``; where there is none, an error that says ``why`` it must be there."""
    if key not in batch:
        raise BatchError(f"the batch has no {key!r}, which {why}; it has {sorted(batch)}")
    value: Tensor = batch[key]
    return value


def model_inputs(batch: Batch) -> dict[str, Any]:
    """The part of the batch that the model reads (NOTE [Padding on the right])."""
    need(batch, "input_ids", "every loss reads")
    inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch}
    if batch.get("right_padded", False):
        inputs.pop("attention_mask", None)
    return inputs


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
    """What a surrogate is made of; all values are 0 where ``mask`` is False."""

    logps: Tensor  # [B, C] log pi(o_t), with gradient
    old_logps: Tensor  # [B, C] log pi_old(o_t); ``logps`` detached when the batch has none
    advantages: Tensor  # [B, C]
    mask: Tensor  # bool [B, C]
