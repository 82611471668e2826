"""Reward functions: what they get, what they may return, what is said when they may not."""

import math
import os
import sys

import pytest

from fxrl.errors import ConfigError
from fxrl.rl.config.tables import RewardConfig
from fxrl.rl.data.rewards import Reward, build_rewards, combine
from fxrl.rl.errors import RewardError

COMPLETIONS = ["the answer is 4", [{"role": "assistant", "content": "7, no: 5"}], "none"]
ARGUMENTS = {
    "prompts": ["p"] * 3,
    "completions": COMPLETIONS,
    "completion_ids": [[1], [1, 2], [1, 2, 3, 4]],
    "answer": ["4", "7", "x"],
    "rows": [{"answer": a} for a in ("4", "7", "x")],
}


def built(name, *, extract=r"-?\d+", score=None, **params):
    params = {name: params} if params else {}
    config = RewardConfig((name,), params=params, extract=extract)
    [reward] = build_rewards(config, "answer", score)
    return reward(3, ARGUMENTS)


def test_exact_takes_the_last_match_or_the_whole_text():
    assert built("exact") == [1.0, 0.0, 0.0]
    assert built("exact", extract=r"(\d+),") == [0.0, 1.0, 0.0]
    assert built("exact", extract=None) == [0.0, 0.0, 0.0]


def test_exact_without_its_column_says_so():
    [reward] = build_rewards(RewardConfig(("exact",)), "label", None)
    with pytest.raises(RewardError, match="no column 'label'"):
        reward(3, ARGUMENTS)


def test_reasoning_gym_asks_the_task():
    seen = []
    score = lambda answer, row: seen.append((answer, row["answer"])) or 0.25  # noqa: E731
    assert built("reasoning_gym", score=score) == [0.25] * 3
    assert seen == [("4", "4"), ("5", "7"), ("none", "x")]


def test_reasoning_gym_without_a_task_is_refused():
    with pytest.raises(ConfigError, match=r"needs data\.reasoning_gym"):
        built("reasoning_gym")


def test_length_and_regex():
    assert built("length", target=2) == [0.5, 1.0, 0.0]
    assert built("regex", pattern=r".*\d") == [1.0, 1.0, 0.0]


def test_a_users_function_gets_all_columns_as_in_trl(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "seen = {}\n"
        "def judge(prompts, completions, **columns):\n"
        "    seen.update(columns); return [1, None, 0.5]\n"
        "def strict(completions, answer, scale=1.0):\n"
        "    return [scale * len(a) for a in answer]\n"
        "async def later(completions, **kwargs):\n"
        "    return [2.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("my_rewards:judge", "my_rewards:strict", "my_rewards:later")
    params = {"my_rewards:strict": {"scale": 3.0}}
    rewards = build_rewards(RewardConfig(names, (1.0, 2.0, 3.0), params), "answer", None)
    assert [reward.name for reward in rewards] == ["judge", "strict", "later"]
    values = [reward(3, ARGUMENTS) for reward in rewards]
    assert values == [[1.0, None, 0.5], [3.0] * 3, [2.0] * 3]
    assert sys.modules["my_rewards"].seen.keys() == {"completion_ids", "answer", "rows"}
    assert combine(values, [r.weight for r in rewards]) == [13.0, 12.0, 12.5]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0, 2.0], "returned 2 values for 3 completions"),
        (0.5, "returned float; it must return a list"),
        (None, "returned NoneType"),
        ([1.0, "good", 0.0], "returned 'good' for completion 1"),
        ([1.0, math.nan, 0.0], "returned nan for completion 1"),
    ],
)
def test_wrong_returns_name_the_function_and_the_entry(values, words):
    with pytest.raises(RewardError, match=f"reward 'mine' {words}"):
        Reward("mine", lambda **_: values, 1.0)(3, ARGUMENTS)


def test_an_exception_is_wrapped_with_its_cause():
    def broken(completions, **_):
        raise KeyError("no such thing")

    with pytest.raises(RewardError, match="reward 'broken' raised KeyError") as caught:
        Reward("broken", broken, 1.0)(3, ARGUMENTS)
    assert isinstance(caught.value.__cause__, KeyError)


def test_tensors_and_arrays_are_lists_too():
    import numpy as np
    import torch

    assert Reward("t", lambda **_: torch.ones(3), 1.0)(3, ARGUMENTS) == [1.0] * 3
    assert Reward("n", lambda **_: list(np.ones(3)), 1.0)(3, ARGUMENTS) == [1.0] * 3


def test_none_everywhere_is_nan_and_none_somewhere_is_left_out():
    found = combine([[None, 1.0, None], [None, 2.0, 3.0]], [1.0, 0.5])
    assert math.isnan(found[0])
    assert found[1:] == [2.0, 1.5]


def test_names_of_rewards_are_their_own(tmp_path, monkeypatch):
    """Metrics and weights go by them."""
    (tmp_path / "own_names.py").write_text("def length(completions): return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = RewardConfig(("own_names:length", "length"))
    names = [reward.name for reward in build_rewards(config, "answer", None)]
    assert names == ["own_names:length", "length"]
    with pytest.raises(ConfigError, match="'length' is named twice; give it a weight instead"):
        RewardConfig(("length", "length"))


@pytest.mark.parametrize("timeout_s", [None, 60.0])
@pytest.mark.parametrize("ends", ["raises", "exits", "returns"])
def test_a_process_that_a_reward_forks_is_no_trainer(ends, timeout_s):
    """It ends where the function does: a second trainer would save the run's state."""

    def forks(completions, **_):
        if (child := os.fork()) == 0:
            if ends == "raises":
                raise ValueError
            if ends == "exits":
                sys.exit(0)
            return [0.0] * len(completions)
        _, status = os.waitpid(child, 0)
        return [float(os.waitstatus_to_exitcode(status))] * len(completions)

    assert Reward("forks", forks, 1.0, timeout_s=timeout_s)(3, ARGUMENTS) == [1.0] * 3
