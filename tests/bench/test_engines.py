"""``bench.engines``: what engines that draw at once reach together."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from bench import engines
from bench.lib import child

WORDS = ["--gpus", "2", "--shape", "tiny", "--rows", "3", "--tokens", "10", "--repeats", "2"]


def test_two_engines_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, shown = threading.Barrier(2), []

    def measured(command: list[str], *, environment: Any, limit_s: Any) -> Any:
        tensor, count, lobby = command[command.index("--worker") + 1 :]
        shown.append((tensor, environment["CUDA_VISIBLE_DEVICES"]))
        if count == "2":
            number = started.wait(60)  # both are there before either has drawn
            engines._meet(Path(lobby), 1)
            return {"tokens_per_s": 30.0 + number, "span": [number, number + 3.0]}
        return {"tokens_per_s": 20.0, "span": [5.0, 11.0]}

    monkeypatch.setattr(child, "measured", measured)
    out = tmp_path / "engines.json"
    words = [*WORDS, "--work", str(tmp_path / "model"), "--out", str(out)]
    assert engines.main(words) == 0
    assert sorted(shown) == [("1", "0"), ("1", "1"), ("2", "0,1")]
    record = json.loads(out.read_text())
    rows = [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]
    assert [(row["tensor"], row["engine"]) for row in rows] == [(1, 0), (1, 1), (2, 0)]
    # 120 tokens: from second 0 to second 4, and in 6 seconds.
    assert [row["of_all"] for row in rows] == [30.0, 30.0, 20.0]
    assert [row["beside"] for row in rows] == [1.0, 1.0, pytest.approx(2 / 3, rel=1e-4)]
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] == 1024


def test_an_engine_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "measured", lambda *_, **__: {"error": "exit code 1: planted"})
    assert engines.main([*WORDS, "--work", str(tmp_path)]) == 1


def test_who_waits_for_nobody_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_WAIT_S", 0.05)
    with pytest.raises(TimeoutError, match="not all of 2 engines"):
        engines._meet(tmp_path, 2)
