"""``bench.scaling``: one rank's work, and what the counts of ranks are compared by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import scaling
from bench.lib import child

TINY = ["--shape", "tiny", "--rows", "2", "--length", "16", "--repeats", "1", "--device", "cpu"]


@pytest.mark.parametrize(("what", "efficiency"), [("weak", 0.8), ("strong", 0.4)])
def test_what_ranks_gain(
    what: str,
    efficiency: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "scaling.json"
    assert scaling.main([what, *TINY, "--worker"]) == 0  # alone: rank 0 of 1
    (told,) = [line for line in capsys.readouterr().out.splitlines() if scaling.MARK in line]
    found = json.loads(told.removeprefix(scaling.MARK))
    assert found["ranks"] == 1
    assert 0 < found["step_ms"] <= found["step_ms_max"]

    def measured(command: list[str], mark: str) -> dict[str, Any]:
        ranks = int(command[command.index("--nproc-per-node") + 1])
        if ranks == 4:
            return {"error": "exit code 1: planted"}
        return found | {"ranks": ranks, "step_ms": 10.0 if ranks == 1 else 12.5}

    monkeypatch.setattr(child, "measured", measured)
    assert scaling.main([what, *TINY, "--ranks", "1,2", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    rows = [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]
    assert [row["efficiency"] for row in rows] == [1.0, pytest.approx(efficiency)]
    assert scaling.main([what, *TINY, "--ranks", "1,4", "--out", str(out)]) == 1
