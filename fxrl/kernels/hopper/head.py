"""The loss head on Hopper in bf16: tiles of the logits live in registers only.

forward, values only     one GEMM whose epilogue takes the rows' statistics         2NHV FLOPs
forward with vectors     the same GEMM leaves 2^(t - shift) in bf16, cuBLAS adds
                         their product with the weight to float32 sums              4NHV
backward                 the GEMM again, its epilogue writes the logits' gradient
                         from the rows' log-sum-exp; cuBLAS makes dH and dW of it   4NHV, 6NHV
forward that keeps       as with vectors, without the product: all exponentials
                         [N, V] stay for dH and dW                                  2NHV, then 4NHV

NOTE [Why exponentials may be stored before the row's sum is known]
u = (1 - p_y) (W_y - sum_{v != y} (e_v / S) W_v) needs e_v only up to one factor per row, which is
applied to the finished sum [R, H]. A bf16 number has float32's exponent, so any shift within 90 of
the row's largest t keeps e_v's eight bits; the target's own t, known from one dot product, is
nearly always that near: less than 76 nats below, for the token was sampled. Rows where it is not
(``misfit``) are found when their statistics are complete, and their sums are made again.

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
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from fxrl.kernels.hopper import module, plan
from fxrl.kernels.hopper.rows import (
    COMBINED,
    combine_blocks,
    finish_vectors,
    mend_exponentials,
    mend_product,
    target_logits,
)
from fxrl.ops.linear_logprob.arguments import (
    DIFFERENTIABLE,
    BackwardArguments,
    ForwardArguments,
    ForwardResult,
    Gradients,
    LossHead,
    Rows,
)
from fxrl.ops.linear_logprob.kept import Kept, new_kept
from fxrl.ops.linear_logprob.matmul import add_product, slices

_LOG2E = 1 / math.log(2)
_PAD = 8  # bf16 numbers in the 16 bytes that TMA wants a row to be a multiple of


class Call:
    """The rows of a call, in the order in which its tiles take them, and what these share.

    NOTE [Why whatever is said of a row is made for all rows of a call]
    A tile of a small head takes the GPU half a millisecond, and operations on vectors of its rows
    take it a few microseconds each. At 65536 x 576 x 49152 scoring runs 18 kernels instead of 112,
    5.7 ms instead of 6.2, and a frozen head 145 instead of 377, 11.9 ms instead of 12.3.

    Args:
        selected: ``[n]`` int64, its rows; None is all of them.
        tile_rows: most rows of a tile.
        statistics: of each row and block of the vocabulary: 2, or 5 with moments.

    Attributes:
        count: n.
        blocks: of the vocabulary.
        target: ``[n]`` int64.
        slope: ``[n]`` float32, scale / T.
        row_scale: ``[n]`` float32, by which the epilogue multiplies f(logit); see loss_head.cu.
        cap: the epilogue's; 0 without a softcap.
        bias: ``[V]`` float32, or None.
        target_t, shift: ``[n]`` float32, written by ``RowTile.find_target``.
        combined: ``[len(COMBINED), n]`` float32, written by ``RowTile.combine``.
    """

    def __init__(
        self, head: LossHead, selected: Tensor | None, tile_rows: int, statistics: int
    ) -> None:
        self.head, self.statistics, self._selected = head, statistics, selected
        rows: Rows = slice(None) if selected is None else selected
        self.target = head.target[rows].contiguous()
        self.count = self.target.shape[0]
        self.slope = head.row_slope(rows).expand(self.count, 1).squeeze(1).contiguous()
        factor = self.slope * (head.softcap / head.scale) if head.softcap else self.slope
        self.row_scale = factor * _LOG2E
        self.cap = head.scale / head.softcap if head.softcap else 0.0
        self.bias = None if head.bias is None else head.bias.float().contiguous()
        self.blocks = -(-head.weight.shape[0] // module.TILE_VOCAB)
        pitch = -(-self.count // _PAD) * _PAD  # Triton compiles another kernel for odd pointers
        of_rows = self.slope.new_empty(2 + len(COMBINED), pitch)[:, : self.count]
        self.target_t, self.shift, self.combined = of_rows[0], of_rows[1], of_rows[2:]
        tile_rows = min(tile_rows, self.count)
        self._partial = self.slope.new_empty(statistics * self.blocks * tile_rows)
        self._target_info = self.slope.new_empty(2 * tile_rows)

    @cached_property
    def index(self) -> Tensor:
        """``[n]`` int64, the rows' places in the batch."""
        if self._selected is not None:
            return self._selected
        return torch.arange(self.count, device=self.target.device)

    def check_targets(self) -> None:
        """Asserts on the device that every target exists."""
        self.head.weight[:, 0].gather(0, self.target)

    def places(self, rows: slice) -> Rows:
        """Where ``rows`` of the call are in the batch."""
        return rows if self._selected is None else self._selected[rows]

    def hidden(self, rows: slice) -> Tensor:
        """``[R, H]``, as TMA can read it."""
        hidden = self.head.hidden[self.places(rows)]
        return hidden if module.aligned(hidden) else _padded(hidden)

    def partial(self, rows: int) -> Tensor:
        """``[statistics, blocks, rows]``, undefined."""
        count = self.statistics * self.blocks * rows
        return self._partial[:count].view(self.statistics, self.blocks, rows)

    def target_info(self, rows: int) -> Tensor:
        """``[2, rows]``, undefined."""
        return self._target_info[: 2 * rows].view(2, rows)

    def at_target(self) -> tuple[Tensor, Tensor]:
        """``[n, 1]``: what stands for the target among the row's exponentials where its log-prob is
        differentiated; and ``[n]``: p_v over the exponential of any other."""
        mass, p_others = (self.combined[COMBINED.index(name)] for name in ("mass", "p_others"))
        entry = torch.where(mass > 0, -p_others / mass, 0.0)
        if self.cap:
            bent = self.target_t / self.row_scale  # the tanh at the target
            entry = entry * (1 - bent.square().clamp(max=1))
        return entry.unsqueeze(1), mass

    def put(self, combined: str, out: Tensor) -> None:
        """Writes the rows' value of that name to their places in ``out [N]``."""
        value = self.combined[COMBINED.index(combined)]
        if self._selected is None:
            out.copy_(value)
        else:
            out[self._selected] = value.to(out.dtype)


class RowTile:
    """The rows ``rows`` of a call: ``hidden [R, H]``, and its part of what is said of them."""

    def __init__(self, call: Call, rows: slice) -> None:
        self.call, self.rows = call, rows
        self.hidden = call.hidden(rows)
        self.count = self.hidden.shape[0]
        self.target, self.row_scale = call.target[rows], call.row_scale[rows]
        self.target_t, self.shift = call.target_t[rows], call.shift[rows]
        self._arguments = module.Arguments(
            target=self.target.data_ptr(),
            row_scale=self.row_scale.data_ptr(),
            bias=None if call.bias is None else call.bias.data_ptr(),
            rows=self.count,
            rows_stride=self.count,
            k_steps=-(-self.hidden.shape[1] // module.TILE_DEPTH),
            row_pairs=-(-self.count // (module.TILE_ROWS * module.CLUSTER)),
            cap=call.cap,
        )

    def find_target(self) -> None:
        """Fills ``target_t`` and ``shift`` ``[R]``, which the statistics and their like need."""
        weight, bias = self.call.head.weight, self.call.bias
        target_logits[(self.count,)](
            self.hidden, weight, self.target, bias, self.row_scale, self.target_t, self.shift,
            weight.shape[1], self.hidden.stride(0), weight.stride(0),
            cap=self.call.cap, has_bias=bias is not None, block=1024, num_warps=4,
        )  # fmt: skip

    def statistics(self) -> None:
        """Fills the call's block statistics."""
        self._launch(module.STATISTICS, slice(0, self.call.head.weight.shape[0]), None, None)

    def exponentials(self, vocab: slice, out: Tensor) -> None:
        """The same for the entries ``vocab``, and ``out [R, C]`` = 2^(t - shift), targets 0."""
        self._launch(module.EXPONENTIALS, vocab, self.shift, out)

    def gradient(self, vocab: slice, coefficients: Tensor, out: Tensor, weighted: bool) -> None:
        """``out [R, C]``: the gradient of the raw logits of the entries ``vocab``."""
        self._launch(module.GRADIENT, vocab, coefficients, out, weighted)

    def combine(self) -> None:
        """Fills this tile's part of the call's ``combined`` from the block statistics."""
        call, block_rows = self.call, 32
        combine_blocks[(triton.cdiv(self.count, block_rows),)](
            call.partial(self.count), call.target_info(self.count), self.target_t, self.target,
            call.combined[:, self.rows], self.count, call.combined.stride(0), call.blocks,
            call.head.weight.shape[0], int(call.statistics > 2), tile_vocab=module.TILE_VOCAB,
            block_rows=block_rows, block_blocks=64, num_warps=8,
        )  # fmt: skip

    def mend(self, product: Tensor) -> None:
        """``product [R, H]`` in float32, of exponentials: its rows that did not fit, made again."""
        call, weight = self.call, self.call.head.weight
        vocab, width = weight.shape
        block_rows, block = 16, min(512, max(16, triton.next_power_of_2(width)))
        mend_product[(triton.cdiv(self.count, block_rows), triton.cdiv(width, block))](
            product, self.hidden, weight, call.bias, self.target, self.row_scale,
            call.combined[:, self.rows], self.count, call.combined.stride(0), width, vocab,
            self.hidden.stride(0), weight.stride(0), cap=call.cap, has_bias=call.bias is not None,
            block_rows=block_rows, block_vocab=64, block_depth=64, block=block, num_warps=4,
            num_stages=2,
        )  # fmt: skip

    def mend_exponentials(self, out: Tensor) -> None:
        """``out [R, V]``: its rows that did not fit, made again."""
        call, weight = self.call, self.call.head.weight
        vocab, width = weight.shape
        block_rows, parts = 16, 64
        mend_exponentials[(triton.cdiv(self.count, block_rows), parts)](
            out, self.hidden, weight, call.bias, self.target, self.row_scale,
            call.combined[:, self.rows], self.count, call.combined.stride(0), width, vocab,
            triton.cdiv(vocab, parts), out.stride(0), self.hidden.stride(0), weight.stride(0),
            cap=call.cap, has_bias=call.bias is not None, block_rows=block_rows, block_vocab=64,
            block_depth=64, num_warps=4, num_stages=2,
        )  # fmt: skip

    def weighted(self, vocab: slice) -> Tensor:
        """``[R]``: sum of gradient_v log2 p_v over the entries ``vocab`` of the last gradients."""
        blocks = slice(vocab.start // module.TILE_VOCAB, -(-vocab.stop // module.TILE_VOCAB))
        return self.call.partial(self.count)[0, blocks].sum(0)

    def finish(self, product: Tensor, names: tuple[str, ...], vectors: Tensor) -> None:
        """The ``vectors [K, N, H]`` of ``names`` ("logprob", "lse", in that order) at this tile's
        rows, from ``product [R, H]``: in float32 the sum over v != y of 2^(t_v - shift) W_v."""
        call, weight = self.call, self.call.head.weight
        _, all_rows, width = vectors.shape
        block = min(1024, triton.next_power_of_2(width))
        finish_vectors[(self.count, triton.cdiv(width, block))](
            product, weight, self.target, call.combined[:, self.rows], call.slope[self.rows],
            self.target_t, self.row_scale, call.index[self.rows], vectors,
            call.combined.stride(0), all_rows, width, weight.stride(0),
            logprob_at=_place("logprob", names), lse_at=_place("lse", names),
            capped=call.cap != 0.0, block=block, num_warps=4,
        )  # fmt: skip

    def _launch(
        self,
        mode: int,
        vocab: slice,
        per_row: Tensor | None,
        out: Tensor | None,
        weighted: bool = False,
    ) -> None:
        arguments: Any = self._arguments
        arguments.partial = self.call.partial(self.count).data_ptr()
        arguments.partial_stride = self.call.blocks * self.count
        arguments.target_info = self.call.target_info(self.count).data_ptr()
        pointer = None if per_row is None else per_row.data_ptr()
        arguments.shift = arguments.gradient = pointer
        arguments.vocab_begin, arguments.vocab_end = vocab.start, vocab.stop
        arguments.vocab_tiles = -(-(vocab.stop - vocab.start) // module.TILE_VOCAB)
        device = self.hidden.device.index
        moments = mode != module.GRADIENT and self.call.statistics > 2
        variant = (mode, self.call.bias is not None, self.call.cap != 0, moments, weighted)
        function = module.kernel(*variant, device)
        module.launch(function, mode, self.hidden, self.call.head.weight, out, arguments)


def _place(name: str, names: tuple[str, ...]) -> int:
    return names.index(name) if name in names else -1


def _padded(matrix: Tensor) -> Tensor:
    """A copy whose rows start 16 bytes aligned."""
    rows, width = matrix.shape
    padded = matrix.new_empty(rows, -(-width // _PAD) * _PAD)[:, :width]
    return padded.copy_(matrix)


_MOMENTS = {"entropy", "sum_p2", "mean_logit"}
_LEAST_ROWS, _LEAST_VOCAB = 64, 1000
_LN2 = math.log(2)


def serves(head: LossHead) -> bool:
    """Whether this route computes ``head``; scoring and training of the same rows must agree."""
    hidden, weight = head.hidden, head.weight
    return (
        hidden.is_cuda
        and hidden.dtype == weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(hidden.device) == (9, 0)
        and hidden.shape[0] >= _LEAST_ROWS
        and weight.shape[0] >= _LEAST_VOCAB
        and module.aligned(weight)
        and module.available()
    )


def forward(arguments: ForwardArguments) -> ForwardResult:
    """``linear_logprob_forward`` of a head that this route ``serves``."""
    head, result = arguments.head, arguments.new_result()
    selected = head.selected(head.row_mask)
    num_rows = head.hidden.shape[0] if selected is None else selected.shape[0]
    if not num_rows:
        return result
    if arguments.save_vectors:
        call = _score_with_vectors(arguments, selected, num_rows, result.vectors)
    else:
        call = _score(arguments, selected, num_rows)
    for name in arguments.outputs:
        call.put(name, result.values[name])
    return result


def _score(
    arguments: ForwardArguments,
    selected: Tensor | None,
    num_rows: int,
    exponentials: Tensor | None = None,
) -> Call:
    """Fills ``exponentials [num_rows, V]``, if any, too."""
    head = arguments.head
    steps = _planned(plan.for_scoring, head, num_rows)
    call = Call(head, selected, steps.rows, _statistics(arguments))
    call.check_targets()
    for rows in slices(num_rows, steps.rows):
        tile = RowTile(call, rows)
        tile.find_target()
        if exponentials is None:
            tile.statistics()
            tile.combine()
        else:
            tile.exponentials(slice(0, head.weight.shape[0]), exponentials[rows])
            tile.combine()
            tile.mend_exponentials(exponentials[rows])
    return call


def _score_with_vectors(
    arguments: ForwardArguments, selected: Tensor | None, num_rows: int, vectors: Tensor
) -> Call:
    """Fills ``vectors`` too."""
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
        tile.mend(others)
        tile.finish(others, arguments.grad_outputs, vectors)
    return call


def keeping(arguments: ForwardArguments) -> Kept:
    """``linear_logprob_keeping`` of a head that this route ``serves``."""
    head, (values, exponentials, masses) = arguments.head, new_kept(arguments)
    call = _score(arguments, None, head.hidden.shape[0], exponentials)
    for name in arguments.outputs:
        call.put(name, values[name])
    at_target, mass = call.at_target()
    exponentials.scatter_(1, call.target.unsqueeze(1), at_target.to(exponentials.dtype))
    torch.mul(mass, -call.slope, out=masses)
    return values, exponentials, masses


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
            self._index, head = selected, head.of(selected)
        self._head, self._by_row, self._weighted = head, by_row, weighted
        self._rows, self._step = min(count, steps.rows), steps.vocab
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
        scratch = hidden.new_empty(self._rows, self._step)
        sums = self._by_row.new_empty(hidden.shape if d_hidden is not None else (0,))
        piece_sum = self._by_row.new_empty((0,) if whole else (self._step, weight.shape[1]))
        for vocab in slices(weight.shape[0], self._step):
            total = piece_sum[: vocab.stop - vocab.start]
            for piece, tiles in self._pieces:
                grad = self._gradient(scratch, piece, tiles, vocab)
                if d_hidden is not None:
                    add_product(sums[piece], grad, weight[vocab], begin=vocab.start == 0)
                if whole:
                    torch.mm(grad.t(), hidden, out=d_weight[vocab])
                else:
                    add_product(total, grad.t(), hidden[piece], begin=piece.start == 0)
            if not whole:
                d_weight[vocab] = total.to(d_weight.dtype)
        del scratch, grad  # the sums are rounded in its place
        if d_hidden is not None:
            d_hidden[self._index] = sums.to(d_hidden.dtype)
        if d_temperature is not None:
            made = temperature_gradient(self._head, self._weighted_sum, self._by_row)
            d_temperature[self._index] = made

    def _gradient(
        self,
        scratch: Tensor,
        piece: slice,
        tiles: list[tuple[slice, RowTile, Tensor]],
        vocab: slice,
    ) -> Tensor:
        """``[rows of piece, entries of vocab]``, a part of ``scratch``."""
        out = scratch[: piece.stop - piece.start, : vocab.stop - vocab.start]
        for inner, tile, of_tile in tiles:
            tile.gradient(vocab, of_tile, out[inner], self._weighted)
            if self._weighted:
                self._weighted_sum[piece][inner] += tile.weighted(vocab)
        return out
