"""An engine that dies, a disk that fills up: what is left to go on from."""

import errno
import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fxrl.engines import EngineError, GenerateTimeoutError, TorchEngine
from fxrl.errors import ConfigError
from fxrl.models import load_model
from fxrl.models.hf import save_beside, save_pretrained
from fxrl.rl.errors import StorageError
from fxrl.rl.loop import build, checkpoint
from fxrl.rl.report.files import JsonLines
from fxrl.rl.train import main
from tests.rl.metrics import numbers
from tests.rows import rows


class FailingEngine(TorchEngine):
    """Dies where and when the class says, once."""

    where, when, error = "generate", 3, EngineError
    made: list["FailingEngine"] = []

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.closed = self.generations = 0
        self.made.append(self)

    def fail_at(self, place):
        if self.where == place and self.generations == self.when:
            type(self).when = -1
            raise self.error(f"vLLM died in {place}")

    def generate(self, prompts, params, *, only=None, on_finished=None):
        self.generations += 1
        self.fail_at("generate")
        found = super().generate(prompts, params, only=only, on_finished=on_finished)
        self.fail_at("the end of generate")
        return found

    @contextmanager
    def standby(self):
        self.fail_at("release")
        with super().standby():
            yield
        self.fail_at("wake")

    def update_lora(self, *, policy_version):
        self.fail_at("sync")
        super().update_lora(policy_version=policy_version)

    def close(self):
        self.closed += 1
        super().close()


@pytest.fixture
def failing(monkeypatch):
    def arm(where, when=3, error=EngineError):
        FailingEngine.where, FailingEngine.when, FailingEngine.error = where, when, error
        FailingEngine.made = []
        monkeypatch.setattr("fxrl.engines.torch.engine.TorchEngine", FailingEngine)

    return arm


def train(file, run_dir, *overrides, resume=None):
    extra = [f"run_dir={run_dir}", "save_every=0", "disk_wait_s=0", *overrides]
    return main(str(file), extra, resume=resume, json=True)


def error_of(capsys):
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["event"] == "error"
    return told["text"]


@pytest.mark.parametrize(
    ("where", "saved"), [("generate", 2), ("release", 2), ("wake", 3), ("sync", 3)]
)
def test_a_dead_engine_costs_no_step_that_was_done(config_file, failing, capsys, where, saved):
    assert train(config_file, "whole") == 0
    failing(where)
    assert train(config_file, "out") == 1
    text = error_of(capsys)
    assert f"vLLM died in {where}" in text
    assert (
        f"out/checkpoints/step-{saved:08d}; go on with: fxrl train {config_file} run_dir=out"
        in text
    )
    assert ("step 3 failed after its updates" in text) == (saved == 3)
    assert FailingEngine.made[0].closed == 1
    assert len(numbers("out")) == saved
    assert train(config_file, "out", resume="") == 0
    assert numbers("out") == numbers("whole")
    assert weights("out") == weights("whole")


def test_an_engine_that_dies_evaluating_costs_no_step(config_file, failing, capsys):
    extra = ("eval.size=2", "eval.every=1")
    assert train(config_file, "whole", *extra) == 0
    failing("generate", when=5)  # evaluations before and after step 1, then after step 2
    assert train(config_file, "out", *extra) == 1
    assert "step 2 failed after its updates" in error_of(capsys)
    assert len(numbers("out")) == 2
    assert numbers("out")[1]["num_tokens"] == numbers("whole")[1]["num_tokens"]
    assert train(config_file, "out", *extra, resume="") == 0
    assert numbers("out")[2:] == numbers("whole")[2:]
    assert weights("out") == weights("whole")


@pytest.mark.parametrize("where", ["generate", "the end of generate"])
def test_a_generation_that_took_too_long_is_drawn_again(config_file, failing, capsys, where):
    assert train(config_file, "whole") == 0
    failing(where, error=GenerateTimeoutError)
    assert train(config_file, "out", "engine_retries=1") == 0
    assert "drawing again, 1 tries left" in capsys.readouterr().out
    assert numbers("out") == numbers("whole"), "the same completions"
    failing(where, error=GenerateTimeoutError)
    assert train(config_file, "no", "engine_retries=0") == 1


def weights(run_dir):
    [last] = sorted(Path(run_dir, "checkpoints").iterdir())[-1:]
    return (last / "adapter_model.safetensors").read_bytes()


def test_between_two_updates_the_last_checkpoint_counts(config_file, monkeypatch, capsys):
    from fxrl.rl.loop.updater import Updater

    plain, calls = Updater.update, []

    def fails(self, batches, number):
        calls.append(number)
        if calls.count(3) == 2:
            raise EngineError("out of memory")
        return plain(self, batches, number)

    monkeypatch.setattr(Updater, "update", fails)
    assert train(config_file, "out", "num_iterations=2", "save_every=1") == 1
    assert "failed between two of its updates" in error_of(capsys)
    assert [p.name for p in sorted(Path("out/checkpoints").iterdir())][-1] == "step-00000002"


def test_an_engine_is_closed_when_the_rest_cannot_be_built(
    config_file, failing, monkeypatch, capsys
):
    def refuse(*_):
        raise ConfigError("no such optimizer")

    failing("never")
    monkeypatch.setattr(build, "build_optimizer", refuse)
    assert train(config_file, "out") == 2  # found late, but the configuration is wrong
    assert "no such optimizer" in error_of(capsys)
    assert [engine.closed for engine in FailingEngine.made] == [1]


def test_a_full_disk_delays_checkpoints_and_loses_nothing(config_file, monkeypatch, capsys):
    assert train(config_file, "whole", "save_every=1") == 0
    plain, writes = checkpoint.torch.save, []

    def full(value, path):
        writes.append(path)
        if len(writes) in (3, 5):  # the optimizer's of step 2 and 3
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(value, path)

    append, lines = JsonLines._append, []

    def full_line(self, line):
        lines.append(line)
        if len(lines) in (4, 5):
            append(self, line[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.torch, "save", full)
        patch.setattr(JsonLines, "_append", full_line)
        capsys.readouterr()
        assert train(config_file, "out", "save_every=1") == 0
    events = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    told = "\n".join(e["text"] for e in events if e["event"] == "message")
    assert "the checkpoint of step 2 could not be written" in told
    assert "tries again after the next step" in told
    assert "1 lines wait in memory" in told
    assert numbers("out") == numbers("whole")
    assert weights("out") == weights("whole")
    assert Path("out/completions.jsonl").read_text() == Path("whole/completions.jsonl").read_text()


def test_at_the_end_the_run_waits_for_room(config_file, monkeypatch, capsys):
    plain, tries = checkpoint.save_checkpoint, []

    def full(run_dir, step, **parts):
        tries.append(step)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(run_dir, step, **parts)

    monkeypatch.setattr(checkpoint, "save_checkpoint", full)
    assert train(config_file, "out", "steps=1", "disk_retries=2") == 0
    assert tries == [1, 1, 1]
    tries.clear()
    assert train(config_file, "less", "steps=1", "disk_retries=1") == 1
    assert "No space left on device" in error_of(capsys)


@pytest.fixture
def small_files():
    """The system lets no file grow above 100,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_the_base_model(config_file, small_files, capsys):
    """safetensors has an error of its own for what the system refuses."""
    assert train(config_file, "out") == 1
    assert "out/model could not be written: File too large; free some space" in error_of(capsys)
    model, _ = load_model("tiny:llama")
    with pytest.raises(OSError, match="File too large"):
        save_pretrained(model, Path("whole"))  # the trained model, which is tried again
    with pytest.raises(OSError, match="File too large"):
        save_beside({"a": torch.zeros(99_999)}, Path("out"), "a.safetensors")
    states = {"a": torch.zeros(99_999)}
    parts = {"model": torch.nn.Linear(1, 1), "optimizer": states, "state": {}, "trainer": {}}
    with pytest.raises(StorageError, match=r"checkpoints: File too large \(optimizer.pt\); free"):
        checkpoint.save_checkpoint(Path("out"), 1, keep=1, **parts)


def test_a_run_dir_that_cannot_be_made(config_file, capsys):
    Path("file").write_text("")
    assert train(config_file, "file/out") == 1
    assert "file/out could not be written: Not a directory" in error_of(capsys)


REWARD = """
import asyncio, time
from pathlib import Path
def stuck(completions, trainer_state, **columns):
    if trainer_state.global_step == 2 and not Path("fixed").exists():
        time.sleep(30)
    return [float(len(c[0]["content"]) % 3) for c in completions]
async def waits(completions, **columns):
    await asyncio.sleep(0.01)
    return [0.5 * len(c[0]["content"]) for c in completions]
"""


@pytest.mark.parametrize("per_group", rows(["true", "false"], ["false"]))
def test_a_reward_that_hangs_keeps_the_run(config_file, capsys, per_group):
    Path("stuck_rewards.py").write_text(REWARD)
    functions = "reward.functions=['stuck_rewards:stuck', 'stuck_rewards:waits', 'length']"
    extra = (functions, "reward.params={}", f"reward.per_group={per_group}")
    assert train(config_file, "out", *extra, "reward.timeout_s=0.3") == 1
    text = error_of(capsys)
    assert "reward 'stuck' did not come back within reward.timeout_s=0.3" in text
    assert "time.sleep(30)" in text
    assert "checkpoints/step-00000001" in text
    Path("fixed").touch()
    assert train(config_file, "out", *extra, "reward.timeout_s=20", resume="") == 0
    assert train(config_file, "whole", *extra) == 0
    assert numbers("out") == numbers("whole")


def test_skipped_rewards_are_told(config_file, capsys):
    Path("stuck_too.py").write_text(REWARD)
    extra = ("reward.functions=['stuck_too:stuck', 'length']", "reward.params={}", "steps=2")
    assert train(config_file, "out", *extra, "reward.timeout_s=0.3", "reward.on_error=skip") == 0
    assert "8 completions get no value from it" in capsys.readouterr().out
    assert numbers("out")[1]["rewards/stuck/mean"] is None
    assert numbers("out")[1]["rewards/length/mean"] is not None
