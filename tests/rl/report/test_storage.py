"""Full disks: nothing half-written, nothing lost, and the run goes on."""

import errno
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxrl.errors import reason_of
from fxrl.rl.errors import StorageError
from fxrl.rl.loop import checkpoint, store
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
    assert told[0].endswith("; free some space")
    lines.flush()
    assert [line["step"] for line in read_lines(tmp_path / "m.jsonl")] == [1]


def test_room_is_asked_for_only_where_it_helps(tmp_path, monkeypatch):
    told = []
    lines = JsonLines(tmp_path / "m.jsonl", 0, tell=told.append)
    (tmp_path / "other").touch()
    (tmp_path / "m.jsonl").unlink()
    (tmp_path / "m.jsonl").symlink_to("other")
    lines.write({"step": 1})
    assert "is a link to other" in told[0]

    def refused(*_, **__):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(store, "sync_tree", refused)
    with pytest.raises(StorageError, match="denied; older") as no:
        save(tmp_path, 1, nn.Linear(2, 2))
    assert not any("space" in text for text in (*told, str(no.value)))


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


SOUND = [b'{"step": 1, "reward": 0.5}\n', b'{"step": 2, "text": "\xe2\x80\xa8"}\n']
DAMAGED = [
    *(b"[1]\n", b"null\n", b'{"step": "2"}\n', b'{"step": 2.5}\n', b'{"step": true}\n'),
    *(b'{"step": 1, "x": "\xff"}\n', b'{"step": 1\x00\n', b'{"reward": 1}\n', b"[" * 9999 + b"\n"),
    *(b'{"step": ' + b"9" * 5000 + b"}\n", b'{"step": 2, "rew'),
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(SOUND + DAMAGED[:-1])), st.sampled_from([b"", DAMAGED[-1]]))
def test_no_damaged_line_costs_another(written, cut_off):
    """What is damaged is kept beside the file, and told; the rest stays, in its order."""
    with TemporaryDirectory() as folder:
        path, told = Path(folder, "m.jsonl"), []
        path.write_bytes(b"".join(written) + cut_off)
        lines = JsonLines(path, 2, tell=told.append)
        lines.write({"step": 3})
        lines.close()
        sound = [json.loads(line) for line in written if line in SOUND]
        assert read_lines(path) == [*sound, {"step": 3}]
        assert len(path.read_bytes().splitlines()) == len(sound) + 1
        bad = [line.rstrip(b"\n") for line in [*written, cut_off] if line and line not in SOUND]
        beside = Path(folder, "m.jsonl.damaged")
        assert (beside.read_bytes().splitlines() if bad else []) == bad
        assert beside.exists() == bool(bad)
        words = f"{path}: {len(bad)} lines could not be read; they are kept in {beside}"
        assert told == ([words] if bad else [])


def test_lines_of_steps_that_are_done_again_are_kept(tmp_path):
    told, path = [], tmp_path / "m.jsonl"
    for first in (1, 3):
        lines = JsonLines(path, first - 1, tell=told.append)
        for step in range(first, 6):
            lines.write({"step": step, "of": first})
        lines.close()
    assert [line["of"] for line in read_lines(path)] == [1, 1, 3, 3, 3]
    former = tmp_path / "m.jsonl.former"
    assert [(line["step"], line["of"]) for line in read_lines(former)] == [(3, 1), (4, 1), (5, 1)]
    assert told == [
        f"{path}: 3 lines are of steps that this run does again; they are kept in {former}"
    ]


def test_a_file_that_is_replaced_or_deleted_loses_no_line(tmp_path):
    told, path = [], tmp_path / "run" / "m.jsonl"
    path.parent.mkdir()
    lines = JsonLines(path, 0, tell=told.append)
    lines.write({"step": 1})
    (tmp_path / "edited").write_text('{"step": 1, "mine": true}\n')
    (tmp_path / "edited").replace(path)
    lines.write({"step": 2})
    assert read_lines(path) == [{"step": 1, "mine": True}, {"step": 2}]
    shutil.rmtree(path.parent)
    lines.write({"step": 3})
    path.unlink()
    lines.flush()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    assert [text.rpartition("/")[2] for text in told] == [
        "m.jsonl was replaced; it is written on",
        "m.jsonl was deleted; it is written on",
        "m.jsonl was deleted; it is written on",
    ]
    lines.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError(" \nno such  scheme\nand more"), "no such scheme"),
        (ValueError("word " * 100), "word " * 39 + "wo..."),
        (ValueError(), "ValueError"),
    ],
)
def test_a_reason_is_one_short_line(error, words):
    assert reason_of(error) == words
