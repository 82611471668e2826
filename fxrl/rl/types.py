"""What the parts of the training loop hand to each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fxrl.engines import Completion

Row = dict[str, Any]
"""One question: the dataset's columns."""
Batch = dict[str, Any]
"""What a loss gets: tensors and the flag ``right_padded``; see ``fxrl.rl.loop.batching``."""
Metrics = dict[str, float | None]
"""Metric name to value; ``None`` where it is not finite or does not exist."""


class Told(NamedTuple):
    """Further facts about a completion that rewards may read."""

    prompt: Any  # text or messages
    # Of the completion; ``None``: its text is all there is.
    messages: Sequence[dict[str, Any]] | None = None
    columns: Mapping[str, Any] = {}  # further arguments of theirs
    num_calls: int = 0  # of tools
    num_failed: int = 0  # of these, that came to nothing


class TokenRow(NamedTuple):
    """A sequence to train on, in plain numbers."""

    prompt: Sequence[int]  # tokens that nothing is learned from, one at least
    completion: Sequence[int]  # those behind them
    # Further numbers of the batch by name, one for each token of ``completion``; a
    # ``completion_mask`` among them says which of these count, else all do.
    per_token: Mapping[str, Sequence[float]]
    per_row: Mapping[str, float]  # likewise one number each

    @property
    def lengths(self) -> tuple[int, int]:
        """(prompt, completion) tokens."""
        return len(self.prompt), len(self.completion)

    @property
    def num_counted(self) -> int:
        """Tokens that are learned from."""
        mask = self.per_token.get("completion_mask")
        return len(self.completion) if mask is None else int(sum(mask))


class Drawn(NamedTuple):
    """One completion, judged."""

    completion: Completion
    text: str
    values: dict[str, float | None]  # of each reward function; ``None`` where it does not apply
    total: float  # their weighted sum, NaN where none applied
    told: Told = Told(None)  # what it says besides its tokens, and the prompt as the rewards saw it


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What reward functions and callbacks may read of the run, under TRL's names."""

    global_step: int  # that is being made, or was made last
    max_steps: int  # the run's last
    epoch: float  # passes over the training questions so far

    def __deepcopy__(self, memo: object) -> TrainerState:
        return self  # frozen, of plain numbers


@dataclass(frozen=True, slots=True)
class Experience:
    """The data that one step trains on."""

    # Those of one unit next to each other; none where there is nothing to train on.
    rows: Sequence[TokenRow]
    metrics: Metrics  # what there is to say of them before anything is trained
    num_tokens: int  # prompt and completion tokens, tools' output included, without padding
    num_completion_tokens: int  # those that are learned from
    # So many rows stay in one micro-batch; all first ones of it, then all second ones.
    unit: int = 1
    # Further numbers of the whole step, which each micro-batch has as 0-d tensors.
    counts: Mapping[str, float] = field(default_factory=dict)

    def samples(self, wanted: int) -> list[dict[str, Any]]:
        """``wanted`` lines of ``completions.jsonl``, or fewer; none of data that are known."""
        return []


@dataclass(frozen=True, slots=True)
class Rollout(Experience):
    """The completions that one step trains on, prompt by prompt; its metrics are over all that were
    drawn, dropped ones included.
    """

    # Completions of one prompt are adjacent; empty if dynamic sampling or
    # ``mask_truncated_completions`` dropped all of them.
    drawn: Sequence[Drawn] = ()
    # One per completion; ``None`` if each token gets its own.
    advantages: Sequence[float | None] = ()

    def samples(self, wanted: int) -> list[dict[str, Any]]:
        """Spread over the step's prompts."""
        pairs = list(zip(self.drawn, self.advantages, strict=True))
        count = min(wanted, len(pairs))
        return [
            {
                "question": last_text(drawn.told.prompt),
                "prompt": drawn.told.prompt,
                "completion": drawn.text,
                "reward": drawn.total if math.isfinite(drawn.total) else None,
                "advantage": advantage,
                **{f"rewards/{name}": value for name, value in drawn.values.items()},
                **({} if drawn.told.messages is None else {"turns": drawn.told.messages}),
            }
            for drawn, advantage in (pairs[i * len(pairs) // count] for i in range(count))
        ]


def of_completion(completion: Completion, worth: float, name: str = "advantages") -> TokenRow:
    """A sampled sequence with its advantage, or with its ``rewards`` where a critic judges that;
    what the policy did not draw of it, such as a tool's output, does not count."""
    sampled = completion.sampled or (True,) * len(completion.token_ids)
    return TokenRow(
        completion.prompt_token_ids,
        completion.token_ids,
        {"completion_mask": sampled, "rollout_logps": completion.logprobs},
        {name: worth},
    )


def last_text(given: Any) -> str:
    """The text of a prompt or completion, of its last message where it is conversational."""
    return given if isinstance(given, str) else str(given[-1]["content"])
