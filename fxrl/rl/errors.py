"""Errors of the training loop; each message names the value, the reason and the cure."""

from __future__ import annotations

from fxrl.errors import ConfigError, FxrlError


class DataError(FxrlError, ValueError):
    """A dataset cannot be read, or its rows do not fit what the configuration says."""


class RewardError(FxrlError):
    """A reward function raised, hung, or returned something else than one number each."""


class CheckpointError(FxrlError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class StorageError(FxrlError):
    """Something could not be written, most likely because the disk is full."""


class NonFiniteError(FxrlError):
    """Loss or gradient was not finite too many times in a row."""


class BadConfigError(ConfigError):
    """All problems of a training configuration at once, one per line."""


class MissingPackageError(FxrlError, ImportError):
    """An optional package is needed for what the configuration asks."""

    def __init__(self, package: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package}; pip install 'fxrl[demo]' brings it"
        )
