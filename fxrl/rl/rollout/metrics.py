"""What a step says of its completions: rewards, lengths, calls; and whether rewards are idle."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxrl.engines import Completion
from fxrl.losses import reward_metrics
from fxrl.rl.report.progress import jsonable
from fxrl.rl.types import Drawn, Metrics


def step_metrics(drawn: Sequence[Drawn], num: int) -> Metrics:
    """Reward and length statistics, under TRL's names; where ``num`` is 1, the step is a group."""
    totals = torch.tensor([d.total for d in drawn], dtype=torch.float64)
    found = reward_metrics(totals, num if num > 1 else len(drawn))
    metrics: Metrics = {k: jsonable(float(v)) for k, v in found.items()}
    for name in drawn[0].values:
        said = [value for d in drawn if (value := d.values[name]) is not None]
        metrics[f"rewards/{name}/mean"] = statistics.fmean(said) if said else None
        metrics[f"rewards/{name}/std"] = statistics.stdev(said) if len(said) > 1 else None
    return metrics | length_metrics([d.completion for d in drawn]) | _tool_metrics(drawn)


def length_metrics(completions: Sequence[Completion]) -> Metrics:
    """TRL's ``completions/*``, of tokens that the policy drew; "terminated" are those that a stop
    token ended."""
    lengths = [c.num_sampled for c in completions]
    ended = [c.num_sampled for c in completions if c.finish_reason == "stop"]
    metrics: Metrics = {}
    for name, values in (("", lengths), ("terminated_", ended)):
        metrics[f"completions/mean_{name}length"] = statistics.fmean(values) if values else 0.0
        metrics[f"completions/min_{name}length"] = float(min(values, default=0))
        metrics[f"completions/max_{name}length"] = float(max(values, default=0))
    metrics["completions/clipped_ratio"] = 1.0 - len(ended) / len(lengths)
    return metrics


def _tool_metrics(drawn: Sequence[Drawn]) -> Metrics:
    """TRL's ``tools/*``: calls a completion, and the share that came to nothing; none where no
    rollout has several turns."""
    told = [d.told for d in drawn if d.told.messages is not None]
    if not told:
        return {}
    calls = sum(one.num_calls for one in told)
    failed = sum(one.num_failed for one in told)
    return {
        "tools/call_frequency": calls / len(told),
        "tools/failure_frequency": failed / calls if calls else 0.0,
    }


IDLE_STEPS = 3


class RewardWatch:
    """Warns of rewards that teach nothing, after ``IDLE_STEPS`` such steps in a row and then after
    twice as many each time. Equal rewards within groups teach nothing if ``by_group``; otherwise
    only missing rewards do."""

    def __init__(self, *, by_group: bool = True) -> None:
        self._by_group = by_group
        self._idle, self._next = 0, IDLE_STEPS

    def warning(self, record: Mapping[str, Any]) -> str | None:
        """The warning, if any, that this step's metrics give rise to, and what to do about it."""
        known = record["reward"] is not None
        if (record["frac_reward_zero_std"] < 1.0) if self._by_group else known:
            self._idle, self._next = 0, IDLE_STEPS
            return None
        self._idle += 1
        if self._idle < self._next:
            return None
        self._next *= 2
        what = "the same within every group"
        if record["reward"] is None:
            what = "None for every completion"
        return (
            f"rewards were {what} in the last {self._idle} steps, so nothing is learned from them; "
            "look at completions.jsonl and the reward functions"
        )
