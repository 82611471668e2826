"""Errors of the training loop; each message names the value, the reason and the cure."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxrl.errors import ConfigError, FxrlError, shown


class DataError(FxrlError, ValueError):
    """A dataset cannot be read, or its rows do not fit what the configuration says."""


class RewardError(FxrlError):
    """A reward function raised, hung, or returned something else than one number each."""


class ToolError(FxrlError):
    """A tool or an environment raised or hung, or what a rollout function returned is wrong."""


class LossError(FxrlError):
    """A loss raised, or returned something else than one number to go down from."""


class CallbackError(FxrlError):
    """A callback raised."""


class TrackerError(FxrlError):
    """A tracker of ``log_to`` cannot be started."""


class HubError(FxrlError):
    """The Hugging Face hub cannot be reached, or refuses; what was trained is in its folder."""


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


_FXRL = str(Path(__file__).parents[1])
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def raised_at(error: BaseException) -> str:
    """`` at rewards.py:12``, the innermost line of the user's own code; empty without any.

    That is code which is neither fxrl's nor installed; where all of it is installed, the innermost
    line of that.
    """
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [f for f in frames if not f.filename.startswith(_FXRL) and f.filename[:1] != "<"]
    own = [f for f in foreign if not f.filename.startswith(_INSTALLED)]
    return "".join(f" at {_place(f.filename, f.lineno)}" for f in (own or foreign)[-1:])


def called(frames: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """The frames of what fxrl's innermost one has called; all of them where that is nothing."""
    ours = [at for at, frame in enumerate(frames, 1) if frame.filename.startswith(_FXRL)]
    return frames[max(ours, default=0) :] or frames


def raised(error: BaseException) -> str:
    """``raised ValueError('no') at rewards.py:12``."""
    return f"raised {shown(error, 1000)}{raised_at(error)}"


def name_of(function: Any) -> str:
    """Name of a function, or of the class of a callable object."""
    return getattr(function, "__name__", type(function).__name__)


def defined_at(function: Any) -> str:
    """`` (defined at rewards.py:3)``; empty where that is unknown."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    return "" if code is None else f" (defined at {_place(code.co_filename, code.co_firstlineno)})"


def _place(filename: str, line: int | None) -> str:
    try:
        path = Path(filename).relative_to(Path.cwd())
    except (ValueError, OSError):  # elsewhere, or the working folder is gone
        path = Path(filename)
    return f"{path}:{line}"


def in_words(error: BaseException) -> str:
    """What ended a run; an error that nobody foresaw says where it comes from."""
    if isinstance(error, FxrlError):
        text = str(error)
    elif isinstance(error, KeyboardInterrupt):
        text = str(error) or "interrupted"
    elif isinstance(error, SystemExit):
        text = f"sys.exit({shown(error.code)}) was called{raised_at(error)}"
    else:
        named = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else shown(error)
        text = f"{named}{raised_at(error)}; --traceback shows how it came about"
    return "\n".join([text, *getattr(error, "__notes__", [])])
