"""Matrix products of the loss head, accumulated and returned in the accumulation dtype.

Three products meet the vocabulary: ``h W^T`` (logits), ``dx W`` (hidden gradient) and ``dx^T h``
(weight gradient). Operands narrower than float32 are multiplied without rounding the result.

NOTE [Why not just hidden.float() @ weight.float().T]
A float32 copy of the head is gigabytes. Where the device multiplies bf16 operands into a float32
result (CUDA) we ask for that; elsewhere the head is widened one block of vocabulary rows at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fxrl.dtypes import wide_dtype

_BLOCK_BYTES = 16 * 2**20


def slices(length: int, step: int) -> Iterator[slice]:
    """``range(length)``, ``step`` at a time."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


@contextmanager
def full_precision(
    device_type: str, dtype: torch.dtype, *, narrow_result: bool = False
) -> Iterator[None]:
    """Products of such operands round as their dtype says, whatever the user has set.

    Args:
        device_type: where the operands are.
        dtype: the operands' own.
        narrow_result: some result is not wider than the operands.

    NOTE [Why TF32 is switched off]
    TF32 keeps 10 bits of a float32 operand, and oneDNN may keep 7: a log-prob would be off by
    more than a policy ratio's clip range, in the one place where it decides. By default cuBLAS may
    also add the parts of a split bf16 product in the result's dtype, which a sum over 10^5 tokens
    cannot afford where that is bf16.

    NOTE [Why only what acts on these operands]
    The settings are the process's. While they differ, a capture in another thread fails (Dynamo
    guards on them), so by default nothing is set; and what is set stays until the last thread that
    needs it is done.
    """
    held = list(_settings(device_type, dtype, narrow_result))
    for setting in held:
        _hold(*setting)
    try:
        yield
    finally:
        for setting in held:
            _release(*setting)


@contextmanager
def exact_products(operand: Tensor, *, narrow_result: bool = False) -> Iterator[None]:
    """Inside, no autocast changes products of such an operand; see ``full_precision``."""
    device, dtype = operand.device.type, operand.dtype
    with (
        torch.autocast(device, enabled=False),
        full_precision(device, dtype, narrow_result=narrow_result),
    ):
        yield


_LOCK = threading.Lock()
_HELD: dict[tuple[Any, str], tuple[int, Any]] = {}  # how many threads need it, and the user's value


def _hold(owner: Any, name: str, exact: Any) -> None:
    with _LOCK:
        count, theirs = _HELD.get((owner, name), (0, getattr(owner, name)))
        _HELD[owner, name] = count + 1, theirs
        if count == 0 and theirs not in (exact, "none"):
            setattr(owner, name, exact)


def _release(owner: Any, name: str, exact: Any) -> None:
    with _LOCK:
        count, theirs = _HELD.pop((owner, name))
        if count > 1:
            _HELD[owner, name] = count - 1, theirs
        elif theirs not in (exact, "none"):
            setattr(owner, name, theirs)


def _settings(
    device_type: str, dtype: torch.dtype, narrow_result: bool
) -> Iterator[tuple[Any, str, Any]]:
    onednn: Any = torch.backends.mkldnn
    matmul = torch.backends.cuda.matmul
    if device_type != "cuda":
        yield onednn.matmul, "fp32_precision", "ieee"
        return
    if dtype != torch.bfloat16:  # float16's gradients are multiplied in float32
        yield matmul, "fp32_precision", "ieee"
    if dtype == torch.float16:
        yield matmul, "allow_fp16_accumulation", False
    if narrow_result and dtype in (torch.bfloat16, torch.float16):
        short = "bf16" if dtype == torch.bfloat16 else "fp16"
        yield matmul, f"allow_{short}_reduced_precision_reduction", False


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
    return operand.dtype if narrow else wide_dtype(operand.dtype)


def backproject(grad: Tensor, weight: Tensor) -> Tensor:
    """``grad[R, V] @ weight[V, H]`` as ``[R, H]`` in the accumulation dtype.

    ``grad`` has the accumulation dtype, or ``product_dtype(weight)`` already.
    """
    wide = wide_dtype(weight.dtype)
    if weight.dtype == wide:
        return torch.mm(grad, weight)
    if product_dtype(weight) == weight.dtype:
        return torch.mm(grad.to(weight.dtype), weight, out_dtype=wide)
    total = grad.new_zeros(grad.shape[0], weight.shape[1])
    for block in _vocab_blocks(weight, wide):
        total.addmm_(grad[:, block], weight[block].to(wide))
    return total


def add_product(total: Tensor, a: Tensor, b: Tensor, *, begin: bool) -> None:
    """``total`` (+)= ``a @ b`` in ``total``'s (accumulation) dtype; ``a`` has that, or
    ``product_dtype(b)``. ``begin``: what ``total`` held is dropped."""
    if a.dtype == total.dtype:
        b = b.to(total.dtype)
        torch.mm(a, b, out=total) if begin else total.addmm_(a, b)
    elif begin:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


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
    return slices(vocab, max(1, _BLOCK_BYTES // (max(width, 1) * dtype.itemsize)))
