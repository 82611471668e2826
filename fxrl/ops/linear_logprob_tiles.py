"""The loops over tiles of rows that the reference and the general device kernels share.

An implementation gives the work of one tile; the loops place its results, make the saved vectors
and multiply its logit gradient with the head and the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from fxrl.ops.linear_logprob_arguments import (
    BackwardArguments,
    ForwardArguments,
    ForwardResult,
    Gradients,
)
from fxrl.ops.linear_logprob_head import LossHead, Rows
from fxrl.ops.linear_logprob_matmul import accumulate_weight_grad, backproject

#: Rows -> values ``[R]`` by name, and ``sum_{v != y} p_v slope_v W_v`` ``[R, H]`` if vectors are
#: saved (slope_v: the softcap's, 1 without; in the accumulation dtype).
ForwardTile: TypeAlias = Callable[[Rows], tuple[Mapping[str, Tensor], Tensor | None]]
#: Rows -> gradient of the raw logits ``[R, V]``, and of the temperature by row ``[R]`` if wanted.
BackwardTile: TypeAlias = Callable[[Rows], tuple[Tensor, Tensor | None]]


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
