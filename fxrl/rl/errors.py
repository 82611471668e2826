"""Errors of the training loop; each message names the value, the reason and the cure."""

from __future__ import annotations

from fxrl.errors import ConfigError, FxrlError


class DataError(FxrlError, ValueError):
    """A dataset cannot be read, or its rows do not fit what the configuration says."""


class RewardError(FxrlError):
    """A reward function raised, hung, or returned something else than one number each."""


class CheckpointError(FxrlError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class RunInUseError(FxrlError):
    """Another process has the run's folder."""


class StorageError(FxrlError):
    """Something could not be written, most likely because the disk is full."""


class NonFiniteError(FxrlError):
    """Loss or gradient was not finite too many times in a row."""


class BadConfigError(ConfigError):
    """All problems of a training configuration at once, one per line."""
