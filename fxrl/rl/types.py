"""What the parts of the training loop hand to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxrl.runtime import Completion

Row = dict[str, Any]
"""One question: the dataset's columns."""
Batch = dict[str, Any]
"""What a loss gets: tensors and the flag ``right_padded``; see ``fxrl.rl.batching``."""
Metrics = dict[str, float | None]
"""Metric name to value; ``None`` where it is not finite or does not exist."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """All completions of one step, prompt by prompt.

    Attributes:
        completions: ``num_prompts * num_generations``, those of one prompt next to each other.
        advantages: one per completion.
        rewards: weighted total, NaN where no function applied.
        texts: decoded completions, without special tokens.
        prompts: as the rewards saw them, one per completion.
        by_function: values of each reward function.
        metrics: reward and length statistics.
        times: seconds by phase.
    """

    completions: Sequence[Completion]
    advantages: Sequence[float]
    rewards: Sequence[float]
    texts: Sequence[str]
    prompts: Sequence[Any]
    by_function: Mapping[str, Sequence[float | None]]
    metrics: Metrics
    times: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens, without padding."""
        return sum(len(c.prompt_token_ids) + len(c.token_ids) for c in self.completions)

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(c.token_ids) for c in self.completions)
