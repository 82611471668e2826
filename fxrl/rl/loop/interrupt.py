"""SIGINT and SIGTERM: the first asks the loop to stop after its step, the second kills."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class StopRequest:
    """``signum`` is the signal that came, ``None`` as long as none did."""

    signum: int | None = None

    def __bool__(self) -> bool:
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 + the signal's number (130 for Ctrl-C)."""
        return 128 + (self.signum or 0)


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Yields the request; the former handlers come back at the end.

    Signals reach only the main thread of Python, so elsewhere the request just stays empty.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    former = {number: signal.getsignal(number) for number in signals}

    def note(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        for number in signals:
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
