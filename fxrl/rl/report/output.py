"""Standard output that outlives its reader: ``| head`` has seen enough, a terminal is closed.

NOTE [A run does not hang on who looks at it]
A stream that cannot be written any more goes on in a file of the run's folder: its descriptor
becomes the file's, so all that writes there goes on (``print`` of user code, libraries, processes
that are started later), and what Python had buffered is not lost. A hangup (SIGHUP) does the same
to all streams but those that are files already.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from fxrl.rl.errors import StorageError

LOG = "train.log"
_HELD = 2048  # characters that surely fit into a stream's own buffer


@contextmanager
def silent() -> Iterator[None]:
    """Discard what Python code writes in the block, so that only one of several ranks talks.

    A crash is still seen, as the process's own descriptors stay as they are.
    """
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


class Outlet:
    """A text stream whose ``write`` and ``flush`` go on elsewhere; all else is the stream's."""

    def __init__(
        self, name: str, stream: TextIO, lose: Callable[[Outlet, bool, str], None]
    ) -> None:
        self._name, self._stream, self._lose = name, stream, lose
        self.lost = False  # it writes to the log

    def write(self, text: str) -> int:
        """As of a stream."""
        # One that flushes by lines holds the line whose flush fails: written again, it came twice.
        by_lines = getattr(self._stream, "line_buffering", False)
        held = by_lines and "\n" in text and len(text) <= _HELD
        self._surely(lambda: self._stream.write(text), self._stream.flush if held else None)
        return len(text)

    def flush(self) -> None:
        """As of a stream."""
        self._surely(self._stream.flush)

    def close(self) -> None:
        """Only flushes: the run goes on writing, whatever user code has closed."""
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _surely(
        self, action: Callable[[], object], again: Callable[[], object] | None = None
    ) -> None:
        for _ in range(3):  # its own place, the log, nowhere
            in_log = self.lost
            try:
                action()
                return
            except OSError as error:
                self._lose(self, in_log, f"{self._name}: {error.strerror}")
                action = again or action

    @property
    def descriptor(self) -> int | None:
        """The system's; a notebook's stream has none."""
        try:
            return int(self._stream.fileno())
        except OSError:
            return None

    @property
    def is_file(self) -> bool:
        """Whether no hangup takes it away."""
        try:
            return self.descriptor is None or stat.S_ISREG(os.fstat(self.descriptor).st_mode)
        except OSError:  # user code has closed the descriptor
            return False

    def tell(self, text: str) -> None:
        """Writes past the buffer, which a signal's handler may not touch, to who still listens."""
        with suppress(OSError):
            if (descriptor := self.descriptor) is None:
                self._stream.write(text)
            else:
                os.write(descriptor, text.encode())


class Output:
    """This process's stdout and stderr, within ``kept``."""

    def __init__(self, words: Callable[[str], str] = str) -> None:
        self._words = words
        self._log: Path | None = None
        self._lock = threading.RLock()
        self._outlets = [
            Outlet("stdout", sys.stdout, self._lose),
            Outlet("stderr", sys.stderr, self._lose),
        ]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Replaces ``sys.stdout`` and ``sys.stderr``."""
        out, err = (cast("TextIO", outlet) for outlet in self._outlets)
        with redirect_stdout(out), redirect_stderr(err):
            try:
                yield
            finally:
                if signal.getsignal(signal.SIGHUP) == self._hang_up:
                    signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def go_on_in(self, log: Path) -> None:
        """From here on neither a reader that goes away nor a hangup ends the process."""
        self._log = log.absolute()
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
            signal.signal(signal.SIGHUP, self._hang_up)

    def _hang_up(self, signum: int, frame: FrameType | None) -> None:
        with self._lock:  # where another thread is losing one, that one is a file after it
            if gone := [outlet for outlet in self._outlets if not outlet.is_file]:
                self._divert(gone, "hangup")

    def _lose(self, outlet: Outlet, in_log: bool, why: str) -> None:
        with self._lock:
            if outlet.lost == in_log:  # else another thread lost it, and it goes on in the log
                self._divert([outlet], why)
        if self._log is None:
            raise StorageError(f"{why}; nothing was trained")

    def _divert(self, gone: list[Outlet], why: str) -> None:
        """What is lost for the first time goes on in the log, if there is one; else nowhere."""
        log, flags = None, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        if self._log is not None and not any(outlet.lost for outlet in gone):
            with suppress(OSError):
                self._log.parent.mkdir(parents=True, exist_ok=True)
                log = os.open(self._log, flags, 0o666)
        if log is not None:
            told = self._words(f"{why}; the run goes on, and writes to {self._log}") + "\n"
            for outlet in self._outlets:
                outlet.tell(told)
            with suppress(OSError):
                os.write(log, told.encode())
        target = os.open(os.devnull, os.O_WRONLY) if log is None else log
        for outlet in gone:
            if (descriptor := outlet.descriptor) is not None:
                os.dup2(target, descriptor)
            outlet.lost = True
        os.close(target)
