"""The figures of a head benchmark's file, and whether they still show what the file holds.

A figure is an SVG beside the JSON: ``NAME_time.svg``, ``NAME_memory.svg``. In its description
stands a digest of the figures it was drawn from, so that a check needs no matplotlib and does not
depend on its version.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.lib.tables import where

MODES = {"no_grad": "log-probs, no gradient", "frozen": "frozen head, forward + backward"}
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fxrl", "font.size": 8}
_CM = 1 / 2.54


def wanted(record: dict[str, Any]) -> list[str]:
    """The names of the figures that a record asks for."""
    readme = record.get("readme") or {}
    return list(readme.get("figures", []))


def path_of(file: Path, name: str) -> Path:
    """Where the figure ``name`` of a result file lies."""
    return file.with_name(f"{file.stem}_{name}.svg")


def digest(record: dict[str, Any], name: str) -> str:
    """Of all that the figure shows."""
    shown = json.dumps([name, _series(record, name)])
    return hashlib.sha256(shown.encode()).hexdigest()[:16]


def is_current(record: dict[str, Any], file: Path, name: str) -> bool:
    """Whether the figure is there and shows the file's rows."""
    figure = path_of(file, name)
    if not figure.exists():
        return False
    found = re.search(r"data ([0-9a-f]{16})", figure.read_text(encoding="utf-8"))
    return found is not None and found[1] == digest(record, name)


def draw(record: dict[str, Any], file: Path, name: str) -> Path:
    """Draws one figure beside the result file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        from matplotlib.figure import Figure

        series = _series(record, name)
        figure = Figure(
            figsize=(24 * _CM, (2 + 7 * max(1, len(series))) * _CM), layout="constrained"
        )
        _PAINTERS[name](figure, series)
        target = path_of(file, name)
        figure.savefig(
            target,
            format="svg",
            metadata={"Date": None, "Creator": None, "Description": f"data {digest(record, name)}"},
        )
    return target


_Bars = dict[str, dict[str, float]]  # variant -> shape -> value


def _series(record: dict[str, Any], name: str) -> dict[str, _Bars]:
    """Title of a panel -> its bars."""
    columns = record["columns"]
    found: dict[str, _Bars] = {}
    modes = MODES if name == "time" else {"frozen": MODES["frozen"]}
    for mode, title in modes.items():
        for row in where(columns, record["rows"], {"mode": [mode]}):
            named = dict(zip(columns, row, strict=True))
            value = _relative_time(named) if name == "time" else named["peak_mib"]
            if value is not None:
                bars = found.setdefault(title, {}).setdefault(named["variant"], {})
                bars[named["shape"]] = value
    return found


def _relative_time(named: dict[str, Any]) -> float | None:
    return None if named["ms"] is None else float(f"{named['ms'] / named['floor_ms']:.4g}")


def _time(figure: Any, series: dict[str, _Bars]) -> None:
    _panels(figure, series, "time / cuBLAS floor (lower is better)", floor=1.0)


def _memory(figure: Any, series: dict[str, _Bars]) -> None:
    _panels(figure, series, "peak over the inputs, MiB", floor=None)


def _panels(figure: Any, series: dict[str, _Bars], label: str, *, floor: float | None) -> None:
    """A panel each: groups of shapes, a bar a variant, on a logarithmic axis."""
    variants = list(dict.fromkeys(variant for bars in series.values() for variant in bars))
    axes = figure.subplots(max(1, len(series)), 1, squeeze=False)[:, 0]
    for axis, (title, bars) in zip(axes, series.items(), strict=False):
        shapes = list(dict.fromkeys(shape for each in bars.values() for shape in each))
        width = 0.85 / len(variants)
        for variant, values in bars.items():
            place = variants.index(variant)
            shown = [shape for shape in shapes if shape in values]
            at = [
                shapes.index(shape) + (place - (len(variants) - 1) / 2) * width for shape in shown
            ]
            heights = [values[shape] for shape in shown]
            drawn = axis.bar(at, heights, width, label=variant, color=f"C{place}")
            axis.bar_label(drawn, fmt="%.3g", fontsize=5, rotation=90, padding=2)
        if floor is not None:
            axis.axhline(floor, color="black", linewidth=0.8, linestyle="--")
        axis.set_yscale("log")
        axis.margins(y=0.25)
        axis.set_xticks(
            range(len(shapes)), ["\n".join(shape.split(",")) for shape in shapes], fontsize=6
        )
        axis.set_xlabel("tokens N, channels H, vocabulary V", fontsize=6)
        axis.set_ylabel(label)
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
    found = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    handles = [found[variant] for variant in variants]
    figure.legend(handles, variants, loc="outside lower center", ncols=5, frameon=False)


_PAINTERS: dict[str, Callable[[Any, dict[str, _Bars]], None]] = {"time": _time, "memory": _memory}
