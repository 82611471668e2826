"""Groups whose rewards are all the same: kept, dropped, or replaced."""

import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fxrl.engines import Completion
from fxrl.errors import ConfigError
from fxrl.rl.config.load import load_config
from fxrl.rl.data.rewards import Reward
from fxrl.rl.report.progress import Reporter
from fxrl.rl.report.timing import Clock
from fxrl.rl.rollout.rollouter import Rollouter, TrainerState
from fxrl.rl.train import main
from tests.rl.metrics import numbers


def finish(prompt, sample):
    """All samples of 4 are cut off, and the last one of every other prompt."""
    return "length" if prompt == 4 or sample == 2 else "stop"


class Engine:
    """Completions that carry their prompt's number; one policy, no sampling."""

    policy_version = 0

    def __init__(self):
        self.timings = {}
        self.calls = []

    def state_dict(self):
        return {}

    def generate(self, prompts, params, *, only=None, on_finished=None):
        self.calls.append(len(prompts))
        self.timings = {"fold": 0.0, "generate": 1.0}
        return [
            [
                Completion(tuple(p), (p[0], sample), (-1.0, -2.0), finish(p[0], sample), 0)
                for sample in range(params.n)
            ]
            for p in prompts
        ]


class Builder:
    def prompt(self, row):
        return row["prompt"]

    def encode(self, prompt):
        return [int(prompt)]


class Tokenizer:
    def batch_decode(self, ids, skip_special_tokens):
        return [" ".join(map(str, row)) for row in ids]


def mixed(completions, completion_ids):
    """Odd prompts: sample 0 is right, the others are not. Even: all the same. 7: no value."""
    return [None if p == 7 else float(p % 2 == 1 and sample == 0) for p, sample in completion_ids]


def rolled(config_file, numbers, *overrides):
    config = load_config(config_file, ["sampling.num_generations=3", *overrides]).settled()
    engine, numbers = Engine(), iter(numbers)
    rewards, stage = [Reward("mixed", mixed, 1.0)], Reporter(Console(quiet=True)).stage
    rollouter = Rollouter(engine, Builder(), rewards, config, Tokenizer(), stage)
    taken = []

    def take(count):
        taken.append(count)
        return [{"prompt": str(next(numbers))} for _ in range(count)]

    clock = Clock(torch.device("cpu"))
    rollout = rollouter.experience(take, lambda: TrainerState(1, 2, 0.0), clock)
    return rollout, taken


def prompts_of(rollout):
    return [c.prompt_token_ids[0] for c, *_ in rollout.drawn][::3]


STEP = "prompts_per_step=4"


def test_off_keeps_all(config_file):
    rollout, taken = rolled(config_file, [1, 2, 3, 7], STEP)
    assert prompts_of(rollout) == [1, 2, 3, 7]
    assert taken == [4]
    assert rollout.metrics["frac_reward_zero_std"] == pytest.approx(0.5)
    assert "dynamic_sampling/num_dropped" not in rollout.metrics
    assert rollout.advantages[3:6] == [0.0] * 3


def test_drop_leaves_them_out_and_counts_them(config_file):
    rollout, taken = rolled(config_file, [1, 2, 3, 7], STEP, "dynamic_sampling=drop")
    assert prompts_of(rollout) == [1, 3]
    assert taken == [4]
    assert len(rollout.advantages) == len(rollout.drawn) == 6
    assert rollout.advantages[0] > 0 > rollout.advantages[1]
    assert [one.values["mixed"] for one in rollout.drawn] == [1.0, 0.0, 0.0] * 2
    # reported of all that was drawn
    assert rollout.metrics["dynamic_sampling/num_dropped"] == 2
    assert rollout.metrics["frac_reward_zero_std"] == pytest.approx(0.5)
    assert rollout.metrics["reward"] == pytest.approx(2 / 9)
    assert rollout.num_completion_tokens == 4 * 3 * 2
    assert rollout.num_tokens == 4 * 3 * 3


def test_refill_asks_for_what_is_missing(config_file):
    extra = (STEP, "dynamic_sampling=refill")
    rollout, taken = rolled(config_file, [1, 2, 3, 7, 4, 5, 9], *extra)
    assert taken == [4, 2, 1]
    assert prompts_of(rollout) == [1, 3, 5, 9]
    assert rollout.metrics["dynamic_sampling/num_refills"] == 2
    assert rollout.metrics["dynamic_sampling/num_dropped"] == 3


def test_refill_stops_at_its_limit(config_file):
    extra = (STEP, "dynamic_sampling=refill", "max_refills=2")
    rollout, taken = rolled(config_file, [2] * 20, *extra)
    assert taken == [4, 4, 4]
    assert rollout.drawn == []
    assert rollout.advantages == []
    assert rollout.metrics["dynamic_sampling/num_dropped"] == 12


def test_the_batch_s_spread_is_that_of_what_is_left(config_file):
    extra = (STEP, "dynamic_sampling=drop", "scale_rewards=batch")
    rollout, _ = rolled(config_file, [1, 2, 3, 4], *extra)
    spread = torch.tensor([1.0, 0, 0, 1, 0, 0]).std().item()
    assert rollout.advantages[0] == pytest.approx((1 - 1 / 3) / (spread + 1e-4))


REWARD = """
def even(completion_ids, prompts, **columns):
    return [float(len(ids) % 2) if "1" in prompts[i][-1]["content"] else 1.0
            for i, ids in enumerate(completion_ids)]
def same(completions, **columns):
    return [1.0] * len(completions)
"""


def train(file, run_dir, *overrides, resume=None):
    extra = ["reward.params={}", f"run_dir={run_dir}", *overrides]
    return main(str(file), extra, resume=resume, json=True)


def test_a_run_with_refills_resumes_exactly(config_file):
    Path("refill_rewards.py").write_text(REWARD)
    extra = ("reward.functions=['refill_rewards:even']", "dynamic_sampling=refill", "save_every=1")
    assert train(config_file, "whole", *extra) == 0
    assert any(line["dynamic_sampling/num_refills"] for line in numbers("whole"))
    assert train(config_file, "parts", *extra, "steps=2") == 0
    assert train(config_file, "parts", *extra, resume="") == 0
    assert numbers("parts") == numbers("whole")


def test_a_step_without_any_signal_updates_nothing_and_goes_on(config_file):
    Path("same_rewards.py").write_text(REWARD)
    extra = ("reward.functions=['same_rewards:same']", "dynamic_sampling=drop", "steps=2")
    assert train(config_file, "out", *extra) == 0
    for line in numbers("out"):
        assert line["loss"] is None
        assert line["dynamic_sampling/num_dropped"] == 2
        assert line["reward"] == 1.0
        assert not math.isnan(line["learning_rate"])


def test_completions_that_were_cut_off_are_left_out_of_the_loss(config_file):
    """They still count in their group's mean and spread."""
    whole, _ = rolled(config_file, [1, 2, 3, 4], STEP)
    rollout, _ = rolled(config_file, [1, 2, 3, 4], STEP, "mask_truncated_completions=true")
    ends = [d.completion.token_ids for d in rollout.drawn]
    assert ends == [(prompt, sample) for prompt in (1, 2, 3) for sample in (0, 1)]
    assert rollout.advantages == [whole.advantages[3 * (p - 1) + sample] for p, sample in ends]
    assert rollout.metrics == whole.metrics | {"completions/num_trained": 6.0}
    assert rollout.num_tokens == whole.num_tokens
    with pytest.raises(ConfigError, match="leaves nothing to train on where"):
        rolled(config_file, [], "mask_truncated_completions=true", "sampling.ignore_eos=true")


def test_a_step_whose_completions_were_all_cut_off_updates_nothing_and_says_so(config_file, capsys):
    extra = ("mask_truncated_completions=true", "sampling.max_tokens=1", "sampling.min_tokens=1")
    assert train(config_file, "out", *extra, "steps=2") == 0
    assert [line["loss"] for line in numbers("out")] == [None, None]
    assert capsys.readouterr().out.count("no update was made: all completions were cut off") == 2
