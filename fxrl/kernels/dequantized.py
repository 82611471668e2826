"""Weights of 8 and 4 bits on CUDA: a tile is widened by one kernel.

``widen`` reads a value of 8 or 4 bits and its scale, and writes the number in the rows' dtype: bit
for bit what the reference makes by way of float32, for 3 bytes of traffic a value instead of 19.
The product is cuBLAS's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxrl.kernels.jit import jit, on_device
from fxrl.ops import dequantized as op
from fxrl.ops.fp8 import BLOCK, why_no_fp8

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
#: Entries of a weight that are widened at a time: 48 MiB in 16 bits, what the reference takes.
_TILE = 24 * 2**20
_ROWS, _COLUMNS = 8, 512  # of a program


def register() -> None:
    """Attach the kernel to the ops for CUDA tensors."""
    op.attach("cuda", widened, _TILE)


@jit
def widen(
    values: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    wide: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    scale_row: tl.tensor,
    scale_column: tl.tensor,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """``ROWS`` x ``COLUMNS`` numbers of a weight; ``PACKED``, a byte has two of them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if PACKED:
        byte = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
        inside = (row < rows) & (byte < columns // 2)
        pair = tl.load(values + row * stride + byte, mask=inside, other=0)
        code = tl.interleave(pair & 15, pair >> 4)
        number = tl.load(codes + code) if TABLE else code.to(tl.float32) - 8
    else:
        inside = (row < rows) & (column < columns)
        number = tl.load(values + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    inside = (row < rows) & (column < columns)
    at = row // SCALE_ROWS * scale_row + column // SCALE_COLUMNS * scale_column
    number *= tl.load(scale + at, mask=inside, other=0.0)
    tl.store(wide + row * columns + column, number.to(wide.dtype.element_ty), mask=inside)


def widened(weight: Sequence[Tensor], format: str, dtype: torch.dtype) -> Tensor:
    """See ``fxrl.ops.dequantized.widened``."""
    values, scale = weight
    packed = format != "fp8"
    if dtype not in _FLOATS or values.stride(1) != 1 or (not packed and why_no_fp8(values.device)):
        return op.widened(weight, format, dtype)
    rows, columns = values.shape[0], values.shape[1] * (2 if packed else 1)
    wide = torch.empty(rows, columns, dtype=dtype, device=values.device)
    (scale_rows, by_row), (scale_columns, by_column) = map(
        _share, (rows, columns), scale.shape, scale.stride()
    )
    table = format == "nf4"
    codes = _nf4(values.device) if table else scale
    with on_device(values):
        widen[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))](
            values, scale, codes, wide, rows, columns, values.stride(0), by_row, by_column,
            SCALE_ROWS=scale_rows, SCALE_COLUMNS=scale_columns, PACKED=packed, TABLE=table,
            ROWS=_ROWS, COLUMNS=_COLUMNS,
        )  # fmt: skip
    return wide


def _share(whole: int, scales: int, stride: int) -> tuple[int, int]:
    """The number of entries of a dim that share a scale, and the stride from one scale to the next,
    which is 0 if all share one."""
    if scales == 1:
        return 1, 0
    return next(n for n in (1, op.GROUP, BLOCK) if -(-whole // n) == scales), stride


@cache
def _nf4(device: torch.device) -> Tensor:
    return torch.tensor(op.NF4, device=device)
