"""What the parts of the training loop hand to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxrl.engines import Completion

Row = dict[str, Any]
"""One question: the dataset's columns."""
Batch = dict[str, Any]
"""What a loss gets: tensors and the flag ``right_padded``; see ``fxrl.rl.loop.batching``."""
Metrics = dict[str, float | None]
"""Metric name to value; ``None`` where it is not finite or does not exist."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """The completions that one step trains on, prompt by prompt.

    Attributes:
        completions: of one prompt next to each other; none where dynamic sampling dropped all.
        advantages: one per completion.
        rewards: weighted total, NaN where no function applied.
        texts: decoded completions, without special tokens.
        prompts: as the rewards saw them, one per completion.
        by_function: values of each reward function.
        metrics: reward and length statistics over all completions drawn, dropped ones included.
        num_tokens: prompt and completion tokens drawn, without padding.
        num_completion_tokens: sampled tokens.
    """

    completions: Sequence[Completion]
    advantages: Sequence[float]
    rewards: Sequence[float]
    texts: Sequence[str]
    prompts: Sequence[Any]
    by_function: Mapping[str, Sequence[float | None]]
    metrics: Metrics
    num_tokens: int
    num_completion_tokens: int
