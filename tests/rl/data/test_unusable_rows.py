"""Rows that give no prompt: named, or left out, before a model is loaded."""

import json
from pathlib import Path

import pytest

from fxrl.rl.loop import models
from fxrl.rl.train import main

GOOD = [{"prompt": f"count to {i}", "answer": str(i)} for i in range(6)]
CASES = {
    "empty": ({"prompt": ""}, "column 'prompt' is empty"),
    "blank": ({"prompt": " \n"}, "column 'prompt' is empty"),
    "none": ({"prompt": None}, "column 'prompt' is None"),
    "missing": ({"answer": "1"}, "it has no column 'prompt'"),
    "no messages": ({"prompt": []}, "column 'prompt' is empty"),
    "too long": ({"prompt": "count " * 100}, "tokens, outside 1..200"),
}


def run(config_file, rows, *options):
    text = "\n".join(json.dumps(row) for row in rows)
    (config_file.parent / "questions.jsonl").write_text(text)
    options = ["run_dir=a", "data.max_prompt_tokens=200", "steps=1", *options]
    return main(str(config_file), options, json=True)


@pytest.mark.parametrize("name", CASES)
def test_it_is_named_before_the_model(config_file, capsys, monkeypatch, name):
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    row, reason = CASES[name]
    assert run(config_file, [*GOOD[:3], row, *GOOD[3:]]) == 2
    told = capsys.readouterr().out
    assert "1 of 7 rows are unusable" in told
    assert "questions.jsonl:4: " in told
    assert reason in told
    assert "add data.unusable_rows=skip to the command" in told
    assert not Path("a").exists()


def test_they_are_left_out_and_counted(config_file, capsys):
    rows = [row for row, _ in CASES.values()]
    options = ("data.unusable_rows=skip", "eval.size=2", "epochs=1", "tensorboard=false")
    config_file.write_text(config_file.read_text().replace("steps = 4\n", ""))
    assert run(config_file, [*rows, *GOOD], *options) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = "\n".join(event["text"] for event in events if event["event"] == "message")
    assert "5 of 12 rows are unusable and left out:\n  questions.jsonl:1: " in told
    assert "1 of 5 rows are unusable and left out:\n  questions.jsonl:6: the prompt has " in told
    samples = Path("a/completions.jsonl").read_text()
    assert "count count" not in samples


def test_all_of_them(config_file, capsys):
    assert run(config_file, [{"prompt": ""}] * 7, "data.unusable_rows=skip") == 2
    told = capsys.readouterr().out
    assert "no other is left" in told
    assert "and 2 more" in told
