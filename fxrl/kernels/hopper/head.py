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

NOTE [Why the sums over vocabulary chunks are float32 and are added by cuBLAS]
Partial sums rounded to bf16 would bias training (each chunk's error is as large as the whole's).
``out=`` of ``addmm`` with a float32 result adds in the GEMM's own epilogue.

NOTE [Why no gradient skipping of improbable blocks]
Blocks of 128 rows x 256 entries of which no row loses more than a mass of 2^-9 (1 - p_y) could be
left out of the vectors' product: |delta u_i| <= 2^-9 |scale / T| (1 - p_y) max_v |W_vi|, half the
bound of what rounding p to bf16 does. It was built, and taken back (H200, forward and backward).
Where nearly all can go it pays: 38.0 ms instead of 60.3 at 16384 x 4096 x 151936, on a Zipf head
whose ids are ranks (98.5 % go). But of SmolLM2's blocks, reading text, 0.9 % may go, for nearly
each holds an entry that some token needs, and of the Zipf head's with shuffled ids 32 %. A listed
block costs 2.3 times cuBLAS's, so that it pays from 60 % on, and asking alone cost 5 to 17 %: 62.7
ms instead of 59.8 with shuffled ids, 4.96 instead of 4.23 at SmolLM2's 16384 x 576 x 49152.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fxrl.kernels.hopper import module, plan
from fxrl.kernels.hopper.call import Call, RowTile, aligned
from fxrl.ops.linear_logprob.arguments import (
    DIFFERENTIABLE,
    BackwardArguments,
    ForwardArguments,
    ForwardResult,
    Gradients,
    LossHead,
    Rows,
    slices,
)
from fxrl.ops.linear_logprob.checks import LinearLogprobError
from fxrl.ops.linear_logprob.op import Forward

_MOMENTS = {"entropy", "sum_p2", "mean_logit"}
_LEAST_ROWS, _LEAST_VOCAB = 64, 1000
_LOG2E, _LN2 = 1 / math.log(2), math.log(2)


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


def _planned(make: Callable[..., plan.TilePlan], head: LossHead, num_rows: int) -> plan.TilePlan:
    """``chunk_tokens`` is the caller's plan: so many rows, of the whole vocabulary but for dW."""
    vocab, width = head.weight.shape
    if head.chunk_tokens:
        whole = -(-vocab // module.TILE_VOCAB) * module.TILE_VOCAB
        by_vocab = make is plan.for_gradient
        step = plan.gradient_vocab(head.chunk_tokens, vocab) if by_vocab else whole
        return plan.TilePlan(head.chunk_tokens, step)
    units = module.multiprocessors(head.hidden.device.index)
    # Masks give another count at every call: plans are made, and kept, for multiples of a tile.
    return make(plan.whole_tiles(num_rows), width, vocab, units)


# -- the products over the vocabulary


def add_product(total: Tensor, a: Tensor, b: Tensor, *, begin: bool) -> None:
    """``total`` (+)= ``a @ b``, of bf16 factors in float32; ``begin``: what it held is dropped."""
    if begin:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class ChunkedProduct:
    """``sum_v a_v W_v`` of a tile's rows, ``a [R, V]`` made and multiplied in chunks."""

    def __init__(self, head: LossHead, steps: plan.TilePlan, num_rows: int) -> None:
        rows, width = min(steps.rows, num_rows), head.weight.shape[1]
        self._weight, self._step = head.weight, steps.vocab
        self._factors = head.hidden.new_empty(rows, self._step)
        self._sums = head.hidden.new_empty(rows, width, dtype=torch.float32)

    def of_exponentials(self, tile: RowTile) -> Tensor:
        """``[R, H]`` float32 (scratch), and the call's block statistics."""
        return self._sum(tile, tile.exponentials)

    def of_gradient(
        self, tile: RowTile, by_row: Tensor, *, weighted: bool, multiply: bool
    ) -> Tensor:
        """``[R, H]`` float32 (scratch; undefined without ``multiply``), and weighted sums."""

        def make(vocab: slice, out: Tensor) -> None:
            tile.gradient(vocab, by_row, out, weighted)

        return self._sum(tile, make, multiply=multiply)

    def _sum(
        self, tile: RowTile, make: Callable[[slice, Tensor], None], *, multiply: bool = True
    ) -> Tensor:
        sums = self._sums[: tile.count]
        for vocab in slices(self._weight.shape[0], self._step):
            out = self._factors[: tile.count, : vocab.stop - vocab.start]
            make(vocab, out)
            if multiply:
                add_product(sums, out, self._weight[vocab], begin=vocab.start == 0)
        return sums


# -- the backward that makes the logits' gradient


def coefficients(arguments: BackwardArguments) -> Tensor:
    """``[8, N]`` float32: log2-sum-exp, a, b, c, d, the gradient at the target, log2 p_y, and
    what a temperature's gradient adds to its weighted sum.

    With w_k the incoming gradient of value k times scale / T, the gradient of a raw logit v != y is

        p (a + b log2 p + c p) + d        a = w_lse - w_entropy entropy - 2 w_p2 sum_p2 - w_logprob
                                          b = -w_entropy ln 2    c = 2 w_p2    d = w_mean / V

    times the softcap's slope; the target's is made apart, so that 1 - p_y is never subtracted.
    """
    logprob, lse, entropy, sum_p2 = arguments.values
    logprob = logprob.clamp(min=-1e6)  # of a banned target: 0 * log 0 is 0
    zero = torch.zeros_like(lse)
    on = dict.fromkeys(DIFFERENTIABLE, zero)
    on |= {name: w.squeeze(1) for name, w in arguments.weights(slice(None)).items()}
    entropy = zero if entropy is None else entropy
    sum_p2 = zero if sum_p2 is None else sum_p2
    p = torch.exp(logprob)
    mean = on["mean_logit"] / arguments.head.weight.shape[0]
    by_p = on["lse"] - on["entropy"] * entropy - 2 * on["sum_p2"] * sum_p2
    at_target = p * (by_p - on["entropy"] * logprob + 2 * on["sum_p2"] * p)
    at_target = at_target - on["logprob"] * torch.expm1(logprob) + mean
    return torch.stack(
        [
            lse * _LOG2E,
            by_p - on["logprob"],
            -_LN2 * on["entropy"],
            2 * on["sum_p2"],
            mean,
            at_target,
            logprob * _LOG2E,
            (on["lse"] + on["mean_logit"]) * lse,
        ]
    )


def temperature_gradient(head: LossHead, weighted: Tensor, of_rows: Tensor) -> Tensor:
    """``[R]`` from the kernel's sum_v gradient_v log2 p_v ``[R]``; ``of_rows``: coefficients."""
    return -(_LN2 * weighted + of_rows[7]) / head.scale


class VocabLoop:
    """dW a chunk of the vocabulary at a time: no float32 copy of the head's size exists.

    NOTE [Why dW goes by vocabulary and dH by rows]
    Each sums over what the other loops over. With all rows' gradient of a chunk in memory its dW
    is one product, and dH, [N, H] in float32, is what accumulates; the other way round it would be
    dW, [V, H] in float32, gigabytes.
    """

    def __init__(
        self,
        head: LossHead,
        steps: plan.TilePlan,
        by_row: Tensor,
        selected: Tensor | None,
        *,
        weighted: bool,
    ) -> None:
        count = by_row.shape[1]
        self._index: Rows = slice(None)
        if selected is not None:
            self._index = selected
            temperature = head.temperature
            if temperature is not None and temperature.dim() and temperature.shape[0] > 1:
                temperature = temperature[selected]
            head = head._replace(
                hidden=head.hidden[selected],
                target=head.target[selected],
                temperature=temperature,
            )
        self._head, self._by_row, self._weighted = head, by_row, weighted
        self._rows, self._step = min(count, steps.rows), steps.vocab
        self._grad = head.hidden.new_empty(self._rows, self._step)
        self._weighted_sum = by_row.new_zeros(count)
        self._tile_rows = plan.launch_rows(head.hidden.shape[1])
        call = Call(head, None, self._tile_rows, 1)
        self._pieces = [(piece, self._tiles(piece, call)) for piece in slices(count, self._rows)]

    def _tiles(self, piece: slice, call: Call) -> list[tuple[slice, RowTile, Tensor]]:
        """Rows within the piece, their tile and their coefficients; made once for all chunks."""
        made = []
        for inner in slices(piece.stop - piece.start, self._tile_rows):
            rows = slice(piece.start + inner.start, piece.start + inner.stop)
            made.append((inner, RowTile(call, rows), self._by_row[:, rows].contiguous()))
        return made

    def run(self, d_weight: Tensor, d_hidden: Tensor | None, d_temperature: Tensor | None) -> None:
        """Fills the three; see ``backward``."""
        hidden, weight = self._head.hidden, self._head.weight
        whole = len(self._pieces) == 1
        sums = self._by_row.new_empty(hidden.shape if d_hidden is not None else (0,))
        piece_sum = self._by_row.new_empty((0,) if whole else (self._step, weight.shape[1]))
        for vocab in slices(weight.shape[0], self._step):
            total = piece_sum[: vocab.stop - vocab.start]
            for piece, tiles in self._pieces:
                grad = self._gradient(piece, tiles, vocab)
                if d_hidden is not None:
                    add_product(sums[piece], grad, weight[vocab], begin=vocab.start == 0)
                if whole:
                    torch.mm(grad.t(), hidden, out=d_weight[vocab])
                else:
                    add_product(total, grad.t(), hidden[piece], begin=piece.start == 0)
            if not whole:
                d_weight[vocab] = total.to(d_weight.dtype)
        if d_hidden is not None:
            d_hidden[self._index] = sums.to(d_hidden.dtype)
        if d_temperature is not None:
            made = temperature_gradient(self._head, self._weighted_sum, self._by_row)
            d_temperature[self._index] = made

    def _gradient(
        self, piece: slice, tiles: list[tuple[slice, RowTile, Tensor]], vocab: slice
    ) -> Tensor:
        """``[rows of piece, entries of vocab]`` (scratch)."""
        out = self._grad[: piece.stop - piece.start, : vocab.stop - vocab.start]
        for inner, tile, of_tile in tiles:
            tile.gradient(vocab, of_tile, out[inner], self._weighted)
            if self._weighted:
                self._weighted_sum[piece][inner] += tile.weighted(vocab)
        return out
