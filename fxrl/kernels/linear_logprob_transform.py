"""What one logit goes through, for every kernel of the fused loss head.

NOTE [Why scale and softcap are compile-time constants]
Triton passes a float argument as float32, which a float64 head must not be rounded to. They are
constants of a model; there is one compilation for each pair.
"""

from __future__ import annotations

import triton.language as tl

from fxrl.kernels.jit import jit


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
