"""The second product, ``sum_v a_v W_v`` ``[R, H]`` of a tile's rows, its factors a made on the way.

NOTE [Why the sums over vocabulary chunks are float32 and are added by cuBLAS]
Partial sums rounded to bf16 would bias training (each chunk's error is as large as the whole's).
``out=`` of ``addmm`` with a float32 result adds in the GEMM's own epilogue.

NOTE [Why no gradient skipping of improbable blocks]
Blocks of 128 rows and 256 entries in which no row loses more than 2^-9 (1 - p_y) of its mass can be
left out of this product within half the error bound of rounding p to bf16. It was built and taken
back (H200). Where nearly all can go it pays: 38.0 ms instead of 60.3, forward and backward, at
16384 x 4096 x 151936, on a Zipf head whose ids follow the ranks (98.5 % of the blocks go). But of
SmolLM2's blocks, reading text, 0.9 % may go, for nearly each holds an entry that some token needs;
of the Zipf head's with shuffled ids 32 %. A listed product costs 2.3 times cuBLAS's for a block, so
that it pays from 60 % on, and asking alone cost 5 to 17 %: 62.7 ms instead of 59.8 with shuffled
ids, 15.3 instead of 14.1 at SmolLM2's 65536 x 576 x 49152, 4.96 instead of 4.23 at 16384 tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxrl.kernels.hopper.plan import Plan
from fxrl.kernels.hopper.tile import RowTile
from fxrl.ops.linear_logprob_head import LossHead, slices


def add_product(total: Tensor, a: Tensor, b: Tensor, *, begin: bool) -> None:
    """``total`` (+)= ``a @ b``, of bf16 factors in float32; ``begin``: what it held is dropped."""
    if begin:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class ChunkedProduct:
    """``sum_v a_v W_v`` of a tile's rows, ``a [R, V]`` made and multiplied in chunks."""

    def __init__(self, head: LossHead, steps: Plan, num_rows: int) -> None:
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
