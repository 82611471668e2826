"""``fxrl::linear_logprob_scale`` on CUDA: one pass over the saved vectors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxrl.kernels.jit import jit

_BLOCK = 4096


def scale(grads: Tensor, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """See ``fxrl.ops.linear_logprob_opaque.linear_logprob_scale``."""
    count, rows, width = vectors.shape
    out = vectors.new_empty(rows, width, dtype=dtype)
    if out.numel() == 0:
        return out
    block = min(_BLOCK, max(16, triton.next_power_of_2(width)))
    with torch.cuda.device(vectors.device.index if vectors.is_cuda else -1):
        scaled_sum[(rows, triton.cdiv(width, block))](
            grads,
            vectors,
            out,
            width,
            grads.stride(0),
            grads.stride(1),
            vectors.stride(0),
            vectors.stride(1),
            vectors.stride(2),
            count=count,
            block=block,
            num_warps=max(1, block // 512),
        )
    return out


@jit
def scaled_sum(
    grads: tl.tensor,
    vectors: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    grads_count: tl.tensor,
    grads_row: tl.tensor,
    vectors_count: tl.tensor,
    vectors_row: tl.tensor,
    vectors_column: tl.tensor,
    count: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``out[row]`` = sum_k grads[k, row] * vectors[k, row], in grads' dtype, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros([block], grads.dtype.element_ty)
    for k in tl.static_range(count):
        grad = tl.load(grads + k * grads_count + row * grads_row)
        at = k * tl.cast(vectors_count, tl.int64) + row * vectors_row + column * vectors_column
        vector = tl.load(vectors + at, mask=inside, other=0.0)
        total += grad * vector.to(grads.dtype.element_ty)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)
