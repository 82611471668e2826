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


@pytest.mark.parametrize(
    "reads", ["model.id=a/final", "data.path=a/questions.jsonl", "eval.path=./a/questions.jsonl"]
)
def test_what_a_run_reads_is_not_moved_aside(config_file, reads, capsys):
    assert train(config_file, "steps=1", "model.lora=none") == 0
    Path("a/questions.jsonl").write_bytes(Path("questions.jsonl").read_bytes())
    key, _, place = reads.partition("=")
    assert train(config_file, reads, "model.lora=none", "--overwrite") == 2
    assert f"aside, and {key}='{place}' lies in it; give another" in capsys.readouterr().out
    assert not Path("a.1").exists()


def test_an_error_breaks_between_words_on_a_terminal(config_file, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's word for a terminal
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["train", str(config_file), "stepz=1"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[-2:] == ["  stepz: no such key; did you mean", "  'steps'?"]
    assert all(len(line) <= 40 or " " not in line for line in told)


def test_either_go_on_or_anew(config_file, capsys):
    assert train(config_file, "--resume", "--overwrite") == 2
    assert "not allowed with" in capsys.readouterr().err


REWARDS = """
def two(a, b):
    return [1.0]


def of_level(completions, completion_ids, level):
    values = [sum(ids) % 5 if one is None else one for ids, one in zip(completion_ids, level)]
    return [float(value) for value in values]


def said(completions, rows):
    assert all(row["completions"] == "mine" for row in rows)
    return [float(len(completion)) for completion in completions]
"""


def test_a_reward_that_wants_what_it_does_not_get_is_refused_before_the_model(config_file, capsys):
    Path("mine.py").write_text(REWARDS)
    assert train(config_file, "reward.functions=['mine.py:two']", "reward.params={}") == 2
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["text"]
    assert "reward 'two' (defined at mine.py:2) wants 'a'; rewards are called by keyword, " in told
    assert told.endswith("prompts, completions, completion_ids, rows, trainer_state, answer")


def test_a_column_that_no_row_of_a_step_has_is_none(config_file):
    rows = [{"prompt": str(number)} for number in range(8)]
    rows[5]["level"] = 3.0
    Path("questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("mine.py").write_text(REWARDS)
    assert train(config_file, "reward.functions=['mine.py:of_level']", "reward.params={}") == 0


def test_a_column_that_rewards_do_not_get_by_its_name_is_told(config_file, capsys):
    Path("questions.jsonl").write_text('{"prompt": "a", "completions": "mine"}\n')
    Path("mine.py").write_text(REWARDS)
    words = ("steps=1", "reward.functions=['mine.py:said']", "reward.params={}")
    assert train(config_file, *words) == 0
    told = [json.loads(line).get("text", "") for line in capsys.readouterr().out.splitlines()]
    assert (
        "data: rewards get the run's own 'completions'; that column of the data is in their "
        "argument 'rows'" in told
    )


def test_one_step_shows_its_completions_once(config_file, capsys):
    assert main(["train", str(config_file), "run_dir=a", "steps=1"]) == 0
    assert capsys.readouterr().out.count("sample completions") == 1
    assert main(["train", str(config_file), "run_dir=b", "steps=3"]) == 0
    assert capsys.readouterr().out.count("sample completions") == 2


def test_too_few_questions(config_file, capsys):
    assert train(config_file, "eval.size=8") == 2
    assert "are too few for 8 held out and at least one to train on" in capsys.readouterr().out


def test_completions_beyond_the_models_positions_are_told_before_the_first_step(
    config_file, capsys
):
    assert train(config_file, "sampling.max_tokens=1024") == 2
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["text"]
    assert told.startswith("sampling.max_tokens=1024 behind the longest prompt, of ")
    longest = int(told.partition("longest prompt, of ")[2].split()[0])
    assert f"more than the model's 1024 positions; lower it to {1024 - longest}, or" in told


def test_a_right_answer_that_no_row_has_is_told_before_the_model(config_file, capsys):
    assert train(config_file, "reward={functions=['exact']}", "data.answer=solution") == 2
    told = capsys.readouterr().out
    assert "reward 'exact' compares with column 'solution', and the data have answer; name" in told
    assert "putting the run together" not in told
