"""Per-row work around the products: what a row's blocks add up to, and the saved vectors.

Units: t is a transformed logit over ln 2, so that exponentials are powers of two and a change of a
block's whole-numbered shift is exact. With M the row's largest shift and sums over v != y

    S = sum 2^(t_v - M)    E = sum 2^(t_v - M) (t_v - M)    Q = sum 4^(t_v - M)

the values follow as in ``fxrl.kernels.linear_logprob.tile``.
"""

from __future__ import annotations

import triton.language as tl

from fxrl.kernels.jit import jit, jit_unspecialized
from fxrl.kernels.linear_logprob.tile import log1p, tanh

#: Rows of what ``combine_blocks`` writes, in this order.
COMBINED = (
    "logprob",
    "lse",
    "entropy",
    "argmax_hit",
    "sum_p2",
    "mean_logit",
    "max_logit",
    "p_others",  # 1 - p_y
    "mass",  # p_v over the stored exponential
    "misfit",  # M where the stored exponentials may have over- or underflowed, else infinite
)

_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST_SHIFT = tl.constexpr(-1e29)  # of a block without finite logits; as in loss_head.cu
_EXCLUDED = tl.constexpr(-1e30)
# The row's largest other logit, less the shift of its exponentials. At 90 their sum over 2^18
# entries, times a weight of 2^18, is still finite; at -90 what is flushed to zero is less than
# 2^-36 of the largest, 2^-18 of all together.
_GAP = tl.constexpr(90.0)
# The target's logit is seldom far above the others (1 - p_y = 2^-70), but may be far below.
_ABOVE_TARGET = tl.constexpr(20.0)


@jit_unspecialized("rows", "pitch", "moments")
def combine_blocks(
    partial: tl.tensor,
    target_info: tl.tensor,
    target_t: tl.tensor,
    target: tl.tensor,
    combined: tl.tensor,
    rows: tl.tensor,
    pitch: tl.tensor,
    blocks: tl.tensor,
    vocab: tl.tensor,
    moments: tl.tensor,
    tile_vocab: tl.constexpr,
    block_rows: tl.constexpr,
    block_blocks: tl.constexpr,
) -> None:
    """``combined [10, rows]`` from ``partial [2 or 5, blocks, rows]``, ``target_info [2, rows]``.

    ``pitch``: of ``combined``. ``moments`` (0 or 1: five statistics) is no compile-time constant:
    one compilation for scoring and training, hence the same bits.
    """
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    live = row < rows
    stride = rows.to(tl.int64) * blocks
    t_y = tl.load(target_t + row, mask=live, other=0.0)
    own = tl.load(target_info + row, mask=live, other=0.0)
    beaten = tl.load(target_info + rows + row, mask=live, other=0.0)
    own_block = tl.load(target + row, mask=live, other=0) // tile_vocab

    largest = tl.full([block_rows], _EXCLUDED, tl.float32)
    for start in range(0, blocks, block_blocks):
        block = start + tl.arange(0, block_blocks)
        inside = (block < blocks)[:, None] & live[None, :]
        at = block.to(tl.int64)[:, None] * rows + row[None, :]
        top = tl.load(partial + at, mask=inside, other=_EXCLUDED)
        # The argmax is the first of equal logits; in the target's own block the GEMM compared.
        ties = (top == own[None, :]) & (block[:, None] < own_block[None, :])
        beats = (top > own[None, :]) | ties
        beaten = tl.maximum(beaten, tl.max(beats.to(tl.float32), 0))
        largest = tl.maximum(largest, tl.max(top, 0))
    base = tl.maximum(tl.ceil(largest), _LOWEST_SHIFT)

    total = tl.zeros([block_rows], tl.float32)
    moment = tl.zeros([block_rows], tl.float32)
    squares = tl.zeros([block_rows], tl.float32)
    mean = tl.zeros([block_rows], tl.float32)
    for start in range(0, blocks, block_blocks):
        block = start + tl.arange(0, block_blocks)
        inside = (block < blocks)[:, None] & live[None, :]
        at = block.to(tl.int64)[:, None] * rows + row[None, :]
        top = tl.load(partial + at, mask=inside, other=_EXCLUDED)
        gap = tl.maximum(tl.ceil(top), _LOWEST_SHIFT) - base[None, :]
        decay = tl.exp2(gap)
        part = tl.load(partial + stride + at, mask=inside, other=0.0)
        total += tl.sum(part * decay, 0)
        more = inside & (block < blocks * moments)[:, None]
        bent = tl.load(partial + 2 * stride + at, mask=more, other=0.0)
        moment += tl.sum((bent + tl.maximum(gap, -1e30) * part) * decay, 0)
        squared = tl.load(partial + 3 * stride + at, mask=more, other=0.0)
        squares += tl.sum(squared * decay * decay, 0)
        mean += tl.sum(tl.load(partial + 4 * stride + at, mask=more, other=0.0), 0)

    log_total = tl.log2(total)
    margin = ((t_y - base) - log_total) * _LN2
    correction = log1p(tl.exp(-tl.abs(margin)))
    logprob = -(tl.maximum(-margin, 0.0) + correction)
    p_others = 1.0 / (1.0 + tl.exp(margin))
    p_target = tl.exp(logprob)
    log_sum = tl.maximum(log_total, t_y - base) * _LN2 + correction
    share = tl.where(total == 0.0, 0.0, 1.0 / total)
    spread = moment * share * _LN2 - log_sum
    entropy = -(p_target * tl.maximum(logprob, -1e30) + p_others * spread)
    per_mass = p_others * share

    valid = margin == margin  # a NaN beats all
    mean = tl.where(mean <= _LOWEST_SHIFT, float("-inf"), mean * _LN2 / vocab)
    put = combined + row
    tl.store(put, logprob, mask=live)
    tl.store(put + pitch, tl.maximum(base + log_total, t_y) * _LN2 + correction, mask=live)
    tl.store(put + 2 * pitch, entropy, mask=live)
    tl.store(put + 3 * pitch, tl.where(valid, 1.0 - beaten, 0.0), mask=live)
    tl.store(put + 4 * pitch, p_target * p_target + per_mass * per_mass * squares, mask=live)
    tl.store(put + 5 * pitch, mean, mask=live)
    tl.store(put + 6 * pitch, tl.maximum(largest, t_y) * _LN2, mask=live)
    tl.store(put + 7 * pitch, p_others, mask=live)
    apart = base - (tl.ceil(t_y) + _ABOVE_TARGET)
    fits = tl.abs(apart) <= _GAP
    tl.store(put + 8 * pitch, per_mass * tl.where(fits, tl.exp2(-apart), 1.0), mask=live)
    tl.store(put + 9 * pitch, tl.where(fits, float("inf"), base), mask=live)


@jit
def target_logits(
    hidden: tl.tensor,
    weight: tl.tensor,
    target: tl.tensor,
    bias: tl.tensor,
    row_scale: tl.tensor,
    target_t: tl.tensor,
    shift: tl.tensor,
    width: tl.tensor,
    hidden_stride: tl.tensor,
    weight_stride: tl.tensor,
    cap: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``target_t[row]``: the target's t; ``shift[row]``: by what the row's exponentials are scaled.

    NOTE [Why the target's logit is not the GEMM's]
    Tensor cores truncate at every addition: a logit of 14 over 4096 channels comes out 4e-5 too
    small, in proportion to both. A log-prob is this one logit less the others' log-sum-exp, which
    smaller logits make. One dot product per row, rounded to nearest, costs 0.3 % of the GEMM and
    takes most of the error away. The first maximum is still told by the GEMM's logits alone: equal
    rows of the head must tie.
    """
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(target + row)
    total = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        inside = at < width
        h = tl.load(hidden + row * hidden_stride + at, mask=inside, other=0.0)
        w = tl.load(weight + y * weight_stride + at, mask=inside, other=0.0)
        total += h.to(tl.float32) * w.to(tl.float32)
    x = tl.sum(total, 0)
    if has_bias:
        x += tl.load(bias + y)
    if cap != 0.0:
        x = tanh(x * cap)
    t = x * tl.load(row_scale + row)
    tl.store(target_t + row, t)
    tl.store(shift + row, tl.ceil(t) + _ABOVE_TARGET)


@jit_unspecialized("rows", "pitch", "vocab")
def mend_product(
    product: tl.tensor,
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    target: tl.tensor,
    row_scale: tl.tensor,
    combined: tl.tensor,
    rows: tl.tensor,
    pitch: tl.tensor,
    width: tl.tensor,
    vocab: tl.tensor,
    hidden_stride: tl.tensor,
    weight_stride: tl.tensor,
    cap: tl.constexpr,
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    block_vocab: tl.constexpr,
    block_depth: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``product[row]`` of misfits, made again: the sum over v != y of 2^(t_v - M) f'(x_v) W_v.

    NOTE [Why misfits are looked for on the device]
    Asking how many there are makes the host wait for the whole forward: the loss and its backward,
    hundreds of small kernels, are then launched to an idle GPU. On an H200 it cost 7 of the 250 ms
    of an update of 12 layers of Qwen3-8B's shape over 8,192 tokens. Without misfits a program ends
    when it has read its rows' flags.
    """
    row, base, wrong = _misfits(combined, rows, pitch, block_rows)
    if tl.max(wrong.to(tl.int32), 0) > 0:
        at = tl.program_id(1) * block + tl.arange(0, block)
        total = tl.zeros([block_rows, block], tl.float32)
        for start in range(0, vocab, block_vocab):
            v = start + tl.arange(0, block_vocab)
            inside = v < vocab
            stored = _exponentials_of(
                hidden, weight, bias, target, row_scale, row, wrong, base, v, inside, width,
                hidden_stride, weight_stride, cap, has_bias, block_rows, block_vocab, block_depth,
            )  # fmt: skip
            stored = tl.where(wrong[:, None], stored, 0.0).to(weight.dtype.element_ty)
            entry = weight + v.to(tl.int64) * weight_stride
            mask = inside[:, None] & (at < width)[None, :]
            w = tl.load(entry[:, None] + at[None, :], mask=mask, other=0.0)
            total = tl.dot(stored, w, total)
        out = product + row[:, None] * width + at[None, :]
        tl.store(out, total, mask=wrong[:, None] & (at < width)[None, :])


@jit_unspecialized("rows", "pitch", "vocab", "share")
def mend_exponentials(
    exponentials: tl.tensor,
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    target: tl.tensor,
    row_scale: tl.tensor,
    combined: tl.tensor,
    rows: tl.tensor,
    pitch: tl.tensor,
    width: tl.tensor,
    vocab: tl.tensor,
    share: tl.tensor,
    out_stride: tl.tensor,
    hidden_stride: tl.tensor,
    weight_stride: tl.tensor,
    cap: tl.constexpr,
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    block_vocab: tl.constexpr,
    block_depth: tl.constexpr,
) -> None:
    """``exponentials[row]`` of misfits, made again: 2^(t_v - M) f'(x_v), 0 at the target; a program
    makes ``share`` entries of each of its rows. See ``mend_product``."""
    row, base, wrong = _misfits(combined, rows, pitch, block_rows)
    if tl.max(wrong.to(tl.int32), 0) > 0:
        begin = tl.program_id(1) * share
        end = tl.minimum(begin + share, vocab)
        for start in range(begin, end, block_vocab):
            v = start + tl.arange(0, block_vocab)
            stored = _exponentials_of(
                hidden, weight, bias, target, row_scale, row, wrong, base, v, v < end, width,
                hidden_stride, weight_stride, cap, has_bias, block_rows, block_vocab, block_depth,
            )  # fmt: skip
            out = exponentials + row[:, None] * out_stride + v[None, :]
            mask = wrong[:, None] & (v < end)[None, :]
            tl.store(out, stored.to(exponentials.dtype.element_ty), mask=mask)


@jit
def _misfits(
    combined: tl.tensor, rows: tl.tensor, pitch: tl.tensor, block_rows: tl.constexpr
) -> tl.tensor:
    """A program's rows, the shift of their exponentials, and whether it is needed."""
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    base = tl.load(combined + 9 * pitch + row, mask=row < rows, other=float("inf"))
    return row, base, base != float("inf")  # true of a NaN


@jit
def _exponentials_of(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    target: tl.tensor,
    row_scale: tl.tensor,
    row: tl.tensor,
    wanted: tl.tensor,
    base: tl.tensor,
    v: tl.tensor,
    inside: tl.tensor,
    width: tl.tensor,
    hidden_stride: tl.tensor,
    weight_stride: tl.tensor,
    cap: tl.constexpr,
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    block_vocab: tl.constexpr,
    block_depth: tl.constexpr,
) -> tl.tensor:
    """2^(t_v - ``base``) f'(x_v) of the ``wanted`` of some rows, 0 at the target and where no
    entry ``v`` is ``inside``."""
    entry = weight + v.to(tl.int64) * weight_stride
    x = tl.zeros([block_rows, block_vocab], tl.float32)
    for first in range(0, width, block_depth):
        k = first + tl.arange(0, block_depth)
        known = (k < width)[None, :]
        h = tl.load(
            hidden + row[:, None] * hidden_stride + k[None, :],
            mask=wanted[:, None] & known,
            other=0.0,
        )
        w = tl.load(entry[:, None] + k[None, :], mask=inside[:, None] & known, other=0.0)
        x = tl.dot(h, tl.trans(w), x)
    if has_bias:
        x += tl.load(bias + v, mask=inside, other=0.0)[None, :]
    slope = 1.0
    if cap != 0.0:
        x = tanh(x * cap)
        slope = 1.0 - x * x
    scale = tl.load(row_scale + row, mask=wanted, other=0.0)
    y = tl.load(target + row, mask=wanted, other=0)
    stored = tl.exp2(x * scale[:, None] - base[:, None]) * slope
    return tl.where(inside[None, :] & (v[None, :] != y[:, None]), stored, 0.0)


@jit_unspecialized("pitch", "all_rows")
def finish_vectors(
    product: tl.tensor,
    weight: tl.tensor,
    target: tl.tensor,
    combined: tl.tensor,
    slopes: tl.tensor,
    target_t: tl.tensor,
    row_scale: tl.tensor,
    row_index: tl.tensor,
    vectors: tl.tensor,
    pitch: tl.tensor,
    all_rows: tl.tensor,
    width: tl.tensor,
    weight_stride: tl.tensor,
    logprob_at: tl.constexpr,
    lse_at: tl.constexpr,
    capped: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``vectors[k, row_index[row]]``, k = logprob_at and lse_at (-1: not wanted), of shape [H].

    With U = ``product[row]``, m the mass of a stored exponential and s = scale / T

        d logprob / dh = s ((1 - p_y) f'(x_y) W_y - m U)    d lse / dh = s (p_y f'(x_y) W_y + m U)

    ``product [rows, H]`` float32, ``combined [10, pitch]``, ``vectors [K, all_rows, H]``.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    y = tl.load(target + row)
    slope = tl.load(slopes + row)
    p_target, p_others = tl.exp(tl.load(combined + row)), tl.load(combined + 7 * pitch + row)
    on_others = slope * tl.load(combined + 8 * pitch + row)
    on_target = slope
    if capped:
        bent = tl.load(target_t + row) / tl.load(row_scale + row)  # the tanh at the target
        on_target *= 1.0 - tl.minimum(bent * bent, 1.0)
    u = tl.load(product + row * width + at, mask=inside, other=0.0) * on_others
    w = tl.load(weight + y * weight_stride + at, mask=inside, other=0.0).to(tl.float32) * on_target
    to = tl.load(row_index + row)
    if logprob_at >= 0:
        out = vectors + (logprob_at * all_rows.to(tl.int64) + to) * width + at
        tl.store(out, (p_others * w - u).to(vectors.dtype.element_ty), mask=inside)
    if lse_at >= 0:
        out = vectors + (lse_at * all_rows.to(tl.int64) + to) * width + at
        tl.store(out, (p_target * w + u).to(vectors.dtype.element_ty), mask=inside)
