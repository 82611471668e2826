"""SIGINT and SIGTERM: the first asks the loop to stop after its step, the second kills. Before and
behind the loop there is nothing to save: the first unwinds.

NOTE [Heard at once]
Python calls a signal's handler in its main thread, between two of its own instructions: not before
a long call into C (a compilation, a matrix product) is over. The signal's number, though, is
written to a socket at once (``signal.set_wakeup_fd``). A thread reads it there, tells the user, and
ends the process at the second signal where the main thread has not heard of the first.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_SOON_S = 0.3  # who unwinds within it has nothing to tell but its end


@dataclass(slots=True)
class StopRequest:
    """``signum`` is the signal that came, ``None`` as long as none did."""

    signum: int | None = None

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 + the signal's number (130 for Ctrl-C)."""
        return 128 + (self.signum or 0)


class Terminated(KeyboardInterrupt):
    """What SIGTERM raises, as Ctrl-C does, so that the terminal is left as it was found."""

    exit_code = 128 + signal.SIGTERM


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *signums: int) -> Iterator[None]:
    """Inside, the main thread handles these signals so; of other threads nothing changes."""
    in_main = threading.current_thread() is threading.main_thread()
    former = {number: signal.signal(number, handler) for number in signums if in_main}
    try:
        yield
    finally:
        for number, one in former.items():
            signal.signal(number, one)


def unwound_by_sigterm() -> AbstractContextManager[None]:
    """SIGTERM raises ``Terminated`` in the main thread; elsewhere nothing changes."""
    return _handling(_unwind, signal.SIGTERM)


def _unwind(signum: int, frame: FrameType | None) -> None:
    raise Terminated("ended by SIGTERM")


@contextmanager
def told_if_slow(tell: Callable[[str], None]) -> Iterator[None]:
    """Call ``tell`` with a signal's name, on another thread, where the block has not been left soon
    after it; a second signal ends the process. The handlers stay what they are."""
    left = threading.Event()

    def hear(signum: int) -> None:
        if not left.wait(_SOON_S):
            tell(SIGNALS[signum])

    with _heard(hear):
        try:
            yield
        finally:
            left.set()


@contextmanager
def stop_on_signal(tell: Callable[[str], None] = lambda name: None) -> Iterator[StopRequest]:
    """Yield a request that a signal fills in; the former handlers come back at the end. ``tell`` is
    called with the first signal's name, on another thread.

    Python delivers signals to its main thread only; on other threads the request stays empty.
    """
    request = StopRequest()

    def note(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def hear(signum: int) -> None:
        request.signum = signum
        tell(SIGNALS[signum])

    with _heard(hear), _handling(note, *SIGNALS):
        yield request


@contextmanager
def _heard(hear: Callable[[int], None]) -> Iterator[None]:
    """Call ``hear`` with the first signal, on a thread that the second ends the process from; see
    NOTE [Heard at once]. On other threads than the main one nothing is heard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def listen() -> None:
        heard = 0
        while byte := reader.recv(1):
            if byte[0] in SIGNALS:
                heard += 1
                if heard > 1:
                    os._exit(128 + byte[0])
                hear(byte[0])

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    former_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former_fd)
        writer.close()
        listener.join()
        reader.close()
