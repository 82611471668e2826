"""How far the log-probs that tokens were sampled with are from the trainer's for the same tokens.

With the same weights on both sides d = log p_trainer - log p_sampler is rounding, and small. What
else it can be (another temperature, a stale prefix cache, weights that were not updated) makes
every importance ratio wrong, so it is measured at each step. The losses of ``fxrl.losses`` do it
from the log-probs they compute anyway; for any other loss nothing else knows them, so a few
thousand tokens of the step are scored for it.

NOTE [What the mean ratio tells]
Tokens are drawn from the sampler's distribution q, so E[exp d] = sum q p / q = 1, whatever the two
models are, as long as the recorded number is log q and q can draw all that p can. A mean ratio that
is many standard errors away from 1 therefore says that the recorded log-prob is not that of the
distribution the token was drawn from (raw instead of processed, another temperature), or, below 1,
that a filter (top-p, top-k, min-p, min_tokens) took part of p away and its mass was spread over the
rest. A mean of 1 with a large d says that the two sides have different weights, or that rounding is
amplified.

NOTE [Why random weights disagree]
An early test on a random model of Qwen3-1.7B's shape saw 0.16 nat on average between vLLM and
Hugging Face, 1.3 at most. It is rounding, amplified by random weights; rope, norms, attention and
scaling agree. ``bench/agreement.py``, vLLM 0.32 on a CPU, every row with the same bf16 weights,
mean |d| in nat over 768 sampled tokens. The random models have that test's gain per layer (std
times sqrt(hidden) = 1.36) and logits (std 13.6); SmolLM2-135M answers chat questions:

    compared                                 2 layers   8 layers   28 layers   SmolLM2
    vLLM fp32   with HF fp32                  6e-7       7e-6       2e-5       5e-6
    HF bf16     with HF fp32                  0.003      0.058      0.16       0.029
    vLLM bf16   with HF fp32                  0.003      0.058      0.14       0.027
    vLLM bf16   with HF bf16                  0.003      0.073      0.20       0.036
    the same, the head in fp32 on both        0.003      0.077      0.20       0.024
    vLLM fp16   with HF fp16                  0.0005     0.010      0.022      0.004
    HF fp32, its embeddings off by 1 ulp      0.001      0.022      0.051      0.001

(1) In fp32 the two programs agree to 1e-5: both compute the same function. (2) In bf16 vLLM is as
far from the fp32 truth as Hugging Face is, and the two roundings add up; nothing is left to
explain. (3) Random layers amplify: one ulp of bf16 on the embeddings grows fifty-fold from 2 to 28
layers, and logits of std 13.6 turn 1 % into 0.14 nat. At the usual initialisation (std 0.02, 28
layers, hidden 256) the same comparison gives 0.004, and trained weights hardly amplify. (4) What a
trained model has left is local rounding. On SmolLM2, rounding one kind of value at a time: logits
0.017 (they are 16 to 32, so bf16 is off by up to 0.06), residual stream 0.009, norms 0.006, all
others below. Even two attention implementations of Hugging Face differ by 0.033 there in bf16.
So no engine agrees with bf16 to 0.01 nat on this model. The head in fp32 on both sides (fxrl's
fused head is; vLLM has ``head_dtype`` since 0.32) takes off a third, float16 with its 3 more bits
gets to 0.004 (as Qi et al. 2025, arXiv:2510.26788, found for training).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fxrl.losses import FACTORIES
from fxrl.rl.types import Batch, Metrics

Level = Literal["ok", "high", "severe"]

# Mean |d| in nat. A ratio's usual clip range is 0.2 wide: a tenth of it, and all of it.
HIGH, SEVERE = 0.02, 0.2
_SURE = 6.0  # standard errors

PROBE_TOKENS = 4096
NEVER_MEASURE = ("dpo", "sft")
"""fxrl's losses that are no policy losses."""
_KEY = "sampling/sampling_logp_difference"


def level(mean: float, high: float = HIGH, severe: float = SEVERE) -> Level:
    """How bad a mean |d| is, in nat."""
    if mean > severe:
        return "severe"
    return "high" if mean > high else "ok"


def warning(mean: float, high: float = HIGH, severe: float = SEVERE) -> str | None:
    """What a mean |d| alone tells and what to do about it; ``None`` while all is well."""
    found = f"drift: sampler and trainer differ by {mean:.3g} nat on average"
    match level(mean, high, severe):
        case "severe":
            return (
                f"{found} (>{severe:g}): the two sides hardly have the same weights; check that "
                "the engine got the last update, that its prefix cache was reset, and the adapter"
            )
        case "high":
            return (
                f"{found} (>{high:g}); keep vllm_importance_sampling_correction on. If it was so "
                "from the first step it is rounding: an fp32 head in the engine, dtype float16, or "
                "no FP8 weights or KV cache make it smaller (fxrl/rl/drift.py has figures)"
            )
    return None


@dataclass(frozen=True, slots=True)
class Drift:
    """One step's comparison; differences in nat, d = trainer's minus sampler's.

    Attributes:
        num_tokens: compared, i.e. in the mask and finite on both sides.
        num_broken: in the mask, but nan or infinite on either side.
        mean, max: of |d|.
        ratio_min, ratio_mean, ratio_max: of exp(d), before any correction cuts it.
        ratio_error: standard error of ``ratio_mean``.
        kl: estimate (k3) of KL(sampler || trainer) per token, never negative.
    """

    num_tokens: int
    num_broken: int
    mean: float
    max: float
    ratio_min: float
    ratio_mean: float
    ratio_max: float
    ratio_error: float
    kl: float

    def metrics(self) -> dict[str, float]:
        """By TRL's names. The losses report the ratio as their correction has cut it, by the same
        names: theirs take precedence where there are both."""
        return {
            "sampling/sampling_logp_difference/mean": self.mean,
            "sampling/sampling_logp_difference/max": self.max,
            "sampling/importance_sampling_ratio/min": self.ratio_min,
            "sampling/importance_sampling_ratio/mean": self.ratio_mean,
            "sampling/importance_sampling_ratio/max": self.ratio_max,
            "sampling/kl": self.kl,
        }

    def level(self, high: float = HIGH, severe: float = SEVERE) -> Level:
        """By the mean difference; a broken token is severe."""
        return "severe" if self.num_broken else level(self.mean, high, severe)

    def warning(self, high: float = HIGH, severe: float = SEVERE) -> str | None:
        """What is wrong and what to do about it; ``None`` while all is well."""
        if self.level(high, severe) == "ok":
            return None
        if self.num_broken:
            return (
                f"drift: {self.num_broken} sampled tokens have a log-prob that is nan or infinite; "
                "the engine has to report log-probs before its filters cut the distribution"
            )
        off = abs(self.ratio_mean - 1)
        if off > _SURE * self.ratio_error and off > 0.01:
            return (
                f"drift: sampler and trainer differ by {self.mean:.3g} nat on average, and their "
                f"mean ratio is {self.ratio_mean:.3f}, not 1: the recorded log-probs are not those "
                "the tokens were drawn with; check the temperature on both sides, that the engine "
                "reports processed log-probs, and that top_p, top_k, min_p and min_tokens are off"
            )
        return warning(self.mean, high, severe)


class DriftMeter:
    """Collects the micro-batches of a step on the device; one synchronisation in ``result``."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._lows: list[Tensor] = []
        self._highs: list[Tensor] = []

    @torch.no_grad()
    def add(self, logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> None:
        """One micro-batch.

        Args:
            logps: trainer's log-probs of the sampled tokens, before its first update, at the
                sampling temperature; any shape.
            rollout_logps: the sampler's, same shape.
            mask: same shape, true (or 1) where a token counts; the rest may hold anything.
        """
        counted = mask.bool()
        d = logps.double() - rollout_logps.double()
        fine = counted & d.isfinite()
        d = torch.where(fine, d, 0.0)
        ratio = torch.exp(d)
        kept = fine.double()
        self._sums.append(
            torch.stack(
                [
                    kept.sum(),
                    (counted & ~fine).double().sum(),
                    d.abs().sum(),
                    (ratio * kept).sum(),
                    (ratio.square() * kept).sum(),
                    (torch.expm1(d) - d).sum(),
                ]
            )
        )
        gap = torch.where(fine, d, -torch.inf)
        self._highs.append(torch.stack([d.abs().amax(), gap.amax()]))
        self._lows.append(torch.where(fine, d, torch.inf).amin())

    def result(self) -> Drift | None:
        """All that was added; ``None`` where no token counted."""
        if not self._sums:
            return None
        device = self._sums[0].device
        sums = torch.stack([s.to(device) for s in self._sums]).sum(0)
        highs = torch.stack([h.to(device) for h in self._highs]).amax(0)
        low = torch.stack([value.to(device) for value in self._lows]).amin(0, keepdim=True)
        values = torch.cat([sums, highs, low]).tolist()
        count, broken, total, ratios, squares, kl, widest, top, bottom = values
        if not count:
            return None if not broken else _nothing_but_broken(int(broken))
        mean = ratios / count
        return Drift(
            num_tokens=int(count),
            num_broken=int(broken),
            mean=total / count,
            max=widest,
            ratio_min=math.exp(bottom),
            ratio_mean=mean,
            ratio_max=_exp(top),
            ratio_error=math.sqrt(max(squares / count - mean * mean, 0.0) / count),
            kl=kl / count,
        )


def _nothing_but_broken(count: int) -> Drift:
    nan = math.nan
    return Drift(0, count, nan, nan, nan, nan, nan, nan, nan)


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def loss_measures(name: str) -> bool:
    """Whether the loss called ``name`` reports the difference itself."""
    return name in FACTORIES and name not in NEVER_MEASURE


def probe_rows(plan: Sequence[Sequence[int]], totals: Sequence[int]) -> tuple[int, ...]:
    """Rows of the micro-batch of the shortest ones, ``PROBE_TOKENS`` at most, at least one."""
    rows = plan[-1]
    widest = max(totals[row] for row in rows)
    return tuple(rows[: max(1, PROBE_TOKENS // widest)])


def measured(logps: Any, batch: Batch) -> Metrics:
    """The metrics of one scored batch, under TRL's names."""
    meter = DriftMeter()
    meter.add(logps, batch["rollout_logps"], batch["completion_mask"])
    found = meter.result()
    values = {} if found is None else found.metrics()
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


class DriftWatch:
    """Tells of a drift when it becomes worse, and not at every step."""

    def __init__(self) -> None:
        self._told: Level = "ok"

    def warning(self, record: Mapping[str, Any]) -> str | None:
        """What to say after a step, if anything.

        Args:
            record: the step's metrics.
        """
        mean = record.get(f"{_KEY}/mean")
        if mean is None:
            return None
        # The losses' ratios are cut by the correction, so only the difference is judged.
        order = ("ok", "high", "severe")
        now, told = level(mean), self._told
        self._told = now
        return warning(mean) if order.index(now) > order.index(told) else None
