"""Rows of a result file as a small table: one key down, one across, a few figures in each cell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

FAILED, CANNOT, DOUBTFUL = "failed", "n/a", "(!)"


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
