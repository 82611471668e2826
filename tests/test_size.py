"""The size ledger: no source file over 300 lines (200 is the soft cap)."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HARD_CAP = 300


def source_files() -> list[Path]:
    inside = [f for f in (ROOT / "fxrl").rglob("*.py") if "passes" not in f.parts]
    return sorted(inside) + sorted((ROOT / "passes").rglob("*.py"))


@pytest.mark.parametrize("file", source_files(), ids=lambda f: str(f.relative_to(ROOT)))
def test_file_is_short(file):
    lines = len(file.read_text().splitlines())
    assert lines <= HARD_CAP, f"{lines} lines; split it by phase or concept"


def test_the_ledger_sees_the_source():
    seen = {str(f.relative_to(ROOT)) for f in source_files()}
    assert {"fxrl/config.py", "fxrl/core/remark.py", "passes/__init__.py"} <= seen
