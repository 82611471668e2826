"""One class per user-facing error; each message names the value, the reason and the cure.

Errors that a bad input causes derive from ``ValueError`` as well, so callers who do not know
fxrl can catch what they know.
"""

from __future__ import annotations


class FxrlError(Exception):
    """Base of every error that fxrl raises on purpose."""


class ConfigError(FxrlError, ValueError):
    """A configuration value is unknown, of the wrong type, or out of range."""


class MissingPackageError(FxrlError, ImportError):
    """An optional package is not installed, or too old to be imported; and what needs it."""

    def __init__(self, package: str, needed_for: str, why: object = "not installed") -> None:
        super().__init__(
            f"{needed_for} needs {package} ({why}); pip install 'fxrl[demo]' brings it"
        )


class MissedRewriteError(FxrlError):
    """``Config(on_miss="error")`` and a rewrite did not happen."""


class VerificationError(FxrlError):
    """The optimized step and the eager step disagree."""


class PlanError(FxrlError, ValueError):
    """A plan is damaged, or names a choice that there is not."""
