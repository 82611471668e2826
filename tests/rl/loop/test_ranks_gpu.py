"""Two GPUs of one host have the numbers of one: NCCL, torchrun, adapters and all weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.rl.loop.rank_cases import CONFIG, TOY

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def lines_of(folder, ranks, *overrides):
    """``metrics.jsonl`` of a run in float64."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = ["-m", "fxrl", "train", "run.toml", f"run_dir=of-{ranks}", "model.device=cuda"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HURT": ""}
    command = [sys.executable, *start, *words, *overrides]
    ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    text = (folder / f"of-{ranks}/metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.lora=none",),
        ("optimize=true", "fxrl.min_saved_bytes=0"),
        ("optimize=true", "fxrl.min_saved_bytes=0", "fxrl.context_parallel=2"),
        ("optimize=true", "model.sharded=true"),
    ],
    ids=["adapter", "all weights", "optimized", "shared sequences", "sharded"],
)
def test_two_gpus_have_the_numbers_of_one(tmp_path, overrides):
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "toy.py").write_text(TOY)
    rows = [f'{{"prompt": "count to {i}", "answer": "{i}"}}\n' for i in range(12)]
    (tmp_path / "questions.jsonl").write_text("".join(rows))
    sharing = any("parallel" in word for word in overrides)
    one = lines_of(tmp_path, 1, *(x for x in overrides if not ("sharded" in x or "parallel" in x)))
    two = lines_of(tmp_path, 2, *overrides)
    assert len(one) == len(two) == 3
    for ours, alone in zip(two, one, strict=True):
        assert sharing or ours["ranks/exposed_s"] > 0
        for name in ("loss", "grad_norm", "reward", "kl", "num_tokens"):
            assert ours[name] == pytest.approx(alone[name], rel=1e-9, abs=1e-9), name
