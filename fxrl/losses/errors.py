"""What a loss says when its settings or its batch cannot be used."""

from __future__ import annotations

from typing import Any, get_args

from fxrl.errors import ConfigError, FxrlError, did_you_mean


class LossConfigError(ConfigError):
    """A loss name, keyword or value is unknown or out of range."""


class BatchError(FxrlError, ValueError):
    """The batch (or the model) lacks what the loss reads, or has it in the wrong shape."""


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise unless ``value`` is one of those of ``choices``, a ``Literal``."""
    if value not in (allowed := get_args(choices)):
        raise LossConfigError(
            f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}"
            + did_you_mean(str(value), allowed)
        )


def check_positive(name: str, value: float, *, or_zero: bool = False) -> None:
    """Raise unless ``value`` is a number above 0 (or at 0, with ``or_zero``)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value >= 0 if or_zero else value > 0):
        bound = "at least 0" if or_zero else "above 0"
        raise LossConfigError(f"{name}={value!r} must be a number {bound}")
