"""Calls that may hang: in a thread that is waited for so long and then left behind."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TimeLimitError(Exception):
    """The call has not come back; ``stack`` says where it hangs."""

    def __init__(self, seconds: float, stack: str) -> None:
        super().__init__(f"did not come back within {seconds:g} s")
        self.stack = stack


class Background(Generic[T]):
    """A call that runs in a thread of its own.

    The thread is a daemon: nothing can end a hanging call from outside, and it must not keep the
    process from ending. (``concurrent.futures`` joins its threads at exit.)
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._function())
        # Whatever it is, it belongs to whoever asks for the result.
        except BaseException as error:
            self._error = error

    def result(self, seconds: float | None = None) -> T:
        """What the function returned; what it raised is raised here.

        Raises:
            TimeLimitError: it has not come back after ``seconds``.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            assert seconds is not None
            raise TimeLimitError(seconds, self._stack())
        if self._error is not None:
            raise self._error
        return self._value[0]

    def _stack(self) -> str:
        frames = sys._current_frames()
        frame = frames.get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else ""


def call_with_limit(function: Callable[[], T], seconds: float | None, name: str) -> T:
    """``function()``, in this thread where there is no limit.

    Raises:
        TimeLimitError: it has not come back after ``seconds``.
    """
    return function() if seconds is None else Background(function, name).result(seconds)
