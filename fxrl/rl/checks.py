"""Range checks that configuration sections share; ``fxrl.rl.binding`` collects what they raise."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fxrl.errors import ConfigError


def at_least(name: str, value: float | None, low: float) -> list[str]:
    """A problem if ``value`` is below ``low``; ``None`` is fine."""
    return [] if value is None or value >= low else [f"{name}={value} is below {low:g}"]


def above(name: str, value: float | None, low: float) -> list[str]:
    """A problem if ``value`` is not above ``low``; ``None`` is fine."""
    return [] if value is None or value > low else [f"{name}={value} must be above {low:g}"]


def within(name: str, value: float, low: float, high: float) -> list[str]:
    """A problem if ``value`` is outside [``low``, ``high``]."""
    return [] if low <= value <= high else [f"{name}={value} is outside [{low:g}, {high:g}]"]


def when(wrong: object, text: str) -> list[str]:
    """``text`` as a problem if ``wrong``."""
    return [text] if wrong else []


def regular_expression(name: str, pattern: str | None) -> list[str]:
    """A problem if ``pattern`` does not compile; ``None`` is fine."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        return [f"{name}={pattern!r} is no regular expression: {error}"]
    return []


def none_of(*problems: Sequence[str]) -> None:
    """Raises them all as one error, a line each (``binding.bind`` splits them again).

    Raises:
        ConfigError: there is one.
    """
    if lines := [line for part in problems for line in part]:
        raise ConfigError("\n".join(lines))
