"""A low-rank product added to a 16-bit weight in place, the sum rounded by chance, on CUDA.

W' = round(W + scaling * B A): one read and one write of W, no delta in memory. The product is made
in tf32 three times over, which is float32's to its last bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fxrl.kernels.jit import jit, jit_unspecialized, on_device
from fxrl.ops.dithered import DROPPED

_ROWS, _COLUMNS, _RANK = 64, 64, 32  # of a program, and of a step of it


@jit_unspecialized("seed", "rank")
def _merge(
    weight: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    scaling: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    rank: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    seed: tl.tensor,
    DROPPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
) -> None:
    """``ROWS`` x ``COLUMNS`` entries; b [rows, rank] and a [rank, columns] are contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    delta = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rank, RANK):
        k = start + tl.arange(0, RANK)
        left = (row < rows) & (k[None, :] < rank)
        right = (k[:, None] < rank) & (column < columns)
        b_part = tl.load(b + row * rank + k[None, :], mask=left, other=0.0).to(tl.float32)
        a_part = tl.load(a + k[:, None] * columns + column, mask=right, other=0.0).to(tl.float32)
        delta = tl.dot(b_part, a_part, delta, input_precision="tf32x3")
    at = weight + row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + scaling * delta
    noise = (_chance(seed, row * columns + column) >> (32 - DROPPED)).to(tl.int32)
    bits = (total.to(tl.int32, bitcast=True) + noise) & -(1 << DROPPED)
    rounded = bits.to(tl.float32, bitcast=True).to(weight.dtype.element_ty)
    tl.store(at, rounded, mask=inside)


@jit
def _chance(seed: tl.tensor, place: tl.tensor) -> tl.tensor:
    """32 bits for each place: MurmurHash3's finalizer. With Philox 1.4e9 entries took 10.9 ms
    instead of 7.1 on an H100."""
    bits = place.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


def merge(weight: Tensor, b: Tensor, a: Tensor, scaling: float, seed: int) -> None:
    """Add ``scaling * b a`` to a bf16 or fp16 weight [out, in], whatever its strides.

    Args:
        b: [out, rank], float32 or 16 bits.
        a: [rank, in], likewise.
        seed: of what the rounding's chance is made, as ``fxrl.ops.dithered`` has it.
    """
    rows, columns = weight.shape
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    factors = (b.contiguous(), a.contiguous(), scaling)
    sizes = (rows, columns, a.shape[0], *weight.stride())
    with on_device(weight):
        _merge[grid](
            weight, *factors, *sizes, seed, DROPPED[weight.dtype], _ROWS, _COLUMNS, _RANK
        )  # fmt: skip
