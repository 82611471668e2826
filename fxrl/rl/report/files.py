"""Where numbers go: JSON lines, exact and repaired; what a full disk stops.

NOTE [A full disk is no reason to lose hours of training]
What cannot be written stays in memory. Lines of metrics wait for the next line; a checkpoint is
tried again after the next step, and the older one stays until a new one is complete. Only at the
end is there no next step: there the run waits, says what for, and tries again.

NOTE [No line is dropped]
A run that goes on from a checkpoint does the steps after it again, so their lines leave the file;
lines that a crash, a bad disk or an editor has damaged cannot stay in it either. Both are kept
beside it (``metrics.jsonl.former``, ``metrics.jsonl.damaged``), and the user is told. A file that
is deleted while the run writes it is written anew, whole.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fxrl.errors import ForeignFileError, reason_of
from fxrl.files import may_lack_space, opened, write_bytes
from fxrl.rl.errors import StorageError
from fxrl.rl.report.progress import jsonable

T = TypeVar("T")
Tell = Callable[[str], None]


def try_to_write(action: Callable[[], T], what: str) -> T:
    """``action()``; an ``OSError`` of it becomes a ``StorageError`` that names ``what``."""
    try:
        return action()
    except OSError as error:
        cure = "free some space, or " if may_lack_space(error) else ""
        raise StorageError(
            f"{what} could not be written: {reason_of(error)}; {cure}give another run_dir"
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
    """``action()``, again while it raises ``OSError`` or ``StorageError``; raises ``StorageError``
    if the last try fails too."""
    while True:
        try:
            return try_to_write(action, what)
        except StorageError as error:
            if not retries:
                raise
            tell(f"{error}; trying again in {wait_s:g} s, {retries} more times")
            sleep(wait_s)
        retries -= 1


METRICS, COMPLETIONS = "metrics.jsonl", "completions.jsonl"


class JsonLines:
    """Appends one JSON object per line; each line is on disk when ``write`` returns.

    A line that cannot be written, on a full disk, waits in memory for the next one; the file never
    holds a part of a line. Lines whose ``step`` is above ``keep_until`` leave it (NOTE [No line is
    dropped]); ``revise`` is applied to those that stay.
    """

    def __init__(
        self,
        path: Path,
        keep_until: int,
        revise: Callable[[dict[str, Any]], dict[str, Any]] = lambda line: line,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path, self._tell = path, tell
        self._pending: list[bytes] = []
        kept: list[dict[str, Any]] = []
        former: list[bytes] = []
        damaged: list[bytes] = []
        for line, text in _parse(path):
            if line is None:
                damaged.append(text)
            elif line["step"] > keep_until:
                former.append(as_line(line))
            else:
                kept.append(revise(line))

        def rewrite() -> None:
            self._set_aside("damaged", damaged, "could not be read")
            self._set_aside("former", former, "are of steps that this run does again")
            write_bytes(path, b"".join(as_line(line) for line in kept))

        try_to_write(rewrite, str(path))
        self._file = opened(path, "a+b", buffering=0)

    def _set_aside(self, name: str, lines: list[bytes], what: str) -> None:
        if lines:
            beside = self.path.with_name(f"{self.path.name}.{name}")
            with opened(beside, "ab") as file:
                file.write(b"".join(lines))
            self._tell(f"{self.path}: {len(lines)} lines {what}; they are kept in {beside}")

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes one line; numbers that are not finite become ``null``."""
        self._pending.append(as_line({k: jsonable(v) for k, v in values.items()}))
        try:
            self.flush()
        except (OSError, ForeignFileError) as error:
            cure = "; free some space" if may_lack_space(error) else ""
            self._tell(
                f"{self.path}: {reason_of(error)}; {len(self._pending)} lines wait in memory, the "
                f"run goes on{cure}"
            )

    def flush(self) -> None:
        """Write the pending lines. Raises ``OSError`` if that still fails, ``ForeignFileError`` if
        a link is in the file's place."""
        self._find_file()
        while self._pending:
            line = self._pending[0]
            end = os.fstat(self._file.fileno()).st_size
            try:
                self._append(line)
            except OSError:
                os.ftruncate(self._file.fileno(), end)  # no half a line
                raise
            self._pending.pop(0)

    def _find_file(self) -> None:
        """Opens the file again that is at ``path``; writes it anew where there is none."""
        there = self.path.exists()
        if there and os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = opened(self.path, "a+b", buffering=0)
        if not there:
            self._file.seek(0)
            file.write(self._file.read())
        self._file.close()
        self._file = file
        self._tell(f"{self.path} was {'replaced' if there else 'deleted'}; it is written on")

    def _append(self, line: bytes) -> None:
        """Write all of it; an unbuffered write may take less at a time."""
        done = 0
        while done < len(line):
            done += self._file.write(line[done:])

    def close(self) -> None:
        """Closes the file; call ``flush`` before where nothing may be lost."""
        self._file.close()


def as_line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, default=str).encode() + b"\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines that are JSON objects with a ``step``; empty without a file."""
    return list(each_line(path))


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """``read_lines``, one at a time."""
    return (line for line, _ in _parse(path) if line is not None)


def _parse(path: Path) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
    """Each line of a file, ``None`` where it is damaged, and its bytes."""
    if not path.is_file():
        return
    with opened(path, "rb") as stream:
        for text in stream:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):  # no JSON, no UTF-8, an integer of 5000 digits
                line = None
            if isinstance(line, dict) and type(line.get("step")) is int:
                yield line, text
            elif text.strip():
                yield None, text.rstrip(b"\n") + b"\n"
