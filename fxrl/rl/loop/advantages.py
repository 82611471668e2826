"""Advantages and returns of a step's tokens, by the values that its scoring has found.

NOTE [Advantages of the whole step]
GAE is of each row by itself; whitening is over all of the step's tokens that count. The ranks tell
each other sums, so no number depends on how rows are cut into micro-batches or dealt to ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxrl.distributed import Ranks
from fxrl.losses import Critic, gae, token_rewards, whiten
from fxrl.rl.types import Batch, Metrics


def add_advantages(
    batches: Sequence[Batch], critic: Critic, ranks: Ranks, sharing: int = 1
) -> Metrics:
    """Puts ``advantages``, whitened, and ``returns`` [B, C] into this rank's micro-batches, which
    have ``rewards`` [B] (they go), ``values`` and ``old_logps`` [B, C]; all ranks call it.

    Of ``sharing`` consecutive ranks each has the same batches. Returns ``explained_variance``, 1 -
    Var(R - V) / Var(R) of the values as they were scored, and with ``kl_coef`` the mean ``kl``.
    """
    for batch in batches:
        mask = batch["completion_mask"]
        scored = (batch["old_logps"], batch.get("ref_logps"))
        rewards = token_rewards(batch.pop("rewards"), mask, *scored, critic.kl_coef)
        options = {"gamma": critic.gamma, "lam": critic.lam}
        batch["advantages"], batch["returns"] = gae(rewards, batch["values"], mask, **options)

    def sums(of: Callable[[Batch], Sequence[Tensor]]) -> list[float]:
        own = [
            torch.stack(
                [torch.where(b["completion_mask"] != 0, t, 0.0).double().sum() for t in of(b)]
            )
            for b in batches
        ]
        rows: list[list[float]] = torch.stack(own).tolist() if own else []
        return [math.fsum(column) for column in zip(*ranks.every(rows, sharing), strict=True)]

    penalized = critic.kl_coef != 0.0
    num, advantage, returned, *kl = sums(
        lambda b: (
            *(b["completion_mask"], b["advantages"], b["returns"]),
            *((b["old_logps"] - b["ref_logps"],) if penalized else ()),
        )
    )
    num = max(1.0, num)  # tools may have said all there is
    mean, mean_return = advantage / num, returned / num
    spread, spread_return = sums(
        lambda b: ((b["advantages"] - mean).square(), (b["returns"] - mean_return).square())
    )
    moments = mean, math.sqrt(spread / max(1.0, num - 1))
    for batch in batches:
        batch["advantages"] = whiten(batch["advantages"], batch["completion_mask"], moments)
    # R - V is the advantage, before it was whitened.
    metrics: Metrics = {"explained_variance": 1 - spread / spread_return if spread_return else None}
    return metrics | ({"kl": kl[0] / num} if penalized else {})
