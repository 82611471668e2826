"""What every benchmark shares: result files, tables, timing and memory, errors as rows.

A result file is JSON with the keys ``title, command, machine, versions, date, columns, rows,
notes`` (a benchmark may add keys of its own, such as curves); a row is a list in the order of
``columns``, and ``None`` stands for what was not measured.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

GiB = 2**30
_PACKAGES = ("torch", "triton", "transformers", "peft", "numpy", "vllm", "trl", "liger-kernel")


class Results:
    """Collects the rows of one benchmark and writes them after each, so a late crash loses none."""

    def __init__(
        self, title: str, columns: Sequence[str], out: str | None, notes: Sequence[str] = ()
    ) -> None:
        self.title, self.columns, self.out = title, tuple(columns), out
        self.rows: list[list[Any]] = []
        self.notes = list(notes)
        self.extra: dict[str, Any] = {}

    def add(self, **values: Any) -> None:
        """One row by column name; missing columns become ``None``, unknown ones are an error."""
        if unknown := set(values) - set(self.columns):
            raise KeyError(f"{sorted(unknown)} are not columns; columns are {self.columns}")
        row = [_rounded(values.get(name)) for name in self.columns]
        self.rows.append(row)
        shown = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        print(f"ROW {shown}", flush=True)
        self.write()

    def write(self) -> None:
        """The JSON file, if ``out`` was given."""
        if self.out is None:
            return
        record = {
            "title": self.title,
            "command": " ".join(["python", "-m", _module_name(), *sys.argv[1:]]),
            "machine": machine(),
            "versions": versions(),
            "date": datetime.date.today().isoformat(),
            "columns": self.columns,
            "rows": self.rows,
            "notes": self.notes,
            **self.extra,
        }
        path = Path(self.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")

    def finish(self) -> None:
        """Writes the file and prints the table last."""
        self.write()
        print(f"\n{self.title} [{machine()}]")
        cells = [list(map(str, self.columns))]
        cells += [[_short(value) for value in row] for row in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        for row in cells:
            print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
        for note in self.notes:
            print(f"note: {note}")
        sys.stdout.flush()


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with ``--out`` and ``--device``."""
    made = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    made.add_argument("--out", help="where the JSON goes")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", default=default, choices=("cuda", "cpu"))
    return made


def machine() -> str:
    """The accelerator's name, or the processor's and the number of cores."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"CPU {platform.machine()}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Python, CUDA and the installed packages that matter."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def synchronize(device: str) -> None:
    """Waits for the GPU; nothing on the CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Drops garbage and cached blocks, so that the next variant starts clean."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def wall_s(work: Callable[[], Any], device: str) -> float:
    """Seconds of one call, launch to last kernel."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def median_ms(work: Callable[[], Any], device: str, *, warmup: int = 2, repeats: int = 7) -> float:
    """Median milliseconds by CUDA events (on the CPU: by the clock)."""
    return spread_ms(work, device, warmup=warmup, repeats=repeats)[1]


def spread_ms(
    work: Callable[[], Any], device: str, *, warmup: int = 2, repeats: int = 7
) -> tuple[float, float, float]:
    """Fastest, median and slowest of ``repeats`` calls, in milliseconds."""
    for _ in range(warmup):
        work()
    synchronize(device)
    times = []
    for _ in range(repeats):
        if device == "cpu":
            times.append(wall_s(work, device) * 1e3)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times), statistics.median(times), max(times)


def peak_bytes(work: Callable[[], Any], device: str) -> tuple[int | None, int | None]:
    """Allocator's peak during one call: in all, and over what was allocated before it."""
    if device != "cuda":
        work()
        return None, None
    free_memory(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return peak, peak - before


def gib(num_bytes: float | None) -> float | None:
    """Bytes as GiB, ``None`` stays."""
    return None if num_bytes is None else num_bytes / GiB


def error_text(error: BaseException) -> str:
    """One line for the table: the class and the first line of the message."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).stem


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:60]
