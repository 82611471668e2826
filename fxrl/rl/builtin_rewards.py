"""The reward functions that a configuration may name without a module, each by its factory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxrl.errors import ConfigError
from fxrl.rl.errors import RewardError
from fxrl.rl.types import Row, last_text

RewardFunction = Callable[..., Any]
ScoreAnswer = Callable[[str, Row], float]


def _answers(completions: Sequence[Any], extract: str | None) -> list[str]:
    answers = []
    for completion in completions:
        text = last_text(completion).strip()
        found = list(re.finditer(extract, text)) if extract else []
        answers.append((found[-1][found[-1].re.groups and 1] or "") if found else text)
    return answers


def exact(*, extract: str | None, answer: str) -> RewardFunction:
    """1 where the extracted answer equals the column ``answer`` as text, else 0."""

    def exact(completions: Sequence[Any], **columns: Any) -> list[float]:
        if answer not in columns:
            raise RewardError(f"no column {answer!r}; name it by data.answer")
        right = (str(value).strip() for value in columns[answer])
        given = _answers(completions, extract)
        return [float(a == b) for a, b in zip(given, right, strict=True)]

    return exact


def reasoning_gym(*, extract: str | None, score: ScoreAnswer | None) -> RewardFunction:
    """The task's own ``score_answer`` of the extracted answer, in [0, 1]."""
    if score is None:
        raise ConfigError("reward 'reasoning_gym' needs data.reasoning_gym; use 'exact' here")

    def reasoning_gym(completions: Sequence[Any], rows: Sequence[Row], **_: Any) -> list[float]:
        given = _answers(completions, extract)
        return [score(a, row) for a, row in zip(given, rows, strict=True)]

    return reasoning_gym


def length(*, target: int = 16) -> RewardFunction:
    """1 at ``target`` tokens, falling linearly to 0 at 0 and at twice as many."""
    if not isinstance(target, int | float) or not 0 < target < math.inf:
        raise ConfigError(f"target={target!r} is no number of tokens above 0")

    def length(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [max(0.0, 1.0 - abs(len(ids) - target) / target) for ids in completion_ids]

    return length


def regex(*, pattern: str) -> RewardFunction:
    """1 where ``pattern`` matches the whole completion (spaces at its ends aside), else 0."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ConfigError(f"pattern={pattern!r} is no regular expression: {error}") from error

    def regex(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(bool(compiled.fullmatch(last_text(c).strip()))) for c in completions]

    return regex


BUILT_IN: Mapping[str, Callable[..., RewardFunction]] = {
    "exact": exact,
    "reasoning_gym": reasoning_gym,
    "length": length,
    "regex": regex,
}
PROVIDED = ("extract", "answer", "score")
"""Their keywords that the run gives, and not ``[reward.params]``."""
