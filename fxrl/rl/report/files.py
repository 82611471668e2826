"""Where numbers go: JSON lines (exact, truncatable) and TensorBoard; what a full disk stops.

NOTE [A full disk is no reason to lose hours of training]
What cannot be written stays in memory. Lines of metrics wait for the next line; a checkpoint is
tried again after the next step, and the older one stays until a new one is complete. Only at the
end is there no next step: there the run waits, says what for, and tries again.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fxrl.errors import optional
from fxrl.files import opened, write_text
from fxrl.rl.errors import StorageError
from fxrl.rl.report.progress import jsonable

T = TypeVar("T")
Tell = Callable[[str], None]


def why(error: BaseException) -> str:
    """The system's reason, in words."""
    reason = getattr(error, "strerror", None)
    return str(reason) if reason else (str(error).splitlines() or [type(error).__name__])[0][:200]


_NO_MATTER_OF_SPACE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG),
}


def try_to_write(action: Callable[[], T], what: str) -> T:
    """``action()``.

    Raises:
        StorageError: it raised an ``OSError``.
    """
    try:
        return action()
    except OSError as error:
        cure = "" if error.errno in _NO_MATTER_OF_SPACE else "free some space, or "
        raise StorageError(
            f"{what} could not be written: {why(error)}; {cure}give another run_dir"
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


METRICS, COMPLETIONS = "metrics.jsonl", "completions.jsonl"


class JsonLines:
    """Appends one JSON object per line; each line is on disk when ``write`` returns.

    A line that cannot be written, on a full disk, waits in memory for the next one; the file never
    holds a part of a line.

    Args:
        keep_until: lines whose ``step`` is larger go first (0 empties the file): what a run wrote
            after its last checkpoint is written again when it resumes.
    """

    def __init__(
        self,
        path: Path,
        keep_until: int,
        revise: Callable[[dict[str, Any]], dict[str, Any]] = lambda line: line,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        kept = [revise(line) for line in read_lines(path) if line["step"] <= keep_until]
        self.path, self._tell = path, tell
        self._pending: list[bytes] = []

        def rewrite() -> None:
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

        try_to_write(rewrite, str(path))
        self._file = opened(path, "ab", buffering=0)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes one line; numbers that are not finite become ``null``."""
        line = json.dumps({k: jsonable(v) for k, v in values.items()}) + "\n"
        self._pending.append(line.encode())
        try:
            self.flush()
        except OSError as error:
            self._tell(
                f"{self.path}: {why(error)}; {len(self._pending)} lines wait in memory, the run "
                "goes on; free some space"
            )

    def flush(self) -> None:
        """Writes what waits.

        Raises:
            OSError: it still cannot be written.
        """
        while self._pending:
            line = self._pending[0]
            end = os.fstat(self._file.fileno()).st_size
            try:
                self._append(line)
            except OSError:
                os.ftruncate(self._file.fileno(), end)  # no half a line
                raise
            self._pending.pop(0)

    def _append(self, line: bytes) -> None:
        """All of it; an unbuffered write may take less at a time."""
        done = 0
        while done < len(line):
            done += self._file.write(line[done:])

    def close(self) -> None:
        """Closes the file; call ``flush`` before where nothing may be lost."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a last line that a kill cut off is left out. Empty without a file."""
    if not path.is_file():
        return []
    lines = []
    with opened(path, "rb") as stream:
        content = stream.read().decode("utf-8")
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break
        lines.append(line)
    return lines


class TensorBoard:
    """Scalars to ``run_dir/tensorboard``; events at and after ``first_step`` are purged.

    A copy of ``metrics.jsonl`` for looking at: where it cannot be written, ``tell`` hears of it
    once and the run goes on without.
    """

    def __init__(
        self, run_dir: Path, first_step: int, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        tensorboard = optional("torch.utils.tensorboard", "tensorboard=true")
        folder = str(run_dir / "tensorboard")
        self._tell = tell
        self._writer: Any = None
        with self._giving_up():
            self._writer = tensorboard.SummaryWriter(folder, purge_step=first_step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Every finite number, under its own name."""
        if self._writer is None:
            return
        with self._giving_up():
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value) and name != "step":
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes."""
        if self._writer is not None:
            with self._giving_up():
                self._writer.close()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            self._tell(
                f"tensorboard: {why(error)}; no further events, metrics.jsonl has the numbers"
            )
