"""Matrix products of the loss head, accumulated and returned in the accumulation dtype.

Three products meet the vocabulary: ``h W^T`` (logits), ``dx W`` (hidden gradient) and ``dx^T h``
(weight gradient). Operands narrower than float32 are multiplied without rounding the result.

NOTE [Why not just hidden.float() @ weight.float().T]
A float32 copy of the head is gigabytes. Where the device multiplies bf16 operands into a float32
result (CUDA) we ask for that; elsewhere the head is widened one block of vocabulary rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_BLOCK_BYTES = 16 * 2**20


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def full_precision() -> Iterator[None]:
    """Products round as their operands' dtype says, whatever the user has set; restored after.

    NOTE [Why TF32 is switched off]
    TF32 keeps 10 bits of a float32 operand, and oneDNN may keep 7: a log-prob would be off by
    more than a policy ratio's clip range, in the one place where it decides. By default cuBLAS may
    also add the parts of a split bf16 product in bf16, which a sum over 10^5 tokens cannot afford.
    """
    onednn: Any = torch.backends.mkldnn
    settings = (
        (torch.backends.cuda.matmul, "fp32_precision", "ieee"),
        (torch.backends.cuda.matmul, "allow_fp16_accumulation", False),
        (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        (onednn.matmul, "fp32_precision", "ieee"),
    )
    changed = []
    try:
        for owner, name, exact in settings:
            value = getattr(owner, name)
            if value not in (exact, "none"):
                changed.append((owner, name, value))
                setattr(owner, name, exact)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


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


def product_dtype(operand: Tensor) -> torch.dtype:
    """The dtype to which a gradient tile may be rounded before it is multiplied with ``operand``.

    NOTE [Why float16 gradients are multiplied in float32]
    bf16 has float32's range, so rounding a tile costs 2^-8 relative and no more. float16 flushes
    what lies below 6e-8, which is where probabilities live, and overflows under a GradScaler.
    """
    narrow = operand.is_cuda and operand.dtype == torch.bfloat16
    return operand.dtype if narrow else accumulation_dtype(operand.dtype)


def backproject(grad: Tensor, weight: Tensor) -> Tensor:
    """``grad[R, V] @ weight[V, H]`` as ``[R, H]`` in the accumulation dtype.

    ``grad`` has the accumulation dtype, or ``product_dtype(weight)`` already.
    """
    wide = accumulation_dtype(weight.dtype)
    if weight.dtype == wide:
        return torch.mm(grad, weight)
    if product_dtype(weight) == weight.dtype:
        return torch.mm(grad.to(weight.dtype), weight, out_dtype=wide)
    total = grad.new_zeros(grad.shape[0], weight.shape[1])
    for block in _vocab_blocks(weight, wide):
        total.addmm_(grad[:, block], weight[block].to(wide))
    return total


def accumulate_weight_grad(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """``total[V, H] += grad[R, V]^T @ hidden[R, H]``; ``total`` is wide, ``grad`` as above."""
    if product_dtype(hidden) == hidden.dtype != total.dtype:
        grad = grad.to(hidden.dtype)
        torch.addmm(total, grad.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(grad.t(), hidden.to(total.dtype))


def _vocab_blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of vocabulary rows whose copy in ``dtype`` stays within ``_BLOCK_BYTES``."""
    vocab, width = weight.shape
    step = max(1, _BLOCK_BYTES // (max(width, 1) * dtype.itemsize))
    for start in range(0, vocab, step):
        yield slice(start, min(start + step, vocab))
