"""Cutting, handing out and merging the work of ``fxrl.kernels.decode_attention_split``."""

from __future__ import annotations

import triton.language as tl

from fxrl.kernels.jit import jit


@jit
def splits_of_rows(
    tiles: tl.tensor,
    real: tl.tensor,
    programs: tl.tensor,
    kv_heads: tl.constexpr,
    min_tiles: tl.tensor,
    slack: tl.tensor,
    max_tiles: tl.tensor,
    rounds: tl.tensor,
) -> tl.tensor:
    """Into how many splits each row is cut; see the NOTE on it where it is used."""
    even = tl.maximum((tl.sum(tiles, 0) * kv_heads + programs - 1) // programs, min_tiles)
    size = even
    if (even > max_tiles) | (tl.sum(real.to(tl.int32), 0) * kv_heads > programs):
        parts = tl.minimum((even + max_tiles - 1) // max_tiles, rounds)
        size = (even + parts - 1) // parts
    else:  # rounding up may leave a second item for a few: grow until there is one each
        for _ in tl.static_range(3):
            items = tl.sum(_cut(tiles, real, size), 0) * kv_heads
            excess = tl.maximum(items - programs, 0)
            size = tl.minimum(
                size + (size * excess + programs - 1) // programs, even + even * slack // 100
            )
    return _cut(tiles, real, size)


@jit
def _cut(tiles: tl.tensor, real: tl.tensor, size: tl.tensor) -> tl.tensor:
    """An empty sequence (a row that pads a graph's batch) has one split: it writes zeros."""
    return tl.where(real, tl.maximum((tiles + size - 1) // size, 1), 0)


@jit
def span_of(length: tl.tensor, window: tl.constexpr) -> tl.tensor:
    """How many of the last keys the query sees."""
    if window > 0:
        length = tl.minimum(length, window)
    return length


@jit
def next_item(arrived: tl.tensor, items: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """An item beyond each program's first, or ``items`` if there is none."""
    item = items
    if items > programs:
        taken = tl.atomic_add(arrived, 1, sem="relaxed")
        if taken == items - 1:  # the last to ask: items - programs got one, programs did not
            tl.store(arrived, 0)
        item = programs + taken
    return item


@jit
def merge_group(
    partial: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    out_head: tl.tensor,
    factor: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_padded: tl.constexpr,
) -> None:
    """All query heads of one (sequence, KV head), whose first split is at ``partial``."""
    width: tl.constexpr = dim_padded + 2
    stride: tl.constexpr = kv_heads * group * width
    d = tl.arange(0, dim_padded)
    for i in range(group):
        if count <= 8:
            result = _merge(partial + i * width, count, stride, 8, dim_padded)
        else:
            result = _merge(partial + i * width, count, stride, 32, dim_padded)
        result = (result * factor).to(out.dtype.element_ty)
        tl.store(out + i * out_head + d, result, mask=d < head_dim)


@jit
def _merge(
    partial: tl.tensor,
    count: tl.tensor,
    stride: tl.constexpr,
    chunk: tl.constexpr,
    dim_padded: tl.constexpr,
) -> tl.tensor:
    """One query head's ``count`` splits, ``chunk`` at a time: loads in flight together."""
    d = tl.arange(0, dim_padded)
    m = float("-inf")
    l = 0.0  # noqa: E741
    acc = tl.zeros([dim_padded], tl.float32)
    for j in range(0, count, chunk):
        split = j + tl.arange(0, chunk)
        here = partial + split.to(tl.int64) * stride
        live = split < count
        m_j = tl.load(here + dim_padded, mask=live, other=float("-inf"), cache_modifier=".cg")
        l_j = tl.load(here + dim_padded + 1, mask=live, other=0.0, cache_modifier=".cg")
        a_j = tl.load(
            here[:, None] + d[None, :], mask=live[:, None], other=0.0, cache_modifier=".cg"
        )
        m_new = tl.maximum(m, tl.max(m_j, 0))
        weight = tl.exp2(m_j - m_new)
        decay = tl.exp2(m - m_new)
        l = l * decay + tl.sum(weight * l_j, 0)  # noqa: E741
        acc = acc * decay + tl.sum(weight[:, None] * a_j, 0)
        m = m_new
    return acc / l
