"""Runs over weights that two ranks share out: the numbers, files and checkpoints of one rank."""

import json
from pathlib import Path

import pytest

from fxrl.models import load_model
from fxrl.models.checkpoint import CheckpointTensors
from fxrl.models.load import write_model
from fxrl.rl import Trainer
from fxrl.rl.train import main
from tests.forked import need_autograd_in_forks
from tests.rl.loop.rank_cases import group
from tests.rl.loop.test_kinds import TINY, tables
from tests.rows import rows

LORA = {"r": 4, "dropout": 0.0}


def close(run_dir, other):
    """What both runs say of learning, line by line."""
    runs = [
        [json.loads(text) for text in Path(one, "metrics.jsonl").read_text().splitlines()]
        for one in (run_dir, other)
    ]
    assert len(runs[0]) == len(runs[1])
    for ours, theirs in zip(*runs, strict=True):
        for name in {"loss", "grad_norm", "eval/loss", "reward"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12), name


def test_a_checkpoint_is_read_in_parts_and_a_run_goes_on_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(*load_model(TINY, "fp64"), Path("base"))
    model = {"id": "base", "dtype": "float64", "device": "cpu", "lora": LORA}
    read, get = set(), CheckpointTensors.get

    def whole(self, names, shape):
        read.add(names[0])
        return get(self, names, shape)

    def rank(**further):
        monkeypatch.setattr(CheckpointTensors, "get", whole)
        Trainer(config=tables("sft", model=model | {"sharded": True}, **further)).train()
        assert read
        assert all("norm" in name for name in read), "nothing else is read in full"

    need_autograd_in_forks()
    ran = group(2, rank_of(rank, run_dir="parts", steps=2))
    assert ran["codes"] == [0, 0], ran["said"]
    Trainer(config=tables("sft", model=model, run_dir="whole", steps=2)).train()
    close("parts", "whole")
    # The base is known by its bits on any number of ranks, and the adapter is nothing new.
    for run_dir in ("parts", "whole"):
        Trainer(config=tables("sft", model=model, run_dir=run_dir, steps=3)).train(resume="")
    close("parts", "whole")


def rank_of(work, **options):
    return lambda: work(**options)


@pytest.mark.parametrize("bits", rows(["none", "fp8"], ["none"]))
def test_completions_are_drawn_over_shared_weights(config_file, bits):
    """Of random weights, of which each rank gives its part away."""
    common = ("model.dtype=float64", "model.lora.dropout=0.0", "steps=1")
    common += (f"model.quantization={bits}",)
    assert main("run.toml", ["run_dir=whole", *common]) == 0
    sharded = ["run_dir=parts", *common, "model.sharded=true"]
    need_autograd_in_forks()
    ran = group(2, main, "run.toml", sharded)
    assert ran["codes"] == [0, 0], ran["said"]
    close("parts", "whole")
