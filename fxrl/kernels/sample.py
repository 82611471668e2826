"""Draw one token a row and its log-probability in one pass over the logits: the launches.

NOTE [Why the launches are two]
``choose`` needs all blocks of its row. Were it the last block's work, a counter in memory would
have to be zero before each call; a second launch costs less than the care for it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fxrl.errors import FxrlError
from fxrl.kernels.sample_rows import choose, summarise

BLOCK = 2048  # logits of one program, all in registers; which token a seed draws depends on it
_WARPS = 4
_CHOOSE_WARPS = 4
EARLY = True
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class FusedSampleError(FxrlError, ValueError):
    """An argument of ``fused_sample`` does not fit; the message says which and how to cure it."""


def fused_sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    state_rows: Tensor | None = None,
    position_rows: Tensor | None = None,
    entropies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A token of each row from softmax(logits / temperature), and its log-probability there.

    Two launches, no wait for the device, no memory but the results and a scratch of 12 bytes for
    each ``BLOCK`` logits: fit for a CUDA graph (which keeps the addresses of all arguments).

    Args:
        logits: ``[R, V]``, bf16, fp16 or fp32, V >= 1, last dimension contiguous.
        temperature: ``[R]`` fp32. 0 takes the largest logit (of equal ones the first) and gives
            its log-probability at temperature 1; otherwise at least 1e-30.
        seeds: ``[R]`` int64, all 64 bits count. Equal (seed, position, logits, temperature) give
            the equal token whatever the other rows are (and, in logits of equal strides, the
            equal bits of its log-probability); other seeds and positions give independent ones.
        positions: ``[R]`` int64, e.g. of the token in its sequence.
        state_rows: ``[R]`` integers; row r then reads ``temperature`` and ``seeds``, of any length,
            at ``state_rows[r]`` (must be in range, not checked).
        position_rows: likewise for ``positions``.
        entropies: ``[R]`` fp32, receives the entropy of softmax(logits / temperature) in nats.

    Returns:
        ``(tokens [R] int64, logprobs [R] fp32)``. A logit of -inf is never drawn. A row without a
        distribution (a NaN, +inf, or nothing but -inf) gives a NaN log-probability and a token
        that means nothing but lies in ``[0, V)``.

    Raises:
        FusedSampleError: for shapes, dtypes, strides or devices other than these.
    """
    _check(logits, temperature, seeds, positions, state_rows, position_rows, entropies)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return tokens, logprobs
    blocks = triton.cdiv(vocab, BLOCK)
    early = EARLY and logits.is_cuda and torch.cuda.get_device_capability(logits.device) >= (9, 0)
    partial = torch.empty(rows, blocks, 3, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device.index if logits.is_cuda else -1):
        summarise[(blocks, rows)](
            logits, temperature, state_rows, partial, logits.stride(0), vocab, BLOCK,
            entropies is not None, num_warps=_WARPS,
        )  # fmt: skip
        choose[(rows,)](
            logits, temperature, seeds, positions, state_rows, position_rows, partial,
            tokens, logprobs, entropies, logits.stride(0), vocab, blocks,
            BLOCK, triton.next_power_of_2(blocks), early, num_warps=_CHOOSE_WARPS, launch_pdl=early,
        )  # fmt: skip
    return tokens, logprobs


def _check(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    state_rows: Tensor | None,
    position_rows: Tensor | None,
    entropies: Tensor | None,
) -> None:
    if logits.dim() != 2 or logits.shape[1] < 1 or logits.dtype not in _FLOATS:
        raise FusedSampleError(
            f"logits {tuple(logits.shape)} {logits.dtype}: must be [R, V >= 1] of {_FLOATS}"
        )
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise FusedSampleError(
            f"logits have stride {logits.stride(1)} in the vocabulary: pass logits.contiguous()"
        )
    rows = logits.shape[0]
    if rows > 65535:  # the second dimension of a launch grid
        raise FusedSampleError(f"logits have {rows} rows: pass at most 65535 at a time")
    integers = (torch.int32, torch.int64)
    vectors: list[tuple[str, Tensor | None, tuple[torch.dtype, ...], bool]] = [
        ("temperature", temperature, (torch.float32,), state_rows is None),
        ("seeds", seeds, (torch.int64,), state_rows is None),
        ("positions", positions, (torch.int64,), position_rows is None),
        ("state_rows", state_rows, integers, True),
        ("position_rows", position_rows, integers, True),
        ("entropies", entropies, (torch.float32,), True),
    ]
    for name, vector, dtypes, by_row in vectors:
        if vector is not None:
            _check_vector(name, vector, dtypes, rows if by_row else None, logits.device)


def _check_vector(
    name: str,
    vector: Tensor,
    dtypes: tuple[torch.dtype, ...],
    rows: int | None,
    device: torch.device,
) -> None:
    what = f"{name} {tuple(vector.shape)} {vector.dtype} on {vector.device}"
    if vector.dim() != 1 or (rows is not None and vector.shape[0] != rows):
        raise FusedSampleError(f"{what}: must be [{'any' if rows is None else rows}]")
    if vector.dtype not in dtypes:
        raise FusedSampleError(f"{what}: must be {' or '.join(map(str, dtypes))}")
    if not vector.is_contiguous():
        raise FusedSampleError(f"{what}: must be contiguous; pass {name}.contiguous()")
    if vector.device != device:
        raise FusedSampleError(f"{what}: must be on {device}, where the logits are")
