"""Which blocks of the vocabulary the product ``O = sum_{v != y} p_v slope_v W_v`` may leave out.

With a tolerance t, blocks of 256 vocabulary entries may be left out for up to 128 rows at once as
long as each of these rows loses a probability mass of at most ``t (1 - p_y)``.

NOTE [Why the error stays below that of rounding to bf16]
Let L be the entries left out of a row, slope = scale / T and 0 <= slope_v <= 1 the softcap's. Only
O enters the vectors of ``hidden_vector``, once, times slope. So for every coordinate i

    |delta u_i| = |slope| |sum_{v in L} p_v slope_v W_vi| <= |slope| max_v |W_vi| sum_{v in L} p_v
                <= t |slope| (1 - p_y) max_v |W_vi|

Rounding p to bf16, which every product with a bf16 head does anyway, moves p_v by up to 2^-8 p_v,
and so u_i by up to 2^-8 |slope| sum_{v != y} p_v |W_vi| <= 2^-8 |slope| (1 - p_y) max_v |W_vi|:
with t = 2^-8 both errors obey one bound. Values (log-prob, entropy, ...) are summed over all
entries whatever t is: only u changes. The proof also holds where the mass is that of
``p_v slope_v``, which is what a device weighs.

NOTE [Why the mass and not each probability decides]
Leaving out every p_v below a threshold, as bf16's underflow suggests, bounds no error: 10^5 entries
of 10^-6 are a tenth of the distribution. The mass is bounded here, however it is spread.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 128
BLOCK_VOCAB = 256


def leave_out_small_blocks_(prob: Tensor, p_others: Tensor, tolerance: float) -> None:
    """Zeroes blocks of ``prob [R, V]`` (0 at the target) of a total within the tolerance.

    ``p_others [R, 1]`` is ``1 - p_y``.
    """
    for start in range(0, prob.shape[0], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        skipped = skippable(block_masses(prob[rows]), tolerance * p_others[rows])
        entries = skipped.repeat_interleave(BLOCK_VOCAB)[: prob.shape[1]]
        prob[rows].masked_fill_(entries, 0)


def block_masses(prob: Tensor) -> Tensor:
    """Sums of ``prob [R, V]`` over blocks of the vocabulary, ``[R, B]``; the last may be short."""
    starts = range(0, prob.shape[1], BLOCK_VOCAB)
    return torch.stack([prob[:, start : start + BLOCK_VOCAB].sum(1) for start in starts], 1)


def skippable(masses: Tensor, budget: Tensor) -> Tensor:
    """``[B]``: the blocks that all rows may leave out together, for ``budget [R, 1]``.

    Blocks go in the order of the largest share of its budget that a row would spend on them, until
    one row's budget is spent. A NaN is never left out.
    """
    share = torch.where(masses == 0, 0, masses / budget).amax(0)
    order = share.argsort(stable=True)
    fits = (masses[:, order].cumsum(1) <= budget).all(0)
    return torch.zeros_like(fits).index_put_((order[fits],), fits.new_ones(()))
