"""The difference between sampling and training log-probs reaches the record, whatever the loss."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxrl.rl.drift import DriftWatch, measured, probe_rows
from fxrl.rl.train import main

MEAN = "sampling/sampling_logp_difference/mean"
LOSS = """
import torch
def mine(model, batch):
    ids, mask = batch["input_ids"], batch["completion_mask"]
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
    logps = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    logps = logps[:, -mask.shape[1]:]
    return -(logps * batch["advantages"][:, None] * mask).sum() / batch["num_items_in_batch"]
"""


def metrics(run_dir):
    return [json.loads(t) for t in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "extra",
    [
        ("loss={name='my_losses:mine'}",),
        ("loss={name='my_losses:mine'}", "num_iterations=2"),
        ("loss.vllm_importance_sampling_correction=false",),
        (),
    ],
    ids=["own loss", "own loss, scored", "no correction", "grpo"],
)
def test_every_step_has_it(config_file, extra):
    Path("my_losses.py").write_text(LOSS)
    assert main(str(config_file), ["run_dir=out", "steps=2", *extra], json=True) == 0
    for line in metrics("out"):
        assert 0 <= line[MEAN] < 1e-4, "the embedded engine samples with the model itself"


def test_an_own_loss_with_the_mask_trains_as_one_without(config_file):
    """``attention_mask`` stays in the batch, and on the right it changes nothing."""
    Path("my_losses.py").write_text(LOSS)
    Path("their_losses.py").write_text(LOSS.replace(', attention_mask=batch["attention_mask"]', ""))
    found = []
    for name in ("my", "their"):
        extra = [f"run_dir={name}", "steps=2", f"loss={{name='{name}_losses:mine'}}"]
        assert main(str(config_file), extra, json=True) == 0
        found.append([line["loss"] for line in metrics(name)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def scored(rows, length, scale, seed, dtype=torch.float64):
    """(trainer's log-probs, batch) of random tokens, some masked."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, length, generator=generator, dtype=torch.float64) * 5
    logps = rollout + torch.randn(rows, length, generator=generator, dtype=torch.float64) * scale
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[0, 0] = True
    return logps.to(dtype), {"rollout_logps": rollout.to(dtype), "completion_mask": mask}


@given(
    rows=st.integers(1, 4), length=st.integers(1, 9), scale=st.floats(0, 3), seed=st.integers(0, 99)
)
def test_what_is_measured_is_the_definition(rows, length, scale, seed):
    logps, batch = scored(rows, length, scale, seed)
    d = (logps - batch["rollout_logps"])[batch["completion_mask"]]
    ratio = d.exp()
    want = {
        MEAN: d.abs().mean(),
        "sampling/sampling_logp_difference/max": d.abs().max(),
        "sampling/importance_sampling_ratio/min": ratio.min(),
        "sampling/importance_sampling_ratio/mean": ratio.mean(),
        "sampling/importance_sampling_ratio/max": ratio.max(),
        "sampling/kl": (ratio - 1 - d).mean(),
    }
    found = measured(logps, batch)
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name] == pytest.approx(float(value), rel=1e-6, abs=1e-9), name


def test_what_is_masked_may_hold_anything():
    logps, batch = scored(3, 8, 0.1, 0)
    mask, clean = batch["completion_mask"], measured(logps, batch)
    for rubbish in (math.nan, math.inf, -math.inf, 1e300):
        assert measured(torch.where(mask, logps, rubbish), batch) == clean
        rollout = torch.where(mask, batch["rollout_logps"], rubbish)
        assert measured(logps, {"rollout_logps": rollout, "completion_mask": mask.float()}) == clean


def test_low_precision_is_widened_first():
    logps, batch = scored(2, 50, 0.01, 1, torch.bfloat16)
    d = (logps.double() - batch["rollout_logps"].double())[batch["completion_mask"]]
    want = float((d.exp() - 1 - d).mean())
    assert measured(logps, batch)["sampling/kl"] == pytest.approx(want)


def test_tokens_without_a_number_are_left_out():
    logps, batch = scored(2, 8, 1e-4, 0)
    batch["rollout_logps"][0, 0] = -math.inf
    assert measured(logps, batch)[MEAN] < 1e-3
    assert measured(logps[:1, :1], {name: value[:1, :1] for name, value in batch.items()}) == {}
    batch["completion_mask"].zero_()
    assert measured(logps, batch) == {}


def test_the_probe_is_small():
    totals = [5000, 3000, 100, 90, 80]
    assert probe_rows([(0,), (1,), (2, 3, 4)], totals) == (2, 3, 4)
    assert probe_rows([(0,), (1,)], totals) == (1,)
    assert probe_rows([(0,)], totals) == (0,)
    assert len(probe_rows([tuple(range(100))], [100] * 100)) == 40


def test_the_advice_fits_the_loss():
    """To keep on what is off, or what a loss does not have, is no advice."""
    for corrected, words in (
        (True, "keep loss.vllm_importance_sampling_correction on"),
        (False, "switch loss.vllm_importance_sampling_correction on"),
        (None, "weight the loss by exp(logps - rollout_logps)"),
    ):
        assert words in DriftWatch(corrected).warning({MEAN: 0.05})


def test_a_warning_comes_when_it_gets_worse():
    watch = DriftWatch()
    said = [watch.warning({MEAN: mean}) for mean in (0.001, 0.05, 0.06, 0.5, 0.4, 0.001, 0.05)]
    assert [text is not None for text in said] == [False, True, False, True, False, False, True]
    assert "differ by 0.05 nat" in said[1]
    assert "it is rounding" in said[1]
    assert "prefix cache" in said[3]
    assert watch.warning({}) is None
