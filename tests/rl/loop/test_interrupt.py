"""Signals: the first is noted, the second has its default effect, others' handlers come back."""

import os
import signal
import subprocess
import sys
import threading

from fxrl.rl.loop.interrupt import stop_on_signal


def test_the_first_is_noted_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signal() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        assert stop.exit_code == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_kills():
    code = (
        "import os, signal\n"
        "from fxrl.rl.loop.interrupt import stop_on_signal\n"
        "with stop_on_signal() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert stop\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('alive', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == ""


def test_elsewhere_than_in_the_main_thread_it_does_nothing():
    found = []

    def work():
        with stop_on_signal() as stop:
            found.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]
