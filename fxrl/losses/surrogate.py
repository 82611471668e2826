"""The frame of every policy loss: what differs is the surrogate and the reduction.

    loss = R[ w * surrogate ] + beta * R[ KL ] - entropy_coef * mean(H)

R is a reduction (``reduce``), w constant weights: the rollout's correction, tokens that are kept.
The mean is over the tokens that are kept, whatever R is, so ``entropy_coef`` means the same under
every loss.
Shapes: B sequences, C completion tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxrl.losses.advantages import ScaleRewards
from fxrl.losses.batch import Batch, LossFn, Metrics, Tokens, completion_mask, need, per_token
from fxrl.losses.logprobs import (
    EntropyUse,
    bounded_exp,
    completion_logits,
    exponent_bound,
    token_stats,
)
from fxrl.losses.options import Baseline, Critic, KLEstimator, LossInfo, PolicyOptions, tells
from fxrl.losses.reduce import (
    Reduction,
    is_mean_over,
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    row_mean,
    share_of_update,
)


def kl_estimate(logps: Tensor, ref_logps: Tensor, estimator: KLEstimator) -> Tensor:
    """One-sample estimates of KL(pi || pi_ref) per token (J. Schulman, Approximating KL, 2020).

    d = log pi_ref(o_t) - log pi(o_t)
    k1 = -d      unbiased; its own gradient has mean 0, so give it a ratio or another weight
    k2 = d^2/2   its gradient is that of the KL, on-policy
    k3 = e^d - d - 1   unbiased and never negative
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
    A token whose ``rollout_logps`` are NaN (the sampler has none) has the ratio 1.
    """
    per_sequence = _is_per_sequence(options)
    truncate = options.vllm_importance_sampling_mode.endswith("truncate")
    low = options.vllm_importance_sampling_clip_min
    high = options.vllm_importance_sampling_clip_max
    with torch.no_grad():
        difference = _known(per_token(old_logps - rollout_logps, mask))
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
            "sampling/importance_sampling_ratio/min": masked_min(weights, counted),
            "sampling/importance_sampling_ratio/mean": masked_mean(weights, counted),
            "sampling/importance_sampling_ratio/max": masked_max(weights, counted),
        }
    return weights, metrics


def logp_difference(old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Metrics:
    """How far the sampler's log-probs are from the policy's, in nat; reported in any case.

    Tokens that one side has no finite log-prob of are left out.
    """
    with torch.no_grad():
        gap = (old_logps - rollout_logps).abs()
        counted = mask & gap.isfinite()
        return {
            "sampling/sampling_logp_difference/mean": masked_mean(gap, counted),
            "sampling/sampling_logp_difference/max": masked_max(gap, counted),
        }


def _known(difference: Tensor) -> Tensor:
    """0 where a log-prob is unknown; infinite differences as they are."""
    return torch.where(difference.isnan(), 0.0, difference)


def _is_per_sequence(options: PolicyOptions) -> bool:
    return options.vllm_importance_sampling_mode.startswith("sequence")


def off_policy_keep(tokens: Tokens, behaviour_logps: Tensor, threshold: float) -> Tensor:
    """Where the policy term stays: A >= 0, or the sequence is not too far off-policy.

        keep_i = A_i >= 0  or  1/|o_i| sum_t log(pi_rollout(o_t) / pi(o_t)) <= threshold

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556. Returns bool [B, C].
    """
    with torch.no_grad():
        gaps = _known(per_token(behaviour_logps, tokens.mask) - tokens.logps)
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


class Extra(NamedTuple):
    """A term beside the policy's that reads the same forward pass (PPO's value loss)."""

    model_options: Callable[[nn.Module, Batch], dict[str, Any]]  # keywords for the model's forward
    # ``(model, output, batch, mask) -> (loss, metrics)``.
    term: Callable[[nn.Module, Any, Batch, Tensor], tuple[Tensor, Metrics]]


Surrogate = Callable[[Tokens], tuple[Tensor, Metrics]]


def policy_loss(
    surrogate: Surrogate,
    reduction: Reduction,
    options: PolicyOptions,
    extra: Extra | None = None,
    *,
    per_sequence: Collection[str] = (),
    advantages: Baseline = "group",
    scale_rewards: ScaleRewards = "group",
    critic: Critic | None = None,
) -> LossFn:
    """A ``loss_fn(model, batch) -> (loss, metrics)``, with its ``loss_info``.

    Args:
        surrogate: gives the policy's loss per token, [B, C] or [B, 1], and its metrics.
        reduction: how losses per token become one number.
        options: temperature, KL, entropy and corrections.
        extra: a further term of the loss.
        per_sequence: names of the surrogate's metrics that are means over sequences.
        advantages, scale_rewards, critic: see ``LossInfo``.
    """
    over = is_mean_over(reduction)
    over_sequences = frozenset(per_sequence)
    if _is_per_sequence(options):
        over_sequences |= {"sampling/importance_sampling_ratio/mean"}

    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        mask = completion_mask(batch)
        model_options = extra.model_options(model, batch) if extra is not None else {}
        logits, output = completion_logits(model, batch, mask.shape[1], **model_options)
        ids, use = batch["input_ids"][:, -mask.shape[1] :], _entropy_use(options)
        stats = token_stats(logits, ids, temperature=options.temperature, entropy=use)
        tokens = _tokens(stats.logps, batch, mask)
        losses, metrics = surrogate(tokens)
        kept = mask
        if options.top_entropy_quantile < 1.0 and stats.entropy is not None:
            kept = high_entropy_keep(stats.entropy, mask, options.top_entropy_quantile)
        weights, weight_metrics = _weights(tokens, kept, batch, options)
        if weights is not None:
            losses = losses * weights
        loss = reduction(losses, mask, batch)
        metrics = {"policy_loss": loss.detach()} | metrics | weight_metrics

        if options.beta != 0.0:
            kl = _kl(tokens, batch, options)
            loss = loss + options.beta * reduction(kl, mask, batch)
            metrics["kl"] = masked_mean(kl, mask).detach()
        if stats.entropy is not None:
            metrics["entropy"] = masked_mean(stats.entropy, mask).detach()
            if options.entropy_coef != 0.0:
                bonus = masked_mean(stats.entropy, kept) * share_of_update(over, mask, batch)
                loss = loss - options.entropy_coef * bonus
        if extra is not None:
            term, term_metrics = extra.term(model, output, batch, mask)
            loss, metrics = loss + term, metrics | term_metrics
        return loss, metrics

    has_kl = options.beta != 0.0 or (critic is not None and critic.kl_coef != 0.0)
    info = LossInfo(
        *(over, over_sequences, advantages, scale_rewards, options),
        reference=has_kl,
        critic=critic,
    )
    return tells(info)(loss_fn)


def _entropy_use(options: PolicyOptions) -> EntropyUse:
    if options.entropy_coef != 0.0:
        return "loss"
    return "log" if options.log_entropy or options.top_entropy_quantile < 1.0 else "none"


def _tokens(logps: Tensor, batch: Batch, mask: Tensor) -> Tokens:
    """Masked tokens are zeroed before any exp: padding may hold anything, inf and NaN included."""
    logps = per_token(logps, mask)
    advantages = need(batch, "advantages", "weighs every policy loss").to(logps.dtype)
    old_logps = batch.get("old_logps")
    old = logps.detach() if old_logps is None else per_token(old_logps, mask).detach()
    return Tokens(logps, old, per_token(advantages, mask).detach(), mask)


def _weights(
    tokens: Tokens, kept: Tensor, batch: Batch, options: PolicyOptions
) -> tuple[Tensor | None, Metrics]:
    """Constant weights of the policy term, [B, C] or [B, 1]; None is 1 everywhere."""
    factors: list[Tensor] = []
    metrics: Metrics = {}
    if (rollout_logps := batch.get("rollout_logps")) is not None:
        if options.vllm_importance_sampling_correction:
            weights, metrics = importance_weights(
                tokens.old_logps, rollout_logps, tokens.mask, options
            )
            factors.append(weights)
        else:
            metrics = logp_difference(tokens.old_logps, rollout_logps, tokens.mask)
    if options.off_policy_mask_threshold is not None:
        behaviour = batch.get("rollout_logps", tokens.old_logps)
        keep = off_policy_keep(tokens, behaviour, options.off_policy_mask_threshold)
        factors.append(keep.to(tokens.logps.dtype))
    if options.top_entropy_quantile < 1.0:
        factors.append(kept.to(tokens.logps.dtype))
    product = None
    for factor in factors:
        product = factor if product is None else product * factor
    return product, metrics


def _kl(tokens: Tokens, batch: Batch, options: PolicyOptions) -> Tensor:
    """KL(pi || pi_ref) per token [B, C]; unbiased off-policy with ``use_bias_correction_kl``."""
    why = ""
    if "ref_logps" not in batch:  # only then: a captured beta may be a symbol, which has no text
        why = f"beta={options.beta} needs; beta=0.0 leaves the KL out"
    ref_logps = per_token(need(batch, "ref_logps", why), tokens.mask).detach()
    kl = kl_estimate(tokens.logps, ref_logps, options.kl_estimator)
    if options.use_bias_correction_kl:
        kl = kl * bounded_exp(tokens.logps - tokens.old_logps)
    return torch.where(tokens.mask, kl, 0.0)
