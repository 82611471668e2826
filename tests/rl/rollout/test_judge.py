"""Decoding and rewards beside generation: same values, earlier."""

import threading

import pytest

from fxrl.engines import Completion
from fxrl.models import tiny_tokenizer
from fxrl.rl.data.rewards import Reward
from fxrl.rl.errors import RewardError
from fxrl.rl.rollout.judge import Judge
from fxrl.rl.types import TrainerState

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2", "level": 3}]
STATE = TrainerState(1, 2, 0.5)


def group(text, count=2):
    ids = tuple(tiny_tokenizer()(text)["input_ids"])
    return [
        Completion((1,), ids[: len(ids) - i], (0.0,) * (len(ids) - i), "stop", 0)
        for i in range(count)
    ]


GROUPS = [group("ones"), group("threes")]


class Spy:
    """A reward that remembers what it got, and where."""

    def __init__(self):
        self.calls = []

    def __call__(self, completions, prompts, completion_ids, **rest):
        self.calls.append((threading.current_thread(), completions, prompts, rest))
        return [float(len(ids)) for ids in completion_ids]


def judged(early, late, finish=()):
    rewards = [
        Reward("late", late, 1.0, per_group=False),
        Reward("early", early, 1.0, per_group=True),
    ]
    prompts, columns = ["a", [{"role": "user", "content": "b"}]], ("answer", "level")
    judge = Judge(ROWS, prompts, rewards, tiny_tokenizer(), STATE, columns)
    for prompt in finish:
        judge.finished(prompt, GROUPS[prompt])
    return judge.verdict(GROUPS)


@pytest.mark.parametrize("finish", [(), (1,), (1, 0)], ids=["at the end", "one early", "both"])
def test_values_are_in_order_whenever_they_were_made(finish):
    early, late = Spy(), Spy()
    drawn = judged(early, late, finish)
    assert [one.text for one in drawn] == ["ones", "one", "threes", "three"]
    assert [list(one.values) for one in drawn] == [["late", "early"]] * 4
    lengths = [4.0, 3.0, 6.0, 5.0]
    assert [one.values for one in drawn] == [{"early": n, "late": n} for n in lengths]
    assert [one.total for one in drawn] == [2 * n for n in lengths]
    [(thread, completions, prompts, rest)] = late.calls  # once, with everything
    assert thread is threading.main_thread()
    assert completions[:2] == ["ones", "one"]
    assert completions[2] == [{"role": "assistant", "content": "threes"}]
    assert prompts[:2] == ["a", "a"]
    assert rest["answer"] == ["1", "1", "2", "2"]
    assert rest["level"] == [None, None, 3, 3]
    assert rest["trainer_state"] is STATE
    assert len(early.calls) == 2
    order = [*finish, *(i for i in (0, 1) if i not in finish)]
    assert [call[3]["answer"] for call in early.calls] == [[ROWS[i]["answer"]] * 2 for i in order]
    assert all(call[0] is not threading.main_thread() for call in early.calls)
    # a column that the first row lacks is None for it here as well
    assert [call[3]["level"] for call in early.calls] == [[ROWS[i].get("level")] * 2 for i in order]


def test_what_a_second_try_draws_again_is_judged_once():
    early = Spy()
    reward = Reward("early", early, 1.0, per_group=True)
    judge = Judge(ROWS, ["a", "b"], [reward], tiny_tokenizer(), STATE)
    judge.finished(0, GROUPS[0])
    judge.finished(0, group("other"))
    assert [one.text for one in judge.verdict([group("other"), GROUPS[1]])][:2] == ["ones", "one"]
    assert len(early.calls) == 2


def test_a_reward_runs_while_others_are_drawn():
    called = threading.Event()

    def early(completions):
        called.set()
        return [0.0] * len(completions)

    judge = Judge(
        ROWS, ["a", "b"], [Reward("early", early, 1.0, per_group=True)], tiny_tokenizer(), STATE
    )
    judge.finished(0, GROUPS[0])
    assert called.wait(5), "before the second prompt has finished"
    assert [one.values["early"] for one in judge.verdict(GROUPS)] == [0.0] * 4


def test_a_reward_that_raises_early_is_told_at_the_end():
    def broken(completions):
        raise KeyError("x")

    with pytest.raises(RewardError, match=r"'early' raised KeyError\('x'\)"):
        judged(broken, Spy(), (0, 1))


def test_a_failed_generation_leaves_no_thread():
    before = threading.active_count()
    judge = Judge(ROWS, ["a", "b"], [], tiny_tokenizer(), STATE)
    judge.abandon()
    judge._worker.result(5)
    assert threading.active_count() == before


def test_a_reward_that_has_failed_ends_the_drawing():
    called = threading.Event()

    def broken(completions):
        called.set()
        raise KeyError("x")

    rewards = [Reward("early", broken, 1.0, per_group=True)]
    judge = Judge(ROWS, ["a", "b"], rewards, tiny_tokenizer(), STATE)
    judge.finished(0, GROUPS[0])
    assert called.wait(5)
    judge._worker._thread.join(5)
    with pytest.raises(RewardError, match=r"'early' raised KeyError\('x'\)"):
        judge.finished(1, GROUPS[1])


def test_an_abandoned_judge_is_waited_for_and_calls_no_more():
    begun, gate, calls = threading.Event(), threading.Event(), []

    def slow(completions):
        calls.append(completions)
        begun.set()
        gate.wait(5)
        return [0.0] * len(completions)

    rewards = [Reward("early", slow, 1.0, per_group=True)]
    judge = Judge(ROWS, ["a", "b"], rewards, tiny_tokenizer(), STATE)
    for number in (0, 1):
        judge.finished(number, GROUPS[number])
    assert begun.wait(5)
    judge.abandon()
    gate.set()
    judge._worker.result(5)
    assert len(calls) == 1
    judge._worker._thread.join(5)  # its result is there a moment before it ends
    assert not judge._worker._thread.is_alive()
