"""One logits tile of the fused loss head in two passes over memory: the Triton kernels.

``partial_statistics`` reads the raw logits ``h W^T`` once (``combine_statistics`` finishes a row).
``probabilities`` and ``gradient`` read raw logits once and the row's values, and write p or
``sum_k weight_k d value_k``. Transform, statistics and derivatives are those of
``fxrl.ops.linear_logprob.reference``. With max and sums of a row over v != y, and x_v = z_v - m,

    m = max z_v    S = sum exp x_v    E = sum exp(x_v) x_v    Q = sum exp(2 x_v)
    d = z_y - m - log S                  1 - p_y = 1 / (1 + exp d)        logprob = -softplus(-d)
    lse - m = log S + softplus(d) = L    p_v = exp(x_v) (1 - p_y) / S
    entropy = -p_y logprob - (1 - p_y) (E / S - L)
    sum_p2  = p_y^2 + (1 - p_y)^2 Q / S^2

no term of which is a difference of nearly equal numbers: see NOTE [Why the target is kept apart
from the other logits].

NOTE [Why all statistics are computed even if one is asked for]
Reading the tile costs more than the arithmetic. And a kernel compiled without some of them may be
contracted differently: scoring (log-prob) and training (log-prob and entropy) would differ in the
last bit, and the first ratio of a policy update would not be 1.

NOTE [Why scale and softcap are compile-time constants]
Triton passes a float argument as float32, which a float64 head must not be rounded to. They are
constants of a model; there is one compilation for each pair.
"""

from __future__ import annotations

import triton.language as tl

from fxrl.kernels.jit import jit, jit_unspecialized


@jit
def tanh(a: tl.tensor) -> tl.tensor:
    """Relative precision near 0 too, where ``1 - exp(-2a)`` has none."""
    decay = tl.exp(-2.0 * tl.abs(a))
    far = (1.0 - decay) / (1.0 + decay)
    s = a * a
    series = 2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0 - s * (1382.0 / 155925.0)))
    near = a * (1.0 + s * (-1.0 / 3.0 + s * series))
    return tl.where(s < 0.01, near, tl.where(a < 0, -far, far))


@jit
def log1p(a: tl.tensor) -> tl.tensor:
    """``log(1 + a)`` for 0 <= a <= 1, by the series of 2 artanh(a / (2 + a))."""
    t = a / (2.0 + a)
    s = t * t
    total = s * 0.0
    for k in tl.static_range(16):
        total = total * s + 1.0 / (31 - 2 * k)
    return 2.0 * t * total


@jit
def transform(
    x: tl.tensor, inverse_t: tl.tensor, scale: tl.constexpr, softcap: tl.constexpr
) -> tl.tensor:
    if softcap > 0.0:
        return tanh(x * (scale / softcap)) * softcap * inverse_t
    else:
        return x * scale * inverse_t


@jit
def add4(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    e: tl.tensor,
    f: tl.tensor,
    g: tl.tensor,
    h: tl.tensor,
) -> tl.tensor:
    """Four sums in one reduction, hence one round through shared memory."""
    return a + e, b + f, c + g, d + h


@jit
def inverse_temperature(
    temperature: tl.tensor, at: tl.tensor, has_temperature: tl.constexpr
) -> tl.tensor:
    if has_temperature:
        return 1.0 / tl.load(temperature + at)
    else:  # both branches: only one of them is compiled
        return 1.0


@jit
def load_logits(
    logits: tl.tensor,
    bias: tl.tensor,
    temperature: tl.tensor,
    row: tl.tensor,
    split: tl.tensor,
    vocab: tl.tensor,
    temperature_stride: tl.tensor,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    has_bias: tl.constexpr,
    has_temperature: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Columns of a split, which of them exist, their transformed logits and the softcap's slope.

    Columns outside are loaded as 0 and transformed to 0.
    """
    column = split * block + tl.arange(0, block)
    valid = column < vocab
    x = tl.load(logits + row * vocab + column, mask=valid, other=0.0)
    if has_bias:
        x += tl.load(bias + column, mask=valid, other=0.0)
    inverse_t = inverse_temperature(temperature, row * temperature_stride, has_temperature)
    if softcap > 0.0:
        capped = tanh(x * (scale / softcap))
        return column, valid, capped * softcap * inverse_t, 1.0 - capped * capped
    else:
        return column, valid, x * scale * inverse_t, 1.0


@jit
def partial_statistics(
    logits: tl.tensor,
    x_target: tl.tensor,
    target: tl.tensor,
    bias: tl.tensor,
    temperature: tl.tensor,
    partial: tl.tensor,
    vocab: tl.tensor,
    temperature_stride: tl.tensor,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    lowest: tl.constexpr,
    has_bias: tl.constexpr,
    has_temperature: tl.constexpr,
    splits: tl.constexpr,
    partials: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``partial[row, split]`` = m, S, E, Q, sum of all z, whether the target is beaten."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    columns, valid, z, _ = load_logits(
        logits, bias, temperature, row, split, vocab, temperature_stride,
        scale, softcap, has_bias, has_temperature, block,
    )  # fmt: skip
    y = tl.load(target + row).to(tl.int32)
    x_y = tl.load(x_target + row)
    if has_bias:
        x_y += tl.load(bias + y)
    inverse_t = inverse_temperature(temperature, row * temperature_stride, has_temperature)
    z_y = transform(x_y, inverse_t, scale, softcap)
    z_other = tl.where(valid & (columns != y), z, float("-inf"))
    largest = tl.maximum(tl.max(z_other, 0), lowest)
    shifted = z_other - largest
    e = tl.exp(shifted)
    shifted = tl.maximum(shifted, lowest)  # a banned token (-inf) adds 0 and not 0 * inf
    # Columns outside are 0: they do not change the sum of z.
    total, moment, squares, mean = tl.reduce((e, e * shifted, e * e, z), 0, add4)
    # The argmax is the first of equal logits.
    beaten = (largest > z_y).to(tl.int32)
    if largest == z_y:
        first = tl.min(tl.where(z_other == z_y, columns, vocab), 0)
        beaten = (first < y).to(tl.int32)
    out = partial + (row * splits + split) * partials
    tl.store(out, largest)
    tl.store(out + 1, total)
    tl.store(out + 2, moment)
    tl.store(out + 3, squares)
    tl.store(out + 4, mean)
    tl.store(out + 5, beaten.to(e.dtype))


@jit
def combine_statistics(
    x_target: tl.tensor,
    target: tl.tensor,
    bias: tl.tensor,
    temperature: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    vocab: tl.tensor,
    temperature_stride: tl.tensor,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    lowest: tl.constexpr,
    has_bias: tl.constexpr,
    has_temperature: tl.constexpr,
    splits: tl.constexpr,
    splits_block: tl.constexpr,
    partials: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """``statistics[row]``, in the order of ``OUTPUTS``, from the partial ones."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, splits_block)
    valid = split < splits
    at = partial + (row * splits + split) * partials
    shift = tl.load(at, mask=valid, other=lowest)
    largest = tl.max(shift, 0)
    shift = shift - largest
    decay = tl.exp(shift)
    part = tl.load(at + 1, mask=valid, other=0.0)
    total = tl.sum(part * decay, 0)
    moment = tl.sum((tl.load(at + 2, mask=valid, other=0.0) + shift * part) * decay, 0)
    squares = tl.sum(tl.load(at + 3, mask=valid, other=0.0) * decay * decay, 0)
    mean = tl.sum(tl.load(at + 4, mask=valid, other=0.0), 0) / vocab
    beaten = tl.max(tl.load(at + 5, mask=valid, other=0.0), 0)

    x_y = tl.load(x_target + row)
    if has_bias:
        x_y += tl.load(bias + tl.load(target + row))
    inverse_t = inverse_temperature(temperature, row * temperature_stride, has_temperature)
    z_y = transform(x_y, inverse_t, scale, softcap)
    log_total = tl.log(total)
    margin = (z_y - largest) - log_total
    correction = log1p(tl.exp(-tl.abs(margin)))
    logprob = -(tl.maximum(-margin, 0.0) + correction)
    p_others = 1.0 / (1.0 + tl.exp(margin))
    p_target = tl.exp(logprob)
    log_sum = tl.maximum(log_total, z_y - largest) + correction  # lse - m
    # A vocabulary of one has no others: their share is 0, and not 0 / 0.
    share = tl.where(total == 0.0, 0.0, 1.0 / total)
    entropy = -(p_target * tl.maximum(logprob, lowest) + p_others * (moment * share - log_sum))
    sum_p2 = p_target * p_target + (p_others * share) * (p_others * share) * squares

    out = statistics + row * columns
    tl.store(out, logprob)
    tl.store(out + 1, tl.maximum(largest + log_total, z_y) + correction)
    tl.store(out + 2, entropy)
    tl.store(out + 3, tl.where(total == total, 1.0 - beaten, 0.0))  # a NaN beats all
    tl.store(out + 4, sum_p2)
    tl.store(out + 5, mean)
    tl.store(out + 6, tl.maximum(largest, z_y))


@jit
def probabilities(
    logits: tl.tensor,
    target: tl.tensor,
    bias: tl.tensor,
    temperature: tl.tensor,
    lse: tl.tensor,
    prob: tl.tensor,
    vocab: tl.tensor,
    temperature_stride: tl.tensor,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    lowest: tl.constexpr,
    has_bias: tl.constexpr,
    has_temperature: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``prob[row]`` = p_v times the softcap's slope; 0 at the target."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    column, valid, z, slope = load_logits(
        logits, bias, temperature, row, split, vocab, temperature_stride,
        scale, softcap, has_bias, has_temperature, block,
    )  # fmt: skip
    p = tl.exp(z - tl.load(lse + row)) * slope
    p = tl.where(column == tl.load(target + row).to(tl.int32), 0.0, p)
    tl.store(prob + row * vocab + column, p.to(prob.dtype.element_ty), mask=valid)


@jit
def gradient(
    logits: tl.tensor,
    target: tl.tensor,
    bias: tl.tensor,
    temperature: tl.tensor,
    row_data: tl.tensor,
    grad: tl.tensor,
    weighted: tl.tensor,
    vocab: tl.tensor,
    temperature_stride: tl.tensor,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    lowest: tl.constexpr,
    has_bias: tl.constexpr,
    has_temperature: tl.constexpr,
    wants_weighted: tl.constexpr,
    splits: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """``grad[row]`` = sum_k weight_k d value_k / d z * dz/d(raw logit, but for scale / T).

    ``row_data [R, columns]`` is in the launcher's order ``ROW_DATA``. ``weighted[row, split]`` =
    sum_v (d / d z_v) log p_v, before the softcap's slope.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    column, valid, z, slope = load_logits(
        logits, bias, temperature, row, split, vocab, temperature_stride,
        scale, softcap, has_bias, has_temperature, block,
    )  # fmt: skip
    row_of = row_data + row * columns
    logprob = tl.maximum(tl.load(row_of), lowest)
    entropy = tl.load(row_of + 2)
    sum_p2 = tl.load(row_of + 3)
    p_others = tl.load(row_of + 4)
    on_logprob = tl.load(row_of + 5)
    on_lse = tl.load(row_of + 6)
    on_entropy = tl.load(row_of + 7)
    on_sum_p2 = tl.load(row_of + 8)
    on_mean = tl.load(row_of + 9) / vocab

    is_target = column == tl.load(target + row).to(tl.int32)
    log_p = tl.where(is_target, logprob, z - tl.load(row_of + 1))
    log_p = tl.where(z == float("-inf"), lowest, log_p)  # a banned token: 0 log 0 = 0
    p = tl.exp(log_p)
    by_p = on_lse - on_entropy * entropy - 2.0 * on_sum_p2 * sum_p2
    made = p * by_p - on_entropy * (p * log_p) + 2.0 * on_sum_p2 * (p * p)
    # 1 - p_y is never formed by subtraction.
    made += on_logprob * tl.where(is_target, p_others, -p) + on_mean
    if wants_weighted:
        tl.store(weighted + row * splits + split, tl.sum(tl.where(valid, made * log_p, 0.0), 0))
    made *= slope
    tl.store(grad + row * vocab + column, made.to(grad.dtype.element_ty), mask=valid)


@jit_unspecialized("grads_count", "vectors_count")  # which the number of rows decides
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


@jit_unspecialized("width")
def picked_rows(
    matrix: tl.tensor,
    row_index: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    """``out[n] = matrix[row_index[n]]``, of ``width`` entries."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    value = tl.load(matrix + tl.load(row_index + row) * stride + at, mask=inside)
    tl.store(out + row * width + at, value, mask=inside)
