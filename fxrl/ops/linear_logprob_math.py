"""The mathematics of the fused loss head, one tile of rows at a time.

With ``x = h W^T + b`` and ``z = softcap(scale * x) / T`` (softcap(a) = c tanh(a / c)), for one row
and its target y, sums over the vocabulary:

    lse      = log sum_v exp z_v            d lse      / d z = p,   p_v = exp(z_v - lse)
    logprob  = z_y - lse                    d logprob  / d z = onehot_y - p
    entropy  = -sum_v p_v log p_v           d entropy  / d z = -p (log p + entropy)
    sum_p2   = sum_v p_v^2                  d sum_p2   / d z = 2 p (p - sum_p2)
    mean     = (1 / V) sum_v z_v            d mean     / d z = 1 / V

and ``dz / dx = scale / T * (1 - tanh^2(scale x / c))``, ``dz / dT = -z / T``.

NOTE [Why the target is kept apart from the other logits]
For a confident token p_y rounds to 1, and both ``z_y - lse`` and ``1 - p_y`` lose every digit: the
token's log-prob becomes 0 and its gradient vanishes. So the log-sum-exp runs over the others only:
``logp = -softplus(lse_{v != y} - z_y)`` is never positive and keeps its relative precision, and the
target's entry of ``onehot - p`` is ``-expm1(logp)``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from fxrl.ops.linear_logprob_matmul import accumulation_dtype, project

Rows: TypeAlias = slice | Tensor

_CPU_TILE_BYTES = 32 * 2**20
_GPU_TILE_BYTES = 320 * 2**20
_GPU_TILE_STEP = 128  # a GEMM's tile: rows beyond a multiple of it cost as much as a full one


@dataclass(frozen=True, slots=True)
class LossHead:
    """The arguments of the op: what is projected, onto what, and how logits are transformed."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    temperature: Tensor | None
    row_mask: Tensor | None
    scale: float
    softcap: float
    chunk_tokens: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of logits, statistics and accumulated gradients."""
        return accumulation_dtype(self.hidden.dtype)

    def tile_rows(self) -> int:
        """Rows per tile: what the caller asked for, else what keeps one logits tile small.

        It must not depend on which outputs or gradients are wanted: a GEMM may round differently
        for another number of rows, and scoring has to be bitwise equal to training.
        """
        if self.chunk_tokens > 0:
            return self.chunk_tokens
        on_cpu = self.hidden.device.type == "cpu"
        budget = _CPU_TILE_BYTES if on_cpu else _GPU_TILE_BYTES
        rows = budget // (self.weight.shape[0] * self.dtype.itemsize)
        step = 16 if on_cpu or rows < _GPU_TILE_STEP else _GPU_TILE_STEP
        return max(1, rows // step * step if rows >= step else rows)

    def tiles(self, row_mask: Tensor | None) -> Iterator[Rows]:
        """Row selections that cover ``row_mask`` (all rows if None), at most a tile each."""
        step = self.tile_rows()
        if row_mask is not None:
            selected = row_mask.nonzero().squeeze(1)
            for start in range(0, selected.shape[0], step):
                yield selected[start : start + step]
            return
        num_rows = self.hidden.shape[0]
        for start in range(0, num_rows, step):
            yield slice(start, min(start + step, num_rows))

    def row_temperature(self, rows: Rows) -> Tensor | None:
        """``[R, 1]`` or ``[1, 1]`` in the accumulation dtype."""
        if self.temperature is None:
            return None
        temperature = self.temperature.to(self.dtype).reshape(-1, 1)
        return temperature if temperature.shape[0] == 1 else temperature[rows]

    def row_slope(self, rows: Rows) -> Tensor:
        """``scale / T``, the row-wise part of dz/dx: ``[R, 1]`` or ``[1, 1]``."""
        temperature = self.row_temperature(rows)
        if temperature is None:
            return torch.full((1, 1), self.scale, dtype=self.dtype, device=self.hidden.device)
        return self.scale / temperature


class Workspace:
    """Scratch tensors ``[R, V]``, made at first use and shared by all tiles of a call."""

    def __init__(self, head: LossHead) -> None:
        self._rows = min(head.tile_rows(), head.hidden.shape[0])
        self._like = head.hidden.new_empty(0, dtype=head.dtype)
        self._vocab = head.weight.shape[0]
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, num_rows: int) -> Tensor:
        """The scratch tensor ``name``, cut to ``num_rows``; its contents are undefined."""
        if name not in self._tensors:
            self._tensors[name] = self._like.new_empty(self._rows, self._vocab)
        return self._tensors[name][:num_rows]


@dataclass(slots=True)
class Tile:
    """Softmax of some rows. Per-row tensors are ``[R, 1]``, the large ones ``[R, V]``.

    ``log_prob`` and ``prob`` are valid only if ``evaluate`` was asked for a value or a gradient
    that needs them; ``cap_slope`` is ``1 - tanh^2`` where there is a softcap.
    """

    target: Tensor
    log_prob: Tensor
    prob: Tensor
    cap_slope: Tensor | None
    values: dict[str, Tensor] = field(default_factory=dict)


def evaluate(
    head: LossHead, rows: Rows, space: Workspace, wanted: Collection[str], *, with_grad: bool
) -> Tile:
    """Logits, softmax and the wanted statistics of ``rows`` (``values`` may hold more)."""
    target = head.target[rows].unsqueeze(1)
    logits = space.take("logits", target.shape[0])
    project(head.hidden[rows], head.weight, out=logits)
    cap_slope = _transform_(head, rows, logits, space if with_grad else None)
    z_target = logits.gather(1, target)
    prob = space.take("prob", target.shape[0])
    tile = Tile(target, logits, prob, cap_slope)
    if "argmax_hit" in wanted:
        tile.values["argmax_hit"] = logits.argmax(1, keepdim=True) == target
    if "mean_logit" in wanted:
        tile.values["mean_logit"] = logits.mean(1, keepdim=True)

    lowest = torch.finfo(head.dtype).min
    logits.scatter_(1, target, -torch.inf)
    largest_other = logits.amax(1, keepdim=True).clamp_(min=lowest)
    torch.exp(logits.sub_(largest_other), out=prob)
    log_sum_others = prob.sum(1, keepdim=True).log_()
    # logaddexp(a, 0) is softplus(a) without softplus's cut-off at 20. Logits are subtracted from
    # logits before anything is added: their difference is (nearly) exact, a log-sum-exp is not.
    logprob = -torch.logaddexp(
        largest_other - z_target + log_sum_others, torch.zeros_like(z_target)
    )
    lse = torch.logaddexp(largest_other + log_sum_others, z_target)
    tile.values |= {"logprob": logprob, "lse": lse}
    tile.values["max_logit"] = torch.maximum(largest_other, z_target)

    if with_grad or "entropy" in wanted or "sum_p2" in wanted:
        log_sum = torch.logaddexp(log_sum_others, z_target - largest_other)
        prob.mul_(torch.exp(-log_sum)).scatter_(1, target, logprob.exp())
        logits.sub_(log_sum).scatter_(1, target, logprob)
        if head.bias is not None:
            # A bias of -inf bans a token: 0 log 0 = 0, not NaN. And 0 (w log 0) for any weight w,
            # so the floor is where exp is 0 in every dtype, not the dtype's lowest number.
            logits.clamp_(min=-1e6)
        work = space.take("grad", target.shape[0])
        if "entropy" in wanted:
            tile.values["entropy"] = -torch.mul(prob, logits, out=work).sum(1, keepdim=True)
        if "sum_p2" in wanted:
            tile.values["sum_p2"] = torch.mul(prob, prob, out=work).sum(1, keepdim=True)
    return tile


def _transform_(
    head: LossHead, rows: Rows, logits: Tensor, slope_space: Workspace | None
) -> Tensor | None:
    """``logits`` becomes ``softcap(scale * (logits + b)) / T``; returns ``1 - tanh^2`` if asked."""
    if head.bias is not None:
        logits.add_(head.bias.to(head.dtype))
    if head.scale != 1.0:
        logits.mul_(head.scale)
    slope = None
    if head.softcap:
        logits.div_(head.softcap).tanh_()
        if slope_space is not None:
            slope = slope_space.take("slope", logits.shape[0])
            torch.mul(logits, logits, out=slope).neg_().add_(1)
        logits.mul_(head.softcap)
    if (temperature := head.row_temperature(rows)) is not None:
        logits.div_(temperature)
    return slope


def logit_grad(tile: Tile, weights: Mapping[str, Tensor], space: Workspace) -> Tensor:
    """``sum_k weights[k] * d value_k / d z`` as ``[R, V]``, in scratch memory.

    ``weights[k]`` is ``[R, 1]`` or ``[1, 1]``, for any of the differentiable outputs.
    """
    total = space.take("grad", tile.target.shape[0])
    zero = total.new_zeros(1, 1)
    on_logprob = weights.get("logprob", zero)
    on_lse = weights.get("lse", zero)
    at_target, elsewhere = on_lse, on_lse - on_logprob
    if "entropy" in weights or "sum_p2" in weights:
        _concentration_(tile, weights, total)
        at_target = total.gather(1, tile.target) + on_lse
        total.add_(elsewhere).mul_(tile.prob)
    else:
        torch.mul(tile.prob, elsewhere, out=total)
    # The target's entry is made apart: (1 - p_y) must not be formed by subtraction.
    at_target = at_target * tile.prob.gather(1, tile.target)
    at_target = at_target - on_logprob * torch.expm1(tile.values["logprob"])
    total.scatter_(1, tile.target, at_target)
    if (on_mean := weights.get("mean_logit")) is not None:
        total.add_(on_mean / total.shape[1])
    return total


def _concentration_(tile: Tile, weights: Mapping[str, Tensor], factor: Tensor) -> None:
    """``factor`` becomes the multiple of p that entropy and sum_p2 add to the gradient."""
    factor.zero_()
    if (on_entropy := weights.get("entropy")) is not None:
        torch.add(tile.log_prob, tile.values["entropy"], out=factor).mul_(-on_entropy)
    if (on_sum_p2 := weights.get("sum_p2")) is not None:
        twice = 2 * on_sum_p2
        factor.addcmul_(tile.prob, twice).sub_(twice * tile.values["sum_p2"])


def temperature_grad(
    head: LossHead, tile: Tile, weights: Mapping[str, Tensor], grad: Tensor
) -> Tensor:
    """``d / dT`` of what ``grad = logit_grad(tile, weights)`` belongs to, ``[R]``.

    ``weights`` carry the factor ``scale / T`` already (``row_slope``), so that
    ``-sum_v (d / dz_v) z_v / T`` is ``-sum_v grad_v z_v / scale`` with ``z = log p + lse``.
    ``sum_v grad_v`` is known: 1 for lse and the mean, 0 for the others.
    """
    weighted = (grad * tile.log_prob).sum(1, keepdim=True)
    shift = weights.get("lse", 0.0) + weights.get("mean_logit", 0.0)
    return -((weighted + shift * tile.values["lse"]) / head.scale).squeeze(1)
