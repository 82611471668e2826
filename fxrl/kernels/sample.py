"""Draw one token a row and its log-probability in one pass over the logits.

With x a row's logits, T its temperature and z = x / T (z = x where T is 0), ``summarise`` reads
each block b of ``BLOCK`` logits once and keeps

    m_b = max x        S_b = sum exp((x - m_b) / T)

and ``choose`` finishes a row: it draws a block, then a token of that block, and returns
log p = (x_token - m) / T - log sum_b S_b exp((m_b - m) / T).

NOTE [Why a block is drawn first and then a token in it]
P(token) = P(block) P(token | block), so two draws are exact, and noise is needed for the blocks
and for the tokens of one block only: random bits and logarithms for all logits of a row would cost
more time than reading them. Each draw is an exponential race: with independent E_i ~ Exp(1) the
smallest E_i / p_i is at i with probability p_i / sum p. The noise is Philox4x32-10 under the key
``seed`` at the counter (index, position, stream): a row's token depends on nothing else of the
batch. Weights are relative to the largest, and E is exact to float32 near 0, so rare tokens keep
their odds down to about 2^-32, the grid of one 32-bit uniform.

NOTE [Why the launches are two]
``choose`` needs all blocks of its row. Were it the last block's work, a counter in memory would
have to be zero before each call; a second launch costs less than the care for it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from fxrl.errors import FxrlError
from fxrl.kernels.jit import jit, on_device

BLOCK = 2048  # logits of one program, all in registers; which token a seed draws depends on it
_WARPS = 4
_CHOOSE_WARPS = 4
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
) -> tuple[Tensor, Tensor]:
    """A token of each row from softmax(logits / temperature), and its log-probability there.

    Two launches, no wait for the device, no memory but the results and a scratch of 8 bytes for
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

    Returns:
        ``(tokens [R] int64, logprobs [R] fp32)``. A logit of -inf is never drawn. A row without a
        distribution (a NaN, +inf, or nothing but -inf) gives a NaN log-probability and a token
        that means nothing but lies in ``[0, V)``.

    Raises:
        FusedSampleError: for shapes, dtypes, strides or devices other than these.
    """
    _check(logits, temperature, seeds, positions, state_rows, position_rows)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return tokens, logprobs
    blocks = triton.cdiv(vocab, BLOCK)
    early = logits.is_cuda and torch.cuda.get_device_capability(logits.device) >= (9, 0)
    partial = torch.empty(rows, blocks, 2, dtype=torch.float32, device=logits.device)
    with on_device(logits):
        summarise[(blocks, rows)](
            logits, temperature, state_rows, partial, logits.stride(0), vocab, BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip
        choose[(rows,)](
            logits, temperature, seeds, positions, state_rows, position_rows, partial,
            tokens, logprobs, logits.stride(0), vocab, blocks,
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


# -- the kernels


@jit
def _row_scale(temperature: tl.tensor, state_rows: tl.tensor, row: tl.tensor) -> Any:
    """What multiplies x so that exp2 of it is exp(x / T); whether the row is greedy; its state."""
    state = row
    if state_rows is not None:
        state = tl.load(state_rows + row).to(tl.int64)
    t = tl.load(temperature + state)
    greedy = t == 0.0
    return 1.4426950408889634 / tl.where(greedy, 1.0, t), greedy, state


@jit
def summarise(
    logits: tl.tensor,
    temperature: tl.tensor,
    state_rows: tl.tensor,
    partial: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    block: tl.constexpr,
) -> None:
    """``partial[row, b] = (m_b, S_b)``."""
    b = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    scale, _, _ = _row_scale(temperature, state_rows, row)
    offsets = b * block + tl.arange(0, block)
    x = tl.load(logits + row * stride + offsets, mask=offsets < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    m = tl.max(x, 0)
    d = (x - tl.where(m == float("-inf"), 0.0, m)) * scale
    out = partial + (row * tl.num_programs(0) + b) * 2
    tl.store(out, m)
    tl.store(out + 1, tl.sum(tl.exp2(d), 0))


@jit
def choose(
    logits: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    state_rows: tl.tensor,
    position_rows: tl.tensor,
    partial: tl.tensor,
    tokens: tl.tensor,
    logprobs: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    blocks: tl.tensor,
    block: tl.constexpr,
    blocks_padded: tl.constexpr,
    early: tl.constexpr,
) -> None:
    """One row: the block, the token and its log-probability."""
    if early:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    scale, greedy, state = _row_scale(temperature, state_rows, row)
    seed = tl.load(seeds + state)
    place = row
    if position_rows is not None:
        place = tl.load(position_rows + row).to(tl.int64)
    position = tl.load(positions + place)

    index = tl.arange(0, blocks_padded)
    here = partial + (row * blocks + index) * 2
    m_b = tl.load(here, mask=index < blocks, other=float("-inf"))
    s_b = tl.load(here + 1, mask=index < blocks, other=0.0)
    m = tl.max(m_b, 0)
    m_finite = tl.where(m == float("-inf"), 0.0, m)
    w_b = tl.exp2((m_b - m_finite) * scale)
    total = tl.sum(s_b * w_b, 0)

    bits, _, _, _ = _philox(seed, index, position, 1)
    won = tl.where(greedy, m_b, _race(s_b * w_b, bits))
    b = tl.minimum(tl.argmax(_numbers(won), 0), blocks - 1)

    offsets = b * block + tl.arange(0, block)
    x = tl.load(logits + row * stride + offsets, mask=offsets < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    m_own = tl.max(x, 0)
    p = tl.exp2((x - tl.where(m_own == float("-inf"), 0.0, m_own)) * scale)
    r0, r1, r2, r3 = _philox(seed, b * (block // 4) + tl.arange(0, block // 4), position, 0)
    bits = tl.reshape(tl.join(tl.join(r0, r1), tl.join(r2, r3)), [block])
    won = tl.where(greedy, x, _race(p, bits))
    token = tl.minimum(b * block + tl.argmax(_numbers(won), 0), vocab - 1)
    x_token = tl.load(logits + row * stride + token).to(tl.float32)

    ln2: tl.constexpr = 0.6931471805599453
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, ((x_token - m_finite) * scale - tl.log2(total)) * ln2)


@jit
def _philox(seed: tl.tensor, index: tl.tensor, position: tl.tensor, stream: tl.constexpr) -> Any:
    """Four words of 32 random bits for each index; position and seed with all their 64 bits."""
    c0 = index.to(tl.uint32)
    low = (c0 * 0 + (position & 0xFFFFFFFF)).to(tl.uint32)
    high = (c0 * 0 + ((position >> 32) & 0xFFFFFFFF)).to(tl.uint32)
    return tl.philox(seed, c0, low, high, c0 * 0 + stream)


@jit
def _race(weight: tl.tensor, bits: tl.tensor) -> tl.tensor:
    """``weight / E``, E ~ Exp(1) made of ``bits``; the largest wins with odds like its weight.

    E = -log(1 - v) for a uniform v: the winners' small E come from small v, which float32
    resolves (by the series, as 1 - v would not).
    """
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.99999994)
    near = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * 0.25)))
    return weight / tl.where(v < 0.015625, near, -tl.log(1.0 - v))


@jit
def _numbers(score: tl.tensor) -> tl.tensor:
    """NaN as -inf, so that the largest is one that exists."""
    return tl.where(score == score, score, float("-inf"))
