"""What is shown of result files: the summary's rows, and commands as one would type them."""

import json
import shlex
from pathlib import Path

import pytest

from bench.lib import tables
from bench.lib.tables import Line, PivotError, shown_commands

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
    monkeypatch.setattr(tables, "LINES", (LINE,))
    return tmp_path


def test_every_line_has_its_file():
    results = Path(__file__).parents[2] / "bench" / "results"
    shown = " ".join(link for *_, link in tables.lines(results))
    assert all(f"`{line.file}`" in shown for line in tables.LINES)
    assert len(tables.LINES) > 3


def test_many_ranks_beside_few(folder):
    columns = ["ranks", "rank", "tokens_per_s", "efficiency", "error"]
    rows = [[1, 0, 100.0, 1.0, None], [2, 0, 190.0, 0.95, None], [2, 1, 190.0, 0.95, None]]
    failed = [[8, None, None, None, "exit code 1"]]
    record = {"title": "weak scaling", "machine": "2 x H100", "columns": columns}
    for name, found in (("weak", rows + failed), ("alone", rows[:1]), ("failed", failed)):
        (folder / f"scaling_{name}_x.json").write_text(json.dumps(record | {"rows": found}))
    _, (job, ours, others, link) = tables.lines(folder)
    assert (job, ours) == ("weak scaling, 2 x H100", "2 x: 190 tokens/s, efficiency 0.95")
    assert others == "1 x: 100 tokens/s"
    assert link == "[`scaling_weak_x`](bench/results/scaling_weak_x.json)"


def test_the_three_fastest_others_though_faster_than_fxrl(folder):
    ((job, ours, others, link),) = tables.lines(folder)
    assert (job, ours) == ("head", "10 ms")
    assert others == "fast: 5 ms<br>slow: 30 ms<br>slower: 40 ms"
    assert link == "[`a`](bench/results/a.json)"


def test_only_the_variants_that_did_the_job(folder, monkeypatch):
    monkeypatch.setattr(
        tables, "LINES", (Line("head", "a", "{ms:.0f}", "ms", LINE.rows, beside=("slow",)),)
    )
    assert tables.lines(folder)[0][2] == "slow: 30"


@pytest.mark.parametrize(
    "line",
    [
        Line("head", "a", "{ms}", "ms", LINE.rows, ours="broken"),
        Line("head", "a", "{ms}", "ms", LINE.rows, beside=("broken",)),
        Line("head", "a", "{ms}", "ms", {"kind": [1]}),
    ],
)
def test_what_a_file_does_not_have_is_an_error(folder, monkeypatch, line):
    monkeypatch.setattr(tables, "LINES", (line,))
    with pytest.raises(PivotError):
        tables.lines(folder)


@pytest.mark.parametrize(
    ("ran", "shown"),
    [
        ("python -m bench.head --append --out /root/out/x.json --repeats 5", "--repeats 5"),
        ("python -m bench.head --time-limit 235 --row-limit 50 --sets 3", "--sets 3"),
        ("python -m bench.head model.id=/tmp/smollm2 steps=3", "steps=3"),
        ("python -m bench.head --peers /tmp/peers", "--peers peers"),
        ("python -m bench.head --flags a;no b;c --sets 4", "--flags 'a;no b;c' --sets 4"),
        ("python -m bench.head --flags 'a;no b'", "--flags 'a;no b'"),
        ("python -m bench.head --models a b c", "--models a b c"),
    ],
)
def test_without_the_machine(ran, shown):
    assert shown_commands(ran) == [f"python -m bench.head {shown}"]


def test_appended_runs_once_each():
    first = "python -m bench.head --shapes 1,2,3;4,5,6"
    ran = f"{first} --out a; {first} --append --out a; python -m bench.head --variants trl"
    shown = shown_commands(ran)
    assert shown == [
        "python -m bench.head --shapes '1,2,3;4,5,6'",
        "python -m bench.head --variants trl",
    ]
    assert shlex.split(shown[0])[-1] == "1,2,3;4,5,6"
