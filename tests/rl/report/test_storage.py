"""Full disks: nothing half-written, nothing lost, and the run goes on."""

import errno
import json
import os
import resource
import signal

import pytest
import torch
from torch import nn

from fxrl.rl.errors import StorageError
from fxrl.rl.loop import checkpoint
from fxrl.rl.report.files import JsonLines, keep_trying, read_lines


@pytest.fixture
def quota():
    """A real limit of the system: no file of this process grows beyond so many bytes."""
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # else it would kill the process
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, former)


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_wait_in_memory_and_come_back_whole(tmp_path, quota):
    told = []
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path, 0, tell=told.append)
    lines.write({"step": 1, "text": "x" * 40})
    size = path.stat().st_size
    quota(size + 10)  # room for a part of the next line
    lines.write({"step": 2, "text": "y" * 40})
    lines.write({"step": 3})
    assert path.stat().st_size == size, "no half a line"
    assert len(told) == 2
    assert "1 lines wait in memory" in told[0]
    assert "2 lines wait in memory" in told[1]
    with pytest.raises(OSError, match="too large"):
        lines.flush()
    quota(None)
    lines.write({"step": 4})
    lines.flush()
    lines.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4]


def test_no_space_is_named(tmp_path, monkeypatch):
    told = []
    lines = JsonLines(tmp_path / "m.jsonl", 0, tell=told.append)
    with monkeypatch.context() as patch:
        patch.setattr(lines, "_append", no_space)
        lines.write({"step": 1})
    assert "No space left on device" in told[0]
    lines.flush()
    assert [line["step"] for line in read_lines(tmp_path / "m.jsonl")] == [1]


def save(run_dir, step, model, keep=2):
    return checkpoint.save_checkpoint(
        run_dir,
        step,
        model=model,
        optimizer={"a": torch.ones(2000)},
        state={},
        trainer={},
        keep=keep,
    )


@pytest.mark.parametrize(
    ("limit", "file"),
    [(0, "trainable.safetensors"), (300, "trainable.safetensors"), (1500, "optimizer.pt")],
)
def test_a_checkpoint_is_whole_or_not_there(tmp_path, quota, limit, file):
    model = nn.Linear(10, 10)
    older = save(tmp_path, 1, model)
    before = {file.name: file.read_bytes() for file in older.iterdir()}
    quota(limit)
    with pytest.raises(StorageError, match="checkpoint of step 2 could not be written") as caught:
        save(tmp_path, 2, model)
    with pytest.raises(StorageError):
        save(tmp_path, 1, model)  # nor does writing one anew lose the old one
    assert f"({file}); free some space; older checkpoints are as they were" in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [older.name]
    assert {file.name: file.read_bytes() for file in older.iterdir()} == before
    quota(None)
    assert checkpoint.list_checkpoints(tmp_path) == [older]
    assert checkpoint.list_checkpoints(save(tmp_path, 2, model).parents[1])[-1].name.endswith("2")


def test_the_same_step_again_is_kept_and_another_state_of_it_is_no_loss(tmp_path):
    model = nn.Linear(2, 2)
    first = save(tmp_path, 1, model)
    assert save(tmp_path, 1, model) == first
    with torch.no_grad():
        model.weight.fill_(3.0)
    again = save(tmp_path, 1, model)
    assert checkpoint.list_checkpoints(tmp_path) == [first, again]
    fresh = nn.Linear(2, 2)
    checkpoint.load_checkpoint(again, fresh)
    assert fresh.weight.eq(3.0).all()


def test_waiting_ends_when_there_is_room_again():
    tries, waits, told = [], [], []

    def action():
        tries.append(1)
        return "done" if len(tries) == 3 else no_space()

    kw = {"retries": 5, "wait_s": 7.0, "sleep": waits.append}
    assert keep_trying(action, "the model", told.append, **kw) == "done"
    assert waits == [7.0, 7.0]
    assert told[0].startswith("the model could not be written: No space left on device; ")
    assert told[0].endswith("trying again in 7 s, 5 more times")


def test_waiting_gives_up_at_last():
    waits = []
    with pytest.raises(StorageError, match=r"the model could not .*: No space left.*run_dir"):
        keep_trying(no_space, "the model", print, retries=2, wait_s=0.5, sleep=waits.append)
    assert waits == [0.5, 0.5]


def test_an_unwritable_start_is_one_clear_error(tmp_path):
    (tmp_path / "m.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    (tmp_path / ".m.jsonl.writing").mkdir()  # in the way
    with pytest.raises(StorageError, match=r"m\.jsonl could not be written: Is a directory"):
        JsonLines(tmp_path / "m.jsonl", 1)
