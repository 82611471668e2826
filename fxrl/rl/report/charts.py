"""Numbers by step as the coordinates of an SVG: lines with bands, and stacked bars.

Nothing is drawn here: ``page.html`` draws what these say, in a box of ``WIDTH`` x ``HEIGHT``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 10, 24  # around the plot: room for the numbers at its axes
MOST_POINTS = 240
"""Where there are more steps, neighbours share a point, which is their mean."""
CUT_ABOVE = 2.5
"""A bar this many times as high as nearly all others would flatten them: it is cut, and says so."""
COLOURS = 8  # of the palette in page.css
LARGEST = 1e100  # sums and differences of smaller numbers are finite

Record = Mapping[str, Any]
Column = NDArray[np.float64]
Columns = Mapping[str, Column]
"""Numbers by name, all in the order of ``step``, one of them; NaN where there is none."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    name: str  # for the legend
    key: str  # in the records
    low: str = ""  # keys of a band around it, if any
    high: str = ""
    style: str = ""  # a CSS class


@dataclass(frozen=True, slots=True)
class Mark:
    """The drawing of one line: SVG path data, its place in the palette, and what to read off."""

    name: str
    style: str
    path: str
    band: str  # path data of the area between low and high, or empty
    at: list[tuple[float, str, str]]  # x coordinate, step and value of each point, in words


@dataclass(frozen=True, slots=True)
class Bar:
    """One step's stack; ``parts`` are (place in the palette, y, height). ``cut``: it is higher."""

    x: float
    width: float
    parts: list[tuple[int, float, float]]
    title: str
    cut: bool


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_ticks: list[tuple[float, str]]  # coordinate and number
    y_ticks: list[tuple[float, str]]
    marks: list[Mark]
    bars: list[Bar]
    legend: list[tuple[str, str]]  # name and CSS class
    note: str = ""  # shown below it

    @property
    def reading(self) -> list[dict[str, Any]]:
        """The name and points of each line, for the page's script."""
        return [{"name": mark.name, "at": mark.at} for mark in self.marks]


def number(record: Record, key: str) -> float | None:
    """A number that can be drawn, or ``None`` for whatever else stands there."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < LARGEST else None


class Numbers(Columns):
    """The numbers of JSON lines as columns: a long run's, as Python's, fill tens of MiB.

    Only what a line has takes memory: lines of a stranger may all have names of their own.
    """

    def __init__(self, lines: Iterable[Record]) -> None:
        self._found: dict[str, tuple[array[int], array[float]]] = {}  # lines, and values in them
        sound = (line for line in lines if number(line, "step") is not None)
        for at, line in enumerate(sound):
            for key in line:
                if (value := number(line, key)) is not None:
                    where, values = self._found.setdefault(key, (array("q"), array("d")))
                    where.append(at)
                    values.append(value)
        _, steps = self._found.get("step", ((), ()))
        self._order = np.argsort(steps, kind="stable")

    def __getitem__(self, key: str) -> Column:
        where, values = self._found[key]
        column = np.full(len(self._order), np.nan)
        column[where] = values
        return column[self._order]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def known(columns: Columns, key: str) -> tuple[Column, Column]:
    """Steps that have a number by that name, and these numbers."""
    if key not in columns:
        return np.empty(0), np.empty(0)
    there = ~np.isnan(column := columns[key])
    return columns["step"][there], column[there]


def line_chart(title: str, columns: Columns, lines: Sequence[Line]) -> Chart | None:
    """Lines over the steps; ``None`` where no step has any of them."""
    drawn = [(line, _thinned(columns, line.key)) for line in lines]
    bands = [_band(columns, line) for line in lines]
    values = [y for _, points in drawn for _, y in points]
    values += [y for low, high in bands for _, y in (*low, *high)]
    if not values:
        return None
    steps = [x for _, points in drawn for x, _ in points]
    x, y = _Axis(min(steps), max(steps), LEFT, WIDTH - RIGHT), _fitting(values)
    marks = []
    for at, ((line, points), (low, high)) in enumerate(zip(drawn, bands, strict=True)):
        if points:
            read = [(round(x(s), 1), f"{s:.0f}", f"{v:.6g}") for s, v in points]
            style = line.style or f"c{at % COLOURS}"
            area = _path([*high, *reversed(low)], x, y) + "Z" if low else ""
            marks.append(Mark(line.name, style, _path(points, x, y), area, read))
    legend = [(mark.name, mark.style) for mark in marks]
    each = max(_sharing(len(known(columns, line.key)[0])) for line in lines)
    note = f"Each point is the mean of {each} steps." if each > 1 else ""
    x_ticks = _ticks(x, "{:.0f}".format, whole=True)
    return Chart(title, x_ticks, _ticks(y, "{:.6g}".format), marks, [], legend, note)


def in_seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value / 3600:.3g} h"


def bar_chart(title: str, columns: Columns, parts: Mapping[str, str]) -> Chart | None:
    """Stacked bars of seconds, one per step; ``None`` if no step has any part. ``parts`` maps names
    to keys; parts below one percent of the total are left out."""
    given = {name: columns[key] for name, key in parts.items() if key in columns}
    if not given:
        return None
    there = ~np.isnan([*given.values()]).all(axis=0)
    steps = columns["step"][there]
    seconds = {name: np.nan_to_num(column[there]).clip(0) for name, column in given.items()}
    totals = np.sum([*seconds.values()], axis=0)
    shown = [name for name in seconds if seconds[name].sum() > totals.sum() / 100]
    usual = np.sort(totals)[(len(steps) - 1) * 9 // 10]
    top = float(max(totals if len(steps) < 3 else totals[totals <= CUT_ABOVE * usual]))
    each = _sharing(len(steps))
    x = _Axis(steps[0] - 0.5, steps[-1] + 0.5, LEFT, WIDTH - RIGHT)
    y = _Axis(0.0, top * 1.08 or 1.0, HEIGHT - BOTTOM, TOP)
    bars = []
    for first in range(0, len(steps), each):
        group = slice(first, first + each)
        left, right = x(steps[first] - 0.5), x(steps[group][-1] + 0.5)
        means = {name: float(seconds[name][group].mean()) for name in shown}
        read = ", ".join(f"{name} {in_seconds(value)}" for name, value in means.items())
        told = f"step {steps[first]:.0f}: {in_seconds(totals[group].mean())} ({read})"
        width = round((right - left) * 0.86, 2)
        bars.append(Bar(round(left, 1), width, _stack(means, y), told, max(totals[group]) > y.high))
    legend = [
        (f"{name}, median {in_seconds(np.median(seconds[name]))}", f"c{place}")
        for place, name in enumerate(shown)
    ]
    x_ticks = _ticks(x, "{:.0f}".format, whole=True)
    note = _too_high([(s, t) for s, t in zip(steps, totals, strict=True) if t > y.high])
    return Chart(title, x_ticks, _ticks(y, in_seconds), [], bars, legend, note)


def _stack(means: Mapping[str, float], y: _Axis) -> list[tuple[int, float, float]]:
    """``Bar.parts``, none of them above the picture."""
    stack, base = [], 0.0
    for place, value in enumerate(means.values()):
        high = min(base + value, y.high)
        stack.append((place, round(y(high), 1), round(y(base) - y(high), 1)))
        base = high
    return stack


def _too_high(cut: Sequence[Point]) -> str:
    """A sentence that names the steps whose bars are cut, and the height of these bars; empty if
    none is."""
    named = ", ".join(f"step {step:.0f} ({in_seconds(total)})" for step, total in cut[:6])
    more = f" and {len(cut) - 6} more" if len(cut) > 6 else ""
    return f"Higher than the picture, marked by a triangle: {named}{more}." if cut else ""


class _Axis:
    """From values to coordinates."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if low == high:
            low, high = low - 0.5, high + 0.5
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def _fitting(values: Sequence[float]) -> _Axis:
    """A y axis with some air around the values."""
    low, high = min(values), max(values)
    air = (high - low) * 0.06 or max(abs(high) * 0.1, 1e-6)
    return _Axis(low - air, high + air, HEIGHT - BOTTOM, TOP)


def _ticks(
    axis: _Axis, form: Callable[[float], str], *, whole: bool = False
) -> list[tuple[float, str]]:
    """About five round numbers on an axis: 1, 2 or 5 times a power of ten apart."""
    rough = (axis.high - axis.low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next((m * power for m in (1, 2, 5) if m * power >= rough), 10 * power)
    apart = max(apart, 1.0) if whole else apart
    first = math.ceil(axis.low / apart)
    numbers = [n * apart for n in range(first, math.floor(axis.high / apart) + 1)]
    return [(round(axis(n), 1), form(n)) for n in numbers]


def _path(points: Sequence[Point], x: _Axis, y: _Axis) -> str:
    joined = "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in points)
    return f"M{joined}" + ("h.01" if len(points) == 1 else "")  # a lone point is a dot


def _band(columns: Columns, line: Line) -> tuple[list[Point], list[Point]]:
    low, high = _thinned(columns, line.low), _thinned(columns, line.high)
    return (low, high) if len(low) == len(high) > 1 else ([], [])


def _thinned(columns: Columns, key: str) -> list[Point]:
    """(step, value) where there is a number by that name, ``MOST_POINTS`` at most."""
    steps, values = known(columns, key)
    each = _sharing(len(steps))
    groups = (slice(first, first + each) for first in range(0, len(steps), each))
    return [(float(steps[group][-1]), float(values[group].mean())) for group in groups]


def _sharing(count: int) -> int:
    """The number of steps that share a point."""
    return max(1, math.ceil(count / MOST_POINTS))
