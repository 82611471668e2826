"""Writing where the disk may be full: the run goes on, nothing is lost, and it is tried again.

NOTE [A full disk is no reason to lose hours of training]
What cannot be written stays in memory. Lines of metrics wait for the next line; a checkpoint is
tried again after the next step, and the older one stays until a new one is complete. Only at the
end is there no next step: there the run waits, says what for, and tries again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from fxrl.rl.errors import StorageError

T = TypeVar("T")
Tell = Callable[[str], None]


def why(error: BaseException) -> str:
    """The system's reason, in words."""
    reason = getattr(error, "strerror", None)
    return str(reason) if reason else (str(error).splitlines() or [type(error).__name__])[0][:200]


def try_to_write(action: Callable[[], T], what: str) -> T:
    """``action()``.

    Raises:
        StorageError: it raised an ``OSError``.
    """
    try:
        return action()
    except OSError as error:
        raise StorageError(
            f"{what} could not be written: {why(error)}; free some space, or give another run_dir"
        ) from error


def keep_trying(
    action: Callable[[], T],
    what: str,
    tell: Tell,
    *,
    retries: int,
    wait_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """``action()``, again as long as it cannot write.

    Args:
        action: raises ``OSError`` or ``StorageError`` where the disk refuses.
        what: is written, for the messages.
        tell: gets a message before each wait.
        retries: further tries.
        wait_s: between them.
        sleep: how to wait.

    Raises:
        StorageError: also the last try failed.
    """
    for left in reversed(range(retries + 1)):
        try:
            return try_to_write(action, what)
        except StorageError as error:
            if not left:
                raise
            tell(f"{error}; trying again in {wait_s:g} s, {left} more times")
            sleep(wait_s)
    raise AssertionError("unreachable: the last try returns or raises")
