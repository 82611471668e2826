"""``bench.fsdp``: one rank's work."""

from __future__ import annotations

from typing import Any

import pytest

from bench import fsdp
from bench.lib import child


@pytest.mark.usefixtures("one_rank")
def test_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(child, "tell", told.append)
    words = ["--shape", "tiny", "--rows", "2", "--length", "16", "--repeats", "1"]
    assert fsdp.main([*words, "--device", "cpu", "--worker"]) == 0
    eager, ours = told
    assert (eager["variant"], ours["variant"]) == ("eager", "fxrl")
    assert eager["captures"] == 0 < ours["captures"]
    assert 0 < ours["from_fp32"] < 2 * eager["from_fp32"] < 0.1
