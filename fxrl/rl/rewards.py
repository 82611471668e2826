"""Reward functions: TRL's signature, four built in, and what is checked of their results.

A reward is called once a step as ``f(prompts=..., completions=..., completion_ids=..., **columns)``
with one entry per completion and returns one float, or ``None`` for "does not apply", per
completion. A function without ``**kwargs`` gets the arguments it names.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxrl.errors import ConfigError
from fxrl.rl.binding import nearest
from fxrl.rl.errors import RewardError
from fxrl.rl.named import keywords_of, load_function, wrong_keywords
from fxrl.rl.types import Row

RewardFunction = Callable[..., Any]
ScoreAnswer = Callable[[str, Row], float]


@dataclass(frozen=True, slots=True)
class Reward:
    """One reward of a run.

    Attributes:
        name: as in metric keys ``rewards/<name>/mean``.
        function: TRL's signature.
        weight: of its value in the total.
    """

    name: str
    function: RewardFunction
    weight: float

    def __call__(self, num: int, arguments: Mapping[str, Any]) -> list[float | None]:
        """``num`` values.

        Raises:
            RewardError: the function raised or returned something else.
        """
        known = keywords_of(self.function)
        given = {k: v for k, v in arguments.items() if known is None or k in known}
        try:
            values = self.function(**given)
            if inspect.isawaitable(values):
                values = asyncio.run(_result(values))
        # User code may raise anything; the run must be saved and the function named.
        except Exception as error:
            raise RewardError(f"reward {self.name!r} raised {error!r}") from error
        return _checked(self.name, values, num)


async def _result(awaitable: Any) -> Any:
    return await awaitable


def _checked(name: str, values: Any, num: int) -> list[float | None]:
    if hasattr(values, "tolist"):  # a tensor or an array
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"reward {name!r} returned {type(values).__name__}; it must return a list with one "
            "float or None per completion"
        )
    if len(values) != num:
        raise RewardError(
            f"reward {name!r} returned {len(values)} values for {num} completions; return one each"
        )
    checked: list[float | None] = []
    for index, value in enumerate(values):
        if hasattr(value, "item"):
            value = value.item()
        if value is not None and (
            not isinstance(value, int | float) or not math.isfinite(float(value))
        ):
            raise RewardError(
                f"reward {name!r} returned {value!r} for completion {index}; return a finite "
                "float, or None where the reward does not apply"
            )
        checked.append(None if value is None else float(value))
    return checked


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
) -> list[Reward]:
    """The run's rewards; keywords of a ``module:function`` reach it as further columns."""
    ours = {"extract": extract, "answer": answer, "score": score}
    rewards = []
    for name, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
        keywords = dict(params.get(name, {}))
        if name in BUILT_IN:
            factory = BUILT_IN[name]
            takes = keywords_of(factory) or ()
            function = factory(**{k: v for k, v in ours.items() if k in takes}, **keywords)
            rewards.append(Reward(name, function, weight))
        else:
            function = _with_keywords(load_function(name), keywords)
            short = name.partition(":")[2]
            taken = short in {reward.name for reward in rewards}
            rewards.append(Reward(name if taken else short, function, weight))
    return rewards


def _with_keywords(function: RewardFunction, keywords: Mapping[str, Any]) -> RewardFunction:
    if not keywords:
        return function
    import functools

    return functools.partial(function, **keywords)
