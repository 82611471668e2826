"""The frame of every policy loss: what differs is the surrogate and the reduction.

    loss = R[ w * surrogate ] + beta * R[ KL ] - entropy_coef * R[ H ]

R is a reduction (``reduce``), w the constant weights of ``corrections``.
Shapes: B sequences, C completion tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxrl.losses.batch import Batch, LossFn, Metrics, Tokens, completion_mask, need, per_token
from fxrl.losses.corrections import (
    high_entropy_keep,
    importance_weights,
    kl_estimate,
    logp_difference,
    off_policy_keep,
)
from fxrl.losses.logprobs import EntropyUse, bounded_exp, completion_logits, token_stats
from fxrl.losses.options import PolicyOptions
from fxrl.losses.reduce import Reduction, masked_mean


class Extra(NamedTuple):
    """A term beside the policy's that reads the same forward pass (PPO's value loss).

    Attributes:
        model_options: keywords for the model's forward.
        term: ``(model, output, batch, mask) -> (loss, metrics)``.
    """

    model_options: Callable[[nn.Module, Batch], dict[str, Any]]
    term: Callable[[nn.Module, Any, Batch, Tensor], tuple[Tensor, Metrics]]


Surrogate = Callable[[Tokens], tuple[Tensor, Metrics]]


def policy_loss(
    surrogate: Surrogate, reduction: Reduction, options: PolicyOptions, extra: Extra | None = None
) -> LossFn:
    """A ``loss_fn(model, batch) -> (loss, metrics)``.

    Args:
        surrogate: gives the policy's loss per token, [B, C] or [B, 1], and its metrics.
        reduction: how losses per token become one number.
        options: temperature, KL, entropy and corrections.
        extra: a further term of the loss.
    """

    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        mask = completion_mask(batch)
        model_options = extra.model_options(model, batch) if extra is not None else {}
        logits, output = completion_logits(model, batch, mask.shape[1], **model_options)
        stats = token_stats(
            logits,
            batch["input_ids"][:, -mask.shape[1] :],
            temperature=options.temperature,
            entropy=_entropy_use(options),
        )
        tokens = _tokens(stats.logps, batch, mask)
        losses, metrics = surrogate(tokens)
        weights, weight_metrics = _weights(tokens, stats.entropy, batch, options)
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
                loss = loss - options.entropy_coef * reduction(stats.entropy, mask, batch)
        if extra is not None:
            term, term_metrics = extra.term(model, output, batch, mask)
            loss, metrics = loss + term, metrics | term_metrics
        return loss, metrics

    return loss_fn


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
    tokens: Tokens, entropy: Tensor | None, batch: Batch, options: PolicyOptions
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
    if options.top_entropy_quantile < 1.0 and entropy is not None:
        keep = high_entropy_keep(entropy, tokens.mask, options.top_entropy_quantile)
        factors.append(keep.to(tokens.logps.dtype))
    product = None
    for factor in factors:
        product = factor if product is None else product * factor
    return product, metrics


def _kl(tokens: Tokens, batch: Batch, options: PolicyOptions) -> Tensor:
    """KL(pi || pi_ref) per token [B, C]; unbiased off-policy with ``use_bias_correction_kl``."""
    why = f"beta={options.beta} needs; beta=0.0 leaves the KL out"
    ref_logps = per_token(need(batch, "ref_logps", why), tokens.mask).detach()
    kl = kl_estimate(tokens.logps, ref_logps, options.kl_estimator)
    if options.use_bias_correction_kl:
        kl = kl * bounded_exp(tokens.logps - tokens.old_logps)
    return torch.where(tokens.mask, kl, 0.0)
