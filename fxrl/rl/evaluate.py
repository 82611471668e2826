"""Held-out accuracy, beside what always giving the most frequent answer would score."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from fxrl.rl.data import majority_baseline
from fxrl.rl.judge import TrainerState
from fxrl.rl.rollout import Roller
from fxrl.rl.rollout_sections import EvalConfig
from fxrl.rl.timing import Clock
from fxrl.rl.types import Metrics, Row

CPU = torch.device("cpu")
RIGHT = 0.99
"""A reward of at least this counts as a right answer."""


def evaluate(
    roller: Roller, rows: Sequence[Row], config: EvalConfig, answer: str, state: TrainerState
) -> Metrics:
    """``eval/accuracy``, ``eval/reward``, ``eval/majority_baseline``, ``eval/mean_length``.

    The training run's random state is left alone: a seed of its own says so to any engine, greedy
    or not.
    """
    name = config.reward or roller.rewards[0].name
    params = roller.params(n=1, greedy=config.greedy, seed=0)
    scores: list[float] = []
    totals: list[float] = []
    lengths: list[int] = []
    for start in range(0, len(rows), config.batch):
        judged = roller.judge(rows[start : start + config.batch], params, state, Clock(CPU))
        scores += [value or 0.0 for value in judged.by_function[name]]
        totals += [total for total in judged.totals if total == total]
        lengths += [len(c.token_ids) for c in judged.completions]
    return {
        "eval/accuracy": statistics.fmean(score >= RIGHT for score in scores),
        "eval/reward": statistics.fmean(totals) if totals else None,
        "eval/majority_baseline": majority_baseline(rows, answer),
        "eval/mean_length": statistics.fmean(lengths),
    }
