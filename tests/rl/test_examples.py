"""The examples: each is a valid configuration, and the tiny one runs as a person would run it."""

import importlib
import json
import runpy
from pathlib import Path

import pytest

import fxrl
from fxrl.rl.callbacks import Control
from fxrl.rl.config.load import load_config
from fxrl.rl.train import main
from tests.rl.metrics import numbers

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_every_example_is_valid(file):
    config = load_config(file)
    assert config.run_dir == f"runs/{file.stem}"


def test_examples_of_tiny_models_rewrite_however_little_it_saves():
    """Otherwise all that they would show is a warning that it is too little."""
    configs = {file.name: load_config(file) for file in EXAMPLES.glob("*.toml")}
    tiny = {name: one for name, one in configs.items() if one.model.id.startswith("tiny:")}
    assert len(tiny) >= 7
    assert {name: one.fxrl.min_saved_bytes for name, one in tiny.items()} == dict.fromkeys(tiny, 0)
    for name in ("trainer", "tools"):
        table = runpy.run_path(str(EXAMPLES / f"{name}.py"))["CONFIG"]
        assert table["fxrl"] == {"min_saved_bytes": 0}


def test_the_tiny_example_is_optimized_and_resumes_exactly(tmp_path, capsys):
    """The real thing: ``fxrl.optimize``, captured anew for the resumed run, and every number of
    its step the same."""
    pytest.importorskip("reasoning_gym")
    example = str(EXAMPLES / "tiny.toml")
    options = ["save_every=2", "tensorboard=false", "model.id=tiny:qwen3:layers=1", "loss.beta=0"]
    options += ["steps=3"]
    assert main(example, [*options, f"run_dir={tmp_path}/whole"], json=True) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    applied = [e["pass_name"] for e in events if e["event"] == "remark" and e["kind"] == "applied"]
    assert "fuse-linear-logprob" in applied
    second = f"{tmp_path}/whole/checkpoints/step-00000002"
    assert main(example, [*options, f"run_dir={tmp_path}/rest"], resume=second, json=True) == 0
    assert [line["step"] for line in numbers(tmp_path / "rest")] == [3]
    assert numbers(tmp_path / "rest") == numbers(tmp_path / "whole")[2:]


def test_the_python_example(tmp_path, monkeypatch):
    """As it stands but for the compiler, which the other one has."""
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLES / "trainer.py"))
    quick = {"steps": 2, "optimize": False, "tensorboard": False}
    assert example["main"](example["CONFIG"] | quick).summary["steps"] == 2
    assert example["main"](example["CONFIG"] | quick).summary["steps"] == 2
    assert (tmp_path / "runs" / "trainer.1" / "final").is_dir()
    stop = example["GoodEnough"](0.0)
    control = Control()
    stop.on_step_end(None, None, control, logs={"reward": 0.1})
    assert control.should_training_stop


LOOPS = {"plain_pytorch": {"steps": 4}, "accelerate_loop": {}, "hf_trainer": {"steps": 4}}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_with_one_changed_line(name, tmp_path, monkeypatch):
    """It trains, and the head is rewritten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    main = importlib.import_module(name).main
    config = fxrl.Config(min_saved_bytes=0, compile_regions=False, on_miss="error")
    losses, step = main(**LOOPS[name], config=config)
    assert losses[-1] < losses[0]
    assert "fuse-linear-logprob" in {r.pass_name for r in step.report.of_kind("applied")}


def test_the_callback_of_the_python_example():
    """A step without any reward is no reason to stop, and another's wish to stop stands."""
    stop = runpy.run_path(str(EXAMPLES / "trainer.py"))["GoodEnough"](0.85).on_step_end
    asked = []
    for wish, rewards in ((False, (None, 0.5, 0.9)), (True, (0.5,))):
        control = Control(should_training_stop=wish)
        for reward in rewards:
            stop(None, None, control, logs={"reward": reward})
            asked.append(control.should_training_stop)
    assert asked == [False, False, True, True]


def test_the_tools_example(tmp_path, monkeypatch):
    """Shorter, and without the compiler: the tool is called, and its words are context."""
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLES / "tools.py"))
    quick = {"steps": 1, "optimize": False, "tensorboard": False, "log_completions": 32}
    sampling = {"sampling": {"max_tokens": 100, "num_generations": 8}}
    example["main"](example["CONFIG"] | quick | sampling, shown=50)
    [line] = numbers(tmp_path / "runs" / "tools")
    assert line["tools/call_frequency"] > 0
    lines = (tmp_path / "runs" / "tools" / "completions.jsonl").read_text().splitlines()
    called = [turns for text in lines if len(turns := json.loads(text)["turns"]) > 1]
    assert [turn["role"] for turn in called[0][:2]] == ["assistant", "tool"]
    page = (tmp_path / "runs" / "tools" / "run.html").read_text()
    assert '<p class="dim">tool</p>' in page
