"""A limit on what a block of code may take, whatever library it is in."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class TimeLimitReached(BaseException):
    """The time is over; not an ``Exception``, so that no library under test swallows it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises ``TimeLimitReached`` in the main thread at its next bytecode after ``seconds``."""

    def stop(*_: Any) -> None:
        raise TimeLimitReached(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    # Not 0, which would switch the alarm off; and again, if a finaliser swallowed it.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
