"""What every benchmark shares: arguments, timing and memory, errors as rows; and its results."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.lib.results import Results, ResultsError, machine, versions

__all__ = ["Results", "ResultsError", "machine", "versions"]

GiB = 2**30


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with ``--out``, ``--json`` and ``--device``."""
    made = argparse.ArgumentParser(
        prog=_program(),
        description=(description or "").strip(),
        epilog="exit codes: 0 measured, 1 something of fxrl failed, 2 bad usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", metavar="FILE", help="where the JSON goes, row by row")
    made.add_argument(
        "--json", action="store_true", help="print the JSON instead of a table; rows to stderr"
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", default=default, choices=("cuda", "cpu"))
    return made


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


def _program() -> str:
    """As it was started: by ``python -m bench.NAME``, which is also what ``fxrl bench`` runs."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name if spec is not None else ""
    return f"fxrl bench {name.removeprefix('bench.')}" if name.startswith("bench.") else "bench"
