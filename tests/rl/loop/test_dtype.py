"""The dtype of a run that names none."""

import json
from pathlib import Path

import pytest
import torch

from fxrl.errors import ConfigError
from fxrl.rl.config.load import load_config
from fxrl.rl.config.tables import LoraConfig, ModelConfig
from fxrl.rl.loop import dtype as precision
from fxrl.rl.loop.dtype import faster, product_times, settle
from fxrl.rl.train import main

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("float32", "bfloat16", "chosen"),
    [
        (46.0, 344.0, "float32"),  # two cores with AVX2, 2048 x 576 x 1536
        (90.2, 247.7, "float32"),  # AVX-512 without bf16
        (5.0, 5.0, "float32"),
        (5.0, 2.6, "float32"),  # ahead, but the casts eat it up
        (5.0, 2.5, "bfloat16"),
        (105.1, 36.0, "bfloat16"),  # AMX
    ],
)
def test_what_a_cpu_is_fast_at(float32, bfloat16, chosen):
    assert faster({"float32": float32, "bfloat16": bfloat16}) == chosen


def test_this_machine_is_measured():
    found = product_times()
    assert list(found) == ["float32", "bfloat16"]
    assert all(0 < ms < 60_000 for ms in found.values())


@pytest.mark.parametrize(
    ("given", "device", "fast", "dtype", "autocast"),
    [
        ({"lora": LoraConfig()}, CPU, "float32", "float32", None),
        ({"lora": LoraConfig()}, CPU, "bfloat16", "bfloat16", torch.bfloat16),
        ({"lora": LoraConfig()}, GPU, None, "bfloat16", torch.bfloat16),
        ({}, CPU, "float32", "float32", None),
        ({}, CPU, "bfloat16", "float32", torch.bfloat16),  # trained weights stay float32
        ({}, GPU, None, "float32", torch.bfloat16),
        ({"lora": LoraConfig(), "autocast": None}, GPU, None, "bfloat16", None),
        ({"autocast": "bfloat16"}, CPU, "float32", "float32", torch.bfloat16),
    ],
)
def test_auto_by_device_and_what_is_trained(given, device, fast, dtype, autocast, monkeypatch):
    times = {"float32": 46.0, "bfloat16": 344.0 if fast == "float32" else 4.6}
    monkeypatch.setattr(precision, "product_times", lambda: times)
    said = []
    model = settle(ModelConfig(id="tiny:llama", dtype="auto", **given), device, None, said.append)
    assert (model.dtype, model.autocast_dtype) == (dtype, autocast)
    assert len(said) == (device == CPU), "a GPU is not asked"
    if said:
        assert f"46 ms in float32 and {times['bfloat16']:.3g} ms in bfloat16" in said[0]
        assert said[0].startswith(f"the run is in {fast}: ")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_dtype_that_is_given_stands_unmeasured(dtype, monkeypatch):
    monkeypatch.setattr(precision, "product_times", lambda: pytest.fail("not asked"))
    model = ModelConfig(id="tiny:llama", dtype=dtype)
    saved = {"dtype": "float32", "autocast": None}
    assert settle(model, CPU, saved, pytest.fail) is model


def test_a_resumed_run_goes_on_in_its_dtype(config_file, monkeypatch, capsys):
    def train(*overrides, resume=None, fast):
        slow, quick = 400.0, 40.0
        times = (
            {"float32": slow, "bfloat16": quick}
            if fast == "bfloat16"
            else {"float32": quick, "bfloat16": slow}
        )
        monkeypatch.setattr(precision, "product_times", lambda: times)
        given = ["run_dir=out", "model.dtype=auto", "loss.beta=0", *overrides]
        code = main(str(config_file), given, resume=resume, json=True)
        return code, capsys.readouterr().out

    code, out = train("steps=1", fast="float32")
    assert (code, "the run is in float32" in out) == (0, True)
    assert written("config.json")["model"]["dtype"] == "float32"
    code, out = train("steps=2", resume="", fast="bfloat16")
    assert (code, "the run is in" in out) == (0, False)
    saved = written("checkpoints/step-00000002/trainer.json")["config"]["model"]
    assert (saved["dtype"], saved["autocast"]) == ("float32", None)
    code, out = train("steps=3", "model.dtype=bfloat16", resume="", fast="bfloat16")
    assert code == 2
    assert "model.dtype: was 'float32', is 'bfloat16'" in out


def written(name):
    return json.loads(Path("out", name).read_text())


def test_weights_that_cannot_learn_are_told(config_file):
    said = []
    for given in ({}, {"lora": LoraConfig()}):
        settle(ModelConfig(id="tiny:llama", dtype="bfloat16", **given), CPU, None, said.append)
    [told] = said
    assert "model.dtype=float32 with model.autocast=bfloat16 keeps them" in told
    with pytest.raises(ConfigError, match=r"model\.dtype='float16': gradients and optimizer"):
        load_config(config_file, ["model.dtype=float16", "model.lora=none"])
    load_config(config_file, ["model.dtype=float16"])  # its adapter is float32
