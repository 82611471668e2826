"""``fxrl::rows_in_e4m3`` and ``fxrl::scaled_mm`` on CUDA.

``quantize`` reads a row once, keeps it in registers and writes it in a byte a value with its scale:
bit for bit what the reference writes. The next row is on its way meanwhile, and factors of columns
stay in registers. The product is cuBLAS's or CUTLASS's, by
``torch._scaled_mm``; with an adapter's on Hopper that of ``kernels.hopper``, which adds it before
the result is rounded and written. ``turn`` lays a weight down for the gradient.

NOTE [Why partial sums are not promoted]
Hopper's tensor cores add FP8 products in an accumulator of about 14 bits, and
``use_fast_accum=False`` moves its sums to float32 every 128 of them, for a tenth of the speed. What
it saves is lost in what e4m3 itself costs: of rows with 4096 and 12288 normal values, the products
are off by 0.0021 and 0.0031 against 0.0017 (bf16's own rounding), beside 0.037 by the quantisation.
vLLM's products of FP8 values in rollouts do the same.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxrl.kernels.hopper import product as hopper
from fxrl.kernels.jit import jit, jit_unspecialized, on_device
from fxrl.ops.fp8 import (
    E4M3,
    LEAST,
    MOST,
    dequantized,
    factors_out,
    quantized_rows,
)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_LONGEST = 2**15  # values of a row that registers hold; longer rows go to the reference
_VALUES_PER_WARP = 512
_ROWS = 4  # that a program takes where each column has a factor: twice the bytes of a row
_SIDE = 128  # of a tile that is turned


@cache
def register() -> None:
    """Attach the kernels to their ops for CUDA tensors."""
    torch.library.impl("fxrl::rows_in_e4m3", "cuda")(rows)
    torch.library.impl("fxrl::scaled_mm", "cuda")(product)


# ---------------------------------------------------------------------------- rows
@jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit_unspecialized("count")
def quantize(
    x: tl.tensor,
    factor: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    factor_stride: tl.tensor,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """``ROWS`` rows, one by one: ``GROUPS`` runs of ``WIDTH`` values with a scale each."""
    at = tl.arange(0, GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = at < columns
    group, groups = tl.arange(0, GROUPS), tl.cdiv(columns, WIDTH)
    if HAS_FACTOR:
        times = tl.load(factor + at * factor_stride, mask=inside, other=0.0)
    first = tl.program_id(0).to(tl.int64) * ROWS
    ahead = tl.load(x + first * stride + at, mask=inside, other=0.0)
    for step in range(ROWS):
        row, found = first + step, ahead.to(tl.float32)
        more = (step + 1 < ROWS) & (row + 1 < count)
        ahead = tl.load(x + (row + 1) * stride + at, mask=inside & more, other=0.0)
        if HAS_FACTOR:
            found *= times
        most = tl.reduce(tl.abs(found), 1, _larger)
        scale = tl.div_rn(_larger(most, LEAST), MOST)
        scaled = found * tl.div_rn(1.0, scale)[:, None]
        rounded = tl.clamp(scaled, -MOST, MOST, tl.PropagateNan.ALL)
        here = row < count
        tl.store(values + row * columns + at, rounded.to(tl.float8e4nv), mask=inside & here)
        tl.store(scales + row * groups + group, scale, mask=(group < groups) & here)


def rows(x: Tensor, factor: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """See ``fxrl.ops.fp8.quantized_rows``."""
    count, columns = x.shape
    if x.dtype not in _FLOATS or columns > _LONGEST or not x.numel():
        return quantized_rows(x, factor, block)
    x = x if x.stride(1) == 1 else x.contiguous()
    width = block or triton.next_power_of_2(columns)
    values = torch.empty(count, columns, dtype=E4M3, device=x.device)
    scales = x.new_empty(count, triton.cdiv(columns, width), dtype=torch.float32)
    groups = triton.next_power_of_2(scales.shape[1])
    factor_stride = 0 if factor is None or factor.shape[0] == 1 else factor.stride(0)
    run = _ROWS if factor_stride else 1
    with on_device(x):
        quantize[(triton.cdiv(count, run),)](
            x, factor, values, scales, count, columns, x.stride(0), factor_stride,
            GROUPS=groups, WIDTH=width, ROWS=run, HAS_FACTOR=factor is not None,
            MOST=MOST, LEAST=LEAST,
            num_warps=min(16, max(1, groups * width // _VALUES_PER_WARP)),
        )  # fmt: skip
    return values, scales


# ---------------------------------------------------------------------------- the product
@jit
def turn(
    source: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    SIDE: tl.constexpr,
) -> None:
    """One tile of bytes ``[rows, columns]``, as ``[columns, rows]``."""
    down = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    across = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (down < rows)[:, None] & (across < columns)[None, :]
    tile = tl.load(source + down.to(tl.int64)[:, None] * stride + across[None, :], mask=inside)
    to = across.to(tl.int64)[:, None] * rows + down[None, :]
    tl.store(turned + to, tl.trans(tile), mask=tl.trans(inside))


def transposed(weight: Tensor) -> Tensor:
    """FP8 ``[N, K]`` as ``[K, N]``, contiguous."""
    if weight.stride(1) != 1:
        return weight.t().contiguous()
    rows, columns = weight.shape
    made = weight.new_empty(columns, rows)
    grid = (triton.cdiv(rows, _SIDE), triton.cdiv(columns, _SIDE))
    with on_device(weight):
        turn[grid](
            weight.view(torch.uint8), made.view(torch.uint8), rows, columns, weight.stride(0),
            SIDE=_SIDE, num_warps=8,
        )  # fmt: skip
    return made


def product(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor | None,
    transpose: bool,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    """See ``fxrl.ops.fp8.scaled_mm``.

    Kernels scale rows alone, and want b's rows along the contraction. A weight with scales by
    block is widened, a tile at a time, and multiplied in bf16.
    """
    if not factors_out(scale_a, b, scale_b):
        assert scale_b is not None
        wide = dequantized(a, scale_a, torch.bfloat16)
        made: Tensor = torch.ops.fxrl.dequantized_mm.default(wide, [b, scale_b], "fp8", False)
        return _added(made.to(dtype), left, right)
    rows = a.contiguous()
    columns = transposed(b) if transpose else b.contiguous()
    if scale_b is not None and scale_b.shape[0] == 1:
        scale_a, scale_b = scale_a * scale_b, None
    scale_a = scale_a.contiguous()
    if left is not None and right is not None and dtype == torch.bfloat16:
        low = (left, right.t() if right.stride(0) == 1 else right.t().contiguous())
        if hopper.serves(rows, columns, *low):
            by_column = None if scale_b is None else scale_b.contiguous()
            return hopper.product(rows, scale_a, columns, by_column, *low)
    made = torch.ops.aten._scaled_mm.default(
        rows,
        columns.t(),
        scale_a,
        scale_a.new_ones(1, columns.shape[0]) if scale_b is None else scale_b.t().contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return _added(made.to(dtype), left, right)


def _added(made: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """A product with one of low rank added in place: by the GEMM, not by a kernel behind it."""
    return made if left is None or right is None else made.addmm_(left, right)
