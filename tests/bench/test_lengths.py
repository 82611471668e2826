"""``bench.lengths`` in its shortest, and what it calls growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import lengths


@pytest.mark.parametrize(
    ("reserved", "grown"),
    [
        ([5.0] * 19 + [7.0] + [7.0] * 30, 0.0),
        ([7.0] * 20 + [6.0] * 30, 0.0),
        ([7.0] * 20 + [6.0, 9.0], 2.0),
        ([7.0], 0.0),
    ],
)
def test_growth_is_what_rises_above_the_warm_up(reserved: list[float], grown: float) -> None:
    assert lengths.growth(reserved) == grown


def test_the_longest_comes_in_the_warm_up() -> None:
    drawn = lengths.lengths(200, 1024, 12288)
    assert len(drawn) == 200
    assert max(drawn) == max(drawn[: lengths.WARM_UP]) == 12288
    assert min(drawn) >= 1024
    assert drawn != lengths.lengths(200, 1024, 12288, seed=1)


@pytest.mark.parametrize(
    ("after", "code"), [({}, 0), ({"reserved_mib": 8.0}, 1), ({"shortages": 1}, 1)]
)
def test_growth_and_shortages_fail(
    after: dict[str, Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"tokens": 8, "ms": 1.0, "peak_gib": None, "predicted_gib": None, "reserved_mib": 4.0}
    step |= {"host_gib": 0.0, "retries": 0, "shortages": 0}
    monkeypatch.setattr(lengths, "steps", lambda args: iter([step] * 24 + [step | after]))
    out = tmp_path / "lengths.json"
    assert lengths.main(["--steps", "25", "--device", "cpu", "--out", str(out)]) == code
    record = json.loads(out.read_text())
    assert [row[0] for row in record["rows"]] == ["1-10", "11-20", "21-25", "in all"]
    assert record["reserved_mib_by_step"] == [4.0] * 24 + [after.get("reserved_mib", 4.0)]
