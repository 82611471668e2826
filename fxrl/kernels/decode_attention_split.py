"""Attention of one query token a sequence over a paged KV cache: the Triton kernel.

A sequence's keys are cut into splits; a work item is one split for one KV head and all query heads
of its group. An item reads its keys and values once, tile by tile, with the softmax's running
maximum m and sum l:

    s = scale q k^T            m' = max(m, max s)        p = exp(s - m')
    l = l exp(m - m') + sum p  acc = acc exp(m - m') + p v

The item that finishes a (sequence, KV head) last merges the splits, in their order:

    m = max_j m_j     out = sum_j exp(m_j - m) acc_j / sum_j exp(m_j - m) l_j

NOTE [Why the work list is made on the device]
A CUDA graph freezes the grid, and lengths change at each replay. So a fixed number of programs
works off a list that each derives from the lengths (``splits_of_rows``): a split has all tiles over
the number of programs, so that each gets one, or a fraction of that where there is much to do. That
bounds the splits by R + programs rounds / heads, whatever the lengths: the scratch is fixed too.
Which program takes an item is first come, first served; what it computes is not, and merging has an
order: results repeat bit for bit. They do change with the batch.

NOTE [Why neighbouring items are neighbouring heads]
In vLLM's NHD layout the heads of a token are adjacent in memory; programs that run at the same
time then read the same DRAM pages.
"""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from fxrl.kernels.decode_attention_work import merge_group, next_item, span_of, splits_of_rows
from fxrl.kernels.jit import jit


@jit
def attend(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    rows: tl.tensor,
    min_tiles: tl.tensor,
    slack: tl.tensor,
    max_tiles: tl.tensor,
    rounds: tl.tensor,
    scale: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_block: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_block: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    table_row: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    softcap: tl.constexpr,
    window: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    group_padded: tl.constexpr,
    head_dim: tl.constexpr,
    dim_padded: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    rows_padded: tl.constexpr,
    stages: tl.constexpr,
    early: tl.constexpr,
) -> None:
    """One program: its share of the items."""
    if early:
        gdc_wait()
    r = tl.arange(0, rows_padded)
    lens = tl.load(seq_lens + r, mask=r < rows, other=0)
    spans = span_of(lens, window)
    tiles = (spans + tile - 1) // tile
    splits = splits_of_rows(
        tiles, r < rows, tl.num_programs(0), kv_heads, min_tiles, slack, max_tiles, rounds
    )
    ends = tl.cumsum(splits, 0)
    items = tl.sum(splits, 0) * kv_heads

    g = tl.arange(0, group_padded)
    d = tl.arange(0, dim_padded)
    valid = (g < group)[:, None] & (d < head_dim)[None, :]
    # Scores in bits, so that exp2 serves: the softcap is applied before, to what it caps.
    factor = scale
    if k_scale is not None:
        factor = factor * tl.load(k_scale)
    to_bits: tl.constexpr = 1.4426950408889634
    if softcap == 0.0:
        factor = factor * to_bits

    # arrived: [0] how many items were taken beyond the first of each program; [1:] finished splits
    programs = tl.num_programs(0)
    item = tl.program_id(0)
    while item < items:
        head = item % kv_heads
        unit = item // kv_heads
        mine = (ends > unit) & (ends - splits <= unit)
        row = tl.sum(tl.where(mine, r, 0), 0)
        count = tl.sum(tl.where(mine, splits, 0), 0)
        first = tl.sum(tl.where(mine, ends - splits, 0), 0)
        length = tl.sum(tl.where(mine, lens, 0), 0)
        span = tl.sum(tl.where(mine, spans, 0), 0)
        step = ((span + tile - 1) // tile + count - 1) // count * tile
        low = length - span + (unit - first) * step
        high = tl.minimum(low + step, length)

        row64 = row.to(tl.int64)
        heads = head * group + g
        query = tl.load(
            q + row64 * q_row + heads[:, None] * q_head + d[None, :], mask=valid, other=0.0
        )
        table = block_table + row64 * table_row
        m = tl.full([group_padded], float("-inf"), tl.float32)
        l = tl.zeros([group_padded], tl.float32)  # noqa: E741
        acc = tl.zeros([group_padded, dim_padded], tl.float32)
        for t in tl.range(low, high, tile, num_stages=stages):
            n = t + tl.arange(0, tile)
            page = tl.load(table + n // block_size, mask=n < high, other=0).to(tl.int64)
            inside = (n < high)[:, None] & (d < head_dim)[None, :]
            k = tl.load(
                k_cache + (page * k_block + (n % block_size) * k_token)[:, None]
                + (head * k_head + d)[None, :],
                mask=inside, other=0.0,
            )  # fmt: skip
            v = tl.load(
                v_cache + (page * v_block + (n % block_size) * v_token)[:, None]
                + (head * v_head + d)[None, :],
                mask=inside, other=0.0,
            )  # fmt: skip
            s = tl.dot(query, tl.trans(k.to(query.dtype))) * factor
            if softcap != 0.0:
                s = (
                    softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * to_bits / softcap)) + 1.0)
                ) * to_bits
            s = tl.where((n < high)[None, :], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))  # finite: a tile has at least one key
            p = tl.exp2(s - m_new[:, None])
            decay = tl.exp2(m - m_new)
            l = l * decay + tl.sum(p, 1)  # noqa: E741
            acc = acc * decay[:, None] + tl.dot(p.to(query.dtype), v.to(query.dtype))
            m = m_new

        v_factor = 1.0
        if v_scale is not None:
            v_factor = tl.load(v_scale)
        target = out + row64 * out_row + heads[:, None] * out_head + d[None, :]
        if count == 1:
            result = acc * (v_factor / tl.where(l == 0.0, 1.0, l))[:, None]
            tl.store(target, result.to(out.dtype.element_ty), mask=valid)
        else:
            # partial: [splits of all rows, kv_heads, group, dim_padded + 2]
            width: tl.constexpr = dim_padded + 2
            here = partial + (unit * kv_heads + head).to(tl.int64) * (group * width) + g * width
            tl.store(here[:, None] + d[None, :], acc, mask=valid)
            tl.store(here + dim_padded, m, mask=g < group)
            tl.store(here + dim_padded + 1, l, mask=g < group)
            tl.debug_barrier()  # all threads' stores, then the count that publishes them
            done = arrived + 1 + row * kv_heads + head
            before = tl.atomic_add(done, 1, sem="acq_rel")
            if before == count - 1:
                tl.debug_barrier()
                merge_group(
                    partial + (first * kv_heads + head).to(tl.int64) * (group * width), count,
                    out + row64 * out_row + head * group * out_head, out_head, v_factor,
                    kv_heads, group, head_dim, dim_padded,
                )  # fmt: skip
                tl.store(done, 0)

        item = next_item(arrived, items, programs)
