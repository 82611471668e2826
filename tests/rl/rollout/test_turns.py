"""Rollouts of several turns, played by a policy that says what a script has it say."""

import asyncio
import json
import threading
import time

import pytest
import torch
from rich.console import Console

from fxrl.engines import Completion, GenerateTimeoutError, SamplingParams
from fxrl.errors import ConfigError
from fxrl.models import tiny_tokenizer
from fxrl.rl.config.load import config_of
from fxrl.rl.data.rewards import Reward
from fxrl.rl.errors import ToolError
from fxrl.rl.loop.batching import make_batches
from fxrl.rl.loop.data import read_questions
from fxrl.rl.report.progress import Reporter
from fxrl.rl.report.timing import Clock
from fxrl.rl.rollout.function import RolloutFunction
from fxrl.rl.rollout.rollouter import Rollouter
from fxrl.rl.rollout.turns import Assignment
from fxrl.rl.types import TrainerState

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
STATE = TrainerState(1, 2, 0.5)


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Policy:
    """Says ``script(conversation, sample)``, a text, and then stops; a log-prob is its place."""

    policy_version = 3
    eos_token_ids = frozenset({EOS})

    def __init__(self, script, failures=0):
        self.script, self.failures = script, failures
        self.timings, self.calls, self.seeds = {}, [], []

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def generate(self, prompts, params, *, only=None, on_finished=None, max_tokens=None):
        if self.failures:
            self.failures -= 1
            raise GenerateTimeoutError("too long")
        self.calls.append(sorted(only))
        self.seeds.append(params.seed)
        drawn = [[] for _ in prompts]
        for place in only:
            said = ids_of(self.script(TOKENIZER.decode(prompts[place]), place))
            tokens = (*said, EOS)[: max_tokens[place]]
            reason = "stop" if tokens[-1] == EOS else "length"
            logprobs = tuple(-(1 + i) / 64 for i in range(len(tokens)))
            drawn[place] = [Completion(tuple(prompts[place]), tokens, logprobs, reason, 3)]
        return drawn


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: another.
    """
    return a + b


async def slow(seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return "done"


def broken(x: int) -> int:
    """Raises.

    Args:
        x: any number.
    """
    raise KeyError(x)


def leaves(x: int) -> int:
    """Exits.

    Args:
        x: any number.
    """
    raise SystemExit(x)


def right(completions, answer, **columns):
    return [float(c[-1]["content"] == a) for c, a in zip(completions, answer, strict=True)]


ROWS = [{"prompt": f"{a}+{b}?", "answer": str(a + b), "goal": a} for a, b in [(1, 2), (3, 4)]]


def rolled(script, rollout, *, rewards=(right,), n=2, failures=0, rows=ROWS, **tables):
    """The rollout of a step over ``ROWS``, and the policy."""
    table = {
        "model": {"id": "tiny:qwen3"},
        "data": {"rows": rows},
        "reward": {"functions": rewards},
        "rollout": rollout,
        "sampling": {"num_generations": n, "max_tokens": 300} | tables.pop("sampling", {}),
        "prompts_per_step": len(rows),
        "run_dir": "unused",
    }
    config = config_of(table | tables, "test", "unused").settled()
    questions = read_questions(config, TOKENIZER, print)
    policy = Policy(script, failures)
    player = questions.conversation or RolloutFunction(
        config.rollout.rollout_func, questions.builder, policy
    )
    stage = Reporter(Console(quiet=True)).stage
    judges = questions.builder, questions.rewards, config, TOKENIZER, stage, questions.columns
    rollouter = Rollouter(policy, *judges, player=player)
    clock = Clock(torch.device("cpu"))
    return rollouter.experience(lambda count: rows, lambda: STATE, clock), policy


def adds_then_answers(conversation, place):
    """Calls ``add`` (sample 1 does not), then says what it was told."""
    if "<|im_start|>tool" in conversation:
        return conversation.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0]
    a, b = conversation.rpartition("?")[0][-3::2]
    return call("add", a=int(a), b=int(b)) if place % 2 == 0 else "?"


def test_a_tool_is_called_and_answers():
    rollout, policy = rolled(adds_then_answers, {"tools": [add]})
    assert policy.calls == [[0, 1, 2, 3], [0, 2]]  # one call a turn, of those that go on
    assert len(set(policy.seeds)) == 2
    said = [one.told.messages for one in rollout.drawn]
    assert [[m["role"] for m in one] for one in said[:2]] == [
        ["assistant", "tool", "assistant"],
        ["assistant"],
    ]
    assert said[0][0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert [one.total for one in rollout.drawn] == [1.0, 0.0, 1.0, 0.0]
    assert rollout.metrics["tools/call_frequency"] == 0.5
    assert rollout.metrics["tools/failure_frequency"] == 0.0
    first = rollout.drawn[0].completion
    text = TOKENIZER.decode(first.token_ids)
    assert text == (
        f"{call('add', a=1, b=2)}<|im_end|>"
        "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )
    drawn = [t for t, s in zip(first.token_ids, first.sampled, strict=True) if s]
    assert TOKENIZER.decode(drawn) == f"{call('add', a=1, b=2)}<|im_end|>3<|im_end|>"
    assert [p != 0 for p in first.logprobs] == list(first.sampled)
    assert rollout.metrics["completions/mean_length"] == (len(drawn) + 2) / 2


def test_what_tools_say_is_context_for_the_loss():
    rollout, _ = rolled(adds_then_answers, {"tools": [add]})
    completions = [one.completion for one in rollout.drawn]
    [batch] = make_batches(rollout.rows, [[0, 1, 2, 3]], pad_token_id=0, device=torch.device("cpu"))
    sampled = [c.sampled or (True,) * len(c.token_ids) for c in completions]
    mask, skipped = batch["completion_mask"], batch["input_ids"].shape[1]
    skipped -= mask.shape[1]
    for row, (one, kept) in enumerate(zip(completions, sampled, strict=True)):
        start = len(one.prompt_token_ids) - skipped
        end = start + len(kept)
        assert mask[row, start:end].tolist() == list(map(float, kept))
        assert not mask[row, :start].any()
        assert not mask[row, end:].any()
        assert torch.equal(batch["rollout_logps"][row, start:end], torch.tensor(one.logprobs))
    assert batch["num_items_in_batch"] == sum(map(sum, sampled)) == mask.sum()


class Game:
    """A secret number is to be guessed."""

    made = 0

    def __init__(self):
        Game.made += 1
        self.guesses = None

    def reset(self, goal, **columns):
        assert columns["answer"]
        self.goal, self.guesses = goal, []
        return f" (below {goal + 2})"

    async def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: the guess.
        """
        await asyncio.sleep(0)
        self.guesses.append(number)
        return "yes" if number == self.goal else "no"

    def get_reward(self):
        return float(self.goal in self.guesses) / max(1, len(self.guesses))


def guesses_on(conversation, place):
    """1, 2, 3, ... (odd samples from 3 on), until it is right."""
    if "yes" in conversation:
        return "done"
    return call("guess", number=conversation.count("\nno") + (3 if place % 2 else 1))


def test_an_environment_keeps_state_and_gives_the_reward():
    Game.made, seen = 0, []

    def spy(environments, prompts, **columns):
        seen.extend(
            (type(one), one.goal, prompt[-1]["content"])
            for one, prompt in zip(environments, prompts, strict=True)
        )
        return [None] * len(prompts)

    rollout, policy = rolled(
        guesses_on,
        {"environment_factory": Game, "max_tool_calling_iterations": 3},
        rewards=[spy],
    )
    assert [one.values["Game"] for one in rollout.drawn] == [1.0, 0.0, pytest.approx(1 / 3), 1.0]
    assert policy.calls == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2], [1, 2]]
    # cut off by the number of calls, with one that was not made
    assert [one.completion.finish_reason for one in rollout.drawn] == [
        "stop",
        "length",
        "stop",
        "stop",
    ]
    assert seen == [(Game, 1, "1+2? (below 3)")] * 2 + [(Game, 3, "3+4? (below 5)")] * 2
    assert Game.made == 4
    assert TOKENIZER.decode(rollout.drawn[0].completion.prompt_token_ids).count("(below 3)") == 1


class Other:
    def reset(self, goal):
        pass

    def look(self) -> str:
        """Looks."""
        return "nothing"


def test_each_row_names_its_environment():
    rows = [ROWS[0] | {"environment": "game"}, ROWS[1] | {"environment": "other"}]
    prompts = {}

    def script(conversation, place):
        prompts[place] = conversation
        return "."

    rollout, _ = rolled(
        script, {"environment_factory": {"game": Game, "other": Other}}, rewards=[], rows=rows, n=2
    )
    assert "tool guess" in prompts[0]
    assert "tool look" not in prompts[0]
    assert "tool look" in prompts[2]
    assert [one.values["Game"] for one in rollout.drawn] == [0.0, 0.0, None, None]


MISTAKES = {
    "no such tool": (call("sub", a=1), "there is no tool 'sub'"),
    "wrong arguments": (call("add", a=1), "missing a required argument: 'b'"),
    "raises": (call("broken", x=1), "KeyError: 1"),
    "exits": (call("leaves", x=1), "SystemExit(1)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_policy_is_told_of_a_failed_call(name):
    said, told = MISTAKES[name]
    script = lambda conversation, place: "." if "<|im_start|>tool\n" in conversation else said  # noqa: E731
    rollout, _ = rolled(script, {"tools": [add, broken, leaves]})
    assert told in rollout.drawn[0].told.messages[1]["content"]
    assert rollout.metrics["tools/failure_frequency"] == 1.0


def test_a_failed_tool_may_end_the_run():
    script = lambda conversation, place: call("broken", x=7)  # noqa: E731
    with pytest.raises(
        ToolError, match=r"tool 'broken' called with {'x': 7} raised KeyError\(7\)"
    ) as told:
        rolled(script, {"tools": [broken], "on_error": "stop"})
    for part in ("test_turns.py", "'1+2?'", 'on_error="tell"'):
        assert part in str(told.value)


def test_a_call_that_hangs_is_given_up():
    """A function in a thread that is left behind, and an async one that is cancelled; the other
    rollouts go on, and an environment that hangs is not used again."""
    never = threading.Event()

    class Stuck(Game):
        def guess(self, number: int) -> str:
            """Guesses.

            Args:
                number: the guess.
            """
            if number == 1:
                never.wait()
            return "yes"

        def get_reward(self):
            return 0.5

    def script(conversation, place):
        if "<|im_start|>tool\n" in conversation:
            return "."
        return call("guess", number=place) if place < 2 else call("slow", seconds=60 * (place - 2))

    began = time.monotonic()
    rollout, _ = rolled(
        script, {"environment_factory": Stuck, "tools": [slow], "timeout_s": 0.2}, rewards=[]
    )
    assert time.monotonic() - began < 30
    answers = [one.told.messages[1]["content"] for one in rollout.drawn]
    assert answers[0] == "yes"
    assert answers[2] == "done"
    assert "did not come back within 0.2 s" in answers[1]
    assert "did not come back within 0.2 s" in answers[3]
    never.set()


def test_async_code_that_blocks_all_others_is_an_error():
    hold = threading.Event()

    async def blocks(x: int) -> int:
        """Blocks.

        Args:
            x: any.
        """
        hold.wait(20)
        return x

    with pytest.raises(ToolError, match=r"(?s)must await what it waits for.*hold.wait"):
        rolled(lambda *_: call("blocks", x=1), {"tools": [blocks], "timeout_s": 0.1})
    hold.set()


@pytest.mark.parametrize(("room", "turns"), [(10, 1), (30, 2)], ids=["no answer", "cut off"])
def test_max_tokens_is_of_all_turns_and_answers(room, turns):
    """An answer that leaves no room for a token is left out: context alone teaches nothing."""
    script = lambda conversation, place: call("add", a=1, b=2)  # noqa: E731
    most = len(ids_of(script("", 0))) + 1 + room
    rollout, policy = rolled(script, {"tools": [add]}, sampling={"max_tokens": most})
    assert len(policy.calls) == turns
    for one in rollout.drawn:
        assert len(one.completion.token_ids) <= most
        assert one.completion.sampled is None or one.completion.sampled[-1]
        assert one.completion.finish_reason == "length"
        assert len(one.told.messages) == 2 * turns - 1


def test_a_turn_that_takes_too_long_is_drawn_again():
    rollout, policy = rolled(adds_then_answers, {"tools": [add]}, failures=1, engine_retries=1)
    again, other = rolled(adds_then_answers, {"tools": [add]})
    assert policy.seeds == other.seeds
    assert [one.completion for one in rollout.drawn] == [one.completion for one in again.drawn]


def test_each_rank_plays_its_share_as_one_would_all():
    def played(mine):
        config = config_of(
            {
                "model": {"id": "tiny:qwen3"},
                "data": {"rows": ROWS},
                "rollout": {"environment_factory": Game},
            },
            "test",
            "unused",
        )
        questions = read_questions(config, TOKENIZER, print)
        policy = Policy(guesses_on)
        params = SamplingParams(n=2, max_tokens=300, seed=7)

        def generate(prompts, params, only, most):
            return policy.generate(prompts, params, only=only, max_tokens=most)

        groups = questions.conversation.play(Assignment(ROWS, mine, params, STATE, generate))
        found = {row: completions for row, (completions, *_) in groups}
        return found, policy, questions

    whole, policy, questions = played([0, 1])
    parts = [played([row]) for row in (0, 1)]
    assert whole == parts[0][0] | parts[1][0]
    assert parts[1][1].calls[0] == [2, 3]
    for _, part, _ in parts:
        assert part.seeds == policy.seeds[: len(part.seeds)]
    asks = [Reward("mine", lambda environments: [], 1.0)]
    questions.conversation.tools.check_ranks(asks, 1)
    with pytest.raises(ConfigError, match="reward 'mine' asks for environments"):
        questions.conversation.tools.check_ranks(asks, 2)


def plays(prompts, trainer):
    """TRL's signature: two turns, with a word of the environment's in between."""
    assert trainer.args.num_generations == 2
    ids = [trainer.processing_class(p[-1]["content"])["input_ids"] for p in prompts]
    first = trainer.generate(ids)
    between = trainer.processing_class(" and")["input_ids"]
    second = trainer.generate(
        [[*p, *c.token_ids, *between] for p, c in zip(ids, first, strict=True)]
    )
    turns = list(zip(first, second, strict=True))
    return {
        "prompt_ids": ids,
        "completion_ids": [[*a.token_ids, *between, *b.token_ids] for a, b in turns],
        "logprobs": [[*a.logprobs, *[0.0] * len(between), *b.logprobs] for a, b in turns],
        "env_mask": [
            [1] * len(a.token_ids) + [0] * len(between) + [1] * len(b.token_ids) for a, b in turns
        ],
        "turns": [2] * len(prompts),
    }


def test_a_rollout_function_plays():
    seen = []

    def judge(completions, turns, **columns):
        seen.extend(turns)
        return [float(len(c[0]["content"])) for c in completions]

    script = lambda conversation, place: "ab" if conversation.endswith("?") else "c"  # noqa: E731
    rollout, policy = rolled(script, {"rollout_func": plays}, rewards=[judge])
    assert seen == [2] * 4
    assert policy.calls == [[0, 1, 2, 3]] * 2
    one = rollout.drawn[0].completion
    assert TOKENIZER.decode(one.token_ids) == "ab<|im_end|> andc<|im_end|>"
    assert one.sampled == (True,) * 3 + (False,) * 4 + (True,) * 2
    assert one.finish_reason == "stop"
    assert rollout.metrics["completions/mean_length"] == 5


def again(change):
    """``plays``, its output changed."""

    def played(prompts, trainer):
        output = plays(prompts, trainer)
        change(output)
        return output

    return played


def retokenized(output):
    """As if a turn had been decoded and encoded again, which made other tokens."""
    output["completion_ids"][1][0] = ids_of("x")[0]


WRONG = {
    "re-tokenized": (retokenized, "are not what the engine drew"),
    "log-probs of others": (
        lambda o: o["logprobs"][1].__setitem__(0, -9.0),
        "are not what the engine drew",
    ),
    "an answer trained on": (
        lambda o: o["env_mask"][1].__setitem__(3, 1),
        "are not what the engine drew",
    ),
    "another prompt": (lambda o: o["prompt_ids"][1].append(5), "are not what the engine drew"),
    "no log-probs": (lambda o: o.pop("logprobs"), "returned no logprobs"),
    "too few": (lambda o: o["turns"].pop(), "3 turns for 4 prompts"),
    "not one each": (lambda o: o["logprobs"][0].pop(), "8 logprobs and 9 entries"),
    "nothing drawn": (
        lambda o: o.update(env_mask=[[0] * 9] * 4),
        "env_mask for prompt 0 without a 1",
    ),
    "no token": (lambda o: o["prompt_ids"][0].__setitem__(0, 10**6), "token id 1000000"),
    "texts": (lambda o: o.update(completion_ids=["abc"] * 4), "give token ids"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_rollout_function_returns_is_checked(name):
    change, told = WRONG[name]
    script = lambda conversation, place: "ab" if conversation.endswith("?") else "c"  # noqa: E731
    with pytest.raises(ToolError, match=told) as error:
        rolled(script, {"rollout_func": again(change)})
    assert "rollout.rollout_func" in str(error.value)
