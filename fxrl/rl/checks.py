"""Range checks that configuration sections share; ``fxrl.rl.binding`` collects what they raise."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fxrl.errors import ConfigError


def at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(f"{name}={value} is below {low:g}")


def within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is outside [{low:g}, {high:g}]")


def none_of(problems: Sequence[str]) -> None:
    """Raises them all as one error, a line each (``binding.bind`` splits them again)."""
    if problems:
        raise ConfigError("\n".join(problems))


def regex_problems(name: str, pattern: str | None) -> list[str]:
    try:
        re.compile(pattern or "")
    except re.error as error:
        return [f"{name}={pattern!r} is no regular expression: {error}"]
    return []
