"""Predictions beside what was measured on a GPU (``bench/results``), on a machine without one."""

import json
from pathlib import Path

import pytest
import torch

import fxrl
from bench.lib import qwen
from fxrl import losses
from fxrl.ir.plan import CutHead, CutLayer, Plan
from fxrl.planner.target import TARGETS

pytest.importorskip("transformers")
pytest.importorskip("peft")

FILE = Path(__file__).parents[2] / "bench/results/plan_predictions_h200.json"
_TABLE = json.loads(FILE.read_text())
ROWS = [dict(zip(_TABLE["columns"], row, strict=True)) for row in _TABLE["rows"]]
#: A budget that is short; seldom none, under which there is nothing to choose.
SHOWN = [ROWS[3], pytest.param(ROWS[8], marks=pytest.mark.slow)]


def name(row):
    return f"{row['shape']}-{row['trained']}-{row['gpu_memory']}".replace(" ", "")


def planned(shape, rank, layers, size, accumulated=False, kept=(), head="rows", **budgets):
    torch._dynamo.reset()
    model = qwen.make_model(shape, "meta", layers=layers, rank=rank, checkpointing=False)
    cuts = {f"0:model.layers.{i}": CutLayer(cut) for i, cut in enumerate(kept)}
    given = Plan(cuts | {"0:lm_head/mm.linear_logprob": CutHead(head)})
    config = fxrl.Config(min_saved_bytes=0, **budgets)
    step = fxrl.optimize(model, losses.grpo(beta=0.0), config, plan=given)
    rows, tokens = size
    return step.plan_for(
        {
            "input_ids": torch.zeros(rows, tokens, dtype=torch.long),
            "completion_mask": torch.ones(rows, tokens - 1),
            "old_logps": torch.zeros(rows, tokens - 1),
            "advantages": torch.zeros(rows),
        },
        target=TARGETS["h200"],
        accumulated=accumulated,
    )


@pytest.mark.parametrize("row", SHOWN, ids=name)
def test_memory_and_seconds_are_as_measured(row):
    rank = int(row["trained"].removeprefix("LoRA r=")) if row["trained"] != "all" else 0
    given = {n: row[n] for n in ("gpu_memory", "host_memory") if row[n] != "-"}
    given = {n: int(size) if size == "0" else size for n, size in given.items()}
    size = tuple(map(int, row["rows x tokens"].split(" x ")))
    plan = planned(row["shape"], rank, row["layers"], size, **given)
    assert plan.peak_gpu_bytes / 2**30 == pytest.approx(row["peak_gib"], rel=0.01)
    assert plan.step_seconds * 1e3 == pytest.approx(row["step_ms"], rel=0.1)


@pytest.mark.parametrize(
    ("shape", "accumulated", "kept", "head", "peak_gib"),
    [
        pytest.param("qwen3-1.7b", True, ["products"] * 4, "rows", 7.101, marks=pytest.mark.slow),
        ("qwen3-1.7b", True, ["fewest"] * 3 + ["attention"], "rows", 6.221),
        ("qwen3-30b-a3b", False, ["products"] * 2, "rows", 15.03),
        ("qwen3-1.7b", False, ["products"] * 8, "exponentials", 11.75),
    ],
    ids=["second micro-batch", "the same, short of memory", "experts", "exponentials kept"],
)
def test_memory_of_full_fine_tuning(shape, accumulated, kept, head, peak_gib):
    """Peaks of an H200 (``bench.predictions``, 1 x 8192 tokens)."""
    given = {"accumulated": accumulated, "kept": kept, "head": head, "gpu_memory": "60GiB"}
    plan = planned(shape, 0, len(kept), (1, 8192), **given)
    assert plan.peak_gpu_bytes / 2**30 == pytest.approx(peak_gib, rel=0.01)
