"""Signals: the first is noted, the second has its default effect, others' handlers come back."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fxrl.rl.loop.interrupt import stop_on_signal, told_if_slow


@pytest.fixture(autouse=True)
def _as_at_a_terminal():
    """What a shell starts in the background begins with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_is_noted_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signal() as stop:
        assert stop.signum is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_code == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_kills():
    code = (
        "import os, signal\n"
        "from fxrl.rl.loop.interrupt import stop_on_signal\n"
        "with stop_on_signal() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert stop.signum\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('alive', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == ""


def test_it_is_told_while_the_main_thread_is_in_one_long_call():
    """Python's own handlers wait for the end of the call."""
    told, begun = [], threading.Event()

    def interrupt():
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    with stop_on_signal(lambda name: told.append((name, time.monotonic()))) as stop:
        thread = threading.Thread(target=interrupt)
        thread.start()
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)
        ended = time.monotonic()
        assert stop.exit_code == 130
    thread.join()
    [(name, when)] = told
    assert name == "Ctrl-C"
    assert when < ended


@pytest.mark.parametrize(("rounds", "names"), [(4_000_000, ["Ctrl-C"]), (1, [])])
def test_who_does_not_unwind_soon_is_told_of_it(rounds, names):
    told = []
    thread = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

    def work():
        with told_if_slow(told.append):
            thread.start()
            hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
            thread.join()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert told == names


def test_the_second_ends_a_long_call_at_once():
    code = (
        "import hashlib, os, signal, threading\n"
        "from fxrl.rl.loop.interrupt import stop_on_signal\n"
        "def tell(name):\n"
        "    print(name, flush=True)\n"
        "    threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()\n"
        "with stop_on_signal(tell) as stop:\n"
        "    threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)\n"
        "    print('alive', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode in (143, -signal.SIGTERM)
    assert done.stdout == "SIGTERM\n"


def test_elsewhere_than_in_the_main_thread_it_does_nothing():
    found = []

    def work():
        with stop_on_signal() as stop:
            found.append(stop.signum)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]
