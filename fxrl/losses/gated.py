"""The losses that weigh every token instead of clipping some away: CISPO and SAPO.

Shapes: B sequences, C completion tokens.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from fxrl.losses.batch import LossFn, Metrics, Tokens
from fxrl.losses.errors import check_positive
from fxrl.losses.logprobs import bounded_exp
from fxrl.losses.options import PolicyKeywords, PolicyOptions, loss_factory
from fxrl.losses.reduce import masked_mean, sequence_mean_token_mean, token_mean_of_update
from fxrl.losses.surrogate import Surrogate, policy_loss


def cispo_surrogate(epsilon_high: float) -> Surrogate:
    """REINFORCE with a bounded, constant importance weight (see ``cispo``)."""
    check_positive("epsilon_high", epsilon_high)

    def surrogate(tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(tokens.logps.detach() - tokens.old_logps)
        losses = -ratio.clamp(max=epsilon_high) * tokens.advantages * tokens.logps
        clipped = ((ratio > epsilon_high) & (tokens.advantages > 0)).to(ratio.dtype)
        return losses, {"cispo_clip_ratio": masked_mean(clipped, tokens.mask)}

    return surrogate


@loss_factory
def cispo(epsilon_high: float = 5.0, **common: Unpack[PolicyKeywords]) -> LossFn:
    """Clipped importance-sampling-weight policy optimization: no token loses its gradient.

        L = -sum_it sg[ min(r_it, epsilon_high) ] A_it log pi(o_it) / N

    N as in ``dapo``. Source: MiniMax-M1, arXiv:2506.13585; ``epsilon_high`` is the bound itself
    (not 1 + epsilon_high), as in TRL, with the value of ScaleRL, arXiv:2510.13786.

    Raises:
        LossConfigError: a value is out of range.
    """
    return policy_loss(cispo_surrogate(epsilon_high), token_mean_of_update, PolicyOptions(**common))


def sapo_surrogate(temperature_pos: float, temperature_neg: float) -> Surrogate:
    """A sigmoid gate around the ratio 1 in place of the clip (see ``sapo``)."""
    check_positive("sapo_temperature_pos", temperature_pos)
    check_positive("sapo_temperature_neg", temperature_neg)

    def surrogate(tokens: Tokens) -> tuple[Tensor, Metrics]:
        ratio = bounded_exp(tokens.logps - tokens.old_logps)
        above = torch.sigmoid(temperature_pos * (ratio - 1.0)) * (4.0 / temperature_pos)
        below = torch.sigmoid(temperature_neg * (ratio - 1.0)) * (4.0 / temperature_neg)
        gate = torch.where(tokens.advantages > 0, above, below)
        return -gate * tokens.advantages, {}

    return surrogate


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

    Raises:
        LossConfigError: a value is out of range.
    """
    surrogate = sapo_surrogate(sapo_temperature_pos, sapo_temperature_neg)
    return policy_loss(surrogate, sequence_mean_token_mean, PolicyOptions(**common))
