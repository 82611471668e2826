"""What every benchmark shares: arguments, timing and memory, a time limit, errors as rows, results.

A result file is a JSON object with ``title``, ``command``, ``machine``, ``versions``, ``date``,
``columns``, ``rows`` and ``notes`` (bench/readme.py says what each is); rows are lists in the order
of ``columns``, and ``None`` stands for what was not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fxrl.ir.table import cell, open_table, plain_text

GiB = 2**30
_PACKAGES = (
    "torch", "triton", "transformers", "peft", "numpy", "vllm", "trl", "liger-kernel",
    "cut-cross-entropy", "nvidia-cutlass-dsl", "verl", "unsloth", "unsloth_zoo", "bitsandbytes",
)  # fmt: skip
_WIDEST = 400  # columns of a table that goes to a file: nothing wraps
_LINE = 150  # of a file, in characters; rows may be longer
_STANDARD = ("title", "command", "machine", "versions", "date", "columns", "rows", "notes")


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


def words(text: str) -> list[str]:
    """``a,b``, as an argument's type."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """``1,2``, likewise."""
    return [int(number) for number in text.split(",")]


def positive(text: str) -> int:
    """A whole number from 1 on, likewise."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def results(
    args: argparse.Namespace, title: str, columns: Sequence[str], notes: Sequence[str] = ()
) -> Results:
    """Those of a benchmark, written and printed as the arguments of its ``parser`` say."""
    return Results(title, columns, args.out, notes, as_json=args.json)


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


def limit_memory(card_gib: float | None) -> None:
    """Lets PyTorch allocate as much of the GPU as a card of that size has; ``None``: all."""
    if card_gib:
        whole = torch.cuda.get_device_properties(0).total_memory / GiB
        torch.cuda.set_per_process_memory_fraction(card_gib / whole)


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
    name = _module_name()
    return f"fxrl bench {name.removeprefix('bench.')}" if name.startswith("bench.") else "bench"


class TimeLimitReached(BaseException):
    """The time is over; not an ``Exception``, so that no library under test swallows it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises ``TimeLimitReached`` in the main thread at its next bytecode after ``seconds``."""

    def stop(*_: Any) -> None:
        raise TimeLimitReached(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    # Not 0, which would switch the alarm off; and again, if a finaliser swallowed it.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class ResultsError(Exception):
    """A file to append to that holds another benchmark or another machine's figures."""


class Results:
    """Collects the rows of one benchmark and writes them after each, so a late crash loses none.

    Args:
        title: heading of the table.
        columns: names.
        out: the JSON file; ``None`` writes none.
        notes: sentences below the table.
        as_json: the whole record on stdout at the end instead of the table; rows as they come
            then go to stderr.
        append: take over the rows of ``out``, if it is there, and add to them.

    Raises:
        ResultsError: ``append`` to what is no such file.
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[str],
        out: str | None,
        notes: Sequence[str] = (),
        *,
        as_json: bool = False,
        append: bool = False,
    ) -> None:
        self.title, self.columns, self.out = title, tuple(columns), out
        self.rows: list[list[Any]] = []
        self.notes = list(notes)
        self.extra: dict[str, Any] = {}
        self._as_json = as_json
        self._before: dict[str, Any] = {}
        self._start = time.monotonic()
        if append and out is not None and Path(out).exists():
            self._take_over(Path(out))

    def _take_over(self, path: Path) -> None:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            columns, here = tuple(record["columns"]), record["machine"]
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ResultsError(f"cannot append to {path}: it is no result file ({error})") from None
        if columns != self.columns or record["title"] != self.title:
            raise ResultsError(f"cannot append to {path}: it holds {record['title']!r}")
        if here != machine():
            raise ResultsError(
                f"cannot append to {path}: it was measured on {here}, and this is {machine()}; "
                "give another --out"
            )
        self._before = record
        self.rows = record["rows"]
        self.notes = [*record["notes"], *(n for n in self.notes if n not in record["notes"])]
        self.extra = {name: record[name] for name in record if name not in _STANDARD}

    def has(self, **values: Any) -> bool:
        """Whether a row with these values is there."""
        places = {self.columns.index(name): value for name, value in values.items()}
        return any(all(row[i] == value for i, value in places.items()) for row in self.rows)

    def drop(self, **values: Any) -> None:
        """Takes out the rows with these values."""
        places = {self.columns.index(name): value for name, value in values.items()}
        self.rows = [r for r in self.rows if any(r[i] != value for i, value in places.items())]

    def add(self, **values: Any) -> None:
        """One row by column name; missing columns become ``None``, unknown ones are an error."""
        if unknown := set(values) - set(self.columns):
            raise KeyError(f"{sorted(unknown)} are not columns; columns are {self.columns}")
        row = [_rounded(values.get(name)) for name in self.columns]
        self.rows.append(row)
        given = {name: value for name, value in values.items() if value is not None}
        self.say("ROW " + ", ".join(f"{name}={_short(value)}" for name, value in given.items()))
        self.write()

    @contextlib.contextmanager
    def row(self, **values: Any) -> Iterator[dict[str, Any]]:
        """One row, added when the block that fills it in ends; what cannot run is a result too, so
        an exception becomes its ``error``."""
        row = dict(values)
        try:
            yield row
        except Exception as error:
            row["error"] = error_text(error)
        self.add(**row)

    def failed(self, variants: str = "") -> bool:
        """Whether a row has an error, of those whose ``variant`` begins so."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return any(r["error"] and str(r.get("variant", "")).startswith(variants) for r in rows)

    def note(self, text: str) -> None:
        """One more sentence below the table, once."""
        if text not in self.notes:
            self.notes.append(text)

    def say(self, text: str) -> None:
        """A line of progress, with the minutes since the start."""
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        stream = sys.stderr if self._as_json else sys.stdout
        print(f"[{minutes}:{seconds:02d}] {text}", file=stream, flush=True)

    @property
    def record(self) -> dict[str, Any]:
        """What the file holds."""
        command = shlex.join(["python", "-m", _module_name(), *sys.argv[1:]])
        before = self._before.get("command")
        return {
            "title": self.title,
            "command": command if before in (None, command) else f"{before}; {command}",
            "machine": machine(),
            "versions": versions() | self._before.get("versions", {}),
            "date": datetime.date.today().isoformat(),
            "columns": self.columns,
            "rows": self.rows,
            "notes": self.notes,
            **self.extra,
        }

    def write(self) -> None:
        """The JSON file, if ``out`` was given."""
        if self.out is None:
            return
        path = Path(self.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(as_json(self.record) + "\n", encoding="utf-8")
        partial.replace(path)  # a run that is killed while it writes leaves the file whole

    def finish(self) -> None:
        """Writes the file and prints the table, or the JSON record, last."""
        self.write()
        if self._as_json:
            print(as_json(self.record), flush=True)
            return
        shown = [
            name for i, name in enumerate(self.columns) if any(r[i] is not None for r in self.rows)
        ]
        table = open_table(*shown, right=_numbers(self.columns, self.rows))
        for row in self.rows:
            named = dict(zip(self.columns, row, strict=True))
            table.add_row(*(cell(_short(named[name])) for name in shown))
        print(f"\n{self.title} [{machine()}]\n")
        if sys.stdout.isatty():
            Console(highlight=False).print(table)
        else:
            print(plain_text(table, _WIDEST))
        for text in self.notes:
            print(f"note: {text}")
        sys.stdout.flush()


def as_json(value: Any, indent: str = "") -> str:
    """Indented JSON in which a row is a line."""
    inner, line = indent + " ", json.dumps(value)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {as_json(one, inner)}" for key, one in value.items()]
    elif isinstance(value, list | tuple) and _is_long(value, line):
        parts = [as_json(one, inner) for one in value]
    else:
        return line
    return line[0] + f"\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}" + line[-1]


def _is_long(values: Sequence[Any], line: str) -> bool:
    """Whether each has a line of its own: lists and tables have, and texts that fill one."""
    nested = any(isinstance(one, dict | list | tuple) for one in values)
    return nested or (len(line) > _LINE and all(isinstance(one, str) for one in values))


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


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).stem


def _numbers(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    """The columns that hold nothing but numbers."""
    kinds = {n: {type(row[i]) for row in rows} - {type(None)} for i, n in enumerate(columns)}
    return tuple(name for name, found in kinds.items() if found and found <= {int, float})


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:60]
