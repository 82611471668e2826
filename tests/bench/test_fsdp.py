"""``bench.fsdp``: one rank's work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bench import fsdp
from bench.lib import child


@pytest.fixture
def _alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(child, "tell", told.append)
    words = ["--shape", "tiny", "--rows", "2", "--length", "16", "--repeats", "1"]
    assert fsdp.main([*words, "--device", "cpu", "--worker"]) == 0
    eager, ours = told
    assert (eager["variant"], ours["variant"]) == ("eager", "fxrl")
    assert eager["captures"] == 0 < ours["captures"]
    assert 0 < ours["from_fp32"] < 2 * eager["from_fp32"] < 0.1
