"""Where numbers go: JSON lines (exact, truncatable) and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fxrl.errors import MissingPackageError
from fxrl.rl.storage import try_to_write, why

METRICS, COMPLETIONS = "metrics.jsonl", "completions.jsonl"


class JsonLines:
    """Appends one JSON object per line; each line is on disk when ``write`` returns.

    A line that cannot be written, on a full disk, waits in memory for the next one; the file never
    holds a part of a line.

    Args:
        path: the file.
        keep_until: lines whose ``step`` is larger go first (0 empties the file): what a run wrote
            after its last checkpoint is written again when it resumes.
        revise: what each kept line becomes.
        tell: hears of lines that have to wait.
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
            work = path.with_name(f".{path.name}.writing")
            work.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(work, path)

        try_to_write(rewrite, str(path))
        self._file = path.open("ab", buffering=0)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes one line; numbers that are not finite become ``null``."""
        line = json.dumps({k: jsonable(v) for k, v in values.items()}) + "\n"
        self._pending.append(line.encode())
        try:
            self._write_pending()
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
        self._write_pending()

    def _write_pending(self) -> None:
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


def jsonable(value: Any) -> Any:
    """``value``, or ``None`` for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a last line that a kill cut off is left out. Empty without a file."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
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
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as missing:
            raise MissingPackageError("tensorboard", "tensorboard=true") from missing
        folder = str(run_dir / "tensorboard")
        self._tell = tell
        try:
            self._writer: Any = SummaryWriter(folder, purge_step=first_step)
        except OSError as error:
            self._give_up(error)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Every finite number, under its own name."""
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value) and name != "step":
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Flushes and closes."""
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        self._tell(f"tensorboard: {why(error)}; no further events, metrics.jsonl has the numbers")
