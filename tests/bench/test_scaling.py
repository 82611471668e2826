"""``bench.scaling``: one rank's work, and what the counts of ranks are compared by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import scaling
from bench.lib import child, rl_job
from tests.rows import rows

TINY = ["--shape", "tiny", "--rows", "2", "--length", "16", "--repeats", "1", "--device", "cpu"]


def told(words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a worker that is alone, rank 0 of 1, has measured."""
    tables: list[dict[str, Any]] = []
    monkeypatch.setattr(child, "tell", tables.append)
    assert scaling.main([*words, "--worker"]) == 0
    (table,) = tables
    return table


@pytest.mark.parametrize("what", rows(["weak", "strong"], ["weak"]))
def test_what_an_update_takes(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = told([what, *TINY], monkeypatch)
    assert found["rank"] == 0
    assert 0 < found["step_ms"] <= found["step_ms_max"]
    assert found["tokens_per_s"] == pytest.approx(2 * 16 / found["step_ms"] * 1e3)
    assert found["length_min"] == found["length_max"] == 16


def test_what_a_step_with_rollouts_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["rollouts", *TINY, "--layers", "1", "--rows", "8", "--work", str(tmp_path)]
    words += ["--stop-tokens", "200", "--ranks", "1", "--out", str(tmp_path / "out.json")]
    for change in ("engine=torch", "model.dtype=float32", "optimize=false"):
        words += ["--override", change]

    def measured(_: list[str], *, each: Any) -> dict[str, Any]:
        found = told(words, monkeypatch)
        each(found)
        return found

    monkeypatch.setattr(child, "measured", measured)
    assert scaling.main(words) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    (values,) = record["rows"]
    row = dict(zip(record["columns"], values, strict=True))
    assert row["length_min"] < row["length_mean"] < row["length_max"] <= 16
    assert row["generate_ms"] + row["train_ms"] < row["step_ms"]
    assert row["efficiency"] == 1.0
    assert row["planned_gib"] is None  # nothing is planned on a CPU
    assert any("dapo" in note for note in record["notes"])


@pytest.mark.parametrize("what", ["weak", "rollouts"])
def test_what_ranks_gain(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(command: list[str], *, each: Any) -> dict[str, Any]:
        count = int(command[command.index("--nproc-per-node") + 1])
        if count == 4:
            return {"error": "exit code 1: planted"}
        for rank in reversed(range(count)):  # who is ready first speaks first
            own = {"rank": rank, "peak_gib": 2.0 + rank}
            step = {"step_ms": 10.0, "tokens_per_s": 100.0 if count == 1 else 160.0}
            each(own if rank else own | step)
        return own

    out = tmp_path / "scaling.json"
    monkeypatch.setattr(child, "measured", measured)
    monkeypatch.setattr(rl_job, "make_model", lambda *_: None)
    words = [what, *TINY, "--work", str(tmp_path), "--out", str(out)]
    assert scaling.main([*words, "--ranks", "1,2"]) == 0
    record = json.loads(out.read_text())
    rows = [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]
    assert [(row["ranks"], row["rank"], row["peak_gib"]) for row in rows] == [
        (1, 0, 2.0),
        (2, 0, 2.0),
        (2, 1, 3.0),
    ]
    assert [row["efficiency"] for row in rows] == [1.0, pytest.approx(0.8), pytest.approx(0.8)]
    assert scaling.main([*words, "--ranks", "1,4"]) == 1


@pytest.mark.parametrize(
    ("spans", "exposed"),
    [
        ([], 0.0),
        ([(0, 5, False), (1, 4, True)], 0.0),
        ([(0, 5, False), (5, 8, True), (8, 9, False)], 3.0),
        ([(2, 8, True), (0, 4, False), (5, 6, False), (5.5, 7, False)], 2.0),
        ([(0, 4, True), (2, 6, True), (3, 5, False)], 4.0),
    ],
)
def test_communication_with_nothing_beside_it(
    spans: list[tuple[float, float, bool]], exposed: float
) -> None:
    assert scaling.exposed(spans) == exposed
