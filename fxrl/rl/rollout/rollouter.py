"""One step's completions: generate, judge, compare within groups, drop those that teach nothing.

NOTE [Dynamic sampling]
Where all completions of a prompt have the same reward, all their advantages are 0: they cost a
forward and a backward pass and move nothing (but a KL term). ``drop`` leaves such groups out, and
``refill`` draws further prompts in their place (DAPO, arXiv:2503.14476), at most ``max_refills``
rounds. The loss then is a mean over the groups that are left. Rewards and lengths are reported over
all completions that were drawn, so that they still describe the policy.

NOTE [Truncated completions]
DAPO's overlong filter (arXiv:2503.14476, section 3.4) sets the loss of a completion that was cut
off to 0: its reward says little about the tokens that are there. ``mask_truncated_completions``
leaves it out of what is trained on, which takes it out of every denominator as well, so that many
such completions make no smaller update. It still counts in its group's mean and spread.

NOTE [Completions on several ranks]
Prompts are dealt to the ranks by their expected tokens; a rank draws all completions of its prompts
and calls the rewards that judge each by itself. Then every rank gets everything: a step's rewards
compare completions of different prompts, advantages and metrics are of the whole step, and what is
trained on is dealt anew, by lengths that are known by then. Rewards that get the whole step are
called on rank 0. A completion's random numbers are those of its place in the step
(``Engine.generate``, ``only``), so the step's completions are the same on any number of ranks, up
to the rounding of logits.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from itertools import compress
from typing import Any, ClassVar, TypeVar

import torch

from fxrl.distributed import Ranks, deal
from fxrl.engines import Completion, Engine, GenerateTimeoutError, SamplingParams
from fxrl.losses import group_advantages, rloo_advantages
from fxrl.rl.config.tables import SamplingConfig, TrainConfig
from fxrl.rl.data.questions import Prompt, PromptBuilder, majority_baseline
from fxrl.rl.data.rewards import Reward
from fxrl.rl.report.progress import Stage, told
from fxrl.rl.report.timing import Clock
from fxrl.rl.rollout.function import RolloutFunction
from fxrl.rl.rollout.judge import Judge
from fxrl.rl.rollout.metrics import RewardWatch, step_metrics
from fxrl.rl.rollout.turns import Assignment, Conversation
from fxrl.rl.rollout.verifiers import VerifiersPlayer
from fxrl.rl.types import (
    Drawn,
    Experience,
    Metrics,
    Rollout,
    Row,
    TokenRow,
    TrainerState,
    of_completion,
)

T = TypeVar("T")
Player = Conversation | RolloutFunction | VerifiersPlayer
"""Plays rollouts of several turns."""

ENGINE_SYNC = ("fold", "restore", "sync")
"""Parts of ``Engine.timings`` that a ``generate`` call spends on handing over the policy."""

CPU = torch.device("cpu")
RIGHT = 0.99
"""A reward of at least this counts as a right answer."""


@dataclass
class Rollouter:
    """Where each step's experience comes from: completions of dataset rows, drawn and judged.
    ``fxrl.rl.data.examples.Examples`` is the same for data that are trained on as they are."""

    # The metrics that a run is judged by: a step's, and an evaluation's without ``eval/``.
    headline: ClassVar[tuple[str, str]] = ("reward", "accuracy")
    draws: ClassVar[bool] = True  # by an engine

    engine: Engine
    builder: PromptBuilder
    rewards: Sequence[Reward]
    config: TrainConfig  # settled
    tokenizer: Any
    stage: Stage
    columns: Sequence[str] = ()  # of the data, which rewards get
    longest: int = 0  # tokens of a prompt
    player: Player | None = None  # plays rollouts of several turns; ``None`` where each is one
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        self.rows_each = self.config.sampling.num_generations  # of a step, for a row of the data
        self._retried: list[str] = []
        self._critic = self.config.loss_info().critic is not None
        self._idle = RewardWatch(by_group=not self._critic)

    def params(self, *, n: int, greedy: bool = False, seed: int | None = None) -> SamplingParams:
        """``[sampling]`` with ``n`` completions; ``greedy`` overrides the temperature."""
        given = {f.name: getattr(self.config.sampling, f.name) for f in fields(SamplingConfig)}
        del given["num_generations"]
        if greedy:
            given["temperature"] = 0.0
        return SamplingParams(n=n, seed=seed, **given)

    def draw(
        self, rows: Sequence[Row], params: SamplingParams, state: TrainerState, clock: Clock
    ) -> list[Drawn]:
        """``params.n`` completions of each row with the values of all reward functions. Raises
        ``RewardError`` if one of these failed, ``EngineError`` if generation did."""
        prompts = [self.builder.prompt(row) for row in rows]
        before = dict(self.engine.timings)
        total = len(rows) * params.n
        with ExitStack() as doing:
            doing.enter_context(clock.phase("generate"))
            say = doing.enter_context(self.stage(f"generating: {total} completions"))
            doing.enter_context(told("fxrl.engines.engine", say))
            judges = self.rewards, self.tokenizer, state, self.columns, self.ranks
            judge = Judge(rows, prompts, *judges)
            try:
                if self.player is not None:
                    groups = self._played(self.player, judge, params)
                else:
                    groups = self._generate(judge, prompts, params)
            except BaseException:
                judge.abandon()
                raise
        # Times that are not of this call stay in ``timings`` as they were.
        new = {k: v for k, v in self.engine.timings.items() if before.get(k) != v}
        clock.move("generate", "sync", sum(new.get(name, 0.0) for name in ENGINE_SYNC))
        with clock.phase("reward"), self.stage(f"judging: {total} completions"):
            return judge.verdict(groups)

    def _generate(
        self, judge: Judge, prompts: Sequence[Prompt], params: SamplingParams
    ) -> list[list[Completion]]:
        """Draws this rank's share."""
        ids = [self.builder.encode(prompt) for prompt in prompts]
        # How long a completion will be nobody knows; it is the same guess for all.
        costs = [len(prompt) + params.n * params.max_tokens / 2 for prompt in ids]
        mine = deal(costs, self.ranks.size)[self.ranks.rank]
        generate = self.engine.generate
        return self._retrying(lambda: generate(ids, params, only=mine, on_finished=judge.finished))

    def _played(
        self, player: Player, judge: Judge, params: SamplingParams
    ) -> list[list[Completion]]:
        """This rank's share of rollouts of several turns; a turn that took too long is drawn
        again."""

        def generate(
            prompts: Sequence[Sequence[int]],
            params: SamplingParams,
            only: Sequence[int],
            most: Sequence[int],
        ) -> list[list[Completion]]:
            draw = functools.partial(self.engine.generate, only=only, max_tokens=most)
            return self._retrying(lambda: draw(prompts, params))

        assert params.seed is not None, "every turn has a seed of its own"
        mine = deal([1.0] * len(judge.rows), self.ranks.size)[self.ranks.rank]
        groups: list[list[Completion]] = [[] for _ in judge.rows]
        asked = Assignment(judge.rows, mine, params, judge.state, generate)
        for row, (group, heard, environments) in player.play(asked):
            groups[row] = list(group)
            judge.finished(row, group, heard, environments)
        return groups

    def _retrying(self, draw: Callable[[], T]) -> T:
        """``draw``, again where it took too long; each try draws the same."""
        left = self.config.engine_retries
        while True:
            sampler = self.engine.state_dict()
            try:
                return draw()
            except GenerateTimeoutError as error:
                if not left:
                    raise
                self.engine.load_state_dict(sampler)
                self._retried.append(f"{error}; drawing again, {left} tries left")
            left -= 1

    def experience(
        self,
        take: Callable[[int], Sequence[Row]],
        state: Callable[[], TrainerState],
        clock: Clock,
    ) -> Rollout:
        """A training step's completions with their advantages; ``take(n)`` gives the next ``n``
        rows of the training data."""
        config = self.config
        num, wanted = config.sampling.num_generations, config.prompts_per_step
        drawn: list[Drawn] = []
        kept: list[Drawn] = []
        most = config.max_refills if config.dynamic_sampling == "refill" else 0
        for refills in range(1 + most):
            rows, now = take(wanted - len(kept) // num), state()
            drawn += self.draw(rows, self._training_params(now, refills), now, clock)
            kept = self._kept(drawn)
            if len(kept) == wanted * num:
                break
        metrics = step_metrics(drawn, num)
        if config.dynamic_sampling != "off":
            metrics |= {
                "dynamic_sampling/num_dropped": (len(drawn) - len(kept)) / num,
                "dynamic_sampling/num_refills": float(refills),
            }
        advantages: list[float | None] = [None] * len(kept)
        if not self._critic:
            advantages = [*_advantages([d.total for d in kept], config)]
        if config.mask_truncated_completions:
            whole = [d.completion.finish_reason != "length" for d in kept]
            kept, advantages = [*compress(kept, whole)], [*compress(advantages, whole)]
            metrics["completions/num_trained"] = float(len(kept))
        lengths = [len(d.completion.prompt_token_ids + d.completion.token_ids) for d in drawn]
        return Rollout(
            [self._row(d, a) for d, a in zip(kept, advantages, strict=True)],
            metrics,
            num_tokens=sum(lengths),
            num_completion_tokens=sum(d.completion.num_sampled for d in drawn),
            drawn=kept,
            advantages=advantages,
        )

    def _row(self, drawn: Drawn, advantage: float | None) -> TokenRow:
        if advantage is None:
            return of_completion(drawn.completion, drawn.total, "rewards")
        return of_completion(drawn.completion, advantage)

    def _training_params(self, state: TrainerState, refills: int) -> SamplingParams:
        """Parameters of one draw of the step; only turns need a seed (``turns``, Random numbers of
        a turn)."""
        num = self.config.sampling.num_generations
        if self.player is None:
            return self.params(n=num)
        name = f"{self.config.seed}/{state.global_step}/{refills}"
        return self.params(n=num, seed=random.Random(name).getrandbits(63))

    def evaluate(
        self,
        data: Sequence[Row],
        state: TrainerState,
        measure: Callable[[Experience], Metrics] | None = None,
    ) -> Metrics:
        """``eval/accuracy``, ``eval/reward``, ``eval/majority_baseline``, ``eval/mean_length`` of
        held-out questions.

        The training run's random state is left alone: a seed of its own says so to any engine,
        greedy or not.
        """
        config = self.config.eval
        name = config.reward or self.rewards[0].name
        params = self.params(n=1, greedy=config.greedy, seed=0)
        drawn: list[Drawn] = []
        for start in range(0, len(data), config.batch):
            drawn += self.draw(data[start : start + config.batch], params, state, Clock(CPU))
        totals = [d.total for d in drawn if not math.isnan(d.total)]
        return {
            "eval/accuracy": statistics.fmean((d.values[name] or 0.0) >= RIGHT for d in drawn),
            "eval/reward": statistics.fmean(totals) if totals else None,
            "eval/majority_baseline": majority_baseline(data, self.config.data.answer),
            "eval/mean_length": statistics.fmean(d.completion.num_sampled for d in drawn),
        }

    def largest(self) -> list[TokenRow]:
        """A row as long as one may become."""
        tokens = self.longest + self.config.sampling.max_tokens
        ids, half = (0,) * tokens, tokens // 2
        row = Completion(ids[:half], ids[half:], (0.0,) * (tokens - half), "length", 0)
        return [self._row(Drawn(row, "", {}, 0.0), None if self._critic else 0.0)]

    def warnings(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Warnings of rewards that teach nothing, and of steps without an update."""
        if (idle := self._idle.warning(record)) is not None:
            yield idle
        if self.config.mask_truncated_completions and record["completions/num_trained"] == 0:
            yield (
                "no update was made: all completions were cut off at sampling.max_tokens="
                f"{self.config.sampling.max_tokens}, and mask_truncated_completions leaves them "
                "out; raise it, or reward shorter ones"
            )

    def failures(self) -> list[str]:
        """Messages about what was retried or skipped since the last call."""
        told = [*self._retried, *(text for reward in self.rewards for text in reward.failures)]
        for failures in (self._retried, *(reward.failures for reward in self.rewards)):
            failures.clear()
        return self.ranks.every(told)

    def _kept(self, drawn: Sequence[Drawn]) -> list[Drawn]:
        """Completions to train on: of the groups that teach something; for a critic those that have
        a reward."""
        num = self.config.sampling.num_generations
        if self._critic:
            return [d for d in drawn if not math.isnan(d.total)]
        if self.config.dynamic_sampling == "off":
            return list(drawn)
        groups = [drawn[first : first + num] for first in range(0, len(drawn), num)]
        return [d for group in groups if _differ([d.total for d in group]) for d in group]


def _differ(totals: Sequence[float]) -> bool:
    """Whether any advantage of the group is not 0; NaN is no reward."""
    known = [total for total in totals if not math.isnan(total)]
    return bool(known) and max(known) - min(known) > 1e-8


def _advantages(totals: Sequence[float], config: TrainConfig) -> list[float]:
    if not totals:
        return []
    values, num = torch.tensor(totals, dtype=torch.float64), config.sampling.num_generations
    if config.advantages == "leave_one_out":
        found = rloo_advantages(values, num)
    else:
        assert config.scale_rewards is not None  # TrainConfig.settled
        found = group_advantages(values, num, config.scale_rewards)
    advantages: list[float] = found.tolist()
    return advantages
