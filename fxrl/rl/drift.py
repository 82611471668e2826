"""How far the log-probs that tokens were sampled with are from the trainer's for the same tokens.

With the same weights on both sides d = log p_trainer - log p_sampler is rounding, and small
(``bench/agreement.py`` has figures, and why there are no better ones). What else it can be (another
temperature, a stale prefix cache, weights that were not updated) makes every importance ratio
wrong, so it is measured at each step. The losses of ``fxrl.losses`` do it from the log-probs they
compute anyway; for any other loss nothing else knows them, so a few thousand tokens of the step are
scored for it.

NOTE [What the mean ratio tells]
Tokens are drawn from the sampler's distribution q, so E[exp d] = sum q p / q = 1, whatever the two
models are, as long as the recorded number is log q and q can draw all that p can. A mean ratio that
is many standard errors away from 1 therefore says that the recorded log-prob is not that of the
distribution the token was drawn from (raw instead of processed, another temperature), or, below 1,
that a filter (top-p, top-k, min-p, min_tokens) took part of p away and its mass was spread over the
rest: ratios per token stay near 1 then, but their product over a completion does not, and a
correction by sequence weighs long completions by next to nothing. A mean of 1 with a large d says
that the two sides have different weights, or that rounding is amplified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fxrl.losses import PolicyOptions, importance_weights, kl_estimate
from fxrl.losses.reduce import masked_mean
from fxrl.rl.report.progress import jsonable
from fxrl.rl.types import Batch, Metrics

# Mean |d| in nat. A ratio's usual clip range is 0.2 wide: a tenth of it, and all of it.
HIGH, SEVERE = 0.02, 0.2

PROBE_TOKENS = 4096
_UNCUT = PolicyOptions(
    vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=None
)


def probe_rows(plan: Sequence[Sequence[int]], totals: Sequence[int]) -> tuple[int, ...]:
    """Rows of the micro-batch of the shortest ones, ``PROBE_TOKENS`` at most, at least one."""
    rows = plan[-1]
    widest = max(totals[row] for row in rows)
    return tuple(rows[: max(1, PROBE_TOKENS // widest)])


def measured(logps: Tensor, batch: Batch) -> Metrics:
    """The metrics of one scored batch, as a loss reports them but for a ratio that nothing cuts: by
    TRL's names, and ``sampling/kl``, estimate (k3) of KL(sampler || trainer) per token.

    ``logps`` [B, C] are the trainer's of the sampled tokens, before its first update, at the
    sampling temperature; the sampler's are in ``batch``. A token without finite ones is left out.
    """
    ours, theirs = logps.double(), batch["rollout_logps"].double()
    counted = batch["completion_mask"].bool() & (ours - theirs).isfinite()
    if not bool(counted.any()):
        return {}
    _, found = importance_weights(ours, theirs, counted, _UNCUT)
    found["sampling/kl"] = masked_mean(kl_estimate(theirs, ours, "k3"), counted)
    return {name: jsonable(float(value)) for name, value in found.items()}


class DriftWatch:
    """Warns of a drift when it grows, not at every step. ``corrected``: whether the loss weighs by
    the importance ratio; ``None`` for a loss of the user's."""

    def __init__(self, corrected: bool | None = None) -> None:
        self._told = 0
        self._advice = {
            True: "keep loss.vllm_importance_sampling_correction on",
            False: "switch loss.vllm_importance_sampling_correction on",
            None: "weight the loss by exp(logps - rollout_logps), cut, as fxrl's losses do",
        }[corrected]

    def warning(self, record: Mapping[str, Any]) -> str | None:
        """What the step's mean |d| tells and what to do about it, if anything.

        The losses' ratios are cut by the correction, so only the difference is judged.
        """
        mean = record.get("sampling/sampling_logp_difference/mean")
        if mean is None:
            return None
        now, told = (mean > HIGH) + (mean > SEVERE), self._told
        self._told = now
        if now <= told:
            return None
        found = f"drift: sampler and trainer differ by {mean:.3g} nat on average"
        if now == 2:
            return (
                f"{found} (>{SEVERE:g}): the two sides hardly have the same weights; check that "
                "the engine got the last update, that its prefix cache was reset, and the adapter"
            )
        return (
            f"{found} (>{HIGH:g}); {self._advice}. If it was so "
            "from the first step it is rounding: an fp32 head in the engine, dtype float16, or "
            "no FP8 weights or KV cache make it smaller (bench/agreement.py has figures)"
        )
