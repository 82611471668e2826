"""Calls that hang are left behind, and everything else passes through."""

import threading
import time

import pytest

from fxrl.rl.data.rewards import Background, Reward, TimeLimitError


def hang(gate):
    gate.wait(20)


@pytest.mark.parametrize("seconds", [None, 5.0])
def test_results_and_errors_pass_through(seconds):
    assert Background(lambda: 3, "x").result(seconds) == 3
    with pytest.raises(ZeroDivisionError):
        Background(lambda: 1 // 0, "x").result(seconds)


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_without_a_limit_a_reward_stays_in_this_thread(timeout_s):
    seen = []
    reward = Reward("x", lambda **_: [seen.append(threading.current_thread())], 1.0,
                    timeout_s=timeout_s)  # fmt: skip
    assert reward(1, {}) == [None]
    assert (seen == [threading.current_thread()]) is (timeout_s is None)


def test_a_hanging_call_is_left_and_says_where():
    gate = threading.Event()
    start = time.monotonic()
    with pytest.raises(TimeLimitError, match=r"within 0\.05 s") as caught:
        Background(lambda: hang(gate), "hanging").result(0.05)
    assert time.monotonic() - start < 5
    assert "gate.wait(20)" in caught.value.stack
    assert "rewards.py" not in caught.value.stack, "only what the call itself does"
    [left] = [thread for thread in threading.enumerate() if thread.name == "hanging"]
    assert left.daemon, "it must not keep the process from ending"
    gate.set()
    left.join(5)


def test_background_runs_at_once():
    gate = threading.Event()
    call = Background(gate.set, "x")
    assert gate.wait(5)
    assert call.result() is None
