"""``fxrl.rl.Trainer``: the same run as the command's, and what callbacks hear and may ask."""

import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM

from fxrl.errors import ConfigError
from fxrl.models import load_model, tiny_tokenizer
from fxrl.rl import Callback, Trainer
from fxrl.rl.callbacks import EVENTS
from fxrl.rl.config.load import load_config
from fxrl.rl.errors import CallbackError, CheckpointError
from fxrl.rl.train import main
from tests.rl.metrics import numbers

TINY = "tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1"
ROWS = [{"prompt": f"count to {i}", "answer": f"{i % 3}"} for i in range(8)]


def tiny_model():
    return load_model(TINY, "float32")[0]


def even(completions, completion_ids, **columns):
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]


@pytest.fixture
def tables(config_file):
    """The fixture's file without what Python gives."""
    table = tomllib.loads(config_file.read_text())
    del table["data"], table["reward"]["functions"], table["model"]["id"]
    return table | {"save_every": 0}


def test_it_is_the_run_of_the_command(config_file, tables):
    assert main(str(config_file), ["run_dir=cli"], json=True) == 0
    trainer = Trainer(TINY, ["length", even], iter(ROWS), tables | {"run_dir": "python"})
    result = trainer.train()
    assert result.exit_code == 0
    assert result.summary["steps"] == 4
    assert numbers("python") == numbers("cli")
    assert Path("python/final/adapter_model.safetensors").is_file()
    assert json.loads(Path("python/config.json").read_text())["reward"]["functions"][1].endswith(
        "test_trainer:even"
    )


def test_a_model_itself_and_a_configuration_object(config_file, tables):
    """The model is trained in place; a second trainer goes on where the first ended."""
    assert main(str(config_file), ["run_dir=cli"], json=True) == 0
    config = dataclasses.replace(load_config(config_file), run_dir="python", steps=2)
    for steps, resume in ((2, None), (4, "")):
        model, tokenizer = load_model(TINY, "float32", seed=config.seed)
        before = {name: p.clone() for name, p in model.named_parameters()}
        told = dataclasses.replace(config, steps=steps)
        trainer = Trainer(model, None, ROWS, told, tokenizer=tokenizer)
        result = trainer.train(resume=resume)
    assert numbers("python") == numbers("cli")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    assert any("lora" in name for name, _ in result.model.named_parameters())
    # No folder or hub has this model, so the run keeps it for those who load the adapter.
    loaded = AutoPeftModelForCausalLM.from_pretrained("python/final").state_dict()
    assert all(torch.equal(loaded[n], p) for n, p in result.model.state_dict().items())


def test_full_fine_tuning_of_a_model_itself(tables):
    model, tokenizer = load_model(TINY, "float32")
    before = model.lm_head.weight.clone()
    del tables["model"]["lora"]
    Trainer(model, even, ROWS, tables | {"steps": 1, "reward": {}}, tokenizer=tokenizer).train()
    assert not torch.equal(model.lm_head.weight, before)
    assert Path("runs/python/final/model.safetensors").is_file()


def test_other_sources_of_rows(config_file, tables):
    datasets = pytest.importorskip("datasets")
    config = load_config(config_file, ["data.size=5"])
    for rows in (datasets.Dataset.from_list(ROWS), (dict(row) for row in ROWS)):
        trainer = Trainer(data=rows, config=config)
        assert list(trainer.config.data.rows) == ROWS[:5]
        assert trainer.config.data.path is None


def test_other_rows_go_on_where_that_is_asked_for(tables):
    tables |= {"steps": 1, "reward": {}, "eval": {"rows": ROWS[:2]}}
    Trainer(TINY, even, ROWS, tables).train()
    others = [*reversed(ROWS)]
    with pytest.raises(CheckpointError, match=r"data: was .*\n.*--accept-changes"):
        Trainer(TINY, even, others, tables | {"steps": 2}).train(resume="")
    again = Trainer(TINY, even, others, tables | {"steps": 2})
    assert again.train(resume="", accept_changes=True).summary["steps"] == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"train": ROWS}}, "of a DatasetDict, one split"),
        ({"config": {"stepz": 1}}, "did you mean 'steps'?"),
        ({"rewards": "lenth"}, "did you mean 'length'?"),
        ({"model": torch.nn.Linear(1, 1)}, "no save_pretrained"),
        ({"callbacks": [Callback]}, "is a class; give Callback()"),
        ({"callbacks": [object()]}, "no method for any event"),
        ({"config": {"steps": 1, "epochs": 1}}, "give one of them"),
        (
            {"model": tiny_model(), "tokenizer": tiny_tokenizer(), "config": {"engine": "vllm"}},
            "loads the weights itself",
        ),
        ({"model": tiny_model()}, "give its tokenizer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments(config_file, change, words):
    given = {"model": TINY, "rewards": "length", "data": ROWS, "config": {}} | change
    with pytest.raises(ConfigError) as caught:
        Trainer(**given)
    assert words in str(caught.value)


def test_a_misspelled_event():
    class Wrong(Callback):
        def on_steps_end(self, config, state, control, **kwargs): ...

    with pytest.raises(ConfigError, match="did you mean 'on_step_end'"):
        Trainer(TINY, "length", ROWS, {}, callbacks=[Wrong()])


class Recorder:
    """Writes down every event; no subclass, as nothing asks for one."""

    def __init__(self, **asks):
        self.asks, self.events, self.given = asks, [], {}

    def __getattr__(self, name):
        if name not in EVENTS:
            raise AttributeError(name)

        def hear(config, state, control, **given):
            self.events.append((name, state.global_step))
            self.given[name] = given
            for what in self.asks.get(f"{name}_{state.global_step}", ()):
                setattr(control, f"should_{what}", True)

        return hear

    def __dir__(self):
        return EVENTS


def names(recorder, step):
    return [name for name, number in recorder.events if number == step]


def test_events_in_their_order(config_file, tables):
    recorder = Recorder()
    tables |= {"steps": 2, "eval": {"size": 2}}
    Trainer(TINY, even, ROWS, tables | {"reward": {}}, callbacks=[recorder]).train()
    start = ["on_train_begin", "on_evaluate", "on_log", "on_step_begin"]
    assert names(recorder, 0) == start
    made = ["on_rollout_end", "on_step_end", "on_log"]
    assert names(recorder, 1) == [*made, "on_step_begin"]
    end = ["on_evaluate", "on_log", "on_save", "on_train_end"]
    assert names(recorder, 2) == [*made[:2], *end]
    given = recorder.given
    assert len(given["on_rollout_end"]["rollout"].drawn) == 8
    assert given["on_log"]["logs"]["step"] == 2
    assert given["on_save"]["path"].is_dir()
    assert given["on_train_end"]["final"] == Path("runs/python/final")
    assert {"model", "tokenizer"} <= given["on_step_begin"].keys()


def test_what_a_callback_asks_for(config_file, tables):
    recorder = Recorder(
        on_step_end_1=["save"], on_step_end_2=["evaluate"], on_rollout_end_3=["training_stop"]
    )
    tables |= {"eval": {"size": 2}, "reward": {}}
    trainer = Trainer(TINY, even, ROWS, tables, callbacks=[recorder])
    result = trainer.train()
    assert (result.exit_code, result.summary["steps"]) == (0, 3)
    found = numbers("runs/python")
    assert ["eval/accuracy" in line for line in found] == [False, True, True]
    assert [number for name, number in recorder.events if name == "on_save"] == [1, 3]
    assert Path("runs/python/final").is_dir()
    trainer.callbacks = ()
    assert trainer.train(resume="").summary["steps"] == 4
    assert ["eval/accuracy" in line for line in numbers("runs/python")] == [False, True, True, True]


def test_a_stop_before_the_first_step(config_file, tables):
    recorder = Recorder(on_train_begin_0=["training_stop"])
    result = Trainer(TINY, even, ROWS, tables | {"reward": {}}, callbacks=[recorder]).train()
    assert (result.exit_code, result.summary["steps"]) == (0, 0)
    assert names(recorder, 0) == ["on_train_begin", "on_train_end"]
    assert Path("runs/python/final/adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("event", "saved"), [("on_rollout_end", 1), ("on_step_end", 2), ("on_evaluate", 2)]
)
def test_a_callback_that_raises(config_file, tables, event, saved):
    """Named, with the state saved, and the others hear the end."""

    def fail(config, state, control, **kwargs):
        if state.global_step == 2:
            raise ValueError("no more")

    wrong, recorder = type("Wrong", (), {event: staticmethod(fail)})(), Recorder()
    tables |= {"eval": {"size": 2, "every": 2}, "reward": {}}
    with pytest.raises(
        CallbackError,
        match=rf"callback Wrong\.{event} raised .*no more.* at .*test_trainer\.py:\d+",
    ):
        Trainer(TINY, even, ROWS, tables, callbacks=[wrong, recorder]).train()
    assert [path.name for path in Path("runs/python/checkpoints").glob("step-*")] == [
        f"step-{saved:08d}"
    ]
    assert isinstance(recorder.given["on_train_end"]["error"], CallbackError)
    assert recorder.given["on_train_end"]["final"] is None
    result = Trainer(TINY, even, ROWS, tables).train(resume="")
    assert result.summary["steps"] == 4
    assert [line["step"] for line in numbers("runs/python")] == [1, 2, 3, 4]


def test_importing_it_is_light():
    code = (
        "import sys, fxrl, fxrl.rl; print({'torch', 'transformers', 'rich'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize("adapter", [None, {"r": 4}], ids=["all weights", "adapter"])
def test_a_model_itself_is_trained_once(tables, adapter):
    """Neither its weights nor its modules are those that the run began with."""
    model, tokenizer = load_model(TINY, "float32")
    tables |= {"steps": 1, "reward": {}, "model": {"lora": adapter}}
    trainer = Trainer(model, even, ROWS, tables, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="holds no run"):
        trainer.train(resume="")
    trainer.train()  # nothing was trained by the call that was refused
    for resume in ("", None):
        with pytest.raises(ConfigError, match="trained in place by an earlier call; load it anew"):
            trainer.train(resume=resume, overwrite=resume is None)
