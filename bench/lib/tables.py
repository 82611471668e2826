"""What is shown of result files: small tables, the README's summary, the command that ran.

``pivot`` makes of rows a table: one key down, one across, a few figures in each cell. ``lines`` are
the few figures before all tables: fxrl, and who comes nearest. Nobody picks the peers: they are the
fastest of all that were measured there, fastest first, unless a file has rows that are no such job.
How steps scale (``scaling_*.json``) is fxrl on many GPUs beside fxrl on few.
``shown_commands`` is a file's command as a reader would type it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAILED, CANNOT, DOUBTFUL = "failed", "n/a", "(!)"
HEAD = ("job", "fxrl", "the fastest others", "file")
_OTHERS = 3
_SCALING = "scaling_*.json"
_ALONE = frozenset({"--append"})
_WITH_VALUE = frozenset({"--out", "--run-dir", "--time-limit", "--row-limit"})
_LOCAL_COPY = re.compile(r"[\w.]+=/")


class PivotError(Exception):
    """A specification that does not fit the file's columns."""


def pivot(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], spec: dict[str, Any]
) -> tuple[list[str], list[list[str]], dict[str, str]]:
    """The header, the lines, and the errors of cells by the name across.

    Both are empty if no row has the figures.

    Args:
        columns: of ``rows``.
        rows: lists in the order of ``columns``.
        spec: ``where`` {column: [values]}, ``rows`` and ``columns`` (names of columns), ``cells``
            (a format string over columns), and optionally ``also`` [heading, format string], a
            column before the others that is the same for a whole line (the first row's is taken).

    A cell without a row is empty; one whose row lacks a figure says ``failed``, or ``n/a`` where
    the variant cannot do it by design; figures of a row that has an error carry ``(!)``.
    """
    chosen = where(columns, rows, spec.get("where", {}), "tables.where")
    down, across = (_at(columns, spec[key], f"tables.{key}") for key in ("rows", "columns"))
    heads = list(dict.fromkeys(row[across] for row in chosen))
    sides = list(dict.fromkeys(row[down] for row in chosen))
    cells: dict[tuple[Any, Any], str] = {}
    errors: dict[str, str] = {}
    for row in chosen:
        named = dict(zip(columns, row, strict=True))
        key = named[spec["rows"]], named[spec["columns"]]
        cells[key] = _cell(spec["cells"], named)
        if named.get("error"):
            errors.setdefault(str(key[1]), named["error"])
    if all(text in (FAILED, CANNOT) for text in cells.values()):
        return [], [], errors
    firsts = {row[down]: dict(zip(columns, row, strict=True)) for row in reversed(chosen)}
    heading, pattern = spec.get("also", (None, ""))
    lines = [
        [
            str(side),
            *([_cell(pattern, firsts[side] | {"error": None})] if heading else []),
            *(cells.get((side, head), "") for head in heads),
        ]
        for side in sides
    ]
    across_names = [*([heading] if heading else []), *map(str, heads)]
    return [spec["rows"].replace("_", " "), *across_names], lines, errors


def where(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    wanted: dict[str, list[Any]],
    key: str = "where",
) -> list[Sequence[Any]]:
    """The rows that have one of the wanted values in each of the columns.

    Raises:
        PivotError: no such column; ``key`` says where it was asked for.
    """
    places = {_at(columns, name, key): values for name, values in wanted.items()}
    return [row for row in rows if all(row[i] in values for i, values in places.items())]


def _at(columns: Sequence[str], name: str, key: str) -> int:
    if name not in columns:
        raise PivotError(f"{key} has {name!r}, columns are {json.dumps(list(columns))}")
    return list(columns).index(name)


def _cell(pattern: str, named: dict[str, Any]) -> str:
    error = named.get("error") or ""
    try:
        return pattern.format(**named) + (f" {DOUBTFUL}" if error else "")
    except TypeError:  # None, where a figure was not measured
        return CANNOT if error.startswith("UnsupportedError") else FAILED
    except KeyError as missing:
        raise PivotError(f"tables.cells has {pattern!r}, but no column is {missing}") from None


# -- the summary


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
_OFFLOAD_CELLS = "{update_ms:.0f} ms, {peak_gib:.1f} GiB, {host_gib:.1f} GiB"
_STEP_CELLS = "{step_ms:.0f} ms, {peak_gib:.1f} GiB"
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
        "the same with gradient, trained head",
        "head_trained_h200",
        _HEAD_CELLS,
        "ms",
        _LARGE,
        ours="fxrl, exponentials kept",
        beside=("torch.compile", "eager"),
    ),
    Line(
        "the same, fxrl keeping no exponentials",
        "head_h200",
        _HEAD_CELLS,
        "ms",
        _LARGE | {"mode": ["trainable"]},
    ),
    Line(
        "GRPO update, Qwen3-8B's shape, LoRA, 16384 tokens, a budget of 24 GiB: time, peak, host",
        "update_step_qwen3_8b_24gib_h200",
        _OFFLOAD_CELLS,
        "update_ms",
    ),
    Line(
        "one sequence of 131072 tokens, the same model: time, peak, host memory",
        "update_step_qwen3_8b_131k_h200",
        _OFFLOAD_CELLS,
        "update_ms",
    ),
    Line(
        "all weights of Qwen3-1.7B's shape, 16384 tokens, a card of 24 GiB: time, peak, host",
        "update_step_full_1.7b_h200",
        _OFFLOAD_CELLS,
        "update_ms",
    ),
    Line(
        "the same weights under FSDP2, two H200s, 2 x 4096 tokens on each: time, peak of a rank",
        "fsdp_qwen3_1.7b_h200",
        "{step_ms:.0f} ms, {peak_gib:.1f} GiB",
        "step_ms",
    ),
    Line(
        "12 layers of Qwen3-8B's shape, LoRA, 16384 tokens, frozen Linears in FP8: time, peak",
        "update_step_qwen3_8b_12_layers_fp8_h200",
        _UPDATE_CELLS,
        "update_ms",
        ours="fxrl-fp8",
        beside=("fxrl",),
    ),
    Line(
        "12 layers of Qwen3-8B's shape, QLoRA over bitsandbytes' NF4, 16384 tokens: time, peak",
        "update_step_qwen3_8b_12_layers_bitsandbytes_h200",
        _UPDATE_CELLS,
        "update_ms",
    ),
    Line(
        "full KL to a teacher, 4 layers of Qwen3-8B's shape, LoRA, 16384 tokens, H100: time, peak",
        "trl_step_distill_qwen3_8b_4_layers_h100",
        _STEP_CELLS,
        "step_ms",
        {"kind": ["distill"]},
    ),
    Line(
        "KTO, 4 layers of Qwen3-8B's shape, LoRA, 16384 tokens, H100: time, peak",
        "trl_step_kinds_qwen3_8b_4_layers_h100",
        _STEP_CELLS,
        "step_ms",
        {"kind": ["kto"]},
    ),
    Line(
        "a reward model, 4 layers of Qwen3-8B's shape, LoRA, 16384 tokens, H100: time, peak",
        "trl_step_kinds_qwen3_8b_4_layers_h100",
        _STEP_CELLS,
        "step_ms",
        {"kind": ["reward_model"]},
    ),
)


def lines(folder: Path) -> list[tuple[str, str, str, str]]:
    """The table's lines, their cells in the order of ``HEAD``; none for a file that is not there.

    Raises:
        PivotError: a file has not what its line shows.
    """
    beside = [_line(line, folder) for line in LINES if (folder / f"{line.file}.json").exists()]
    return beside + [line for file in sorted(folder.glob(_SCALING)) for line in _scaled(file)]


def _line(line: Line, folder: Path) -> tuple[str, str, str, str]:
    record = json.loads((folder / f"{line.file}.json").read_text(encoding="utf-8"))
    columns = record["columns"]
    chosen = where(columns, record["rows"], line.rows, "rows")
    named = [dict(zip(columns, row, strict=True)) for row in chosen]
    measured = sorted((r for r in named if r[line.by] is not None), key=lambda r: r[line.by])
    ours = [r for r in measured if r["variant"] == line.ours]
    failed = [r for r in named if r.get("error") and r[line.by] is None]
    peers = [r for r in named if r["variant"] in (line.beside or {r["variant"]} - {line.ours})]
    others = [r for r in (*measured, *failed) if r in peers]
    if len(ours) != 1 or not others:
        raise PivotError(f"the summary's line {line.job!r} needs {line.ours} and another, once")
    beside = [f"{r['variant']}: {_figures(line, r)}" for r in others[:_OTHERS]]
    return line.job, line.cells.format(**ours[0]), "<br>".join(beside), _link(line.file)


def _link(file: str) -> str:
    return f"[`{file}`](bench/results/{file}.json)"


def _scaled(file: Path) -> Iterator[tuple[str, str, str, str]]:
    """Most ranks beside fewest, of a file of ``bench.scaling`` in which more than one count ran."""
    record = json.loads(file.read_text(encoding="utf-8"))
    named = [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]
    ran = sorted((r for r in named if r.get("rank") == 0), key=lambda r: r["ranks"])
    if not ran or ran[0]["ranks"] == ran[-1]["ranks"]:
        return
    few, many = (f"{r['ranks']} x: {r['tokens_per_s']:.0f} tokens/s" for r in (ran[0], ran[-1]))
    job = f"{record['title']}, {record['machine']}"
    yield job, f"{many}, efficiency {ran[-1]['efficiency']:.2f}", few, _link(file.stem)


def _figures(line: Line, row: dict[str, Any]) -> str:
    if row[line.by] is not None:
        return line.cells.format(**row)
    return "out of memory" if row["error"].startswith("OutOfMemoryError") else FAILED


# -- the command


def shown_commands(command: str) -> list[str]:
    """The commands that made a file, once each, in order, without the measuring machine's places.

    A file records the words that ran, with paths and time limits of a machine that is gone. What
    is shown leaves out where results went and how long the run might take (``--out``, limits), and
    overrides ``KEY=/a/path``, which name a copy of what the file already names; of other absolute
    paths the last part stays. What a shell would take for its own is quoted.
    """
    parts = re.split(r"; (?=python -m )", command)
    return list(dict.fromkeys(" ".join(map(shlex.quote, _kept(part))) for part in parts))


def _kept(command: str) -> Iterator[str]:
    words = iter(_whole_values(shlex.split(command)))
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif word not in _ALONE and not _LOCAL_COPY.match(word):
            yield word.rpartition("/")[2] if word.startswith("/") else word


def _whole_values(words: Iterable[str]) -> list[str]:
    """Older files hold values unquoted: of an option's words with a semicolon one value is made."""
    made: list[str] = []
    values: list[str] = []

    def flush() -> None:
        made.extend([" ".join(values)] if any(";" in v for v in values) else values)
        values.clear()

    for word in words:
        if word.startswith("--"):
            flush()
            made.append(word)
        else:
            values.append(word)
    flush()
    return made
