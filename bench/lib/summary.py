"""The few figures that the README shows before all tables: fxrl, and who comes nearest.

Each line takes one file's rows of one job. Nobody picks the peers: they are the fastest of all that
were measured there, fastest first, unless a file has rows that are no such job.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.lib.pivot import PivotError, where

HEAD = ("job", "fxrl", "the fastest others", "file")
_OTHERS = 3


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        job: what was done.
        file: of bench/results, without ``.json``.
        cells: format string over the file's columns.
        by: the column that says who is fastest.
        rows: {column: [values]}, the rows of this job.
        ours: the row that is fxrl's, by its ``variant``.
        beside: the variants that did the same job; empty: all others.
    """

    job: str
    file: str
    cells: str
    by: str
    rows: dict[str, list[Any]] = field(default_factory=dict)
    ours: str = "fxrl"
    beside: tuple[str, ...] = ()


_HEAD_CELLS = "{ms:.1f} ms, {peak_mib:.0f} MiB, {logprob_error:.0e}"
_UPDATE_CELLS = "{update_ms:.0f} ms, {peak_gib:.1f} GiB"
_LARGE = {"shape": ["16384,4096,151936"]}

LINES = (
    Line(
        "log-probs of 16384 tokens, H 4096, V 151936, bf16: time, peak over the inputs, error",
        "head_h200",
        _HEAD_CELLS,
        "ms",
        _LARGE | {"mode": ["no_grad"]},
    ),
    Line(
        "the same with gradient, frozen head",
        "head_h200",
        _HEAD_CELLS,
        "ms",
        _LARGE | {"mode": ["frozen"]},
    ),
    Line(
        "the same with gradient, trainable head",
        "head_h200",
        _HEAD_CELLS,
        "ms",
        _LARGE | {"mode": ["trainable"]},
    ),
    Line(
        "GRPO update, Qwen3-8B's shape, LoRA, 16384 tokens: time, peak",
        "update_step_qwen3_8b_h200",
        _UPDATE_CELLS,
        "update_ms",
        {"layers": [36]},
    ),
    Line(
        "GRPO step with rollouts, Qwen3-1.7B's shape, LoRA, 32 x 2048 tokens: time, the GPU's peak",
        "rl_step_qwen3_1.7b_h200",
        "{step_s:.2f} s, {peak_gib:.1f} GiB",
        "step_s",
        beside=("trl",),
    ),
)


def lines(folder: Path) -> list[tuple[str, str, str, str]]:
    """The table's lines, their cells in the order of ``HEAD``; none for a file that is not there.

    Raises:
        PivotError: a file has not what its line shows.
    """
    return [_line(line, folder) for line in LINES if (folder / f"{line.file}.json").exists()]


def _line(line: Line, folder: Path) -> tuple[str, str, str, str]:
    record = json.loads((folder / f"{line.file}.json").read_text(encoding="utf-8"))
    columns = record["columns"]
    chosen = where(columns, record["rows"], line.rows, "rows")
    named = [dict(zip(columns, row, strict=True)) for row in chosen]
    measured = sorted((r for r in named if r[line.by] is not None), key=lambda r: r[line.by])
    ours = [r for r in measured if r["variant"] == line.ours]
    others = [r for r in measured if r["variant"] in (line.beside or {r["variant"]} - {line.ours})]
    if len(ours) != 1 or not others:
        raise PivotError(f"the summary's line {line.job!r} needs {line.ours} and another, once")
    beside = [f"{r['variant']}: {line.cells.format(**r)}" for r in others[:_OTHERS]]
    link = f"[`{line.file}`](bench/results/{line.file}.json)"
    return line.job, line.cells.format(**ours[0]), "<br>".join(beside), link
