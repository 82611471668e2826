"""The README's summary: fxrl's row and the fastest others of the same job."""

import json
from pathlib import Path

import pytest

from bench.lib import summary
from bench.lib.pivot import PivotError
from bench.lib.summary import Line

ROWS = [
    ["frozen", "slow", 30.0],
    ["frozen", "fxrl", 10.0],
    ["frozen", "broken", None],
    ["frozen", "slower", 40.0],
    ["frozen", "fast", 5.0],
    ["frozen", "slowest", 50.0],
    ["no_grad", "other mode", 1.0],
]
LINE = Line("head", "a", "{ms:.0f} ms", "ms", {"mode": ["frozen"]})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    record = {"columns": ["mode", "variant", "ms"], "rows": ROWS}
    (tmp_path / "a.json").write_text(json.dumps(record))
    monkeypatch.setattr(summary, "LINES", (LINE,))
    return tmp_path


def test_every_line_has_its_file():
    results = Path(__file__).parents[2] / "bench" / "results"
    assert len(summary.lines(results)) == len(summary.LINES) > 3


def test_the_three_fastest_others_though_faster_than_fxrl(folder):
    ((job, ours, others, link),) = summary.lines(folder)
    assert (job, ours) == ("head", "10 ms")
    assert others == "fast: 5 ms<br>slow: 30 ms<br>slower: 40 ms"
    assert link == "[`a`](bench/results/a.json)"


def test_only_the_variants_that_did_the_job(folder, monkeypatch):
    monkeypatch.setattr(
        summary, "LINES", (Line("head", "a", "{ms:.0f}", "ms", LINE.rows, beside=("slow",)),)
    )
    assert summary.lines(folder)[0][2] == "slow: 30"


@pytest.mark.parametrize(
    "line",
    [
        Line("head", "a", "{ms}", "ms", LINE.rows, ours="broken"),
        Line("head", "a", "{ms}", "ms", LINE.rows, beside=("broken",)),
        Line("head", "a", "{ms}", "ms", {"kind": [1]}),
    ],
)
def test_what_a_file_does_not_have_is_an_error(folder, monkeypatch, line):
    monkeypatch.setattr(summary, "LINES", (line,))
    with pytest.raises(PivotError):
        summary.lines(folder)
