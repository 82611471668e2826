"""What is done about reward functions that raise, hang, or wait."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from fxrl.rl.data.rewards import Reward, call_all
from fxrl.rl.errors import RewardError


def reward(function, **rules):
    return Reward("mine", function, 1.0, **rules)


class Flaky:
    """Raises the first ``failures`` times."""

    def __init__(self, failures):
        self.left = failures

    def __call__(self, completions, **_):
        self.left -= 1
        if self.left >= 0:
            raise OSError("no answer")
        return [1.0] * len(completions)


def test_retries_help_where_the_failure_passes():
    assert reward(Flaky(2), retries=2)(2, {"completions": "ab"}) == [1.0, 1.0]
    with pytest.raises(RewardError, match=r"'mine' raised OSError\('no answer'\) at .*\(2 times\)"):
        reward(Flaky(2), retries=1)(2, {"completions": "ab"})


def test_skip_gives_no_value_and_says_so():
    mine = reward(Flaky(9), retries=1, on_error="skip")
    assert mine(2, {"completions": "ab"}) == [None, None]
    [told] = mine.failures
    assert told.startswith("reward 'mine' raised OSError('no answer') at ")
    assert told.endswith(" (2 times); 2 completions get no value from it")


def test_a_wrong_result_is_no_passing_failure():
    """Retries and skip are for failures; a function that returns nonsense is a mistake."""
    mine = reward(lambda completions: [1.0], retries=3, on_error="skip")
    with pytest.raises(RewardError, match="returned 1 values for 2"):
        mine(2, {"completions": "ab"})


def test_a_hang_ends_after_the_limit_and_names_function_and_place():
    gate = threading.Event()

    def stuck(completions):
        gate.wait(20)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"'mine' .* reward\.timeout_s=0\.05") as caught:
        reward(stuck, timeout_s=0.05)(2, {"completions": "ab"})
    assert "gate.wait(20)" in str(caught.value)
    gate.set()


def test_what_a_hanging_call_did_is_put_back_at_once_and_never_later(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    gate, threads = threading.Event(), []

    def stuck(completions):
        threads.append(threading.current_thread())
        os.chdir("/")
        gate.wait(20)

    with pytest.raises(RewardError, match="did not come back"):
        reward(stuck, timeout_s=0.05)(1, {"completions": "a"})
    assert Path.cwd() == tmp_path
    monkeypatch.chdir("elsewhere")
    gate.set()
    threads[0].join()
    assert Path.cwd() == tmp_path / "elsewhere"


def test_an_async_function_is_cancelled():
    cancelled = []

    async def slow(completions):
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    start = time.monotonic()
    with pytest.raises(RewardError, match=r"reward\.timeout_s=0\.05"):
        reward(slow, timeout_s=0.05)(2, {"completions": "ab"})
    assert time.monotonic() - start < 5
    deadline = time.monotonic() + 5
    while not cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cancelled == [True]


def test_an_async_function_that_blocks_is_caught_too():
    gate = threading.Event()

    async def blocks(completions):
        gate.wait(20)

    with pytest.raises(RewardError, match=r"reward\.timeout_s=0\.05"):
        reward(blocks, timeout_s=0.05)(1, {"completions": "a"})
    gate.set()


def test_async_functions_wait_together():
    """Each waits for the other: one after the other they would never end."""
    meeting = threading.Barrier(2)

    async def meets(completions):
        await asyncio.to_thread(meeting.wait, 10)
        return [1.0] * len(completions)

    rewards = [Reward(name, meets, 1.0, timeout_s=15) for name in ("a", "b")]
    rewards.insert(1, Reward("c", lambda completions: [2.0] * len(completions), 1.0))
    found = call_all(rewards, 2, {"completions": "xy"})
    assert list(found) == ["a", "c", "b"], "in the order of the configuration"
    assert found == {"a": [1.0, 1.0], "c": [2.0, 2.0], "b": [1.0, 1.0]}


def test_an_async_failure_is_named():
    async def broken(completions):
        raise ValueError("x")

    rewards = [Reward("ok", lambda completions: [0.0], 1.0), Reward("broken", broken, 1.0)]
    with pytest.raises(RewardError, match=r"'broken' raised ValueError\('x'\)"):
        call_all(rewards, 1, {"completions": "a"})


class Called:
    async def __call__(self, completions):
        await asyncio.sleep(0)
        return [1.0] * len(completions)


@pytest.mark.parametrize(
    "function", [Called().__call__, Called(), lambda completions: Called()(completions)]
)
@pytest.mark.parametrize("timeout_s", [None, 15])
def test_async_functions_work_where_a_loop_runs_already(function, timeout_s):
    """As in a notebook."""

    async def cell():
        return call_all([reward(function, timeout_s=timeout_s)], 2, {"completions": "xy"})

    assert list(asyncio.run(cell()).values()) == [[1.0, 1.0]]
    is_lambda = getattr(function, "__name__", "") == "<lambda>"
    assert reward(function).is_async is not is_lambda
