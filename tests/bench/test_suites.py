"""``step``, ``rl_step``, ``rollout``, ``generate``, ``fp8_rollouts`` on a CPU; what they refuse."""

import json

import pytest
import torch

from bench import fp8_rollouts, generate, region_flags, rl_step, rollout, step, update_step


def rows_of(file):
    record = json.loads(file.read_text())
    return [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]


@pytest.mark.slow
def test_step_fits_a_cpu(tmp_path):
    out = tmp_path / "step.json"
    arguments = [
        "--device",
        "cpu",
        "--variants",
        "eager,fxrl",
        "--repeats",
        "1",
        "--ref-seeds",
        "0",
    ]
    assert step.main([*arguments, "--out", str(out)]) == 0
    eager, ours = rows_of(out)
    assert eager["tokens"] == ours["tokens"] == 128
    assert ours["loss"] == pytest.approx(eager["loss"], abs=2e-2)
    assert min(eager["update_ms"], ours["update_ms"]) > 0


def test_step_fails_if_fxrl_fails(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(update_step, "make_step", broken)
    given = ["--device", "cpu", "--ref-seeds", "0", "--out", str(tmp_path / "step.json")]
    assert step.main([*given, "--variants", "eager"]) == 0
    assert step.main([*given, "--variants", "eager,fxrl"]) == 1
    assert rows_of(tmp_path / "step.json")[1]["error"] == "RuntimeError: planted"


def test_region_flags_times_both_halves(tmp_path, monkeypatch):
    out = tmp_path / "flags.json"
    given = "--device cpu --shape tiny --bodies mlp --tokens 64 --attention any --flags default"
    words = ["region_flags", *given.split(), "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    region_flags.main()
    (row,) = rows_of(out)
    assert min(row["forward_ms"], row["vjp_ms"]) > 0


def test_generate(tmp_path, capsys):
    out = tmp_path / "generate.json"
    arguments = ["--prompts", "2", "--samples", "3", "--tokens", "5", "--repeats", "1"]
    assert generate.main([*arguments, "--device", "cpu", "--json", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    ours, hugging_face = rows_of(out)
    for row in (ours, hugging_face):
        assert row["error"] is None
        assert row["sequences"] == 6
        assert row["tokens_per_s"] == pytest.approx(30 / row["s"], rel=1e-4)


def test_generate_counts_what_was_made(tmp_path, monkeypatch):
    variants = {"fxrl TorchEngine": lambda *given: lambda: 7}
    monkeypatch.setattr(generate, "_VARIANTS", variants)
    out = tmp_path / "generate.json"
    given = ["--prompts", "2", "--samples", "3", "--tokens", "5", "--device", "cpu"]
    assert generate.main([*given, "--out", str(out)]) == 1
    assert rows_of(out)[0]["error"] == "RuntimeError: made 7 tokens, not 30"
    with pytest.raises(SystemExit) as stop:
        generate.main(["--tokens", "0"])
    assert stop.value.code == 2


def test_rollout_picks_what_the_machine_can_do(monkeypatch, capsys):
    ran = []

    class Done:
        returncode = 5

    monkeypatch.setattr(rollout.subprocess, "run", lambda words, check: ran.append(words) or Done)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rollout.main(["--tokens", "3"]) == 5
    assert ran[-1][1:] == ["-m", "bench.generate", "--tokens", "3"]
    assert rollout.main(["step"]) == 2
    assert "step needs a CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rollout.importlib.util, "find_spec", lambda name: None)
    assert rollout.main(["kernels"]) == 5
    assert rollout.main(["agreement"]) == 2
    assert "pip install -e '.[vllm]'" in capsys.readouterr().err
    assert rollout.main(["agreement", "--help"]) == 5  # help needs nothing
    monkeypatch.setattr(rollout.importlib.util, "find_spec", lambda name: object())
    assert rollout.main([]) == 5
    assert ran[-1][1:] == ["-m", "bench.rl_step"]
    assert rollout.main(["speed"]) == 2
    assert "no part 'speed'; there are generate" in capsys.readouterr().err


def test_a_run_that_holds_its_weights_in_four_bits(tmp_path, monkeypatch):
    """In this process, where all is imported."""

    def measured(words, **_):
        monkeypatch.setattr("sys.argv", words[1:])
        return rl_step._fxrl(rl_step._arguments())

    monkeypatch.setattr(rl_step, "measured", measured)
    out, given = tmp_path / "rl.json", ["--shape", "tiny", "--length", "4", "--steps", "2"]
    given += ["--variants", "fxrl-held-nf4", "--work", str(tmp_path), "--override"]
    given += ["optimize=false", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["rl_step", *given])
    assert rl_step.main() == 0
    [row] = rows_of(out)
    assert row["error"] is None
    assert 0 < row["generate_s"] < row["step_s"]
    config = next(tmp_path.glob("fxrl-*/config.json")).read_text()
    assert "nf4" in config


def test_fp8_rollouts_tell_what_is_gained(tmp_path, monkeypatch):
    """Beside bf16 of as many sequences; what fails, fails alone."""
    speeds = {"bf16": (100.0, 300.0), "fp8": (150.0, 360.0)}

    def measured(command, *, limit_s, each):
        variant = command[command.index("--worker") + 1]
        for count, speed in zip((32, 256), speeds.get(variant, ()), strict=False):
            each({"sequences": count, "tokens_per_s": speed, "step_ms": count / speed * 1e3})
        return {} if variant in speeds else {"error": "exit code 1: no room"}

    monkeypatch.setattr(fp8_rollouts, "measured", measured)
    out = tmp_path / "rollouts.json"
    given = ["--variants", "bf16,fp8,fp8-kv", "--layers", "1", "--work", str(tmp_path / "work")]
    monkeypatch.setattr("sys.argv", ["fp8_rollouts", *given, "--out", str(out)])
    assert fp8_rollouts.main() == 1
    assert [row["over_bf16"] for row in rows_of(out)] == [1, 1, 1.5, 1.2, None]
    assert rows_of(out)[-1]["error"] == "exit code 1: no room"
    assert json.loads((tmp_path / "work" / "config.json").read_text())["num_hidden_layers"] == 1
