"""Calls that hang are left behind, and everything else passes through."""

import threading
import time

import pytest

from fxrl.rl.data.rewards import Background, TimeLimitError, call_with_limit


def hang(gate):
    gate.wait(20)


@pytest.mark.parametrize("seconds", [None, 5.0])
def test_results_and_errors_pass_through(seconds):
    assert call_with_limit(lambda: 3, seconds, "x") == 3
    with pytest.raises(ZeroDivisionError):
        call_with_limit(lambda: 1 // 0, seconds, "x")


def test_without_a_limit_it_stays_in_this_thread():
    here = threading.current_thread()
    assert call_with_limit(threading.current_thread, None, "x") is here
    assert call_with_limit(threading.current_thread, 5.0, "x") is not here


def test_a_hanging_call_is_left_and_says_where():
    gate = threading.Event()
    start = time.monotonic()
    with pytest.raises(TimeLimitError, match=r"within 0\.05 s") as caught:
        call_with_limit(lambda: hang(gate), 0.05, "hanging")
    assert time.monotonic() - start < 5
    assert "gate.wait(20)" in caught.value.stack
    [left] = [thread for thread in threading.enumerate() if thread.name == "hanging"]
    assert left.daemon, "it must not keep the process from ending"
    gate.set()
    left.join(5)


def test_background_runs_at_once():
    gate = threading.Event()
    call = Background(gate.set, "x")
    assert gate.wait(5)
    assert call.result() is None
