"""What several threads lose at once goes on in the log, as what one loses does."""

import os
import signal
import sys
import threading
import time

import pytest

from fxrl.rl.report.output import Output

BOTH_S = 0.1
"""In which a second thread surely comes to the lock that the first one holds."""


class Pipe:
    """A stream whose reader goes away when two threads write there for the first time."""

    def __init__(self):
        reader, self._writer = os.pipe()
        self._both = threading.Barrier(2, action=lambda: os.close(reader))
        self._came = set()

    def fileno(self):
        return self._writer

    def write(self, text):
        if len(self._came) < 2 and text not in self._came:
            self._came.add(text)
            self._both.wait(10)
        return os.write(self._writer, text.encode())


@pytest.fixture
def log(tmp_path):
    return tmp_path / "train.log"


def slowly(told):
    time.sleep(BOTH_S)
    return told


def test_two_threads_at_once(monkeypatch, log):
    stream = Pipe()
    monkeypatch.setattr("sys.stdout", stream)
    output = Output(slowly)
    with output.kept():
        output.go_on_in(log)
        lines = [f"line {n}\n" for n in (1, 2)]
        threads = [threading.Thread(target=sys.stdout.write, args=[line]) for line in lines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.stdout.write("line 3\n")
    first, *others = log.read_text().splitlines()
    assert first.startswith("stdout: Broken pipe; the run goes on")
    assert sorted(others) == ["line 1", "line 2", "line 3"]


@pytest.mark.parametrize("buffering", [1, -1])  # by lines as a terminal's, and as a file's
def test_what_is_lost_while_it_is_flushed_comes_once(monkeypatch, log, buffering):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering) as stream:
        monkeypatch.setattr("sys.stdout", stream)
        output = Output(str)
        with output.kept():
            output.go_on_in(log)
            for n in (1, 2):
                assert sys.stdout.write(f"line {n}\n") == 7
                sys.stdout.flush()
    assert log.read_text().splitlines()[1:] == ["line 1", "line 2"]


def test_a_hangup_while_a_thread_loses_the_stream(monkeypatch, log):
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    reader, writer = os.pipe()
    os.close(reader)
    losing = threading.Event()

    def words(told):
        losing.set()
        return slowly(told)

    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        output = Output(words)
        with output.kept():
            output.go_on_in(log)
            sys.stdout.write("line 1\n")
            thread = threading.Thread(target=sys.stdout.flush)
            thread.start()
            assert losing.wait(10)
            os.kill(os.getpid(), signal.SIGHUP)
            thread.join()
            print("line 2", flush=True)
    signal.signal(signal.SIGHUP, inherited)
    first, *others = log.read_text().splitlines()
    assert first.startswith("stdout: Broken pipe; the run goes on")
    assert others == ["line 1", "line 2"]
