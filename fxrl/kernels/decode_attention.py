"""Attention of one query token a sequence over a paged KV cache.

Keys are cut into splits (``decode_schedule.py``): of one sequence, or of the prefix that a set of
sequences has in common. A work item is one split for one KV head, for all query heads of its group
and all sequences of the set. An item reads its keys and values once, tile by tile, with the
softmax's running maximum m and sum l:

    s = scale q k^T            m' = max(m, max s)        p = exp(s - m')
    l = l exp(m - m') + sum p  acc = acc exp(m - m') + p v

The item that finishes a (sequence, KV head) last merges the splits, in their order:

    m = max_j m_j     out = sum_j exp(m_j - m) acc_j / sum_j exp(m_j - m) l_j

Which program takes an item is first come, first served; what it computes is not, and merging has an
order: results repeat bit for bit. They do change with the batch.

NOTE [Why neighbouring items are neighbouring heads]
In vLLM's NHD layout the heads of a token are adjacent in memory; programs that run at the same
time then read the same DRAM pages.

NOTE [What an item waits for]
Beside its tiles an item of some tiles costs 6 us on an H200, all of it latency: loads that depend
on each other before the first key, a count that must be seen after the last, and the merge. So a
split's record names its sequences, what only the end needs is read before the keys, one atomic
both counts an item and takes the next, and a merge reads all heads at once where there are few
splits. 128 sequences of 656 tokens, 8 of each prompt of 512, Qwen3-8B's heads: 38 us that were 48.
Tiles are as fast as they come: with two in flight it took 40, read for eight sequences at a time
48, by two warps a program 44 or more.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from fxrl.kernels.decode_schedule import (
    DecodeAttentionError,
    DecodeSchedule,
    DecodeWorkspace,
    lanes_of,
    made_for,
    members_of,
    record_of,
    schedule_decode,
)
from fxrl.kernels.jit import jit, jit_unspecialized, on_device

_LOG2_E = tl.constexpr(math.log2(math.e))
_E4M3 = torch.float8_e4m3fn
# In which the products of each dtype of caches are: what e4m3 holds, fp16 holds as well.
_PRODUCTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, _E4M3: tl.float16}


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    window: int = 0,
    softcap: float = 0.0,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    schedule: DecodeSchedule | None = None,
) -> Tensor:
    """Attention of each sequence's newest token to all keys in its cache (that token's included).

    Keys that several sequences have in common, in blocks of the same numbers, are read once for as
    many of them as a program has room for. One launch with ``workspace`` and ``schedule``, no wait
    for the device; the grid does not depend on the lengths, so a CUDA graph may replay it with
    others.

    Args:
        q: ``[R, Hq, D]`` bf16, fp16 or e4m3, D contiguous and at most 256.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]``, any strides with D contiguous
            (vLLM's NHD and HND), of ``q``'s dtype or e4m3; Hq is a multiple of Hkv, block_size a
            power of two.
        block_table: ``[>= R, max_blocks]`` int32; ``block_table[r, i]`` holds the block of tokens
            ``i block_size`` to ``(i + 1) block_size - 1`` of sequence r (in range, not checked).
        seq_lens: ``[>= R]`` int32 on the device. 0 reads nothing and gives zeros.
        scale: of q k^T, e.g. ``D ** -0.5``.
        out: ``[R, Hq, D]`` with D contiguous, written and returned; made if None, in bf16 for a
            ``q`` in e4m3.
        window: only the last so many keys (0: all).
        softcap: scores become ``softcap tanh(scores / softcap)`` (0: unchanged).
        q_scale, k_scale, v_scale: what an entry in e4m3 stands for is multiplied with: one float32
            entry each, on the device, read when the kernel runs (None: 1).
        workspace: scratch to reuse; in CUDA graphs it saves a launch.
        schedule: ``schedule_decode`` of these very lengths and tables, which all layers of a step
            may share; made if None, by up to three launches.

    Returns:
        ``out``. Sums are float32; the same arguments on the same GPU give the same bits.

    Raises:
        DecodeAttentionError: for shapes, dtypes, strides or devices other than these.
    """
    if out is None:
        made_in = torch.bfloat16 if q.dtype == _E4M3 else q.dtype
        out = torch.empty(q.shape, dtype=made_in, device=q.device)
    _check(q, k_cache, v_cache, block_table, seq_lens, out, window, softcap)
    rows, q_heads, dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    if rows == 0:
        return out
    if workspace is None:
        workspace = DecodeWorkspace(rows, q_heads, kv_heads, dim, q.device)
    workspace.check(rows, q_heads, kv_heads, dim)
    if schedule is None:
        schedule = schedule_decode(
            q, k_cache, block_table, seq_lens, window=window, workspace=workspace
        )
    elif schedule.made_for != (here := made_for(q, k_cache, block_table, seq_lens, window)):
        raise DecodeAttentionError(
            f"the schedule was made for {schedule.made_for}, this call is {here} (rows, KV heads, "
            "query heads of each, block size, window, addresses of tables and lengths): call "
            "schedule_decode for each kind of layer, once a step"
        )
    group, tuning = q_heads // kv_heads, workspace.tuning
    with on_device(q):
        attend[(workspace.programs,)](
            q, k_cache, v_cache, block_table, out,
            schedule.splits, schedule.work, schedule.slots,
            workspace.partial, workspace.arrived, rows, float(scale), q_scale, k_scale, v_scale,
            q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
            block_table.stride(0), out.stride(0), out.stride(1),
            softcap=float(softcap), product=_PRODUCTS[k_cache.dtype],
            kv_heads=kv_heads, group=group,
            lanes=lanes_of(group), members=members_of(group), head_dim=dim,
            dim_padded=max(16, triton.next_power_of_2(dim)), block_size=block_size,
            tile=tuning.tile, record=record_of(group), stages=tuning.stages,
            early=tuning.early, num_warps=tuning.warps, launch_pdl=tuning.early,
        )  # fmt: skip
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    window: int,
    softcap: float,
) -> None:
    if q.dim() != 3 or q.dtype not in _PRODUCTS or not 1 <= q.shape[2] <= 256:
        raise DecodeAttentionError(
            f"q {tuple(q.shape)} {q.dtype}: must be [R, Hq, D <= 256] of {(*_PRODUCTS,)}"
        )
    if window < 0 or softcap < 0:
        raise DecodeAttentionError(f"window={window}, softcap={softcap}: must be at least 0")
    _check_cache("k_cache", k_cache, q, k_cache)
    _check_cache("v_cache", v_cache, q, k_cache)
    if out.shape != q.shape:
        raise DecodeAttentionError(f"out {tuple(out.shape)}: must be {tuple(q.shape)}, as q")
    for name, index, dims in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
        if index.dim() != dims or index.dtype != torch.int32 or index.shape[0] < q.shape[0]:
            raise DecodeAttentionError(
                f"{name} {tuple(index.shape)} {index.dtype}: must be int32 with {q.shape[0]} rows"
            )
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out}
    named |= {"block_table": block_table, "seq_lens": seq_lens}
    for name, tensor in named.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise DecodeAttentionError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension: must be 1"
            )
        if tensor.device != q.device:
            raise DecodeAttentionError(f"{name} is on {tensor.device}, q on {q.device}")


def _check_cache(name: str, cache: Tensor, q: Tensor, k_cache: Tensor) -> None:
    what = f"{name} {tuple(cache.shape)} {cache.dtype}"
    if cache.dim() != 4 or cache.shape[3] != q.shape[2] or cache.shape != k_cache.shape:
        raise DecodeAttentionError(f"{what}: must be [num_blocks, block_size, Hkv, {q.shape[2]}]")
    if cache.dtype not in (q.dtype, _E4M3) or cache.dtype != k_cache.dtype:
        raise DecodeAttentionError(f"{what}: must be {q.dtype}, as q, or both caches {_E4M3}")
    if q.shape[1] % cache.shape[2]:
        raise DecodeAttentionError(f"{what}: {q.shape[1]} query heads are no multiple of its heads")
    if cache.shape[1] & (cache.shape[1] - 1):
        raise DecodeAttentionError(f"{what}: the block size must be a power of two")


# -- the kernel


@jit_unspecialized("rows")
def attend(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    out: tl.tensor,
    splits: tl.tensor,
    work: tl.tensor,
    slots: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    q_scale: tl.tensor | None,
    k_scale: tl.tensor | None,
    v_scale: tl.tensor | None,
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
    product: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    lanes: tl.constexpr,
    members: tl.constexpr,
    head_dim: tl.constexpr,
    dim_padded: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    record: tl.constexpr,
    stages: tl.constexpr,
    early: tl.constexpr,
) -> None:
    """One program: its share of the items."""
    if early:
        gdc_wait()
    items = tl.load(splits) * kv_heads
    # A lane is one query head of one sequence of the item's.
    lane = tl.arange(0, lanes)
    member = lane // group
    d = tl.arange(0, dim_padded)
    # Scores in bits, so that exp2 serves: the softcap is applied before, to what it caps.
    factor = times(times(scale, q_scale), k_scale)
    if softcap == 0.0:
        factor = factor * _LOG2_E

    # arrived: [0] how many items were taken beyond the first of each program; [1:] finished splits
    programs = tl.num_programs(0)
    counter = tl.arange(0, 2 * triton.next_power_of_2(members))  # one a sequence, then the taken
    item = tl.program_id(0)
    size, nth, low, high, row = split_of(work, item // kv_heads, record)
    while item < items:
        head = item % kv_heads
        table = block_table + row.to(tl.int64) * table_row
        sequences = work + item // kv_heads * record + 4
        live = member < size
        sequence = tl.load(sequences + member, mask=live, other=0)
        heads = head * group + lane % group
        valid = live[:, None] & (d < head_dim)[None, :]
        query = tl.load(
            q + sequence.to(tl.int64)[:, None] * q_row + heads[:, None] * q_head + d[None, :],
            mask=valid, other=0.0,
        ).to(product)  # fmt: skip
        # What the end needs; see NOTE [What an item waits for].
        results = tl.load(slots + rows + row)
        slot = tl.load(slots + sequence, mask=live, other=0) + nth
        owns = counter < size
        owner = tl.load(sequences + counter, mask=owns, other=0)
        first = tl.load(slots + owner, mask=owns, other=0)
        count = tl.load(slots + rows + owner, mask=owns, other=0)
        m, l, acc = read_keys(  # noqa: E741
            query, k_cache + head * k_head, v_cache + head * v_head, table, low, high, factor,
            k_block, k_token, v_block, v_token,
            softcap, product, head_dim, block_size, tile, stages,
        )  # fmt: skip
        acc = times(acc, v_scale)

        # partial: [slots of all sequences, kv_heads, group, dim_padded + 2]
        width: tl.constexpr = dim_padded + 2
        alone = (size == 1) & (results == 1)
        if alone:
            target = out + row.to(tl.int64) * out_row + heads[:, None] * out_head + d[None, :]
            result = acc * (1.0 / tl.where(l == 0.0, 1.0, l))[:, None]
            tl.store(target, result.to(out.dtype.element_ty), mask=valid)
        else:
            mine = partial + (slot * kv_heads + head).to(tl.int64) * (group * width)
            mine += lane % group * width
            tl.store(mine[:, None] + d[None, :], acc, mask=valid)
            tl.store(mine + dim_padded, m, mask=live)
            tl.store(mine + dim_padded + 1, l, mask=live)

        counts = counter < tl.where(alone, 0, size)
        takes = counter == tl.where(items > programs, members, -1)
        tl.debug_barrier()  # all threads' stores, then the count that publishes them
        place = tl.where(counter == members, 0, 1 + owner * kv_heads + head)
        before = tl.atomic_add(arrived + place, 1, mask=counts | takes, sem="acq_rel")
        last = counts & (before == count - 1)
        ended, of_head, item = size, head, items
        if items > programs:
            taken = tl.sum(tl.where(takes, before, 0), 0)
            if taken == items - 1:  # the last to ask: items - programs got one, programs did not
                tl.store(arrived, 0)
            item = programs + taken
        size, nth, low, high, row = split_of(work, item // kv_heads, record)

        for i in range(ended):
            this = last & (counter == i)
            if tl.max(this.to(tl.int32), 0) > 0:
                tl.debug_barrier()
                sequence_of = tl.sum(tl.where(this, owner, 0), 0)
                start = tl.sum(tl.where(this, first, 0), 0) * kv_heads + of_head
                merge_group(
                    partial + start.to(tl.int64) * (group * width),
                    tl.sum(tl.where(this, count, 0), 0),
                    out + sequence_of.to(tl.int64) * out_row + of_head * group * out_head,
                    out_head, kv_heads, group, head_dim, dim_padded,
                )  # fmt: skip
                tl.store(arrived + 1 + sequence_of * kv_heads + of_head, 0)


@jit
def read_keys(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    factor: tl.tensor,
    k_block: tl.tensor,
    k_token: tl.tensor,
    v_block: tl.tensor,
    v_token: tl.tensor,
    softcap: tl.constexpr,
    product: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
) -> tl.tensor:
    """One KV head's keys and values from ``low`` to ``high``: m, l and acc of each lane. Tiles lie
    at multiples of their size, so that one is in one block of the cache or fills several."""
    lanes: tl.constexpr = query.shape[0]
    d = tl.arange(0, query.shape[1])
    within = tl.arange(0, tile) % block_size
    k_offset = within[:, None] * k_token + d[None, :]
    v_offset = within[:, None] * v_token + d[None, :]
    m = tl.full([lanes], float("-inf"), tl.float32)
    l = tl.zeros([lanes], tl.float32)  # noqa: E741
    acc = tl.zeros([lanes, query.shape[1]], tl.float32)
    begin = low // tile * tile
    block = block_of(table, begin, high, tile, block_size)
    for t in tl.range(begin, high, tile, num_stages=stages):
        n = t + tl.arange(0, tile)
        live = (n >= low) & (n < high)
        inside = live[:, None] & (d < head_dim)[None, :]
        at = t % block_size
        here = block.to(tl.int64)
        k = tl.load(k_cache + (here * k_block + at * k_token) + k_offset, mask=inside, other=0.0)
        v = tl.load(v_cache + (here * v_block + at * v_token) + v_offset, mask=inside, other=0.0)
        block = block_of(table, t + tile, high, tile, block_size)
        s = tl.dot(query, tl.trans(k.to(product))) * factor
        if softcap != 0.0:
            s = (softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * _LOG2_E / softcap)) + 1.0)) * _LOG2_E
        s = tl.where(live[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))  # finite: a tile has at least one key
        p = tl.exp2(s - m_new[:, None])
        decay = tl.exp2(m - m_new)
        l = l * decay + tl.sum(p, 1)  # noqa: E741
        acc = acc * decay[:, None] + tl.dot(p.to(product), v.to(product))
        m = m_new
    return m, l, acc


@jit
def block_of(
    table: tl.tensor, t: tl.tensor, high: tl.tensor, tile: tl.constexpr, block_size: tl.constexpr
) -> tl.tensor:
    """The cache's block that holds the tile at ``t``, or ``[tile, 1]`` of them for smaller blocks;
    read a tile ahead, as the address of what is read next depends on it."""
    if tile <= block_size:
        return tl.load(table + t // block_size, mask=t < high, other=0)
    else:
        n = t + tl.arange(0, tile)
        return tl.load(table + n // block_size, mask=n < high, other=0)[:, None]


@jit
def times(a: tl.tensor, scale: tl.tensor | None) -> tl.tensor:
    """``a`` times the entry that ``scale`` points to, if there is one."""
    if scale is not None:
        a = a * tl.load(scale)
    return a


# -- handing out and merging its work


@jit
def split_of(work: tl.tensor, number: tl.tensor, record: tl.constexpr) -> tl.tensor:
    """What ``DecodeSchedule.work`` says of a split; it is read before whether there is such a one
    is known, as the one takes as long as the other."""
    here = work + number * record
    return (
        tl.load(here), tl.load(here + 1), tl.load(here + 2), tl.load(here + 3), tl.load(here + 4),
    )  # fmt: skip


@jit
def merge_group(
    partial: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    out_head: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_padded: tl.constexpr,
) -> None:
    """All query heads of one (sequence, KV head), whose first split is at ``partial``: together
    where there are few splits, else one after another, with as many loads in flight."""
    heads: tl.constexpr = triton.next_power_of_2(group)
    if count <= 16:
        merge_heads(
            partial, count, out, out_head, tl.arange(0, heads), max(1, 16 // heads),
            kv_heads, group, head_dim, dim_padded,
        )  # fmt: skip
    else:
        for i in range(group):
            merge_heads(
                partial, count, out, out_head, i + tl.arange(0, 1), 32,
                kv_heads, group, head_dim, dim_padded,
            )  # fmt: skip


@jit
def merge_heads(
    partial: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    out_head: tl.tensor,
    head: tl.tensor,
    chunk: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_padded: tl.constexpr,
) -> None:
    """These query heads' ``count`` splits, ``chunk`` at a time: loads in flight together."""
    width: tl.constexpr = dim_padded + 2
    d = tl.arange(0, dim_padded)
    m = tl.full([head.shape[0]], float("-inf"), tl.float32)
    l = tl.zeros([head.shape[0]], tl.float32)  # noqa: E741
    acc = tl.zeros([head.shape[0], dim_padded], tl.float32)
    for j in range(0, count, chunk):
        split = j + tl.arange(0, chunk)
        here = partial + split.to(tl.int64)[:, None] * (kv_heads * group * width)
        here += head[None, :] * width
        live = (split < count)[:, None] & (head < group)[None, :]
        m_j = tl.load(here + dim_padded, mask=live, other=float("-inf"), cache_modifier=".cg")
        l_j = tl.load(here + dim_padded + 1, mask=live, other=0.0, cache_modifier=".cg")
        a_j = tl.load(
            here[:, :, None] + d[None, None, :],
            mask=live[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(m_j, 0))
        weight = tl.exp2(m_j - m_new[None, :])
        decay = tl.exp2(m - m_new)
        l = l * decay + tl.sum(weight * l_j, 0)  # noqa: E741
        acc = acc * decay[:, None] + tl.sum(weight[:, :, None] * a_j, 0)
        m = m_new
    valid = (head < group)[:, None] & (d < head_dim)[None, :]
    target = out + head[:, None] * out_head + d[None, :]
    tl.store(target, (acc / l[:, None]).to(out.dtype.element_ty), mask=valid)
