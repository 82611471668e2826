"""The difference between sampling and training log-probs reaches the record, whatever the loss."""

import json
from pathlib import Path

import pytest
import torch

from fxrl.rl.drift import DriftWatch, loss_measures, measured, probe_rows
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


def test_what_is_measured():
    batch = {
        "rollout_logps": torch.tensor([[-1.0, -2.0, 0.0], [-3.0, 0.0, 0.0]]),
        "completion_mask": torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
    }
    logps = torch.tensor([[-1.5, -2.0, -9.0], [-2.0, -9.0, -9.0]])
    found = measured(logps, batch)
    assert found[MEAN] == pytest.approx(0.5)
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(1.0)


def test_the_probe_is_small():
    totals = [5000, 3000, 100, 90, 80]
    assert probe_rows([(0,), (1,), (2, 3, 4)], totals) == (2, 3, 4)
    assert probe_rows([(0,), (1,)], totals) == (1,)
    assert probe_rows([(0,)], totals) == (0,)
    assert len(probe_rows([tuple(range(100))], [100] * 100)) == 40


def test_losses_that_measure_themselves():
    assert loss_measures("dapo")
    assert not loss_measures("sft")
    assert not loss_measures("my_losses:mine")


def test_a_warning_comes_when_it_gets_worse():
    watch = DriftWatch()
    said = [watch.warning({MEAN: mean}) for mean in (0.001, 0.05, 0.06, 0.5, 0.4, 0.001, 0.05)]
    assert [text is not None for text in said] == [False, True, False, True, False, False, True]
    assert "differ by 0.05 nat" in said[1]
    assert watch.warning({}) is None
