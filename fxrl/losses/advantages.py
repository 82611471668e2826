"""Advantages from rewards: what a trainer puts into ``batch["advantages"]``.

Shapes: N completions, group by group, G per prompt; B sequences, C completion tokens.
A reward of NaN is none (its function did not apply): that completion gets advantage 0 and plays
no part in its group's mean and spread.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fxrl.losses.batch import BatchError, check_choice

ScaleRewards = Literal["group", "batch", "none"]
EPSILON = 1e-4  # added to a standard deviation before it divides, as in TRL


def group_advantages(
    rewards: Tensor, num_generations: int, scale_rewards: ScaleRewards = "group"
) -> Tensor:
    """GRPO's advantages: the reward relative to its group.

        A_i = (r_i - mean(group)) / (std + 1e-4)

    std (unbiased) is the group's, the batch's, or absent (Dr. GRPO, arXiv:2503.20783).

    Args:
        rewards: [N] float; rows ``i*G .. i*G + G - 1`` are of one prompt.
        num_generations: G.
        scale_rewards: whose standard deviation divides: ``"group"``, ``"batch"``, ``"none"``.

    Returns:
        [N], the rewards' dtype; 0 where all of a group's rewards are the same.

    Raises:
        BatchError: N is not a multiple of G.
    """
    check_choice("scale_rewards", scale_rewards, ScaleRewards)
    grouped, valid = _groups(rewards, num_generations)
    centred = torch.where(valid, grouped - _mean(grouped, valid, dim=1), 0.0)
    if scale_rewards == "group":
        centred = centred / (_std(grouped, valid, dim=1) + EPSILON)
    elif scale_rewards == "batch":
        flat, flat_valid = grouped.reshape(1, -1), valid.reshape(1, -1)
        centred = centred / (_std(flat, flat_valid, dim=1) + EPSILON)
    return centred.reshape(-1)


def rloo_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """RLOO's advantages: the reward minus the mean of the *other* rewards of its group.

        A_i = r_i - 1/(G - 1) sum_{j != i} r_j

    Source: arXiv:2402.14740. A completion that is alone in its group gets 0.

    Args, returns and raises as ``group_advantages``.
    """
    grouped, valid = _groups(rewards, num_generations)
    clean = torch.where(valid, grouped, 0.0)
    others = valid.sum(1, keepdim=True) - 1
    baseline = (clean.sum(1, keepdim=True) - clean) / others.clamp(min=1)
    return torch.where(valid & (others > 0), clean - baseline, 0.0).reshape(-1)


def reward_metrics(rewards: Tensor, num_generations: int) -> dict[str, Tensor]:
    """TRL's ``reward``, ``reward_std`` (mean of the groups') and ``frac_reward_zero_std``.

    ``reward`` is NaN where no completion has one.
    """
    grouped, valid = _groups(rewards, num_generations)
    spread = _std(grouped, valid, dim=1)
    return {
        "reward": grouped[valid].mean(),
        "reward_std": spread.mean(),
        "frac_reward_zero_std": (spread < 1e-8).to(spread.dtype).mean(),
    }


def token_rewards(
    rewards: Tensor,
    mask: Tensor,
    logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """A reward for each token: a completion's own at its last one, less a penalty on each.

        r_t = [t is the last] r - kl_coef (log pi_old(o_t) - log pi_ref(o_t))

    over the tokens that count. Source: InstructGPT, arXiv:2203.02155 eq. 2, its beta.

    Args:
        rewards: [B].
        mask: [B, C], non-zero where a token counts.
        logps, ref_logps: [B, C], read where ``kl_coef`` is not 0.

    Returns:
        [B, C], the rewards' dtype, 0 where masked. No gradient.
    """
    counts = mask != 0
    behind = counts.flip(1).cumsum(1).flip(1)  # tokens that count, from each one on
    found = torch.where(counts & (behind == 1), rewards[:, None], 0.0)
    if kl_coef != 0.0 and logps is not None and ref_logps is not None:
        found = found - torch.where(counts, kl_coef * (logps - ref_logps), 0.0)
    return found.detach()


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation per token, for PPO.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    over the tokens that count, those between them skipped; V is 0 after the last one.
    Source: arXiv:1506.02438 eq. 16.

    Args:
        rewards, values: [B, C]; ``values`` are of the state before each token.
        mask: [B, C], non-zero where a token counts.

    Returns:
        Advantages and returns, [B, C], 0 where masked. No gradient.
    """
    counts = mask != 0
    with torch.no_grad():
        skips = (~counts).to(values.dtype)
        known = torch.where(counts, values, 0.0)
        from_here = _recurrence(skips, known)  # of the first token that counts, from each one on
        next_values = F.pad(from_here[:, 1:], (0, 1))
        deltas = torch.where(counts, rewards + gamma * next_values - values, 0.0)
        found = _recurrence(torch.where(counts, gamma * lam, skips), deltas)
        advantages = torch.where(counts, found, 0.0)
        returns = torch.where(counts, advantages + values, 0.0)
    return advantages, returns


def _recurrence(factors: Tensor, terms: Tensor) -> Tensor:
    """x_t = factors_t x_{t+1} + terms_t with x = 0 behind the end, [B, C].

    Each round composes the maps of as many tokens again, so there are log2(C) rounds of a few
    kernels; token by token there would be C.
    """
    reach = 1
    while reach < terms.shape[1]:
        terms = terms + factors * F.pad(terms[:, reach:], (0, reach))
        factors = factors * F.pad(factors[:, reach:], (0, reach))
        reach *= 2
    return terms


def whiten(values: Tensor, mask: Tensor, moments: tuple[float, float] | None = None) -> Tensor:
    """``values`` with mean 0 and standard deviation 1 over the tokens that count, 0 elsewhere.

    ``moments`` are mean and standard deviation over more than these values, such as a whole step's.
    """
    counts = mask != 0
    flat, valid = values.reshape(1, -1), counts.reshape(1, -1)
    mean, std = moments or (_mean(flat, valid, dim=1), _std(flat, valid, dim=1))
    return torch.where(counts, (values - mean) / (std + EPSILON), 0.0)


def _groups(rewards: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    """Rewards and their validity as [N / G, G]."""
    if num_generations < 1 or rewards.numel() % num_generations:
        raise BatchError(
            f"{rewards.numel()} rewards are not groups of num_generations={num_generations}"
        )
    grouped = rewards.reshape(-1, num_generations)
    return grouped, ~torch.isnan(grouped)


def _mean(values: Tensor, valid: Tensor, *, dim: int) -> Tensor:
    total = torch.where(valid, values, 0.0).sum(dim, keepdim=True)
    return total / valid.sum(dim, keepdim=True).clamp(min=1)


def _std(values: Tensor, valid: Tensor, *, dim: int) -> Tensor:
    """Unbiased standard deviation of the valid entries; 0 where there are fewer than two."""
    gaps = torch.where(valid, values - _mean(values, valid, dim=dim), 0.0)
    freedom = (valid.sum(dim, keepdim=True) - 1).clamp(min=1)
    return (gaps.square().sum(dim, keepdim=True) / freedom).sqrt()
