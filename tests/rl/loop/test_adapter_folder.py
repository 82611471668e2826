"""``model.id`` names the folder of an adapter, which is trained further."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from fxrl.errors import ConfigError
from fxrl.models import ModelError, load_model, load_tokenizer
from fxrl.rl import Callback, Trainer
from fxrl.rl.config.load import config_of
from fxrl.rl.errors import CheckpointError
from fxrl.rl.train import main
from tests.rl.loop.test_kinds import KINDS, tables
from tests.rl.metrics import numbers

DOUBLE = {"device": "cpu", "dtype": "float64"}


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    """``run_dir`` of two steps of SFT: an adapter in ``final``, its base model in ``model``."""
    folder = tmp_path_factory.mktemp("adapters") / "sft"
    model = tables("sft")["model"] | DOUBLE | {"lora": {"r": 4, "targets": ["q_proj", "v_proj"]}}
    Trainer(config=tables("sft", steps=2, run_dir=str(folder), model=model)).train()
    return folder


def further(kind, folder, **changes):
    return tables(kind, model={"id": str(folder)} | DOUBLE) | changes


def adapter_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reward_model"])
def test_a_run_begins_where_the_adapter_is_and_resumes(kind, sft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = {}

    class Noted(Callback):
        def on_train_begin(self, config, state, control, model, **kwargs):
            began.update(adapter_of(model), peft=model.peft_config["default"])

    whole = Trainer(config=further(kind, sft / "final", run_dir="whole"), callbacks=[Noted()])
    whole = whole.train()
    config = began.pop("peft")
    assert (config.r, config.target_modules) == (4, {"q_proj", "v_proj"})
    base, _ = load_model(sft / "model", "float64")
    stored = adapter_of(PeftModel.from_pretrained(base, sft / "final", is_trainable=True))
    assert stored.keys() == began.keys()
    assert all(torch.equal(stored[name], began[name]) for name in stored)
    ended = adapter_of(whole.model)
    assert any(not torch.equal(ended[name], began[name]) for name in ended)
    if kind == "dpo":  # the reference is what the adapter was
        assert numbers("whole")[0]["rewards/margins"] == 0 != numbers("whole")[1]["rewards/margins"]

    Trainer(config=further(kind, sft / "final", run_dir="parts", steps=2)).train()
    parts = Trainer(config=further(kind, sft / "final", run_dir="parts")).train(resume="")
    assert numbers("whole")[2:] == numbers("parts")[2:]
    assert all(torch.equal(p, adapter_of(parts.model)[name]) for name, p in ended.items())
    saved = json.loads(Path("parts/final/adapter_config.json").read_text())
    assert Path(saved["base_model_name_or_path"]) == (sft / "model").resolve()


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_rollouts_are_drawn_with_it(name, sft, config_file, tmp_path):
    model = {"id": str(sft / "checkpoints/step-00000002")} | DOUBLE  # which has no tokenizer
    table = {
        "model": model,
        "data": {"path": "questions.jsonl"},
        "reward": {"functions": ["toy_rewards.py:even"]},
        "loss": {"name": name, "beta": 0.1},
        "sampling": {"num_generations": 4, "max_tokens": 8},
        "optim": {"lr": 1e-2},
        **{"steps": 2, "prompts_per_step": 2, "optimize": False, "tensorboard": False},
    }
    Trainer(config=table | {"run_dir": "a"}).train()
    first, second = numbers("a")
    assert first["sampling/sampling_logp_difference/max"] < 1e-12
    assert second["sampling/sampling_logp_difference/max"] < 1e-12
    assert first["kl"] == pytest.approx(0, abs=1e-12)
    assert second["kl"] > 1e-9


@pytest.mark.parametrize("adapter", ["{ r = 4 }", "none"])
def test_a_value_head_goes_on_with_its_model(adapter, config_file):
    table = ["loss.name=ppo", "loss.beta=0", "steps=1", "model.dtype=float64", "optim.lr=0.1"]
    assert main(str(config_file), [*table, "run_dir=a", f"model.lora={adapter}"]) == 0
    table += ["run_dir=b", "model.lora=none", "model.id=a/final"]
    assert main(str(config_file), [*table, "optim.lr=0.0"]) == 0  # so that it stays as it began
    ended, began = (load_file(f"{run}/final/value_head.safetensors") for run in "ab")
    assert all(torch.equal(ended[name], began[name]) for name in ended)
    assert any(value.count_nonzero() for value in ended.values())
    save_file({"value_head.other": torch.ones(1)}, "a/final/value_head.safetensors")
    assert main(str(config_file), [*table, "run_dir=c"]) != 0


def test_a_reward_model_goes_on_with_its_head(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Trainer(config=tables("reward_model", run_dir="a", steps=2)).train()
    table = tables("reward_model", run_dir="b", steps=1, model={"id": "a/final", "device": "cpu"})
    Trainer(config=table).train()
    ends, begins = numbers("a")[-1], numbers("b")[0]
    assert begins["eval/initial_loss"] == pytest.approx(ends["eval/loss"], rel=1e-5)


def test_an_adapter_that_has_changed_since_is_noticed(sft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sft / "final", "given")
    Trainer(config=further("dpo", "given", run_dir="a", steps=1)).train()
    shutil.copy(
        sft / "checkpoints/step-00000002/adapter_model.safetensors",
        "given/adapter_model.safetensors",
    )
    Trainer(config=further("dpo", "given", run_dir="a", steps=2)).train(resume="")  # the same bits
    Trainer(config=further("sft", "given", run_dir="other", steps=1)).train()
    shutil.copy("other/final/adapter_model.safetensors", "given/adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="adapter: was 4 tensors"):
        Trainer(config=further("dpo", "given", run_dir="a", steps=3)).train(resume="")


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"lora": {"r": 4}}, "sft", r"model.lora: id='.*' is an adapter.*leave \[model.lora\] out"),
        ({}, "reward_model", "is an adapter of a language model.*trains a reward model; merge it"),
    ],
)
def test_what_does_not_go_with_it(change, kind, words, sft):
    table = further(kind, sft / "final")
    with pytest.raises(ConfigError, match=words):
        config_of(table | {"model": table["model"] | change}, "run.toml", "runs/a")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "names no base model; write its folder"),
        ([], "names no base model"),
        ({"base_model_name_or_path": "given"}, "its base model 'given' is an adapter itself"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_configuration(table, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("given").mkdir()
    Path("given/adapter_config.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=words):
        config_of(further("sft", "given"), "run.toml", "runs/a")


@pytest.mark.parametrize("base", ["another shape", "more layers", "no such"])
def test_a_base_model_that_it_does_not_fit(base, sft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sft / "final", "given")
    shape = {"another shape": "layers=1,hidden=48", "more layers": "layers=2,hidden=32"}
    if base in shape:
        model, tokenizer = load_model(f"tiny:llama:{shape[base]},heads=2,kv_heads=1", "float64")
        model.save_pretrained("base")
        tokenizer.save_pretrained("base")
    file = Path("given/adapter_config.json")
    table = json.loads(file.read_text()) | {"base_model_name_or_path": "base"}
    file.write_text(json.dumps(table))
    words = "'given' cannot be put on its base model 'base'" if base in shape else "model 'base'"
    with pytest.raises(ModelError, match=words):
        Trainer(config=further("sft", "given", run_dir="a", steps=1)).train()


def test_its_tokenizer_is_its_base_models_where_it_has_none(sft):
    ours, theirs = (load_tokenizer(sft / f) for f in ("checkpoints/step-00000002", "model"))
    assert ours.get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank_pattern": [1]}, "cannot be put on"),
        ({"peft_type": "NONE_SUCH"}, "cannot read its adapter_config.json"),
        ({"target_modules": ["nowhere"]}, "cannot be put on its base model.*nowhere"),
        (None, "cannot be put on its base model"),
    ],
)
def test_an_adapter_that_is_damaged(change, words, sft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sft / "final", "given")
    file, weights = Path("given/adapter_config.json"), Path("given/adapter_model.safetensors")
    if change is None:
        weights.write_bytes(weights.read_bytes()[:99])
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=words):
        Trainer(config=further("sft", "given", run_dir="a", steps=1)).train()
