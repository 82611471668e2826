"""The front end: help, usage errors, exit codes, how errors look."""

import atexit
import gc
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fxrl.cli import commands, main, parse, show
from fxrl.errors import ConfigError, FxrlError

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "explain", "plan", "dump", "verify", "train", "report", "report-run", "bench", "doctor",
    "fetch-model",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_json(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"fxrl {command}" in text.partition("examples:")[2]
    assert max(map(len, text.splitlines())) <= 80  # a longer one breaks within a word
    assert "--json" in text


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"    {command}" in text for command in COMMANDS)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["optimise"], "invalid choice: 'optimise'"),
        (["doctr"], "did you mean 'doctor'?"),
        (["explain", "tiny:qwen3"], "--loss"),
        (["explain", "tiny:qwen3", "--loss", "grpo", "--batch", "0"], "0 is below 1"),
        (["explain", "tiny:qwen3", "--loss", "grpo", "--batch", "two"], "'two' is no whole number"),
        (["verify", "tiny:qwen3", "--loss", "grpo", "--dtype", "int8"], "int8"),
        (["verify", "tiny:qwen3", "--loss", "grpo", "--dtype", "bf61"], "did you mean 'bf16'?"),
        (["dump", "tiny:qwen3", "--loss", "grpo"], "--out"),
        (["train"], "CONFIG.toml"),
        (["train", "a.toml", "--jsn"], "unrecognized arguments: --jsn"),
        (["doctor", "a=1"], "unrecognized arguments: a=1"),
    ],
)
def test_bad_usage_is_2(argv, says, capsys):
    assert main(argv) == 2
    assert says in capsys.readouterr().err


def test_overrides_on_both_sides_of_options():
    args = parse(["train", "a.toml", "steps=2", "--json", "seed=3"])
    assert args.overrides == ["steps=2", "seed=3"]
    assert args.json


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [(["--help"], 0, "usage: fxrl"), (["train", "absent.toml"], 2, "absent.toml: cannot be read")],
)
def test_what_is_instant_and_torch_free(argv, code, says):
    """``fxrl --help`` and a mistyped path must not wait for torch; the same for ``import fxrl``."""
    run = f"import sys, fxrl.cli; code = fxrl.cli.main({argv}); print(code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True)
    assert says in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{code} False"


def test_errors_break_between_words_on_a_terminal(monkeypatch, capsys):
    text = "--sharded is of frozen weights, and without an adapter all are trained; add --lora RANK"
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    show.error(FxrlError(text), as_json=False)
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().err).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 60
    assert " ".join(lines) == f"error: {text}"


@pytest.mark.parametrize(("error", "code"), [(ConfigError, 2), (FxrlError, 1)])
def test_errors_are_one_line(error, code, monkeypatch, capsys):
    def fail(args):
        raise error("steps=[0] is below 1; use 1")  # brackets are no rich markup

    monkeypatch.setattr("fxrl.cli.commands.doctor", fail)
    assert main(["doctor", "--json"]) == code
    printed = capsys.readouterr()
    assert printed.err == "error: steps=[0] is below 1; use 1\n"
    assert json.loads(printed.out)["error"] == error.__name__
    with pytest.raises(error):
        main(["doctor", "--traceback"])


def test_ctrl_c_is_130(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("fxrl.cli.commands.doctor", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"fxrl": "fxrl.cli:main"}
    done = subprocess.run(
        [sys.executable, "-m", "fxrl", "--version"], cwd=ROOT, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == f"fxrl {project['version']}"


def test_train_hands_everything_over(monkeypatch):
    from fxrl.rl import train

    seen = {}

    def fake(config_path, overrides, **options):
        seen.update(config=str(config_path), overrides=list(overrides), **options)
        return 1

    monkeypatch.setattr(train, "main", fake)
    argv = ["train", "a.toml", "steps=2", "--resume", "runs/a", "--json"]
    assert main(argv) == 1
    assert seen == {
        "config": "a.toml",
        "overrides": ["steps=2"],
        "resume": "runs/a",
        "accept_changes": False,
        "json": True,
        "overwrite": False,
        "traceback": False,
    }


def test_resume_does_not_swallow_an_override():
    args = parse(["train", "a.toml", "--resume", "steps=2", "run_dir=runs/a"])
    assert args.resume == ""
    assert sorted(args.overrides) == ["run_dir=runs/a", "steps=2"]
    assert parse(["train", "a.toml"]).resume is None
    assert parse(["train", "a.toml", "--resume", "runs/b"]).resume == "runs/b"


def test_bad_training_config_is_2(tmp_path, capsys):
    (tmp_path / "a.toml").write_text("stepps = 3")
    assert main(["train", str(tmp_path / "a.toml")]) == 2
    assert "did you mean 'steps'?" in capsys.readouterr().err


LOSSES = """import torch
def misspelt(model, batch):
    return batch["ids"].sumx()
def too_wide(model, batch):
    logps = torch.log_softmax(model(input_ids=batch["input_ids"]).logits, -1).amax(-1)
    return (logps * batch["completion_mask"]).sum()
def of_no_arguments():
    pass
"""


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (
            "explain tiny:qwen3 --loss own.py:misspelt",
            1,
            "KeyError('ids') at own.py:3; --traceback",
        ),
        ("verify tiny:qwen3 --loss own.py:misspelt", 1, "kl, old_logps, ref_logps; --make-batch"),
        ("explain tiny:qwen3 --loss own.py:too_wide", 1, "broadcastable to [4, 1024]"),
        ("plan tiny:qwen3 --loss own.py:misspelt", 1, "KeyError('ids') at own.py:3"),
        ("dump tiny:qwen3 --loss own.py:misspelt --out d", 1, "KeyError('ids') at own.py:3"),
        ("explain tiny:qwen3 --loss grpo --make-batch own.py:of_no_arguments", 1, "takes 0 posit"),
        ("explain tiny:qwen3 --loss half.py:f", 2, "failed: SyntaxError: invalid syntax (half.py,"),
        ("explain own.py --loss grpo", 1, "model 'own.py' is a file, no config.json"),
        ("report tiny:qwen3 --loss grpo --out /proc/a.zip", 2, "/proc/a.zip cannot be written: No"),
        ("plan diff own.py half.py", 1, "own.py: the plan is no JSON"),
        ("plan diff none own.py", 2, "none cannot be read: No such file"),
        ("plan tiny:qwen3 --target h9", 2, "--target 'h9' is unknown"),
        (
            "fetch-model --cache-dir /proc/a",
            1,
            "/proc/a could not be written: No such file or direc",
        ),
        ("train", 2, "the following arguments are required: CONFIG.toml\n"),
    ],
)
def test_what_goes_wrong_is_told_in_words(argv, code, says, tmp_path, monkeypatch, capsys):
    """Without a traceback, a guess at the disk, or a cure that is none."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(LOSSES)
    Path("half.py").write_text("def f(:\n")
    assert main(argv.split()) == code
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told
    assert "fake_tensor.py" not in told
    assert "free some space" not in told
    assert told.count("module:function") == 0


def test_a_process_ends_with_its_last_word():
    """What is left is not freed one by one, and what bindings say of that is not heard."""
    run = (
        "import atexit, gc, os, sys\n"
        "def after():\n"
        "    print(gc.get_freeze_count() > 0, flush=True); os.write(2, b'leaked')\n"
        "atexit.register(after); sys.argv = ['fxrl', '--help']\n"
        "from fxrl.cli import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.parametrize(
    ("words", "collects"),
    [("plan M", False), ("explain M --loss grpo", False), ("train M.toml", True)],
)
def test_a_command_on_fakes_collects_no_garbage(words, collects, monkeypatch):
    seen = []
    command, *_ = words.split()
    monkeypatch.setattr(commands, command, lambda args: seen.append(gc.isenabled()) or 0)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    monkeypatch.setattr(sys, "argv", ["fxrl", *words.split()])
    assert [main(words.split()), main()] == [0, 0]
    gc.enable()
    assert seen == [True, collects]  # a caller's own process is left alone
