"""``bench.learn``: its tasks are ones that ``fxrl train`` takes, and what it reads off a run."""

import json
import re
from pathlib import Path

import pytest

from bench import learn
from bench.lib import sums
from fxrl.rl.config.load import load_config
from fxrl.rl.train import main as train


@pytest.mark.parametrize("name", sums.TASKS)
def test_a_task_is_a_configuration_with_rows_to_hold_out(name, tmp_path):
    config = load_config(sums.write(name, tmp_path, "tiny:llama"))
    rows = [json.loads(line) for line in Path(config.data.path).read_text().splitlines()]
    assert len({json.dumps(row["prompt"]) for row in rows}) == len(rows)
    assert len(rows) > 2 * config.eval.size
    assert config.rollout.has_tools == (name == "tools")


def test_answers_are_right_and_wrong():
    for row in sums.one_digit():
        a, sign, b = row["prompt"].removeprefix("What is ").removesuffix("?").split()
        right = int(a) + int(f"{sign}{b}")
        assert int(row["chosen"]) == right
        assert 0 < abs(int(row["rejected"]) - right) <= 3


def test_only_what_the_calculator_said_counts():
    row = sums.four_digits()[0]
    right = row["answer"]
    small, large = sorted(map(int, re.findall(r"\d+", row["prompt"][0]["content"])))
    assert int(right) == large - small
    call = {"role": "assistant", "content": "", "tool_calls": []}
    heard = {"role": "tool", "content": right}
    said = {"role": "assistant", "content": f"It is {right}."}
    given = [[call, heard, said], [said], [call, {**heard, "content": "1"}, said], [call, heard]]
    assert sums.told(given, [right] * 4) == [1.0, 0.0, 0.0, 0.0]


LINES = [
    {"step": 1, "loss": 3.0, "eval/initial_loss": 5.0, "step_time": 1.0},
    {"step": 2, "loss": 1.0, "eval/loss": 0.5, "eval/rewards/accuracies": 0.75},
]


@pytest.mark.parametrize(
    ("name", "gain", "error"),
    [("sft", 4.5, None), ("dpo", 0.25, "gained less than 0.3"), ("tools", None, "gained less")],
)
def test_what_is_read_off_a_run(name, gain, error, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    row, curve = learn.collect(tmp_path, sums.TASKS[name])
    assert row.get("gain") == gain
    assert (error or "") in row.get("error", "")
    assert ("error" in row) == (error is not None)
    assert curve["loss"] == [(1, 3.0), (2, 1.0)]
    assert row["steps"] == 2


def test_a_file_is_judged_by_accuracy(tmp_path):
    lines = [
        {"step": 1, "reward": 0.1, "eval/initial_accuracy": 0.2, "eval/majority_baseline": 0.1},
        {"step": 2, "reward": 0.6, "eval/accuracy": 0.9, "eval/majority_baseline": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row, curve = learn.collect(tmp_path, None)
    assert row["gain"] == pytest.approx(0.7)
    assert row["majority_baseline"] == 0.1
    assert [point["step"] for point in curve["held_out"]] == [0, 2]
    assert "gain_asked" not in row


def test_a_run_that_fails_is_a_row(tmp_path, monkeypatch):
    """Also where it gained too little, and with overrides behind the options."""
    monkeypatch.setattr(learn, "_start", lambda *_: None)
    monkeypatch.setattr(learn, "_wait", lambda *_: "exit code 2, see log.txt")
    out = tmp_path / "out.json"
    given = ["sft", "--model", "tiny:llama", "--seeds", "0", "--run-dir", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", ["learn", *given, "--out", str(out), "steps=3"])
    assert learn.main() == 1
    [row] = json.loads(out.read_text())["rows"]
    assert row[-1] == "exit code 2, see log.txt"
    assert "overrides: steps=3" in out.read_text()


@pytest.mark.slow
def test_fp8_beside_bf16(tmp_path, monkeypatch):
    """Both curves of every seed, and what they say; in this process, where all is imported."""

    def start(args, run):
        run.folder.mkdir(parents=True)
        told = [f"run_dir={run.folder}", f"seed={run.seed}", *args.overrides, *run.overrides]
        return train(args.config, told)

    monkeypatch.setattr(learn, "_start", start)
    monkeypatch.setattr(learn, "_wait", lambda code, deadline: code)
    out = tmp_path / "out.json"
    given = ["grpo", "--model", "tiny:llama", "--seeds", "0,1", "--run-dir", str(tmp_path / "runs")]
    given += ["--against", "fp8: fxrl.precision=fp8 fxrl.compile_regions=false", "--out", str(out)]
    small = ["steps=1", "prompts_per_step=2", "eval.size=2", "fxrl.compile_regions=false"]
    small += ["sampling.num_generations=2", "reward.functions=['length']"]
    monkeypatch.setattr("sys.argv", ["learn", *given, *small])
    assert learn.main() == 1  # a model of random weights learns no sums
    record = json.loads(out.read_text())
    rows = [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]
    assert [row["error"] for row in rows] == ["gained less than 0.3"] * 4
    assert [row["steps"] for row in rows] == [1] * 4
    *plain, fp8, again = (row["drift_mean"] for row in rows)
    assert plain == [0, 0]
    assert min(fp8, again) > 1e-3, "the trainer multiplies in FP8, and the engine does not"
    assert list(record["curves"]) == ["as given", "fp8"]
    bf16, fp8 = record["curves"].values()
    for seed in ("0", "1"):
        assert bf16[seed]["reward"][0] == fp8[seed]["reward"][0], "the same data, by one policy"
    assert [(one["curve"], one["steps"]) for one in record["comparisons"]] == [
        ("reward", [1, 1]),
        ("loss", [1, 1]),
    ]
    assert sum("between seeds" in note for note in record["notes"]) == 2


def test_what_is_within_the_noise_of_seeds():
    given = {str(seed): {"reward": [], "loss": [(1, 9.0), (2, seed)]} for seed in (1, 2, 3)}
    other = {"0": {"reward": [], "loss": [(1, 9.0), (2, 2.1), (3, 50.0)]}}
    [one] = learn.compared({"as given": given, "x=1": other})
    assert (one["variant"], one["curve"], one["steps"]) == ("x=1", "loss", [1, 2])
    assert one["within"]
    # Of three seeds with a standard deviation of 1, 95 % of means of three more lie within 3.51.
    far = learn.within_noise([1.0, 2.0, 3.0], [5.6, 5.6, 5.6])
    assert far["noise"] == pytest.approx(4.303 * (2 / 3) ** 0.5)
    assert not far["within"]
    assert learn.within_noise([1.0, 2.0, 3.0], [5.5, 5.5, 5.5])["within"]


def test_a_comparison_takes_seeds(monkeypatch, capsys):
    given = ["learn", "sft", "--against", "fxrl.precision=fp8", "--seeds", "0"]
    monkeypatch.setattr("sys.argv", given)
    with pytest.raises(SystemExit, match="2"):
        learn.main()
    assert "noise between seeds, of which it takes two" in capsys.readouterr().err


def test_former_runs_are_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "sft_seed1").mkdir()
    monkeypatch.setattr("sys.argv", ["learn", "sft", "--run-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        learn.main()
    told = capsys.readouterr().err
    assert f"there are runs already: {tmp_path}/sft_seed1; remove them, or give" in told
    assert [path.name for path in tmp_path.iterdir()] == ["sft_seed1"]
