"""What is added to, or weighs, the policy term: KL, rollout correction, token selection.

Shapes: B sequences, C completion tokens. All values are 0 where a token is masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxrl.losses.batch import Metrics, Tokens, per_token
from fxrl.losses.logprobs import bounded_exp, exponent_bound
from fxrl.losses.options import KLEstimator, PolicyOptions
from fxrl.losses.reduce import masked_mean, masked_sum, row_mean


def kl_estimate(logps: Tensor, ref_logps: Tensor, estimator: KLEstimator) -> Tensor:
    """One-sample estimates of KL(pi || pi_ref) per token (J. Schulman, Approximating KL, 2020).

        d = log pi_ref(o_t) - log pi(o_t)
        k1 = -d      unbiased; its own gradient has mean 0, so give it a ratio or another weight
        k2 = d^2/2   its gradient is that of the KL, on-policy
        k3 = e^d - d - 1   unbiased and never negative

    Args:
        logps: [B, C], with gradient.
        ref_logps: [B, C].
    """
    difference = ref_logps - logps
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    bounded = difference.clamp(max=exponent_bound(difference.dtype))
    return torch.expm1(bounded) - difference  # expm1: no cancellation where the two are close


def importance_weights(
    old_logps: Tensor, rollout_logps: Tensor, mask: Tensor, options: PolicyOptions
) -> tuple[Tensor, Metrics]:
    """Weights that undo the sampler's distribution: truncated or masked importance sampling.

        rho_t = pi_old(o_t) / pi_rollout(o_t)            mode "token_*"      [B, C]
        rho   = prod_t pi_old(o_t) / pi_rollout(o_t)     mode "sequence_*"   [B, 1]
        "*_truncate": min(max(rho, clip_min), clip_max)
        "*_mask":     rho where clip_min <= rho <= clip_max, else 0

    Sources: truncated importance sampling (Ionides, 2008); masked, for the mismatch between the
    trainer and its sampler: IcePop, arXiv:2510.18855. Constant: no gradient flows through.
    """
    per_sequence = options.vllm_importance_sampling_mode.startswith("sequence")
    truncate = options.vllm_importance_sampling_mode.endswith("truncate")
    low = options.vllm_importance_sampling_clip_min
    high = options.vllm_importance_sampling_clip_max
    with torch.no_grad():
        difference = per_token(old_logps - rollout_logps, mask)
        logs = masked_sum(difference, mask).unsqueeze(-1) if per_sequence else difference
        ratio = bounded_exp(logs)
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        if low is not None:
            outside = outside | (ratio < low)
        if high is not None:
            outside = outside | (ratio > high)
        bounded = ratio if low is None and high is None else ratio.clamp(low, high)
        weights = bounded if truncate else torch.where(outside, 0.0, ratio)
        counted = mask.any(-1, keepdim=True) if per_sequence else mask
        metrics = logp_difference(old_logps, rollout_logps, mask) | {
            "sampling/importance_sampling_ratio/min": _masked_min(weights, counted),
            "sampling/importance_sampling_ratio/mean": masked_mean(weights, counted),
            "sampling/importance_sampling_ratio/max": torch.where(counted, weights, 0.0).amax(),
        }
    return weights, metrics


def logp_difference(old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Metrics:
    """How far the sampler's log-probs are from the policy's, in nat; reported in any case."""
    with torch.no_grad():
        gap = per_token(old_logps - rollout_logps, mask).abs()
        return {
            "sampling/sampling_logp_difference/mean": masked_mean(gap, mask),
            "sampling/sampling_logp_difference/max": gap.amax(),
        }


def _masked_min(values: Tensor, mask: Tensor) -> Tensor:
    smallest = torch.where(mask, values, torch.inf).amin()
    return torch.where(mask.any(), smallest, 0.0)


def off_policy_keep(tokens: Tokens, behaviour_logps: Tensor, threshold: float) -> Tensor:
    """Where the policy term stays: A >= 0, or the sequence is not too far off-policy.

        keep_i = A_i >= 0  or  1/|o_i| sum_t log(pi_rollout(o_t) / pi(o_t)) <= threshold

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556. Returns bool [B, C].
    """
    with torch.no_grad():
        gaps = per_token(behaviour_logps, tokens.mask) - tokens.logps
        drift = row_mean(gaps, tokens.mask).unsqueeze(-1)  # [B, 1]
        return (tokens.advantages >= 0) | (drift <= threshold)


def high_entropy_keep(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """The ``share`` of the batch's tokens with the highest entropy (arXiv:2506.01939).

    The cut is the linearly interpolated quantile; spelled out, because ``torch.nanquantile`` takes
    neither symbolic sizes (torch 2.11) nor more than 16 million tokens.

    Returns bool [B, C]; no token where all are masked.
    """
    with torch.no_grad():
        ordered = torch.where(mask, entropy, torch.inf).flatten().sort().values
        place = ((1.0 - share) * (mask.sum() - 1)).clamp(min=0).to(entropy.dtype)
        ends = torch.stack([place.floor(), place.ceil()]).to(torch.int64)
        below, above = ordered.gather(0, ends).unbind(0)
        cut = below + (above - below) * (place - place.floor())
        return (entropy >= cut) & mask
