"""Checkpoints: complete or absent, exact, and of the same run."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fxrl import files
from fxrl.rl.errors import CheckpointError
from fxrl.rl.loop import checkpoint


def save(run_dir, step, model, keep=2):
    optimizer = torch.optim.AdamW(model.parameters()).state_dict()
    return checkpoint.save_checkpoint(
        run_dir,
        step,
        model=model,
        optimizer={"optimizer": optimizer},
        state={"random": checkpoint.random_state()},
        trainer={"config": {}},
        keep=keep,
    )


def tied():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def test_random_state_round_trip(tmp_path):
    path = save(tmp_path, 1, nn.Linear(2, 2))
    expected = (random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item())
    _, state = checkpoint.load_checkpoint(path, nn.Linear(2, 2))
    checkpoint.set_random_state(state["random"])
    assert (random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item()) == expected


def test_only_trainable_weights_are_saved_and_restored_exactly(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    path = save(tmp_path, 1, model)
    want = model[1].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
        model[1].weight.fill_(7.0)
    checkpoint.load_checkpoint(path, model)
    assert torch.equal(model[1].weight, want)
    assert (model[0].weight == 7.0).all()


def memory_in_use():
    """Bytes of this process that no file has."""
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["RssAnon"].split()[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux counts it")
def test_states_are_read_where_they_are_used(tmp_path):
    model = nn.Linear(2**12, 2**10, bias=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    saved = {"optimizer": optimizer.state_dict()}
    folder = tmp_path / "of"
    options = {"model": model, "optimizer": saved, "state": {}, "trainer": {}, "keep": 1}
    path = checkpoint.save_checkpoint(folder, 1, **options)
    before = memory_in_use()
    found, _ = checkpoint.load_checkpoint(path, model)
    assert memory_in_use() - before < model.weight.nbytes  # the states have twice that
    state = found["optimizer"]["state"][0]
    assert torch.equal(state["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_tied_weights(tmp_path):
    model, other = tied(), tied()
    checkpoint.load_checkpoint(save(tmp_path, 1, model), other)
    assert torch.equal(other[1].weight, model[0].weight)
    assert other[1].weight is other[0].weight


def test_the_newest_are_kept_and_found(tmp_path):
    assert checkpoint.find_checkpoint(tmp_path, "") is None
    paths = [save(tmp_path, step, nn.Linear(1, 1)) for step in (1, 2, 10)]
    assert checkpoint.list_checkpoints(tmp_path) == [paths[1], paths[2]]
    assert checkpoint.find_checkpoint(tmp_path, "") == paths[2]
    assert checkpoint.find_checkpoint(tmp_path / "other", str(paths[1])) == paths[1]
    assert checkpoint.find_checkpoint(tmp_path / "other", str(tmp_path)) == paths[2]
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        checkpoint.find_checkpoint(tmp_path, str(tmp_path / "nowhere"))


def test_a_write_that_was_cut_off_is_no_checkpoint(tmp_path, monkeypatch):
    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, nn.Linear(1, 1))
    assert checkpoint.find_checkpoint(tmp_path, "") is None


def test_damage_and_other_models_are_named(tmp_path):
    path = save(tmp_path, 1, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="do not fit the model: bias, weight"):
        checkpoint.load_checkpoint(path, nn.Linear(2, 3, bias=True))
    (path / "optimizer.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load_checkpoint(path, nn.Linear(2, 2))


def test_another_configuration_is_refused_where_it_matters(tmp_path):
    saved = {"steps": 3, "optim": {"schedule": "constant", "lr": 1.0}}
    checkpoint.check_same_run(tmp_path, saved, saved | {"steps": 9})
    with pytest.raises(CheckpointError, match=r"optim\.lr: was 1\.0, is 2\.0"):
        checkpoint.check_same_run(
            tmp_path, saved, saved | {"optim": {"schedule": "constant", "lr": 2.0}}
        )
    linear = {"steps": 3, "optim": {"schedule": "linear"}}
    with pytest.raises(CheckpointError, match="steps: was 3, is 9"):
        checkpoint.check_same_run(tmp_path, linear, linear | {"steps": 9})


def test_parameters_that_are_views_of_one_storage(tmp_path):
    """As those of a model made of vLLM's fused weights: saved apart, restored in place."""
    fused = torch.randn(12, 4)
    model = nn.Module()
    for name, rows in (("q", fused[:4]), ("k", fused[4:8]), ("v", fused[8:])):
        setattr(model, name, nn.Parameter(rows))
    before = fused.clone()
    path = save(tmp_path, 1, model)
    assert (path / "trainable.safetensors").stat().st_size < 2 * fused.nbytes + 400
    fused.zero_()
    checkpoint.load_checkpoint(path, model)
    assert torch.equal(fused, before), "the storage that the engine reads"
