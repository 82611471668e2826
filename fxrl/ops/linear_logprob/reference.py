"""The mathematics of the fused loss head, one tile of rows at a time: the ops' specification.

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

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from fxrl.ops.linear_logprob.arguments import (
    BackwardArguments,
    ForwardArguments,
    ForwardResult,
    Gradients,
    LossHead,
    Rows,
    RowValues,
)
from fxrl.ops.linear_logprob.matmul import accumulate_weight_grad, backproject, project

#: Rows -> values ``[R]`` by name, and ``sum_{v != y} p_v slope_v W_v`` ``[R, H]`` if vectors are
#: saved (slope_v: the softcap's, 1 without; in the accumulation dtype).
ForwardTile: TypeAlias = Callable[[Rows], tuple[Mapping[str, Tensor], Tensor | None]]
#: Rows -> gradient of the raw logits ``[R, V]``, and of the temperature by row ``[R]`` if wanted.
BackwardTile: TypeAlias = Callable[[Rows], tuple[Tensor, Tensor | None]]


def reference_forward(arguments: ForwardArguments) -> ForwardResult:
    """The specification of ``linear_logprob_forward``."""
    head, space, save = arguments.head, Workspace(arguments.head), arguments.save_vectors

    def run(rows: Rows) -> tuple[Mapping[str, Tensor], Tensor | None]:
        tile = project_tile(head, rows, space, with_slope=save)
        values = row_statistics(head, tile, space, arguments.outputs, with_prob=save)
        others = None
        if save:
            prob = space.take("prob", tile.target.shape[0])
            if tile.cap_slope is not None:
                prob.mul_(tile.cap_slope)
            others = backproject(prob, head.weight)
        return {name: value.squeeze(1) for name, value in values.items()}, others

    return forward_tiles(arguments, run)


def reference_backward(arguments: BackwardArguments) -> Gradients:
    """The specification of ``linear_logprob_backward``."""
    head, space = arguments.head, Workspace(arguments.head)

    def run(rows: Rows) -> tuple[Tensor, Tensor | None]:
        tile = project_tile(head, rows, space, with_slope=True)
        values, weights = arguments.values.of(rows), arguments.weights(rows)
        grad = logit_grad(head, tile, values, weights, space)
        on_temperature = None
        if arguments.want_temperature:
            on_temperature = temperature_grad(head, tile, values, weights, grad)
        if tile.cap_slope is not None:
            grad.mul_(tile.cap_slope)
        return grad, on_temperature

    return backward_tiles(arguments, run)


# -- the loops over tiles, which the general device kernels share: an implementation gives the work
# of one tile; the loops place its results, make the saved vectors and multiply its logit gradient


def forward_tiles(arguments: ForwardArguments, tile: ForwardTile) -> ForwardResult:
    """``linear_logprob_forward`` one tile of unmasked rows at a time."""
    head, result = arguments.head, arguments.new_result()
    for rows in head.tiles(head.row_mask):
        values, others = tile(rows)
        for name in arguments.outputs:
            result.values[name][rows] = values[name].to(result.values[name].dtype)
        if others is not None:
            row_values = values["logprob"], values["lse"]
            for k, name in enumerate(arguments.grad_outputs):
                vector = hidden_vector(head, rows, name, *row_values, others)
                result.vectors[k, rows] = vector.to(result.vectors.dtype)
    return result


def backward_tiles(arguments: BackwardArguments, tile: BackwardTile) -> Gradients:
    """``linear_logprob_backward`` one tile of live rows at a time.

    dW is accumulated in one float32 (float64) ``[V, H]`` and rounded to the weight's dtype once.
    """
    head, made = arguments.head, arguments.new_gradients()
    for rows in head.tiles(arguments.live_rows()):
        grad, on_temperature = tile(rows)
        if on_temperature is not None:
            made.temperature[rows] = on_temperature
        if arguments.want_hidden:
            made.hidden[rows] = backproject(grad, head.weight).to(made.hidden.dtype)
        if arguments.want_weight:
            accumulate_weight_grad(made.weight, grad, head.hidden[rows])
        if arguments.want_bias:
            made.bias += grad.sum(0)
    return made


def hidden_vector(
    head: LossHead, rows: Rows, name: str, logprob: Tensor, lse: Tensor, others: Tensor
) -> Tensor:
    """``d value / d hidden`` ``[R, H]`` of ``logprob`` or ``lse`` (``[R]`` each, of ``rows``).

    With O = ``others`` = sum_{v != y} p_v slope_v W_v, which both share:

        d logprob / d h = scale / T ((1 - p_y) slope_y W_y - O)
        d lse     / d h = scale / T (p_y       slope_y W_y + O)

    The target's row of the head enters here and not in the product: it is not rounded with the
    probabilities, and ``1 - p_y`` is never formed by subtraction.
    """
    logprob, lse = logprob.unsqueeze(1), lse.unsqueeze(1)
    share = -torch.expm1(logprob) if name == "logprob" else logprob.exp()
    if head.softcap:
        share = share * head.cap_slope(rows, logprob + lse)
    at_target = share * head.weight[head.target[rows]].to(head.dtype)
    made = at_target - others if name == "logprob" else at_target + others
    return made.mul_(head.row_slope(rows))


# -- one tile


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


@dataclass(frozen=True, slots=True)
class Tile:
    """Transformed logits ``[R, V]`` in scratch memory, and the target of each row ``[R, 1]``.

    ``cap_slope`` is ``1 - tanh^2`` ``[R, V]`` where there is a softcap and it was asked for.
    """

    target: Tensor
    logits: Tensor
    cap_slope: Tensor | None


def project_tile(head: LossHead, rows: Rows, space: Workspace, *, with_slope: bool) -> Tile:
    """``softcap(scale * (h W^T + b)) / T`` of ``rows``."""
    target = head.target[rows].unsqueeze(1)
    logits = space.take("logits", target.shape[0])
    project(head.hidden[rows], head.weight, out=logits)
    if head.bias is not None:
        logits.add_(head.bias.to(head.dtype))
    if head.scale != 1.0:
        logits.mul_(head.scale)
    slope = None
    if head.softcap:
        logits.div_(head.softcap).tanh_()
        if with_slope:
            slope = space.take("slope", logits.shape[0])
            torch.mul(logits, logits, out=slope).neg_().add_(1)
        logits.mul_(head.softcap)
    if (temperature := head.row_temperature(rows)) is not None:
        logits.div_(temperature)
    return Tile(target, logits, slope)


def row_statistics(
    head: LossHead, tile: Tile, space: Workspace, wanted: Collection[str], *, with_prob: bool
) -> dict[str, Tensor]:
    """The wanted values (and maybe more), ``[R, 1]`` each; ``tile.logits`` are used up.

    ``with_prob`` leaves ``p_v``, 0 at the target, in the scratch tensor ``prob``.
    """
    logits, target = tile.logits, tile.target
    z_target = logits.gather(1, target)
    prob = space.take("prob", target.shape[0])
    values = {}
    if "argmax_hit" in wanted:
        values["argmax_hit"] = logits.argmax(1, keepdim=True) == target
    if "mean_logit" in wanted:
        values["mean_logit"] = logits.mean(1, keepdim=True)

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
    values["logprob"] = logprob
    values["lse"] = torch.logaddexp(largest_other + log_sum_others, z_target)
    values["max_logit"] = torch.maximum(largest_other, z_target)

    if with_prob or "entropy" in wanted or "sum_p2" in wanted:
        log_sum = torch.logaddexp(log_sum_others, z_target - largest_other)
        prob.mul_(torch.exp(-log_sum))
        p_target, work = logprob.exp(), space.take("grad", target.shape[0])
        if "entropy" in wanted:
            log_prob = _finite_(head, logits.sub_(log_sum).scatter_(1, target, 0))
            at_target = p_target * logprob.clamp(min=lowest)
            others = torch.mul(prob, log_prob, out=work).sum(1, keepdim=True)
            values["entropy"] = -(at_target + others)
        if "sum_p2" in wanted:
            others = torch.mul(prob, prob, out=work).sum(1, keepdim=True)
            values["sum_p2"] = p_target * p_target + others
    return values


def _finite_(head: LossHead, log_prob: Tensor) -> Tensor:
    """A bias of -inf bans a token: 0 log 0 = 0, not NaN.

    And 0 (w log 0) for any weight w, so the floor is where exp is 0 in every dtype, not the
    dtype's lowest number.
    """
    return log_prob if head.bias is None else log_prob.clamp_(min=-1e6)


def logit_grad(
    head: LossHead, tile: Tile, values: RowValues, weights: Mapping[str, Tensor], space: Workspace
) -> Tensor:
    """``sum_k weights[k] * d value_k / d z`` as ``[R, V]``, in scratch memory.

    ``weights[k]`` and ``values`` are ``[R, 1]``. ``tile.logits`` become ``log p``.
    """
    total = space.take("grad", tile.target.shape[0])
    zero = total.new_zeros(1, 1)
    on_logprob = weights.get("logprob", zero)
    on_lse = weights.get("lse", zero)
    log_prob = tile.logits.sub_(values.lse).scatter_(1, tile.target, values.logprob)
    prob = space.take("prob", tile.target.shape[0])
    torch.exp(_finite_(head, log_prob), out=prob)
    at_target, elsewhere = on_lse, on_lse - on_logprob
    if "entropy" in weights or "sum_p2" in weights:
        _concentration_(log_prob, prob, values, weights, total)
        at_target = total.gather(1, tile.target) + on_lse
        total.add_(elsewhere).mul_(prob)
    else:
        torch.mul(prob, elsewhere, out=total)
    # The target's entry is made apart: (1 - p_y) must not be formed by subtraction.
    at_target = at_target * prob.gather(1, tile.target)
    at_target = at_target - on_logprob * torch.expm1(values.logprob)
    total.scatter_(1, tile.target, at_target)
    if (on_mean := weights.get("mean_logit")) is not None:
        total.add_(on_mean / total.shape[1])
    return total


def _concentration_(
    log_prob: Tensor,
    prob: Tensor,
    values: RowValues,
    weights: Mapping[str, Tensor],
    factor: Tensor,
) -> None:
    """``factor`` becomes the multiple of p that entropy and sum_p2 add to the gradient."""
    factor.zero_()
    if (on_entropy := weights.get("entropy")) is not None:
        assert values.entropy is not None
        torch.add(log_prob, values.entropy, out=factor).mul_(-on_entropy)
    if (on_sum_p2 := weights.get("sum_p2")) is not None:
        assert values.sum_p2 is not None
        twice = 2 * on_sum_p2
        factor.addcmul_(prob, twice).sub_(twice * values.sum_p2)


def temperature_grad(
    head: LossHead, tile: Tile, values: RowValues, weights: Mapping[str, Tensor], grad: Tensor
) -> Tensor:
    """``d / dT`` of what ``grad = logit_grad(...)`` belongs to, ``[R]``.

    ``weights`` carry the factor ``scale / T`` already (``row_slope``), so that
    ``-sum_v (d / dz_v) z_v / T`` is ``-sum_v grad_v z_v / scale`` with ``z = log p + lse``.
    ``sum_v grad_v`` is known: 1 for lse and the mean, 0 for the others.
    """
    weighted = (grad * tile.logits).sum(1, keepdim=True)
    shift = weights.get("lse", 0.0) + weights.get("mean_logit", 0.0)
    return -((weighted + shift * values.lse) / head.scale).squeeze(1)
