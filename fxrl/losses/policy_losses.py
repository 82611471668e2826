"""The policy losses: those that clip the ratio, that weigh every token, and that need no ratio.

GRPO, BNPO, Dr. GRPO, DAPO, GSPO and LUSPO share the surrogate of PPO and differ in the level of the
ratio and in the reduction; CISPO and SAPO clip no token away; REINFORCE is the plain gradient, and
RLOO takes a whole completion for one action.
Shapes: B sequences, C completion tokens, |o_i| tokens of sequence i that count.
"""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor

from fxrl.losses.advantages import ScaleRewards
from fxrl.losses.batch import LossConfigError, LossFn, Metrics, Tokens, check_choice, check_positive
from fxrl.losses.logprobs import bounded_exp
from fxrl.losses.options import PolicyKeywords, PolicyOptions, loss_factory
from fxrl.losses.reduce import (
    Reduction,
    fixed_length_mean,
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    row_mean,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    token_mean_of_update,
)
from fxrl.losses.surrogate import Surrogate, policy_loss

Level = Literal["token", "sequence", "sequence_token"]


def log_ratio(tokens: Tokens, level: Level) -> Tensor:
    """Log of the importance ratio that is clipped.

        token:           log r_t = log pi(o_t) - log pi_old(o_t)                      [B, C]
        sequence:        log s = 1/|o| sum_t log r_t                                  [B, 1]
        sequence_token:  log s_t = sg[log s] + log pi(o_t) - sg[log pi(o_t)]          [B, C]

    Source: GSPO and GSPO-token, arXiv:2507.18071. ``sequence_token`` has the value of
    ``sequence`` and lets advantages differ from token to token.
    """
    per_token = tokens.logps - tokens.old_logps
    if level == "token":
        return per_token
    sequence = row_mean(per_token, tokens.mask).unsqueeze(-1)
    if level == "sequence":
        return sequence
    return sequence.detach() + tokens.logps - tokens.logps.detach()


def clip_range(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    """``(1 - epsilon, 1 + epsilon_high)``; ``epsilon_high=None`` is ``epsilon``."""
    high = epsilon if epsilon_high is None else epsilon_high
    check_positive("epsilon", epsilon, or_zero=True)
    check_positive("epsilon_high", high, or_zero=True)
    return 1.0 - epsilon, 1.0 + high


def clipped_surrogate(
    epsilon: float, epsilon_high: float | None, delta: float | None, level: Level
) -> Surrogate:
    """PPO's clipped objective, optionally bounded on the other side too.

        L_t = -min( r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon_high) A_t )
        with delta: the first r_t becomes min(r_t, delta)

    Sources: PPO arXiv:1707.06347 eq. 7; two-sided clip arXiv:2505.07291, which for delta = c is
    the dual clip of arXiv:1912.09729: max(., c A_t) where A_t < 0.
    """
    low, high = clip_range(epsilon, epsilon_high)
    if delta is not None and not delta > high:
        raise LossConfigError(f"delta={delta} must be above 1 + epsilon_high = {high}; or None")
    if delta is not None:
        check_positive("delta", delta)
    check_choice("importance_sampling_level", level, Level)

    def surrogate(tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(log_ratio(tokens, level))
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        advantages = tokens.advantages
        losses = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
        with torch.no_grad():
            metrics = clip_metrics(ratio, tokens, low, high, per_sequence=level != "token")
        return losses, metrics

    return surrogate


def clip_metrics(
    ratio: Tensor, tokens: Tokens, low: float, high: float, *, per_sequence: bool
) -> Metrics:
    """Share of tokens (or of sequences) whose gradient the clip removes.

    ``low_min`` and ``high_max`` are the least and the largest share of one sequence's tokens;
    sequences without tokens are ignored.
    """
    mask, counted = tokens.mask, tokens.mask.any(-1)
    too_low = ((ratio < low) & (tokens.advantages < 0)).to(ratio.dtype)
    too_high = ((ratio > high) & (tokens.advantages > 0)).to(ratio.dtype)
    low_rows, high_rows = row_mean(too_low, mask), row_mean(too_high, mask)  # [B]
    if per_sequence:
        low_share, high_share = masked_mean(low_rows, counted), masked_mean(high_rows, counted)
    else:
        low_share, high_share = masked_mean(too_low, mask), masked_mean(too_high, mask)
    return {
        "clip_ratio/low_mean": low_share,
        "clip_ratio/low_min": masked_min(low_rows, counted),
        "clip_ratio/high_mean": high_share,
        "clip_ratio/high_max": masked_max(high_rows, counted),
        "clip_ratio/region_mean": low_share + high_share,
    }


_CLIP_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


def _clipped_loss(
    reduction: Reduction,
    clip: tuple[float, float | None, float | None, Level],
    common: PolicyKeywords,
    scale_rewards: ScaleRewards = "group",
) -> LossFn:
    """``clipped_surrogate(*clip)`` under a reduction."""
    return policy_loss(
        clipped_surrogate(*clip),
        reduction,
        PolicyOptions(**common),
        per_sequence=() if clip[-1] == "token" else _CLIP_MEANS,
        scale_rewards=scale_rewards,
    )


@loss_factory
def grpo(
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: Level = "token",
    **common: Unpack[PolicyKeywords],
) -> LossFn:
    """Group relative policy optimization: mean over sequences of the mean over tokens.

        L = 1/B sum_i 1/|o_i| sum_t L_it       L_it: ``clipped_surrogate``

    Source: DeepSeekMath, arXiv:2402.03300 eq. 3 (its KL is ``beta``, ``kl_estimator="k3"``).

    Args:
        epsilon: lower clip, 1 - epsilon; also the upper one where ``epsilon_high`` is None.
        epsilon_high: upper clip, 1 + epsilon_high.
        delta: upper bound of the unclipped ratio, for A < 0; None is none.
        importance_sampling_level: ratio per token, per sequence, or per sequence with the
            gradient per token; see ``log_ratio``.
        **common: the fields of ``PolicyOptions``.

    Returns:
        ``loss_fn(model, batch) -> (loss, metrics)``; keys of the batch: ``losses.batch``.

    Raises:
        LossConfigError: a value is out of range.
    """
    clip = epsilon, epsilon_high, delta, importance_sampling_level
    return _clipped_loss(sequence_mean_token_mean, clip, common)


@loss_factory
def bnpo(
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: Level = "token",
    **common: Unpack[PolicyKeywords],
) -> LossFn:
    """``grpo`` with the mean over all tokens of this batch.

        L = sum_it L_it / sum_i |o_i|

    Source: TRL's ``loss_type="bnpo"``. It depends on how the update is cut into batches; ``dapo``
    with ``num_items_in_batch`` does not.
    """
    clip = epsilon, epsilon_high, delta, importance_sampling_level
    return _clipped_loss(token_mean, clip, common)


@loss_factory
def dr_grpo(
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: Level = "token",
    max_completion_length: int = 512,
    **common: Unpack[PolicyKeywords],
) -> LossFn:
    """``grpo`` without its length bias: divided by a constant instead of by the length.

        L = 1/(B max_completion_length) sum_it L_it

    Source: Understanding R1-Zero-like training, arXiv:2503.20783 (with advantages that are not
    divided by their standard deviation: ``group_advantages(scale_rewards="none")``).
    """
    check_positive("max_completion_length", max_completion_length)
    clip = epsilon, epsilon_high, delta, importance_sampling_level
    return _clipped_loss(fixed_length_mean(max_completion_length), clip, common, "none")


@loss_factory
def dapo(
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: Level = "token",
    **common: Unpack[PolicyKeywords],
) -> LossFn:
    """``grpo`` with the mean over all tokens of the update; the paper has ``epsilon_high=0.28``.

        L = sum_it L_it / N,   N = batch["num_items_in_batch"], else sum_i |o_i|

    Source: DAPO, arXiv:2503.14476 eq. 8.
    """
    clip = epsilon, epsilon_high, delta, importance_sampling_level
    return _clipped_loss(token_mean_of_update, clip, common)


@loss_factory
def gspo(
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    delta: float | None = None,
    importance_sampling_level: Level = "sequence",
    **common: Unpack[PolicyKeywords],
) -> LossFn:
    """Group sequence policy optimization: one ratio for the sequence, clipped as one.

        s_i = (pi(o_i) / pi_old(o_i))^(1/|o_i|)
        L = -1/B sum_i min( s_i A_i, clip(s_i, 1 - epsilon, 1 + epsilon_high) A_i )

    Source: arXiv:2507.18071, clip ranges of its section 5.1. For advantages or weights
    that differ from token to token take its GSPO-token, ``"sequence_token"``.
    """
    clip = epsilon, epsilon_high, delta, importance_sampling_level
    return _clipped_loss(sequence_mean_token_mean, clip, common)


@loss_factory
def luspo(
    epsilon: float = 2e-3,
    epsilon_high: float | None = 2.5e-3,
    delta: float | None = None,
    importance_sampling_level: Level = "sequence",
    **common: Unpack[PolicyKeywords],
) -> LossFn:
    """Length-unbiased sequence policy optimization: ``gspo`` times the sequence's length.

        L = -1/B sum_i |o_i| min( s_i A_i, clip(s_i, 1 - epsilon, 1 + epsilon_high) A_i )

    Source: arXiv:2602.05261, clip ranges of its section 5.1.
    """
    clip = epsilon, epsilon_high, delta, importance_sampling_level
    return _clipped_loss(sequence_mean_token_sum, clip, common)


@loss_factory
def cispo(epsilon_high: float = 5.0, **common: Unpack[PolicyKeywords]) -> LossFn:
    """Clipped importance-sampling-weight policy optimization: no token loses its gradient.

        L = -sum_it sg[ min(r_it, epsilon_high) ] A_it log pi(o_it) / N

    N as in ``dapo``. Source: MiniMax-M1, arXiv:2506.13585; ``epsilon_high`` is the bound itself
    (not 1 + epsilon_high), as in TRL, with the value of ScaleRL, arXiv:2510.13786.
    """
    check_positive("epsilon_high", epsilon_high)

    def surrogate(tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(tokens.logps.detach() - tokens.old_logps)
        losses = -ratio.clamp(max=epsilon_high) * tokens.advantages * tokens.logps
        clipped = ((ratio > epsilon_high) & (tokens.advantages > 0)).to(ratio.dtype)
        return losses, {"cispo_clip_ratio": masked_mean(clipped, tokens.mask)}

    return policy_loss(surrogate, token_mean_of_update, PolicyOptions(**common))


@loss_factory
def sapo(
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    **common: Unpack[PolicyKeywords],
) -> LossFn:
    """Soft adaptive policy optimization: the gradient fades as the ratio leaves 1.

        f(r) = 4/tau sigmoid(tau (r - 1)),   tau = tau_pos where A > 0, else tau_neg
        L = -1/B sum_i 1/|o_i| sum_t f(r_it) A_it

    At r = 1 the gradient is that of ``grpo``. Source: arXiv:2511.20347.
    """
    check_positive("sapo_temperature_pos", sapo_temperature_pos)
    check_positive("sapo_temperature_neg", sapo_temperature_neg)

    def gate(ratio: Tensor, temperature: float) -> Tensor:
        return torch.sigmoid(temperature * (ratio - 1.0)) * (4.0 / temperature)

    def surrogate(tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(tokens.logps - tokens.old_logps)
        above, below = gate(ratio, sapo_temperature_pos), gate(ratio, sapo_temperature_neg)
        return -torch.where(tokens.advantages > 0, above, below) * tokens.advantages, {}

    return policy_loss(surrogate, sequence_mean_token_mean, PolicyOptions(**common))


@loss_factory
def reinforce(**common: Unpack[PolicyKeywords]) -> LossFn:
    """The plain policy gradient.

        L = -1/B sum_i sum_t A_it log pi(o_it)

    Right on-policy; ``old_logps`` play no part but in the rollout correction and the KL's weight.
    Source: Williams, Machine Learning 8, 1992.
    """

    def surrogate(tokens: Tokens) -> tuple[Tensor, Metrics]:
        return -tokens.advantages * tokens.logps, {}

    return policy_loss(surrogate, sequence_mean_token_sum, PolicyOptions(**common))


@loss_factory
def rloo(
    epsilon: float = 0.2, epsilon_high: float | None = None, **common: Unpack[PolicyKeywords]
) -> LossFn:
    """REINFORCE leave-one-out: a completion is one action.

        r_i = pi(o_i) / pi_old(o_i) = exp( sum_t log r_it )
        L = -1/B sum_i min( r_i A_i, clip(r_i, 1 - epsilon, 1 + epsilon_high) A_i )

    A_i is the reward minus the mean of the others in its group: ``rloo_advantages``. On-policy
    (r_i = 1) its gradient is ``reinforce``'s. The paper puts the KL into the reward; ``beta`` here
    adds its mean per token to the loss. Advantages [B, C] are averaged over the sequence.
    Source: Back to basics, arXiv:2402.14740.
    """
    low, high = clip_range(epsilon, epsilon_high)

    def surrogate(tokens: Tokens) -> tuple[Tensor, Metrics]:
        mask = tokens.mask
        ratio = bounded_exp(masked_sum(tokens.logps - tokens.old_logps, mask).unsqueeze(-1))
        advantage = row_mean(tokens.advantages, mask).unsqueeze(-1)  # [B, 1]
        losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        with torch.no_grad():
            metrics = clip_metrics(ratio, tokens, low, high, per_sequence=True)
        return losses, metrics

    return policy_loss(
        surrogate,
        sequence_mean_token_mean,
        PolicyOptions(**common),
        per_sequence=_CLIP_MEANS,
        advantages="leave_one_out",
    )
