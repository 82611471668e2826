"""``index.md``: the page from which a person reads a dump."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from fxrl.inspect.records import CaptureRecord, RegionRecord
from fxrl.ir.remark import Report, format_bytes

_HOW_TO_READ = """\
## How to read

1. The remarks of a capture say of every site what was done, or why nothing was and the cure.
2. Each pass of a capture has its graph before and after, and the difference: start with the diff.
   One value stands on one line, `%name = operator(operands) : dtype[shape]`; `s0`, `s1`, ... are
   dynamic sizes, `grad` marks an input that requires a gradient.
3. A region is a part of the graph that was outlined, with its own backward: `forward.txt` is what
   runs, `vjp.txt` computes its gradients, `generated/` is the code that was compiled from both.
4. `aot/` is what remains around the regions; `00_dynamo.py` is the program before any pass."""


@dataclass(frozen=True, slots=True)
class RegionFiles:
    """Where the parts of a region were written; an empty path: there is no such part."""

    record: RegionRecord
    forward: str
    vjp: str
    generated: list[str]


@dataclass(frozen=True, slots=True)
class CaptureFiles:
    """Where the parts of a capture were written; ``stages`` are (before, after, diff)."""

    record: CaptureRecord
    inputs: str
    dynamo: str
    stages: list[tuple[str, str, str]]
    regions: list[RegionFiles]
    aot: list[str]
    report: str


def index(
    captures: Sequence[CaptureFiles],
    report: Report,
    decompiled: Sequence[str],
    notes: Sequence[str],
) -> str:
    """The page as Markdown; every link is relative to the dump's folder."""
    parts = ["# What fxrl did", _summary(captures, report)]
    if not captures:
        parts.append("Nothing is captured yet: call the step on a batch first, then dump again.")
    else:
        parts.append(_HOW_TO_READ)
    parts += [_capture(files) for files in captures]
    parts.append(_decompiled(decompiled, notes))
    return "\n\n".join(parts) + "\n"


def _summary(captures: Sequence[CaptureFiles], report: Report) -> str:
    applied, missed = len(report.of_kind("applied")), len(report.of_kind("missed"))
    breaks = sum(len(files.record.graph_breaks) for files in captures)
    return (
        f"Captures: {len(captures)}. Rewrites applied: {applied}, missed: {missed}. "
        f"Graph breaks: {breaks}. "
        f"Predicted to save {format_bytes(report.saved_bytes)} at the peak.\n\n"
        "All remarks: [report.txt](report.txt), for tools [report.jsonl](report.jsonl)."
    )


def _capture(files: CaptureFiles) -> str:
    record = files.record
    parts = [
        f"## Capture {record.index}",
        f"The program as Dynamo delivered it: {_link(files.dynamo)}; "
        f"its remarks: {_link(files.report)}.",
        f"### Inputs\n\n{_code(record.inputs) if record.inputs else 'none'}",
        f"### Passes\n\n{_passes(files)}",
        f"### Remarks\n\n{_bullets(map(str, record.report.remarks), 'no pass found a site')}",
    ]
    breaks = (f"{one.source or 'unknown place'}: {one.reason}" for one in record.graph_breaks)
    parts.append(f"### Graph breaks\n\n{_bullets(breaks, 'none: one graph holds it all')}")
    parts.append(f"### Regions\n\n{_regions(files.regions)}")
    parts.append(f"### Around the regions\n\n{_bullets(map(_link, files.aot), 'not compiled')}")
    return "\n\n".join(parts)


def _passes(files: CaptureFiles) -> str:
    rows = []
    for stage, paths in zip(files.record.stages, files.stages, strict=True):
        before, after, diff = paths
        changed = stage.before != stage.after
        rows.append(
            (
                stage.name,
                str(len(stage.report.of_kind("applied"))),
                str(len(stage.report.of_kind("missed"))),
                format_bytes(stage.report.saved_bytes),
                _link(diff, "diff") if changed else "no change",
                f"{_link(before, 'before')}, {_link(after, 'after')}",
            )
        )
    heads = ("pass", "applied", "missed", "saves", "diff", "graphs")
    return _table(heads, rows) if rows else "none ran"


def _regions(regions: Sequence[RegionFiles]) -> str:
    rows = [
        (
            f"`{region.record.region_id}`",
            ", ".join(f"`{site}`" for site in region.record.sites),
            _link(region.forward, "forward"),
            _link(region.vjp, "vjp") if region.vjp else "no gradient",
            ", ".join(map(_link, region.generated)) or "not compiled",
        )
        for region in regions
    ]
    return _table(("region", "sites", "forward", "backward", "code"), rows) if rows else "none"


def _decompiled(paths: Sequence[str], notes: Sequence[str]) -> str:
    text = _bullets([*map(_link, paths), *notes], "not part of this dump")
    return f"## Dynamo's bytecode, decompiled\n\n{text}"


def _link(path: str, text: str = "") -> str:
    return f"[{text or PurePosixPath(path).name}]({path})"


def _code(text: str) -> str:
    return f"```\n{text.rstrip()}\n```"


def _bullets(items: Iterable[str], nothing: str) -> str:
    return "\n".join(f"- {' '.join(item.split())}" for item in items) or nothing


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    escaped = ((cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
