"""Reward functions: TRL's signature, four built in, and what is checked of their results.

A reward is called once a step as ``f(prompts=..., completions=..., completion_ids=..., **columns)``
with one entry per completion and returns one float, or ``None`` for "does not apply", per
completion. A function without ``**kwargs`` gets the arguments it names. Those built in judge each
completion by itself, so they are called for each prompt's completions as soon as these are there,
and so are your own with ``reward.per_group``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxrl.errors import ConfigError
from fxrl.rl.binding import nearest
from fxrl.rl.errors import RewardError
from fxrl.rl.named import keywords_of, load_function, wrong_keywords
from fxrl.rl.reward_call import CallRules, Reward, RewardFunction
from fxrl.rl.types import Row

ScoreAnswer = Callable[[str, Row], float]


def combine(values: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float]:
    """Weighted sum over functions for each completion; NaN where every function said ``None``.

    Args:
        values: [functions][completions].
        weights: [functions].
    """
    totals = []
    for row in zip(*values, strict=True):
        said = [w * value for w, value in zip(weights, row, strict=True) if value is not None]
        totals.append(math.fsum(said) if said else math.nan)
    return totals


def completion_text(completion: Any) -> str:
    """The text of a completion, conversational or not."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _answers(completions: Sequence[Any], extract: str | None) -> list[str]:
    answers = []
    for completion in completions:
        text = completion_text(completion).strip()
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

    def length(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [max(0.0, 1.0 - abs(len(ids) - target) / target) for ids in completion_ids]

    return length


def regex(*, pattern: str) -> RewardFunction:
    """1 where ``pattern`` matches the whole completion (spaces at its ends aside), else 0."""
    compiled = re.compile(pattern, re.DOTALL)

    def regex(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(bool(compiled.fullmatch(completion_text(c).strip()))) for c in completions]

    return regex


BUILT_IN: Mapping[str, Callable[..., RewardFunction]] = {
    "exact": exact,
    "reasoning_gym": reasoning_gym,
    "length": length,
    "regex": regex,
}
_OURS = ("extract", "answer", "score")  # given by the run, not by [reward.params]


def reward_problems(functions: Sequence[str], params: Mapping[str, Any]) -> list[str]:
    """One line per name that is no reward and per wrong keyword; imports the user's modules."""
    lines = []
    for name in functions:
        if name in BUILT_IN:
            keywords = params.get(name, {})
            if not isinstance(keywords, Mapping):
                lines.append(f"params.{name}={keywords!r} is not a table")
                continue
            wrong = wrong_keywords(BUILT_IN[name], keywords, besides=_OURS)
            lines += [f"params.{name}.{line}" for line in wrong]
        elif ":" in name:
            try:
                load_function(name)
            except ConfigError as error:
                lines.append(f"functions: {error}")
        else:
            near = nearest(name, tuple(BUILT_IN))
            hint = f"; did you mean {near}?" if near else f" ({', '.join(BUILT_IN)})"
            lines.append(f"functions: {name!r} is neither built in{hint} nor module:function")
    for name in params:
        if name not in functions:
            lines.append(f"params.{name}: no such entry in functions")
    return lines


def build_rewards(
    functions: Sequence[str],
    weights: Sequence[float] | None,
    params: Mapping[str, Any],
    *,
    extract: str | None,
    answer: str,
    score: ScoreAnswer | None,
    rules: CallRules | None = None,
    per_group: bool = False,
) -> list[Reward]:
    """The run's rewards; keywords of a ``module:function`` reach it as further columns."""
    rules = rules or CallRules()
    ours = {"extract": extract, "answer": answer, "score": score}
    rewards = []
    for name, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
        keywords = dict(params.get(name, {}))
        if name in BUILT_IN:
            factory = BUILT_IN[name]
            takes = keywords_of(factory) or ()
            function = factory(**{k: v for k, v in ours.items() if k in takes}, **keywords)
            rewards.append(Reward(name, function, weight, rules, per_group=True))
        else:
            function = _with_keywords(load_function(name), keywords)
            short = name.partition(":")[2]
            taken = short in {reward.name for reward in rewards}
            rewards.append(Reward(name if taken else short, function, weight, rules, per_group))
    return rewards


def _with_keywords(function: RewardFunction, keywords: Mapping[str, Any]) -> RewardFunction:
    if not keywords:
        return function
    import functools

    return functools.partial(function, **keywords)
