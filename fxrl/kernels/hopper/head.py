"""The loss head on Hopper in bf16: tiles of the logits live in registers only.

forward, values only     one GEMM whose epilogue takes the rows' statistics         2NHV FLOPs
forward with vectors     the same GEMM leaves 2^(t - shift) in bf16, cuBLAS adds
                         their product with the weight to float32 sums              4NHV
backward                 the GEMM again, its epilogue writes the logits' gradient
                         from the rows' log-sum-exp; cuBLAS makes dH and dW of it   4NHV, 6NHV

NOTE [Why exponentials may be stored before the row's sum is known]
u = (1 - p_y) (W_y - sum_{v != y} (e_v / S) W_v) needs e_v only up to one factor per row, which is
applied to the finished sum [R, H]. A bf16 number has float32's exponent, so any shift within 90 of
the row's largest t keeps e_v's eight bits; the target's own t, known from one dot product, is
nearly always that near: less than 76 nats below, for the token was sampled. Rows where it is not
(``misfit``) are found when their statistics are complete, and made again by the general route.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from fxrl.kernels.hopper import module, plan
from fxrl.kernels.hopper.call import Call, aligned
from fxrl.kernels.hopper.gradient import VocabLoop, coefficients, temperature_gradient
from fxrl.kernels.hopper.products import ChunkedProduct
from fxrl.kernels.hopper.tile import RowTile
from fxrl.ops.linear_logprob_arguments import (
    BackwardArguments,
    ForwardArguments,
    ForwardResult,
    Gradients,
)
from fxrl.ops.linear_logprob_checks import LinearLogprobError
from fxrl.ops.linear_logprob_head import LossHead, slices

_MOMENTS = {"entropy", "sum_p2", "mean_logit"}
_LEAST_ROWS, _LEAST_VOCAB = 64, 1000

Forward: TypeAlias = Callable[[ForwardArguments], ForwardResult]


def serves(head: LossHead) -> bool:
    """Whether this route computes ``head``; scoring and training of the same rows must agree."""
    hidden, weight = head.hidden, head.weight
    return (
        hidden.is_cuda
        and hidden.dtype == weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(hidden.device) == (9, 0)
        and hidden.shape[0] >= _LEAST_ROWS
        and weight.shape[0] >= _LEAST_VOCAB
        and aligned(weight)
        and module.available()
    )


def forward(arguments: ForwardArguments, otherwise: Forward) -> ForwardResult:
    """``linear_logprob_forward`` of a head that this route ``serves``.

    ``otherwise`` computes the vectors of the rows whose exponentials do not fit; that there are
    none is read back from the device, once a call.
    """
    head, result = arguments.head, arguments.new_result()
    selected = head.selected(head.row_mask)
    num_rows = head.hidden.shape[0] if selected is None else selected.shape[0]
    if not num_rows:
        return result
    if not arguments.save_vectors:
        _put_values(_score(arguments, selected, num_rows), arguments, result)
        return result
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise LinearLogprobError(
            "a CUDA graph is being captured, and the loss head's forward with gradient asks the "
            "device whether every row fits; leave the head out of the graph"
        )
    call = _score_with_vectors(arguments, selected, num_rows, result.vectors)
    _put_values(call, arguments, result)
    misfits = torch.zeros_like(head.target, dtype=torch.bool)
    call.put("misfit", misfits)
    if bool(misfits.any()):
        again = otherwise(replace(arguments, head=head._replace(row_mask=misfits)))
        result.vectors[:, misfits] = again.vectors[:, misfits]
    return result


def _score(arguments: ForwardArguments, selected: Tensor | None, num_rows: int) -> Call:
    head = arguments.head
    steps = _planned(plan.for_scoring, head, num_rows)
    call = Call(head, selected, steps.rows, _statistics(arguments))
    call.check_targets()
    for rows in slices(num_rows, steps.rows):
        tile = RowTile(call, rows)
        tile.find_target()
        tile.statistics()
        tile.combine()
    return call


def _score_with_vectors(
    arguments: ForwardArguments, selected: Tensor | None, num_rows: int, vectors: Tensor
) -> Call:
    """Fills ``vectors`` too; where the call says ``misfit``, a row's are not valid."""
    head = arguments.head
    steps = _planned(plan.for_product, head, num_rows)
    call = Call(head, selected, steps.rows, _statistics(arguments))
    call.check_targets()
    product = ChunkedProduct(head, steps, num_rows)
    for rows in slices(num_rows, steps.rows):
        tile = RowTile(call, rows)
        tile.find_target()
        others = product.of_exponentials(tile)
        tile.combine()
        tile.finish(others, arguments.grad_outputs, vectors)
    return call


def _put_values(call: Call, arguments: ForwardArguments, result: ForwardResult) -> None:
    for name in arguments.outputs:
        call.put(name, result.values[name])


def backward(arguments: BackwardArguments) -> Gradients:
    """``linear_logprob_backward``, but for a bias's gradient, of a head that this route serves."""
    head, live = arguments.head, arguments.live_rows().nonzero().squeeze(1)
    made = replace(arguments, want_weight=False).new_gradients()
    if arguments.want_weight:  # rounded once, from float32 sums: no float32 copy is accumulated
        made.weight = torch.zeros_like(head.weight, memory_format=torch.contiguous_format)
    num_rows = live.shape[0]
    if not num_rows:
        return made
    selected = live if num_rows < head.hidden.shape[0] else None
    by_row = coefficients(arguments)
    by_row = by_row if selected is None else by_row[:, selected]
    d_hidden = made.hidden if arguments.want_hidden else None
    d_temperature = made.temperature if arguments.want_temperature else None
    if arguments.want_weight:
        steps = _planned(plan.for_gradient, head, num_rows)
        by_vocab = VocabLoop(head, steps, by_row, selected, weighted=d_temperature is not None)
        by_vocab.run(made.weight, d_hidden, d_temperature)
        return made
    steps = _planned(plan.for_product, head, num_rows)
    call = Call(head, selected, steps.rows, 1)
    product = ChunkedProduct(head, steps, num_rows)
    for rows in slices(num_rows, steps.rows):
        tile, places = RowTile(call, rows), call.places(rows)
        of_tile = by_row[:, rows].contiguous()
        sums = product.of_gradient(
            tile, of_tile, weighted=d_temperature is not None, multiply=d_hidden is not None
        )
        if d_hidden is not None:
            d_hidden[places] = sums.to(d_hidden.dtype)
        if d_temperature is not None:
            weighted = tile.weighted(slice(0, head.weight.shape[0]))
            d_temperature[places] = temperature_gradient(head, weighted, of_tile)
    return made


def _statistics(arguments: ForwardArguments) -> int:
    return 2 if _MOMENTS.isdisjoint(arguments.outputs) else 5


def _planned(make: Callable[..., plan.Plan], head: LossHead, num_rows: int) -> plan.Plan:
    """``chunk_tokens`` is the caller's plan: so many rows, of the whole vocabulary but for dW."""
    vocab, width = head.weight.shape
    if head.chunk_tokens:
        whole = -(-vocab // module.TILE_VOCAB) * module.TILE_VOCAB
        by_vocab = make is plan.for_gradient
        step = plan.gradient_vocab(head.chunk_tokens, vocab) if by_vocab else whole
        return plan.Plan(head.chunk_tokens, step)
    units = module.multiprocessors(head.hidden.device.index)
    # Masks give another count at every call: plans are made, and kept, for multiples of a tile.
    return make(plan.whole_tiles(num_rows), width, vocab, units)
