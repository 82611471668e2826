"""Checkpoint folders under bit flips, power losses, kills and strangers."""

import dataclasses
import io
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxrl.files import make_folder
from fxrl.rl.errors import CheckpointError
from fxrl.rl.loop import checkpoint, store
from fxrl.rl.report.files import JsonLines, read_lines
from fxrl.rl.train import main


def save(run_dir, step, keep=1, branch=1):
    torch.manual_seed(step)
    return checkpoint.save_checkpoint(
        run_dir,
        step,
        branch=branch,
        model=nn.Linear(3, 3),
        optimizer={"a": torch.ones(40)},
        state={"b": torch.ones(4)},
        trainer={"config": {}},
        keep=keep,
    )


def test_every_flipped_bit_is_found_and_its_file_named(config_file):
    assert main(str(config_file), ["run_dir=out", "steps=1"], json=True) == 0
    [path] = checkpoint.list_checkpoints(Path("out"))
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    expected = "adapter_config.json adapter_model.safetensors manifest.json optimizer.pt state.pt"
    assert sorted(files) == [*expected.split(), "trainer.json"]
    chance = random.Random(1)
    for name, content in files.items():
        for _ in range(64):
            damaged = bytearray(content)
            damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            (path / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"is damaged: {name}"):
                store.verify(path)
        (path / name).write_bytes(content)
    assert checkpoint.find_checkpoint(Path("out"), "") == path


class Disk:
    """What would be on the disk under ``root`` if the power failed after each call of the system.

    A file has the bytes of its last ``fsync``, and a folder the names; what came later may or may
    not have arrived.
    """

    CALLS = ("mkdir", "replace", "fsync", "unlink", "rmdir")

    def __init__(self, root, monkeypatch):
        self.root, self.ids, self.states = root, {}, []
        self.bytes, self.names = {}, {}
        for path in (root, *root.rglob("*")):
            self.synced(path)
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self.watched(getattr(os, name)))

    def id_of(self, path):
        found = path.lstat()
        return self.ids.setdefault(found.st_ino, (found.st_ino, len(self.ids), len(self.states)))

    def watched(self, plain):
        def call(*args, **kwargs):
            result = plain(*args, **kwargs)
            live = {p.stat().st_ino for p in [self.root, *self.root.rglob("*")]}
            self.ids = {number: name for number, name in self.ids.items() if number in live}
            if plain.__name__ == "fsync":
                self.synced(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
            self.states += [self.lazy(self.id_of(self.root)), self.eager(0), self.eager(0.5)]
            return result

        return call

    def synced(self, path):
        if path.is_dir():
            self.names[self.id_of(path)] = {p.name: self.id_of(p) for p in path.iterdir()}
        else:
            self.bytes[self.id_of(path)] = path.read_bytes()

    def lazy(self, folder, prefix=""):
        """Nothing has arrived that was not waited for."""
        found = {}
        for name, number in self.names.get(folder, {}).items():
            if number in self.bytes:
                found[prefix + name] = self.bytes[number]
            else:
                found |= {prefix + name: None} | self.lazy(number, f"{prefix}{name}/")
        return found

    def eager(self, part):
        """All names have arrived, and ``part`` of the bytes that were not waited for."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            content = None
            if path.is_file():
                now = path.read_bytes()
                content = self.bytes.get(self.id_of(path), now[: int(part * len(now))])
            found[path.relative_to(self.root).as_posix()] = content
        return found


def lay_out(state, root):
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, content in state.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def test_whenever_the_power_fails_the_last_checkpoint_is_sound(tmp_path, monkeypatch):
    root, done = tmp_path / "disk", []
    run = root / "run"
    root.mkdir()
    make_folder(run)
    with monkeypatch.context() as patch:
        disk = Disk(root, patch)
        for step in (1, 2, 3):
            lines = JsonLines(
                run / "metrics.jsonl", step
            )  # as of a run that is resumed at every step
            lines.write({"step": step})
            lines.close()
            save(run, step)
            done.append(len(disk.states))
    assert done[-1] > 60
    for index, state in enumerate(disk.states):
        lay_out(state, tmp_path / "found")
        found = tmp_path / "found/run"
        completed = sum(index >= count - 1 for count in done)
        path = checkpoint.find_checkpoint(found, "")
        step = store.place_of(path).step if path else 0
        assert step in (completed, completed + 1), index
        if path is not None:
            checkpoint.load_checkpoint(path, nn.Linear(3, 3))
            steps = [line["step"] for line in read_lines(found / "metrics.jsonl")]
            assert steps[:step] == list(range(1, step + 1)), index


def test_the_simulated_disk_finds_what_was_not_waited_for(tmp_path, monkeypatch):
    """The judge itself: without ``fsync`` of the files, or of the folder, something is lost."""
    for what in ("sync_tree", "rename"):
        root = tmp_path / what
        root.mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(root, patch)
            if what == "sync_tree":
                patch.setattr(store, "sync_tree", lambda folder: None)
            else:
                patch.setattr(store, "rename", os.rename)
            save(root / "run", 1)
            save(root / "run", 2)
        lost = 0
        for state in disk.states[-3:]:
            lay_out(state, tmp_path / "found")
            try:
                found = checkpoint.find_checkpoint(tmp_path / "found/run", "")
                lost += found is None or found.name != "step-00000002"
            except CheckpointError:
                lost += 1
        assert lost


class Killed(BaseException):
    """As SIGKILL: nothing that comes after it does anything."""


def test_a_kill_at_any_call_leaves_a_run_to_resume(tmp_path, monkeypatch):
    import safetensors.torch

    places = [(os, name) for name in (*Disk.CALLS, "open")]
    places += [(io, "open"), (torch, "save"), (safetensors.torch, "save_file")]
    plain = {place: getattr(*place) for place in places}

    def killing(number):
        calls = []

        def watched(place):
            def call(*args, **kwargs):
                calls.append(place)
                if len(calls) >= number:
                    if place[0] not in (os, io) and len(calls) == number:
                        Path(args[1]).write_bytes(b"half of it")
                    raise Killed
                return plain[place](*args, **kwargs)

            return call

        for place in places:
            monkeypatch.setattr(*place, watched(place))

    number, finished = 0, False
    while not finished:
        number += 1
        run = tmp_path / str(number)
        save(run, 1)
        killing(number)
        try:
            save(run, 2)
            finished = True
        except Killed:
            pass
        finally:
            for place in places:
                monkeypatch.setattr(*place, plain[place])
        found = checkpoint.find_checkpoint(run, "")
        assert store.place_of(found).step in (1, 2)
        save(run, 3)
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert number > 30


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(["step", "branch", "parent", "files", "format", "sha256", "other"])


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    path = save(run, 1)
    return run, path, {file.name: file.read_bytes() for file in path.iterdir()}


def check_manifest(sound, content):
    _, path, files = sound
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        store.verify(path)
    (path / "manifest.json").write_bytes(files["manifest.json"])


@settings(max_examples=60, deadline=None)
@given(changes=st.dictionaries(FIELDS, JSON, min_size=1), whole=st.none() | JSON, raw=st.binary())
def test_a_manifest_may_hold_anything(sound, changes, whole, raw):
    values = json.loads(sound[2]["manifest.json"])
    check_manifest(sound, json.dumps(values | changes if whole is None else whole).encode())
    check_manifest(sound, raw)


@pytest.mark.parametrize("content", [b"", b"[" * 50_000, b"1" * 5000, b"{}", b"null", b"\xff"])
def test_a_manifest_that_is_none(sound, content):
    check_manifest(sound, content)


@pytest.mark.parametrize("change", [{"parent": []}, {"step": -1}, {"step": True}, {"branch": 1.0}])
def test_a_manifest_signed_by_a_stranger(sound, change):
    manifest = store.read_manifest(sound[1])
    check_manifest(sound, dataclasses.replace(manifest, **change).render().encode())


def test_files_outside_of_the_checkpoint_are_none_of_its_own(tmp_path):
    path = save(tmp_path, 1)
    secret = tmp_path / "secret"
    secret.write_bytes((path / "state.pt").read_bytes())
    (path / "state.pt").unlink()
    (path / "state.pt").symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be read: it lies outside"):
        store.verify(path)
    (path / "optimizer.pt").unlink()
    os.mkfifo(path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be read: it is no file"):
        store.verify(path)
    manifest = store.read_manifest(path)
    files = {"../../secret": (manifest.files["state.pt"])}
    text = store.Manifest(1, 1, None, files).render()
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"\.\./\.\./secret cannot be read"):
        store.verify(path)


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path):
    path = save(tmp_path, 1)
    path.rename(path.with_name("step-00000007"))
    with pytest.raises(CheckpointError, match="it was step-00000001, and the folder"):
        checkpoint.find_checkpoint(tmp_path, "")
    copy = tmp_path / "best"
    shutil.copytree(path.with_name("step-00000007"), copy)
    assert checkpoint.find_checkpoint(tmp_path, str(copy)) == copy


def test_only_a_branch_deletes_its_own(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step, keep=2)
    for step in (3, 4, 5):
        save(tmp_path, step, keep=1, branch=2)
    names = [place.name for place in store.list_places(tmp_path)]
    assert names == ["step-00000004", "step-00000006", "step-00000005-branch-2"]
    assert checkpoint.find_checkpoint(tmp_path, "").name == names[-1]
