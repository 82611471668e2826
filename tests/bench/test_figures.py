"""Pivot tables and figures: what they show, and that a figure knows when it is out of date."""

import copy
import json
import xml.etree.ElementTree as ElementTree

import pytest

from bench import readme
from bench.lib import figures
from bench.lib.tables import PivotError, pivot

COLUMNS = ["shape", "mode", "variant", "ms", "floor_ms", "of_floor", "peak_mib", "error"]
ROWS = [
    ["1,2,3", "frozen", "fxrl", 10.0, 9.0, 0.9, 320.0, None],
    ["1,2,3", "frozen", "peer", 20.0, 9.0, 0.45, 9000.0, None],
    ["4,5,6", "frozen", "fxrl", 4.0, 3.0, 0.75, 100.0, None],
    ["4,5,6", "frozen", "peer", None, 3.0, None, None, "RuntimeError: planted"],
    ["1,2,3", "no_grad", "fxrl", 5.0, 4.5, 0.9, 1.0, None],
]
SPEC = {
    "title": "Frozen",
    "where": {"mode": ["frozen"]},
    "rows": "shape",
    "columns": "variant",
    "cells": "{ms:.1f} ms, {of_floor:.0%}",
}


@pytest.fixture
def record():
    return {
        "title": "Head", "command": "x", "machine": "GPU", "versions": {}, "date": "2026-01-02",
        "columns": COLUMNS, "rows": copy.deepcopy(ROWS), "notes": [],
        "readme": {"tables": [SPEC], "figures": ["time", "memory"]},
    }  # fmt: skip


def test_pivot():
    head, lines, errors = pivot(COLUMNS, ROWS, SPEC)
    assert head == ["shape", "fxrl", "peer"]
    assert lines == [
        ["1,2,3", "10.0 ms, 90%", "20.0 ms, 45%"],
        ["4,5,6", "4.0 ms, 75%", "failed"],
    ]
    assert errors == {"peer": "RuntimeError: planted"}
    assert pivot(COLUMNS, ROWS, SPEC | {"where": {"mode": ["no"]}})[1] == []
    head, lines, _ = pivot(COLUMNS, ROWS, SPEC | {"also": ["floor", "{floor_ms:.0f}"]})
    assert head == ["shape", "floor", "fxrl", "peer"]
    assert [line[1] for line in lines] == ["9", "3"]


def test_pivot_without_figures_is_empty():
    rows = [[*row[:6], None, *row[7:]] for row in ROWS]
    head, lines, errors = pivot(COLUMNS, rows, SPEC | {"cells": "{peak_mib:.0f}"})
    assert head == lines == []
    assert errors == {"peer": "RuntimeError: planted"}


def test_pivot_tells_cannot_from_failed_and_doubtful():
    rows = copy.deepcopy(ROWS)
    rows[3][-1] = "UnsupportedError: no softcap"
    rows[1][-1] = "ArithmeticError: not finite: dh_error"
    _, lines, errors = pivot(COLUMNS, rows, SPEC)
    assert lines[1][2] == "n/a"
    assert lines[0][2] == "20.0 ms, 45% (!)"
    assert "not finite" in errors["peer"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows": "form"}, "tables.rows has 'form'"),
        ({"where": {"form": [1]}}, "tables.where has 'form'"),
        ({"cells": "{speed}"}, "no column is 'speed'"),
    ],
)
def test_bad_specifications(changes, says):
    with pytest.raises(PivotError, match=says):
        pivot(COLUMNS, ROWS, SPEC | changes)


def test_readme_shows_tables_and_figures(record, tmp_path):
    (tmp_path / "head.json").write_text(json.dumps(record))
    text = readme.results(tmp_path)
    assert "**Frozen**\n\n| shape | fxrl | peer |" in text
    assert text.count("- peer: RuntimeError: planted") == 1
    assert f"![Head: time]({(tmp_path / 'head_time.svg').as_posix()})" in text
    assert "no_grad" not in text


@pytest.mark.parametrize("name", ["time", "memory"])
def test_figure_is_current_until_its_rows_change(record, tmp_path, name):
    pytest.importorskip("matplotlib")
    file = tmp_path / "head.json"
    file.write_text(json.dumps(record))
    assert [found[2] for found in readme.stale_figures(tmp_path)] == ["time", "memory"]
    drawn = figures.draw(record, file, name)
    assert drawn == tmp_path / f"head_{name}.svg"
    first = drawn.read_bytes()
    assert len(first) < 200_000
    words = "".join(ElementTree.fromstring(first).itertext())
    for word in ("peer", "fxrl", "vocabulary"):
        assert word in words
    assert figures.is_current(record, file, name)
    figures.draw(record, file, name)
    assert drawn.read_bytes() == first  # the same rows, the same bytes
    record["rows"][0][COLUMNS.index("ms")] = 11.0
    assert figures.is_current(record, file, name) == (name == "memory")
    record["rows"][0][COLUMNS.index("peak_mib")] = 321.0
    assert not figures.is_current(record, file, name)


def test_check_fails_on_a_stale_figure(record, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    (results / "head.json").write_text(json.dumps(record))
    for file, sections in readme.FILES.items():
        marks = "".join(f"<!-- begin {n} -->\n<!-- end {n} -->\n" for n in sections)
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(marks)
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.main(["--check"]) == 1
    assert readme.main([]) == 0
    assert readme.main(["--check"]) == 0
    assert "](results/head_time.svg)" in (tmp_path / "bench" / "RESULTS.md").read_text()
    (results / "head_memory.svg").unlink()
    assert readme.main(["--check"]) == 1
    assert "head_memory.svg out of date" in capsys.readouterr().err
    assert readme.main(["--show", str(results / "head.json")]) == 0
    assert "**Frozen**" in capsys.readouterr().out
    assert readme.main(["--show", str(results / "no.json")]) == 1
