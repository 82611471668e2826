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
from fxrl.kernels.hopper.gradient import VocabLoop, coefficients, temperature_gradient
from fxrl.kernels.hopper.products import ChunkedProduct, SkippingProduct
from fxrl.kernels.hopper.rows import COMBINED
from fxrl.kernels.hopper.tile import RowTile, Scratch, aligned
from fxrl.ops.linear_logprob_arguments import (
    BackwardArguments,
    ForwardArguments,
    ForwardResult,
    Gradients,
)
from fxrl.ops.linear_logprob_checks import LinearLogprobError
from fxrl.ops.linear_logprob_head import LossHead, Rows, row_tiles

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
        _score(arguments, selected, num_rows, result)
        return result
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise LinearLogprobError(
            "a CUDA graph is being captured, and the loss head's forward with gradient asks the "
            "device whether every row fits; leave the head out of the graph"
        )
    misfits = _score_with_vectors(arguments, selected, num_rows, result)
    if bool(misfits.any()):
        again = otherwise(replace(arguments, head=head._replace(row_mask=misfits)))
        result.vectors[:, misfits] = again.vectors[:, misfits]
    return result


def _score(
    arguments: ForwardArguments, selected: Tensor | None, num_rows: int, result: ForwardResult
) -> None:
    head = arguments.head
    steps = _planned(plan.for_scoring, head, num_rows)
    scratch = Scratch(head, min(steps.rows, num_rows), _statistics(arguments))
    for rows in row_tiles(selected, num_rows, steps.rows):
        tile = RowTile(head, rows, scratch)
        tile.find_target()
        tile.statistics()
        _put_values(arguments, rows, tile.combine(), result)


def _score_with_vectors(
    arguments: ForwardArguments, selected: Tensor | None, num_rows: int, result: ForwardResult
) -> Tensor:
    """``[N]`` bool: True where a row's vectors are not valid."""
    head = arguments.head
    skips = arguments.skip_tolerance > 0
    steps = _planned(plan.for_skipping if skips else plan.for_product, head, num_rows)
    scratch = Scratch(head, min(steps.rows, num_rows), _statistics(arguments))
    product: ChunkedProduct | SkippingProduct
    if skips:
        product = SkippingProduct(head, steps, num_rows, arguments.skip_tolerance)
    else:
        product = ChunkedProduct(head, steps, num_rows)
    misfits = head.target.new_zeros(head.target.shape[0], dtype=torch.bool)
    for rows in row_tiles(selected, num_rows, steps.rows):
        tile = RowTile(head, rows, scratch)
        tile.find_target()
        others = product.of_exponentials(tile)
        combined = tile.combine()
        factors = _vector_factors(tile, combined, arguments.grad_outputs)
        tile.finish(others, *factors, result.vectors)
        misfits[rows] = combined[COMBINED.index("misfit")] != 0
        _put_values(arguments, rows, combined, result)
    return misfits


def backward(arguments: BackwardArguments) -> Gradients:
    """``linear_logprob_backward``, but for a bias's gradient, of a head that this route serves."""
    head, live = arguments.head, arguments.live_rows().nonzero().squeeze(1)
    made = replace(arguments, want_weight=False).new_gradients()
    if arguments.want_weight:  # rounded once, from float32 sums: no float32 copy is accumulated
        made.weight = torch.zeros_like(head.weight, memory_format=torch.contiguous_format)
    num_rows = live.shape[0]
    if not num_rows:
        return made
    by_row = coefficients(arguments)
    d_hidden = made.hidden if arguments.want_hidden else None
    d_temperature = made.temperature if arguments.want_temperature else None
    if arguments.want_weight:
        by_vocab = VocabLoop(head, by_row, live, weighted=d_temperature is not None)
        by_vocab.run(made.weight, d_hidden, d_temperature)
        return made
    steps = _planned(plan.for_product, head, num_rows)
    scratch = Scratch(head, min(steps.rows, num_rows), 1)
    product = ChunkedProduct(head, steps, num_rows)
    for rows in row_tiles(live, num_rows, steps.rows):
        tile = RowTile(head, rows, scratch)
        of_tile = by_row[:, rows].contiguous()
        sums = product.of_gradient(
            tile, of_tile, weighted=d_temperature is not None, multiply=d_hidden is not None
        )
        if d_hidden is not None:
            d_hidden[rows] = sums.to(d_hidden.dtype)
        if d_temperature is not None:
            weighted = tile.weighted(slice(0, head.weight.shape[0]))
            d_temperature[rows] = temperature_gradient(head, weighted, of_tile)
    return made


def _statistics(arguments: ForwardArguments) -> int:
    return 2 if _MOMENTS.isdisjoint(arguments.outputs) else 5


def _put_values(
    arguments: ForwardArguments, rows: Rows, combined: Tensor, result: ForwardResult
) -> None:
    for name in arguments.outputs:
        value = result.values[name]
        value[rows] = combined[COMBINED.index(name)].to(value.dtype)


def _planned(make: Callable[..., plan.Plan], head: LossHead, num_rows: int) -> plan.Plan:
    """``chunk_tokens`` is the caller's plan: so many rows, of the whole vocabulary."""
    vocab, width = head.weight.shape
    if head.chunk_tokens:
        return plan.Plan(head.chunk_tokens, -(-vocab // module.TILE_VOCAB) * module.TILE_VOCAB)
    units = module.multiprocessors(head.hidden.device.index)
    # Masks give another count at every call: plans are made, and kept, for multiples of a tile.
    return make(plan.whole_tiles(num_rows), width, vocab, units)


def _vector_factors(
    tile: RowTile, combined: Tensor, names: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    """``[K, R]`` each: what multiplies the product and the target's row of the weight."""
    logprob, mass = (combined[COMBINED.index(name)] for name in ("logprob", "mass"))
    on_target = tile.slope * tile.target_slope()
    of = {
        "logprob": (-tile.slope * mass, -on_target * torch.expm1(logprob)),
        "lse": (tile.slope * mass, on_target * torch.exp(logprob)),
    }
    from_product, from_target = zip(*(of[name] for name in names), strict=True)
    return torch.stack(from_product), torch.stack(from_target)
