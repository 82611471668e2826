"""Where numbers go: JSON lines (exact, truncatable) and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fxrl.rl.errors import MissingPackageError

METRICS, COMPLETIONS = "metrics.jsonl", "completions.jsonl"


class JsonLines:
    """Appends one JSON object per line; each line is on disk when ``write`` returns.

    Args:
        path: the file.
        keep_until: lines whose ``step`` is larger go first (0 empties the file): what a run wrote
            after its last checkpoint is written again when it resumes.
        revise: what each kept line becomes.
    """

    def __init__(
        self,
        path: Path,
        keep_until: int,
        revise: Callable[[dict[str, Any]], dict[str, Any]] = lambda line: line,
    ) -> None:
        kept = [revise(line) for line in read_lines(path) if line["step"] <= keep_until]
        work = path.with_name(f".{path.name}.writing")
        work.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(work, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes one line; numbers that are not finite become ``null``."""
        self._file.write(json.dumps({k: jsonable(v) for k, v in values.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
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
    """Scalars to ``run_dir/tensorboard``; events at and after ``first_step`` are purged."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as missing:
            raise MissingPackageError("tensorboard", "tensorboard=true") from missing
        folder = str(run_dir / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=first_step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Every finite number, under its own name."""
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value) and name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()
