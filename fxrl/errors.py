"""One class per user-facing error; each message names the value, the reason and the cure.

Errors that a bad input causes derive from ``ValueError`` as well, so callers who do not know
fxrl can catch what they know.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message: the nearest name, or where none is near those that there are."""
    names = sorted(known)
    if near := nearest(name, names):
        return near
    more = f" and {len(names) - 30} more" if len(names) > 30 else ""
    return f"; known: {', '.join(names[:30])}{more}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message: the nearest name, if one is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: object, most: int = 200) -> str:
    """``repr(value)``, cut; a class of the user's may raise in its own."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= most else f"{text[:most]}..."


def first_line(error: BaseException, most: int = 500) -> str:
    """What went wrong somewhere else: an error's kind and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:most]


def reason_of(error: BaseException) -> str:
    """The system's reason, or the first line of what an error says that was to be expected."""
    text = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
    line = " ".join(text.splitlines()[0].split())
    return line if len(line) <= 200 else f"{line[:197]}..."


class FxrlError(Exception):
    """Base of every error that fxrl raises on purpose."""


class ConfigError(FxrlError, ValueError):
    """A configuration value is unknown, of the wrong type, or out of range."""


def check_one_of(
    name: str, value: object, allowed: Iterable[str], error: type[FxrlError] = ConfigError
) -> None:
    """Raise unless ``value`` is one of few that are allowed."""
    if value not in (known := tuple(allowed)):
        choices = ", ".join(map(repr, known))
        raise error(f"{name}={value!r} is not one of {choices}{nearest(str(value), known)}")


def installing(what: str) -> str:
    """The command that installs a package, or ``[an extra]`` of fxrl: in a checkout, which is no
    package of an index, that of the checkout."""
    if not what.startswith("["):
        return f"pip install {what}"
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        return f"pip install 'fxrl{what}'"
    try:
        place = "." if root == Path.cwd() else root
    except OSError:  # the working folder is gone
        place = root
    return f"pip install -e '{place}{what}'"


class MissingPackageError(FxrlError, ImportError):
    """An optional package is not installed, or too old to be imported; and what needs it."""

    def __init__(
        self,
        package: str,
        needed_for: str,
        why: object = "not installed",
        install: str = "[demo]",
    ) -> None:
        cure = installing(install)
        super().__init__(f"{needed_for} needs {package} ({why}); {cure} brings it")


TESTED: Mapping[str, tuple[str, ...]] = {"trl": ("1.16.0",), "vllm": ("0.25.1", "0.32.0")}
"""Versions that tests and benchmarks ran with, of packages whose insides fxrl uses."""


def optional(package: str, purpose: str, install: str = "[demo]") -> Any:
    """Imports a package that only an extra brings, or none; ``install`` as for ``installing``."""
    try:
        return importlib.import_module(package)
    except ImportError as missing:
        raise MissingPackageError(package, purpose, missing, install) from missing


class ForeignFileError(FxrlError):
    """What stands where fxrl keeps a file is a link, or no plain file."""


class MissedRewriteError(FxrlError):
    """``Config(on_miss="error")`` and a rewrite did not happen."""


class VerificationError(FxrlError):
    """The optimized step and the eager step disagree."""


class PlanError(FxrlError, ValueError):
    """A plan is damaged, or names a choice that there is not."""


class HostMemoryError(FxrlError):
    """The host gives no memory for what layers keep, or does not let it be pinned.

    Attributes:
        reason: The kernel's or the driver's own words, one line; empty where it was never asked.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
