"""One step's completions: generate, judge, compare within groups."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxrl.losses import group_advantages, reward_metrics, rloo_advantages
from fxrl.rl.config import TrainConfig
from fxrl.rl.prompts import Prompt, PromptBuilder
from fxrl.rl.rewards import Reward, combine
from fxrl.rl.sections import SamplingConfig
from fxrl.rl.types import Metrics, Rollout, Row
from fxrl.runtime import Completion, Engine, SamplingParams


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What reward functions may read of the run, under TRL's names (``trainer_state``)."""

    global_step: int
    max_steps: int
    epoch: float


@dataclass(frozen=True, slots=True)
class Judged:
    """Completions with their texts and rewards; all lists have one entry per completion."""

    completions: list[Completion]
    texts: list[str]
    prompts: list[Prompt]
    by_function: dict[str, list[float | None]]
    totals: list[float]
    times: dict[str, float]


class Roller:
    """Generates and judges completions of dataset rows.

    Args:
        engine: rollout engine.
        builder: rows to prompts and tokens.
        rewards: reward functions.
        sampling: how to draw.
        tokenizer: decodes completions.
    """

    def __init__(
        self,
        engine: Engine,
        builder: PromptBuilder,
        rewards: Sequence[Reward],
        sampling: SamplingConfig,
        tokenizer: Any,
    ) -> None:
        self.engine, self.builder, self.rewards = engine, builder, rewards
        self.sampling, self.tokenizer = sampling, tokenizer

    def params(self, *, n: int, greedy: bool = False, seed: int | None = None) -> SamplingParams:
        """``[sampling]`` with ``n`` completions; ``greedy`` overrides the temperature."""
        return SamplingParams(
            n=n,
            temperature=0.0 if greedy else self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
            max_tokens=self.sampling.max_tokens,
            seed=seed,
        )

    def judge(self, rows: Sequence[Row], params: SamplingParams, state: TrainerState) -> Judged:
        """``params.n`` completions of each row and what every reward function says of them.

        Raises:
            RewardError: a reward function failed.
        """
        start = time.perf_counter()
        prompts = [self.builder.prompt(row) for row in rows]
        groups = self.engine.generate([self.builder.encode(p) for p in prompts], params)
        completions = [completion for group in groups for completion in group]
        generated = time.perf_counter()
        texts = [
            self.tokenizer.decode(list(c.token_ids), skip_special_tokens=True) for c in completions
        ]
        each_row = [row for row in rows for _ in range(params.n)]
        each_prompt = [prompt for prompt in prompts for _ in range(params.n)]
        arguments = _columns(each_row) | {
            "prompts": each_prompt,
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for text, prompt in zip(texts, each_prompt, strict=True)
            ],
            "completion_ids": [list(c.token_ids) for c in completions],
            "rows": each_row,
            "trainer_state": state,
        }
        by_function = {r.name: r(len(completions), arguments) for r in self.rewards}
        totals = combine(list(by_function.values()), [reward.weight for reward in self.rewards])
        times = {
            "time/generate": generated - start,
            "time/reward": time.perf_counter() - generated,
        }
        return Judged(completions, texts, each_prompt, by_function, totals, times)

    def rollout(self, rows: Sequence[Row], config: TrainConfig, state: TrainerState) -> Rollout:
        """A training step's completions with their advantages."""
        num = config.sampling.num_generations
        judged = self.judge(rows, self.params(n=num), state)
        totals = torch.tensor(judged.totals, dtype=torch.float64)
        if config.advantages == "group":
            advantages = group_advantages(totals, num, config.scale_rewards)
        else:
            advantages = rloo_advantages(totals, num)
        metrics: Metrics = {k: _finite(float(v)) for k, v in reward_metrics(totals, num).items()}
        for name, values in judged.by_function.items():
            said = [value for value in values if value is not None]
            metrics[f"rewards/{name}/mean"] = statistics.fmean(said) if said else None
            metrics[f"rewards/{name}/std"] = statistics.stdev(said) if len(said) > 1 else None
        return Rollout(
            completions=judged.completions,
            advantages=advantages.tolist(),
            rewards=judged.totals,
            texts=judged.texts,
            prompts=judged.prompts,
            by_function=judged.by_function,
            metrics=metrics | length_metrics(judged.completions),
            times=judged.times,
        )


def length_metrics(completions: Sequence[Completion]) -> Metrics:
    """TRL's ``completions/*``; "terminated" are those that a stop token ended."""
    lengths = [len(c.token_ids) for c in completions]
    ended = [len(c.token_ids) for c in completions if c.finish_reason == "stop"]
    metrics: Metrics = {}
    for name, values in (("", lengths), ("terminated_", ended)):
        metrics[f"completions/mean_{name}length"] = statistics.fmean(values) if values else 0.0
        metrics[f"completions/min_{name}length"] = float(min(values, default=0))
        metrics[f"completions/max_{name}length"] = float(max(values, default=0))
    metrics["completions/clipped_ratio"] = 1.0 - len(ended) / len(lengths)
    return metrics


def _columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """All columns; a row that lacks one has ``None`` there."""
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return {str(name): [row.get(name) for row in rows] for name in names}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
