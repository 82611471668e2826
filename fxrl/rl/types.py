"""What the parts of the training loop hand to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fxrl.engines import Completion

Row = dict[str, Any]
"""One question: the dataset's columns."""
Batch = dict[str, Any]
"""What a loss gets: tensors and the flag ``right_padded``; see ``fxrl.rl.loop.batching``."""
Metrics = dict[str, float | None]
"""Metric name to value; ``None`` where it is not finite or does not exist."""


class Told(NamedTuple):
    """What the rewards hear of a completion besides its tokens.

    Attributes:
        prompt: text or messages.
        messages: of the completion; ``None``: its text is all there is.
        columns: further arguments of theirs.
        num_calls: of tools.
        num_failed: of these, that came to nothing.
    """

    prompt: Any
    messages: Sequence[dict[str, Any]] | None = None
    columns: Mapping[str, Any] = {}
    num_calls: int = 0
    num_failed: int = 0


class Drawn(NamedTuple):
    """One completion, judged.

    Attributes:
        completion: as the engine gave it.
        text: of it, without special tokens.
        prompt: as the rewards saw it, a text or chat messages.
        values: of each reward function; ``None`` where it does not apply.
        total: their weighted sum, NaN where none applied.
        told: what it says besides its tokens.
    """

    completion: Completion
    text: str
    prompt: Any
    values: dict[str, float | None]
    total: float
    told: Told = Told(None)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What reward functions and callbacks may read of the run, under TRL's names.

    Attributes:
        global_step: the step that is being made, or was made last.
        max_steps: the run's last.
        epoch: passes over the training questions so far.
    """

    global_step: int
    max_steps: int
    epoch: float

    def __deepcopy__(self, memo: object) -> TrainerState:
        return self  # frozen, of plain numbers


@dataclass(frozen=True, slots=True)
class Rollout:
    """The completions that one step trains on, prompt by prompt.

    Attributes:
        drawn: those of one prompt next to each other; none where dynamic sampling or
            ``mask_truncated_completions`` left out all.
        advantages: one per completion.
        metrics: reward and length statistics over all completions drawn, dropped ones included.
        num_tokens: prompt and completion tokens, tools' output included, without padding.
        num_completion_tokens: sampled tokens.
    """

    drawn: Sequence[Drawn]
    advantages: Sequence[float]
    metrics: Metrics
    num_tokens: int
    num_completion_tokens: int
