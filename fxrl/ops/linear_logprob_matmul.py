"""Matrix products of the loss head, accumulated and returned in the accumulation dtype.

Three products meet the vocabulary: ``h W^T`` (logits), ``dx W`` (hidden gradient) and ``dx^T h``
(weight gradient). Operands narrower than float32 are multiplied without rounding the result.

NOTE [Why not just hidden.float() @ weight.float().T]
A float32 copy of the head is gigabytes. Where the device multiplies bf16 operands into a float32
result (CUDA) we ask for that; elsewhere the head is widened one block of vocabulary rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_BYTES = 16 * 2**20


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out[R, V] = hidden[R, H] @ weight[V, H]^T`` in ``out``'s (accumulation) dtype."""
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        wide = hidden.to(out.dtype)
        for block in _vocab_blocks(weight, out.dtype):
            torch.mm(wide, weight[block].to(out.dtype).t(), out=out[:, block])


def backproject(grad: Tensor, weight: Tensor) -> Tensor:
    """``grad[R, V] @ weight[V, H]`` as ``[R, H]`` in ``grad``'s (accumulation) dtype."""
    if weight.dtype == grad.dtype:
        return torch.mm(grad, weight)
    if _multiplies_narrow(weight):
        return torch.mm(grad.to(weight.dtype), weight, out_dtype=grad.dtype)
    total = grad.new_zeros(grad.shape[0], weight.shape[1])
    for block in _vocab_blocks(weight, grad.dtype):
        total.addmm_(grad[:, block], weight[block].to(grad.dtype))
    return total


def accumulate_weight_grad(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """``total[V, H] += grad[R, V]^T @ hidden[R, H]``; ``total`` and ``grad`` are wide."""
    if not _multiplies_narrow(hidden):
        total.addmm_(grad.t(), hidden.to(grad.dtype))
        return
    for block in _vocab_blocks(total, total.dtype):
        narrow = grad[:, block].to(hidden.dtype)
        total[block] += torch.mm(narrow.t(), hidden, out_dtype=total.dtype)


def _multiplies_narrow(operand: Tensor) -> bool:
    """Whether a gradient tile may be rounded to ``operand``'s dtype for the product.

    NOTE [Why float16 gradients are multiplied in float32]
    bf16 has float32's range, so rounding a tile costs 2^-9 relative and no more. float16 flushes
    what lies below 6e-8, which is where probabilities live, and overflows under a GradScaler.
    """
    return operand.is_cuda and operand.dtype == torch.bfloat16


def _vocab_blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of vocabulary rows whose copy in ``dtype`` stays within ``_BLOCK_BYTES``."""
    vocab, width = weight.shape
    step = max(1, _BLOCK_BYTES // (max(width, 1) * dtype.itemsize))
    for start in range(0, vocab, step):
        yield slice(start, min(start + step, vocab))
