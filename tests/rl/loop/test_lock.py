"""One run at a time in a run_dir."""

import contextlib
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from fxrl.rl.errors import RunInUseError
from fxrl.rl.loop.lock import hold
from fxrl.rl.train import main


def quiet(text):
    raise AssertionError(text)


def test_a_second_run_and_a_resume_are_refused_and_lose_nothing(config_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(str(config_file), [f"run_dir={out}", "steps=1"], json=True) == 0
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    for how in ({}, {"resume": ""}, {"resume": "sound"}, {"overwrite": True}):
        capsys.readouterr()
        with hold(out, quiet):
            assert main(str(config_file), [f"run_dir={out}"], **how, json=True) == 2
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert told["kind"] == "RunInUseError"
        for part in (f"process {os.getpid()} on {socket.gethostname()}", "began at 2", str(out)):
            assert part in told["text"]
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_a_run_that_is_moved_aside_leaves_the_lock(config_file, tmp_path, capsys):
    reward = "from pathlib import Path\ndef even(completions, **columns):\n"
    reward += "    return [float(Path('out/.lock').is_file())] * len(completions)\n"
    assert main(str(config_file), ["run_dir=out", "steps=1"], json=True) == 0
    (tmp_path / "toy_rewards.py").write_text(reward)
    assert main(str(config_file), ["run_dir=out", "steps=1"], overwrite=True, json=True) == 0
    assert json.loads(Path("out/metrics.jsonl").read_text())["rewards/even/mean"] == 1.0
    assert not [path for path in tmp_path.rglob("*.lock") if path.is_file()]


def test_no_moment_of_a_move_aside_lets_another_run_in(config_file, monkeypatch, capsys):
    """Whoever comes is refused; who comes while the folder has no name gets it, and is alone."""
    assert main(str(config_file), ["run_dir=out", "steps=1"], json=True) == 0
    Path("link").symlink_to("out")
    came, refused = [], []

    def come():
        if not Path("out").exists():
            Path("out").mkdir()
            came.append(held.enter_context(hold(Path("out"), quiet)))
        elif not came:
            with pytest.raises(RunInUseError), hold(Path("link"), quiet):
                pass
            refused.append(True)

    def watched(plain):
        def call(*args, **kwargs):
            result = plain(*args, **kwargs)
            if not inside:
                inside.append(True)
                come()
                inside.clear()
            return result

        inside = watching
        return call

    watching = []

    with contextlib.ExitStack() as held, monkeypatch.context() as patch:
        for name in ("link", "mkdir", "replace", "fsync", "unlink"):
            patch.setattr(os, name, watched(getattr(os, name)))
        assert main(str(config_file), ["run_dir=link", "steps=1"], overwrite=True, json=True) == 1
        assert len(came) == 1
        assert refused
        assert Path("out/.lock").exists(), "it is the other's"
    assert "Directory not empty" in capsys.readouterr().out
    assert {path.name for path in Path("out.1").iterdir()} > {"checkpoints", "config.json"}
    assert main(str(config_file), ["run_dir=link", "steps=1"], json=True) == 0
    assert main(str(config_file), ["run_dir=link", "steps=2"], overwrite=True, json=True) == 0
    assert Path("link").is_symlink()
    assert len(Path("out/metrics.jsonl").read_text().splitlines()) == 2
    assert not [p for p in Path().rglob("*") if p.name in (".lock", ".out.new")]


def test_a_folder_made_for_nothing_goes_again(tmp_path):
    with hold(tmp_path / "new", quiet):
        assert (tmp_path / "new/.lock").is_file()
    assert not (tmp_path / "new").exists()
    with hold(tmp_path / "used", quiet):
        (tmp_path / "used/file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["used", "file"]


def in_child(body):
    """Forks; ``body(say)`` runs in the child, which then waits to be killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body(lambda text: os.write(writer, text))
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    said = os.read(reader, 100)
    os.close(reader)
    return pid, said


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_dead_holder_is_none(tmp_path):
    def holder(say):
        with hold(tmp_path, quiet):
            say(b"held")
            signal.pause()

    pid, said = in_child(holder)
    assert said == b"held"
    try:
        with pytest.raises(RunInUseError, match=f"process {pid} on "), hold(tmp_path, quiet):
            pass
    finally:
        kill(pid)
    assert (tmp_path / ".lock").exists()
    with hold(tmp_path, quiet):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_worker_of_a_dead_holder_holds_nothing(tmp_path):
    """An engine's worker may outlive the run by minutes."""

    def holder(say):
        with hold(tmp_path, quiet):
            worker, _ = in_child(lambda told: told(b"there"))
            say(str(worker).encode())
            signal.pause()

    pid, worker = in_child(holder)
    kill(pid)
    try:
        with hold(tmp_path, quiet):
            pass
    finally:
        os.kill(int(worker), signal.SIGKILL)


def test_a_child_on_its_way_out_leaves_the_lock_alone(tmp_path):
    with contextlib.ExitStack() as held:
        held.enter_context(hold(tmp_path, quiet))
        pid, said = in_child(lambda say: say(b"left" if held.close() is None else b""))
        kill(pid)
        assert said == b"left"
        assert (tmp_path / ".lock").exists()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    told = []
    with hold(tmp_path, told.append):
        pass
    assert "no lock (Function not implemented)" in told[0]
