"""How long a run is, and what becomes of a run that is already there."""

import json
from pathlib import Path

import pytest

from fxrl.cli import main


def train(file, *words):
    return main(["train", str(file), "run_dir=a", "--json", *words])


def lines(run_dir):
    return [json.loads(text) for text in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def test_epochs_are_passes_over_the_questions(config_file, capsys):
    """Eight questions, one of them held out, two a step."""
    assert train(config_file, "epochs=0.5", "eval.size=1") == 0
    assert "epochs=0.5: 2 steps of 2 prompts over 7 questions" in capsys.readouterr().out
    assert len(lines("a")) == 2
    assert train(config_file, "epochs=1", "eval.size=1", "--resume") == 0
    found = lines("a")
    assert len(found) == 4
    assert found[-1]["epoch"] == 8 / 7


def test_overwrite_moves_the_run_aside(config_file, capsys):
    assert train(config_file, "steps=1") == 0
    first = Path("a/metrics.jsonl").read_text()
    assert train(config_file, "steps=1", "seed=1") == 2
    assert "--overwrite" in capsys.readouterr().out
    assert train(config_file, "steps=1", "seed=1", "--overwrite") == 0
    assert "the run that it held is in a.1" in capsys.readouterr().out
    second = Path("a/metrics.jsonl").read_text()
    assert train(config_file, "steps=1", "seed=2", "--overwrite") == 0
    assert Path("a.1/metrics.jsonl").read_text() == first
    assert Path("a.2/metrics.jsonl").read_text() == second
    assert Path("a.1/final/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("words", [("stepz=1",), ("data.max_prompt_tokens=5",)])
def test_what_is_wrong_moves_nothing(config_file, words):
    assert train(config_file, "steps=1") == 0
    assert train(config_file, *words, "--overwrite") == 2
    assert not Path("a.1").exists()
    assert len(lines("a")) == 1


def test_either_go_on_or_anew(config_file, capsys):
    assert train(config_file, "--resume", "--overwrite") == 2
    assert "not allowed with" in capsys.readouterr().err
