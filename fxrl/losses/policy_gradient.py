"""REINFORCE, and RLOO: REINFORCE over whole completions.

Shapes: B sequences, C completion tokens.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from fxrl.losses.batch import LossFn, Metrics, Tokens
from fxrl.losses.clipped import clip_metrics, clip_range
from fxrl.losses.logprobs import bounded_exp
from fxrl.losses.options import PolicyKeywords, PolicyOptions, loss_factory
from fxrl.losses.reduce import (
    masked_sum,
    row_mean,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
)
from fxrl.losses.surrogate import Surrogate, policy_loss


def _score_function(tokens: Tokens) -> tuple[Tensor, Metrics]:
    return -tokens.advantages * tokens.logps, {}


@loss_factory
def reinforce(**common: Unpack[PolicyKeywords]) -> LossFn:
    """The plain policy gradient.

        L = -1/B sum_i sum_t A_it log pi(o_it)

    Right on-policy; ``old_logps`` play no part but in the rollout correction and the KL's weight.
    Source: Williams, Machine Learning 8, 1992.
    """
    return policy_loss(_score_function, sequence_mean_token_sum, PolicyOptions(**common))


def rloo_surrogate(epsilon: float, epsilon_high: float | None) -> Surrogate:
    """The clipped objective with the ratio of the whole completion (see ``rloo``)."""
    low, high = clip_range(epsilon, epsilon_high)

    def surrogate(tokens: Tokens) -> tuple[Tensor, Metrics]:
        mask = tokens.mask
        ratio = bounded_exp(masked_sum(tokens.logps - tokens.old_logps, mask).unsqueeze(-1))
        advantage = row_mean(tokens.advantages, mask).unsqueeze(-1)  # [B, 1]
        losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        with torch.no_grad():
            metrics = clip_metrics(ratio, tokens, low, high, per_sequence=True)
        return losses, metrics

    return surrogate


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

    Raises:
        LossConfigError: a value is out of range.
    """
    surrogate = rloo_surrogate(epsilon, epsilon_high)
    return policy_loss(surrogate, sequence_mean_token_mean, PolicyOptions(**common))
