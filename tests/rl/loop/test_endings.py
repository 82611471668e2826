"""Nothing ends a run silently: its state is saved, one message says why, the code is not 0."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from fxrl.rl.loop.trainer import TrainingLoop
from fxrl.rl.train import main
from tests.rl.metrics import numbers

BEHAVE = """
import asyncio, os, signal, sys, torch
from pathlib import Path
class Broken(Exception):
    def __repr__(self): return 1 / 0
    __str__ = __repr__
def even(completions, completion_ids, prompts, rows, trainer_state, **columns):
    values = [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
    if trainer_state.global_step == 3 and not Path("well").exists():
        {behaviour}  # line 10
    return values
"""
FUNCTIONS = "reward.functions=['length', 'behaving.py:even']"


@pytest.fixture
def behaving(config_file):
    """Trains with a reward that does ``behaviour`` in step 3, until there is a file ``well``."""

    def train(behaviour, *overrides, run_dir="out", resume=None, json=True, **options):
        Path("behaving.py").write_text(BEHAVE.replace("{behaviour}", behaviour))
        extra = [f"run_dir={run_dir}", FUNCTIONS, "save_every=0", *overrides]
        return main(str(config_file), extra, resume=resume, json=json, **options)

    return train


def events(capsys, kind):
    told = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    return [event["text"] for event in told if event["event"] == kind]


@pytest.mark.parametrize(
    ("behaviour", "code", "says", "how"),
    [
        pytest.param(
            "sys.exit(0)",
            1,
            "reward 'even' raised SystemExit(0) at behaving.py:10",
            (),
            marks=pytest.mark.slow,
        ),
        ("sys.exit(3)", 1, "raised SystemExit(3) at behaving.py:10", ("reward.timeout_s=20",)),
        ("os.strerror('x')", 1, "TypeError(", ("reward.per_group=true",)),
        pytest.param(
            "raise asyncio.CancelledError",
            1,
            "CancelledError() at behaving.py:10",
            (),
            marks=pytest.mark.slow,
        ),
        ("raise Broken", 1, "<Broken, whose repr raises ZeroDivisionError> at behaving.py:10", ()),
        ("raise KeyboardInterrupt", 130, "interrupted\nstep 3 failed", ()),
        ("values[0] = 10**5000", 1, "for completion 0; return a finite float", ()),
        pytest.param(
            "values[0] = 1e300",
            1,
            "1e+300 for completion 0; return a finite float of at most",
            (),
            marks=pytest.mark.slow,
        ),
        ("values = None", 1, "returned NoneType; it must return a list", ()),
        pytest.param(
            "values = [torch.ones(2)] * 8",
            1,
            "tensor([1., 1.]) for completion 0",
            (),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_reward_that_ends_the_run(behaving, capsys, behaviour, code, says, how):
    assert behaving(behaviour, *how) == code
    [text] = events(capsys, "error")
    assert says in text
    assert (
        "the state before it is in out/checkpoints/step-00000002; go on with: fxrl train " in text
    )
    if code == 1:
        assert "behaving.py:" in text
    assert len(numbers("out")) == 2


def test_what_a_reward_ended_goes_on_as_if_it_had_not(behaving):
    assert behaving("sys.exit(0)") == 1
    Path("well").touch()
    assert behaving("sys.exit(0)", resume="") == 0
    assert behaving("pass", run_dir="whole") == 0
    assert numbers("out") == numbers("whole")


def test_model_made_code_that_exits_is_skipped_where_errors_are(behaving, capsys):
    """Rewards that execute completions meet ``exit()`` in them."""
    assert behaving("sys.exit(0)", "reward.on_error=skip") == 0
    assert "raised SystemExit(0) at behaving.py:10; 8 completions" in "\n".join(
        events(capsys, "message")
    )
    assert len(numbers("out")) == 4


REACHING_OUT = (
    "[row.clear() for row in rows]; [p[0].update(content='?') for p in prompts]; rows.clear()"
    "; prompts.clear(); completion_ids.clear(); completions.clear(); columns.clear()"
    "; torch.set_grad_enabled(False); torch.set_default_dtype(torch.float64)"
    "; os.mkdir('sub'); os.chdir('sub')"
)


def test_a_reward_changes_nothing_but_its_values(behaving):
    extra = ("steps=6", "prompts_per_step=4", "sampling.num_generations=2")  # three epochs
    assert behaving("pass", *extra, run_dir="whole") == 0
    assert behaving(REACHING_OUT, *extra) == 0
    assert numbers("out") == numbers("whole")


@pytest.mark.parametrize("behaviour", ["sys.stdout = open(os.devnull, 'w')", "sys.stdout.close()"])
def test_a_reward_does_not_silence_the_run(behaving, monkeypatch, capsys, behaviour):
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", sys.stdout)  # put back afterwards
        assert behaving(behaviour) == 0
    told = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [event["step"] for event in told if event["event"] == "step"] == [1, 2, 3, 4]
    assert told[-1]["event"] == "summary"


def test_weights_that_take_a_total_past_a_float(behaving, capsys):
    assert behaving("values = [1e99] * 8", "reward.weights=[1.0, 1e10]") == 1
    [text] = events(capsys, "error")
    assert "times reward.weights=[1.0, 10000000000.0], add up to 1e+109" in text
    assert "step-00000002" in text


LOSS = """
import sys, torch
from fxrl import losses
calls, grpo = [], losses.by_name("grpo")
def loss(model, batch):
    value, metrics = grpo(model, batch)
    calls.append(1)
    if len(calls) >= 3:
        {behaviour}  # line 9
    return value, metrics
"""


def train_with_loss(file, behaviour, *overrides):
    Path("behaving_loss.py").write_text(LOSS.replace("{behaviour}", behaviour))
    extra = ["run_dir=out", "loss={name='behaving_loss.py:loss'}", "save_every=0", *overrides]
    return main(str(file), extra, json=True)


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        pytest.param(
            "[][3]",
            "raised IndexError('list index out of range') at behaving_loss.py:9",
            marks=pytest.mark.slow,
        ),
        ("sys.exit(0)", "raised SystemExit(0) at behaving_loss.py:9"),
        ("return None", "returned None; return a tensor with one real number"),
        pytest.param(
            "return model.training", "returned True; return a tensor", marks=pytest.mark.slow
        ),
        (
            "return value.expand(3), metrics",
            "returned a torch.float32 tensor [3]; return a tensor with one",
        ),
        ("return value.detach()", "returned a loss without a gradient"),
        pytest.param(
            "torch.set_grad_enabled(False); return value * 2",
            "returned a loss without a gradient",
            marks=pytest.mark.slow,
        ),
        ("return value, [1.0]", "returned [1.0] as metrics; return a dict"),
        (
            "metrics['wide'] = torch.ones(2)",
            "returned a torch.float32 tensor [2] as its metric 'wide'",
        ),
        (
            "metrics['text'] = 'good'",
            "returned 'good' as its metric 'text'; return one real number",
        ),
        (
            "metrics['step'] = 7",
            "returned a metric named 'step'; take a text that metrics.jsonl does",
        ),
        pytest.param(
            "metrics['time/train'] = 7",
            "returned a metric named 'time/train'",
            marks=pytest.mark.slow,
        ),
        ("metrics[3] = 7", "returned a metric named 3"),
    ],
)
def test_a_loss_that_goes_wrong_at_step_3(config_file, capsys, behaviour, says):
    assert train_with_loss(config_file, behaviour) == 1
    [text] = events(capsys, "error")
    assert f"loss 'behaving_loss.py:loss' (defined at behaving_loss.py:5) {says}" in text
    assert "the state before it is in out/checkpoints/step-00000002" in text
    assert len(numbers("out")) == 2


def test_a_loss_changes_nothing_but_its_values(config_file):
    assert train_with_loss(config_file, "pass") == 0
    plain = numbers("out")
    shutil.rmtree("out")
    behaviour = "torch.set_grad_enabled(False); torch.set_default_dtype(torch.float64)"
    assert train_with_loss(config_file, f"import os; os.chdir('/'); {behaviour}") == 0
    assert numbers("out") == plain


def test_numbers_are_metrics_and_appear_when_they_like(config_file):
    assert train_with_loss(config_file, "metrics |= {'calls': len(calls), 'late': True}") == 0
    assert [line.get("calls") for line in numbers("out")] == [None, None, 3.0, 4.0]
    assert numbers("out")[2]["late"] == 1.0


def test_micro_batches_with_different_metrics(config_file, capsys):
    behaviour = "metrics[f'odd{len(calls) % 2}'] = 1"
    assert train_with_loss(config_file, behaviour, "micro_batch_tokens=20") == 1
    text = events(capsys, "error")[0]
    assert "the metrics ['odd1'] for some micro-batches of a step only" in text


def test_every_name_of_the_trainer_is_reserved(config_file):
    """A name that a loss may take as well would overwrite the trainer's own number."""
    from fxrl.rl.loop.metrics import RESERVED

    Path("bare.py").write_text(
        "def loss(model, batch):\n    return model(batch['input_ids']).logits.mean()"
    )
    extra = ["loss={name='bare.py:loss'}", "eval.size=2", "dynamic_sampling=refill", "steps=1"]
    assert main(str(config_file), ["run_dir=out", *extra], json=True) == 0
    free = {name for name in numbers("out")[0] if not RESERVED.match(name)}
    assert all(name.startswith("sampling/") for name in free), "the drift's, as the losses call it"


@pytest.mark.parametrize(
    ("values", "words"),
    [("[None] * 8", "None for every completion"), ("[0.5] * 8", "the same within every group")],
)
def test_rewards_that_teach_nothing_are_told(config_file, capsys, values, words):
    Path("same.py").write_text(f"def same(completions, **columns):\n    return {values}\n")
    extra = ["run_dir=out", "reward={functions=['same.py:same']}", "steps=7"]
    assert main(str(config_file), extra, json=True) == 0
    told = [text for text in events(capsys, "message") if "rewards were" in text]
    assert [text.partition(":")[0] for text in told] == ["step 3", "step 6"]
    assert f"rewards were {words} in the last 3 steps, so nothing is learned" in told[0]
    assert {line["reward"] for line in numbers("out")} == {None if "None" in values else 0.5}


def test_ctrl_c_is_answered_within_the_step(behaving, capsys):
    assert behaving("os.kill(os.getpid(), signal.SIGINT); signal.sigtimedwait([], 0)") == 130
    told = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    texts = [event.get("text") or f"step {event.get('step')}" for event in told]
    [heard] = (i for i, text in enumerate(texts) if text.startswith("Ctrl-C: the run stops after"))
    assert "a second Ctrl-C ends it at once" in texts[heard]
    assert heard < texts.index("step 3")
    assert "stopped after step 3 of 4; go on with: fxrl train " in texts[-1]
    functions = "reward.functions=['length', 'behaving.py:even']"
    assert texts[-1].endswith(f' run_dir=out "{functions}" save_every=0 --resume')


def test_sigterm_before_the_first_step_unwinds(config_file, capsys):
    """So a live view gives the terminal its cursor back."""
    former = signal.getsignal(signal.SIGTERM)
    Path("killer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    assert main(str(config_file), ["run_dir=out", "reward.functions=['killer.py:even']"]) == 143
    told = capsys.readouterr().err
    assert "fxrl train: ended by SIGTERM" in told
    assert "Traceback" not in told
    assert signal.getsignal(signal.SIGTERM) is former


@contextmanager
def piped(monkeypatch):
    """A pipe as stdout; gives the end that reads."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        yield read


def test_a_reader_that_goes_away(behaving, monkeypatch, capsys):
    with piped(monkeypatch) as reader:
        behaviour = f"os.close({reader}); print('a print of the reward')"
        assert behaving(behaviour, json=False) == 0
    log = Path("out/train.log").read_text()
    assert "stdout: Broken pipe; the run goes on, and writes to " in log
    assert "a print of the reward" in log
    assert "step 4/4" in log
    assert "step 2/4" not in log
    assert len(numbers("out")) == 4
    assert f"writes to {Path('out/train.log').absolute()}" in capsys.readouterr().err


@pytest.mark.parametrize("json", [False, True])
def test_a_reader_that_was_never_there(behaving, monkeypatch, capsys, json):
    with piped(monkeypatch) as reader:
        os.close(reader)
        assert behaving("pass", json=json) == 1
    assert capsys.readouterr().err == "fxrl train: stdout: Broken pipe; nothing was trained\n"


@pytest.fixture
def heard_hangups():
    """SIGHUP as a terminal's processes have it: under `nohup` it is inherited as ignored."""
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, inherited)


@contextmanager
def looked_at(terminal):
    """Someone reads what is written there: where nobody does, a slow run fills it and waits.

    Yields a descriptor without content; who duplicates it to ``terminal`` closes that.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)

    def read():
        data = b"?"
        while data:
            try:
                data = os.read(terminal, 2**16)
            except BlockingIOError:  # a read that waits would keep the terminal open
                time.sleep(0.02)

    os.set_blocking(terminal, False)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield nothing
    finally:
        os.dup2(nothing, terminal)
        thread.join()
        os.close(nothing)
        os.close(terminal)


def test_a_hangup_of_the_terminal(behaving, monkeypatch, heard_hangups):
    """The log has lines, where the terminal had a live view."""
    near, far = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(far, "w") as stream, looked_at(near) as nothing:
        monkeypatch.setattr("sys.stdout", stream)
        behaviour = f"os.dup2({nothing}, {near}); os.kill(os.getpid(), signal.SIGHUP)"
        assert behaving(behaviour, json=False) == 0
    log = Path("out/train.log").read_text()
    # Whichever is noticed first: the signal, or what the view's thread could not write.
    assert log.startswith(
        ("hangup; the run goes on", "stdout: Input/output error; the run goes on")
    )
    assert [f"step {n}/4" in log for n in (1, 2, 3, 4)] == [False, False, True, True]
    assert "│" in log.partition("summary")[2] or "final" in log
    assert "\x1b" not in log
    assert [line for line in log.splitlines() if line.endswith(" ")] == []
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.parametrize(
    "behaviour",
    ["import shutil; shutil.rmtree('out')", "os.unlink('out/metrics.jsonl')"],
    ids=["run_dir", "metrics.jsonl"],
)
def test_what_vanishes_while_the_run_writes_it(behaving, capsys, behaviour):
    assert behaving("pass", run_dir="whole") == 0
    capsys.readouterr()
    assert behaving(behaviour) == 0
    assert "out/metrics.jsonl was deleted; it is written on" in "\n".join(events(capsys, "message"))
    assert numbers("out") == numbers("whole")
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["tokens"] == json.loads(Path("whole/summary.json").read_text())["tokens"]
    assert Path("out/final/adapter_model.safetensors").is_file()


def test_the_whole_traceback(behaving, capsys):
    assert behaving("{}['key']", json=False, traceback=True) == 1
    told = capsys.readouterr().err
    assert "{}['key']  # line 10" in told
    assert "KeyError: 'key'\n" in told
    assert told.count("\nfxrl train: reward 'even' raised KeyError('key') at behaving.py:10") == 1


@pytest.mark.parametrize("folder", ["/proc/self", "run.toml/cache"])
def test_compiled_code_that_cannot_be_kept(behaving, monkeypatch, capsys, folder):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    assert behaving("pass") == 2
    [text] = events(capsys, "error")
    assert f"TORCHINDUCTOR_CACHE_DIR={folder}: compiled code cannot be kept there: " in text


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt, 130, r"interrupted"),
        (SystemExit(0), 1, r"sys\.exit\(0\) was called at .*test_endings\.py:\d+"),
        (KeyError("x"), 1, r"KeyError\('x'\) at .*test_endings\.py:\d+; --traceback shows how .*"),
    ],
)
def test_a_start_that_fails(behaving, monkeypatch, capsys, error, code, says):
    def fails(*_):
        raise error

    monkeypatch.setattr("fxrl.rl.loop.run.build_parts", fails)
    assert behaving("pass") == code
    [text] = events(capsys, "error")
    assert re.fullmatch(says, text)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (KeyError, 1)])
def test_the_end_of_the_run_is_no_exception(behaving, monkeypatch, capsys, error, code):
    def fails(*_):
        raise error("x")

    with monkeypatch.context() as patch:
        patch.setattr("fxrl.rl.loop.run.summarize", fails)
        assert behaving("pass") == code
    [text] = events(capsys, "error")
    assert "what step 4 reached is saved; go on with: fxrl train " in text
    assert behaving("pass", resume="") == 0
    assert len(numbers("out")) == 4


def test_metrics_that_cannot_be_drawn_cost_no_model(behaving):
    """Someone writes into the file while the run does."""
    line = '{"step": 2, "reward": "high", "step_time": null, "time/train": [1]}\\n\\xff\\n'
    assert behaving(f"open('out/metrics.jsonl', 'a', encoding='latin-1').write('{line}')") == 0
    assert Path("out/final/adapter_model.safetensors").is_file()
    assert json.loads(Path("out/summary.json").read_text())["steps"] == 4


def test_a_resumed_run_keeps_what_it_cannot_read(behaving, capsys):
    assert behaving("pass", "steps=2") == 0
    path = Path("out/metrics.jsonl")
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first[:20] + b"\xff" + first[20:] + second)
    capsys.readouterr()
    assert behaving("pass", "steps=4", resume="") == 0
    assert "out/metrics.jsonl: 1 lines could not be read; they are kept in" in "\n".join(
        events(capsys, "message")
    )
    assert [line["step"] for line in numbers("out")] == [2, 3, 4]
    damaged = Path("out/metrics.jsonl.damaged").read_bytes()
    assert damaged.replace(b"\xff", b"") == first


def test_a_signal_between_two_steps_loses_none(config_file, monkeypatch):
    """It comes when the step has asked whether it is the last."""
    asked = TrainingLoop._ends

    def signalled(loop, stop):
        ends = asked(loop, stop)
        if loop.done == 1 and stop.signum is None:
            os.kill(os.getpid(), signal.SIGINT)
        return ends

    monkeypatch.setattr(TrainingLoop, "_ends", signalled)
    assert main(str(config_file), ["run_dir=out", "save_every=0"]) == 130
    assert [path.name for path in Path("out/checkpoints").iterdir()] == ["step-00000001"]
