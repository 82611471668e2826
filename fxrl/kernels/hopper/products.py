"""The second product, ``sum_v a_v W_v`` ``[R, H]`` of a tile's rows, its factors a made on the way.

NOTE [Why the sums over vocabulary chunks are float32 and are added by cuBLAS]
Partial sums rounded to bf16 would bias training (each chunk's error is as large as the whole's).
``out=`` of ``addmm`` with a float32 result adds in the GEMM's own epilogue.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxrl.kernels.hopper.plan import Plan
from fxrl.kernels.hopper.tile import RowTile
from fxrl.kernels.linear_logprob_skip import kept_blocks, product_of_kept
from fxrl.ops.linear_logprob_head import LossHead, slices

_PAYS = 0.4  # of the blocks kept; see NOTE [Why the first rows decide whether to skip at all]
_OF_BUDGET = 1 - 2**-10  # masses are float32 sums: their own rounding must not spend more


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


class SkippingProduct:
    """The same over the blocks that a tolerance does not let go: ``fxrl.ops.linear_logprob_skip``.

    A row's budget is a share of its whole sum, so its exponentials are all made before the first
    is multiplied: fewer rows at a time than without skipping.

    NOTE [Why the first rows decide whether to skip at all]
    A block that is kept costs 2.3 times what it costs in cuBLAS (H200, 16384 x 4096 x 151936: 68 %
    of the blocks in 45.7 ms, all of them by cuBLAS in 29), so skipping pays from some 60 % on. How
    many can go is a property of head and text: asking the device once a call is cheap, and leaving
    out nothing is always right.
    """

    def __init__(self, head: LossHead, steps: Plan, num_rows: int, tolerance: float) -> None:
        self._weight, self._tolerance = head.weight, tolerance
        rows = min(steps.rows, num_rows)
        self._factors = head.hidden.new_empty(rows, steps.vocab)
        self._sums = head.hidden.new_empty(0, dtype=torch.float32)
        self._pays: bool | None = None

    def of_exponentials(self, tile: RowTile) -> Tensor:
        """``[R, H]`` float32, and the tile's statistics."""
        vocab = self._weight.shape[0]
        factors = self._factors[: tile.count, :vocab]
        tile.exponentials(slice(0, vocab), factors)
        if self._pays is not False:
            masses = tile.block_masses()
            kept = kept_blocks(masses, _OF_BUDGET * self._tolerance * masses.sum(1))
            if self._pays is None:
                self._pays = kept.share() <= _PAYS
            if self._pays:
                return product_of_kept(factors, self._weight, kept)
            self._sums = self._sums.new_empty(self._factors.shape[0], self._weight.shape[1])
        sums = self._sums[: tile.count]
        add_product(sums, factors, self._weight, begin=True)
        return sums
