"""``bench.lengths`` in its shortest, and what it calls growth."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_every_step_is_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "lengths.json"
    asked = "--shape tiny --layers 1 --steps 12 --shortest 8 --longest 16 --device cpu --out"
    assert lengths.main([*asked.split(), str(out)]) == 0
    record = json.loads(out.read_text())
    assert [row[0] for row in record["rows"]] == ["1-10", "11-12", "in all"]
    assert len(record["reserved_mib_by_step"]) == 12
    assert record["grown_mib"] == 0
