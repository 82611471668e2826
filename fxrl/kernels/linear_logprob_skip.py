"""The head's second product over the blocks of the vocabulary that cannot be left out.

``U = e W`` with ``e [R, V]`` nonnegative, p_v = e_v * factor of the row. For 128 rows at a time,
``choose_blocks`` lists the blocks of 256 entries that some row needs (see
``fxrl.ops.linear_logprob_skip``: why that is bounded), and ``listed_product`` multiplies those.

NOTE [Why a level and not a sorted list]
The reference takes blocks in the order of their largest share until a row's budget is spent.
Sorting is slow where the masses are, but the order only matters through the level at which it
stops, and the level is found by halving the interval of its logarithm. Every row's sum is checked
at each level, so a coarse level leaves out less and never too much. The lowest level, a share of
1 / (number of blocks), always fits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxrl.kernels.jit import jit
from fxrl.ops.linear_logprob_skip import BLOCK_ROWS, BLOCK_VOCAB

_HALVINGS = 8  # of at most 12 octaves: the level is at most 3 % below the best
_ROWS_AT_ONCE = 8  # of the masses that one program holds in registers
_TILE_WIDTH = 256
_TILE_DEPTH = 128  # bytes
_MAX_PARTS = 8


class KeptBlocks(NamedTuple):
    """Per group of 128 rows: ``listed [G, B]`` int32 in order, ``length [G]`` of them."""

    listed: Tensor
    length: Tensor

    def share(self) -> float:
        """How much of all blocks is kept; read back from the device."""
        return float(self.length.sum()) / max(1, self.listed.numel())


def kept_blocks(masses: Tensor, budget: Tensor) -> KeptBlocks:
    """The blocks without which some row of a group would lose more than its budget.

    Args:
        masses: ``[R, B]`` float32, each row's sums over its blocks, the last of which may be short.
        budget: ``[R]`` float32, the mass that a row may lose, in the unit of ``masses``.
    """
    rows, blocks = masses.shape
    groups = triton.cdiv(rows, BLOCK_ROWS)
    listed = torch.empty(groups, blocks, dtype=torch.int32, device=masses.device)
    length = torch.empty(groups, dtype=torch.int32, device=masses.device)
    if groups:
        choose_blocks[(groups,)](
            masses,
            budget,
            listed,
            length,
            rows,
            blocks,
            masses.stride(0),
            masses.stride(1),
            budget.stride(0),
            octaves=max(1, math.ceil(math.log2(blocks))),
            halvings=_HALVINGS,
            group_rows=BLOCK_ROWS,
            rows_at_once=_ROWS_AT_ONCE,
            padded=triton.next_power_of_2(blocks),
            num_warps=8,
        )
    return KeptBlocks(listed, length)


def skipping_product(
    e: Tensor, weight: Tensor, masses: Tensor, budget: Tensor, *, parts: int | None = None
) -> Tensor:
    """``e [R, V] @ weight [V, H]`` over the kept blocks, as float32 ``[R, H]``; deterministic.

    Args:
        e: ``weight``'s dtype, 0 at the target, contiguous along V; rows may be strided.
        weight: contiguous along H.
        masses: ``[R, ceil(V / 256)]`` float32, sums of the exact ``e`` over blocks.
        budget: ``[R]`` float32, what a row may lose of them.
        parts: a tile's list of blocks is shared by so many programs, whose sums are added in
            order; by default as many as fill the device.
    """
    return product_of_kept(e, weight, kept_blocks(masses, budget), parts=parts)


def product_of_kept(
    e: Tensor, weight: Tensor, kept: KeptBlocks, *, parts: int | None = None
) -> Tensor:
    """``skipping_product`` for blocks that are chosen already."""
    (rows, vocab), width = e.shape, weight.shape[1]
    groups, tiles = kept.length.shape[0], triton.cdiv(width, _TILE_WIDTH)
    if parts is None:
        parts = _parts(groups * tiles, e.device)
    partial = e.new_empty(parts, rows, width, dtype=torch.float32)
    if groups:
        listed_product[(tiles, parts, groups)](
            e,
            weight,
            kept.listed,
            kept.length,
            partial,
            rows,
            vocab,
            width,
            kept.listed.stride(0),
            e.stride(0),
            weight.stride(0),
            parts=parts,
            block_vocab=BLOCK_VOCAB,
            tile_rows=BLOCK_ROWS,
            tile_width=min(_TILE_WIDTH, max(16, triton.next_power_of_2(width))),
            tile_depth=_TILE_DEPTH // e.element_size(),
            num_warps=8,
            stages=3,
        )
    return partial[0] if parts == 1 else partial.sum(0)


def _parts(tiles: int, device: torch.device) -> int:
    """Programs per tile: two rounds over the device even out lists of different lengths."""
    if device.type != "cuda" or tiles == 0:
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(_MAX_PARTS, max(1, 2 * processors // tiles))


@jit
def choose_blocks(
    masses: tl.tensor,
    budget: tl.tensor,
    listed: tl.tensor,
    length: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    budget_stride: tl.tensor,
    octaves: tl.constexpr,
    halvings: tl.constexpr,
    group_rows: tl.constexpr,
    rows_at_once: tl.constexpr,
    padded: tl.constexpr,
) -> None:
    """One program per group of rows; see the module's docstring for the result."""
    group = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, padded)
    share = tl.zeros([padded], tl.float32)
    for start in range(0, group_rows, rows_at_once):
        row = group * group_rows + start + tl.arange(0, rows_at_once)
        inside = (row < rows)[:, None] & (block < blocks)[None, :]
        at = row[:, None] * row_stride + block[None, :].to(tl.int64) * block_stride
        mass = tl.load(masses + at, mask=inside, other=0.0)
        allowed = tl.load(budget + row * budget_stride, mask=row < rows, other=0.0)[:, None]
        # No NaN survives: what cannot be weighed is kept.
        spent = tl.where((mass > 0.0) & (allowed > 0.0), mass / allowed, float("inf"))
        spent = tl.where(spent == spent, spent, float("inf"))
        share = tl.maximum(share, tl.max(tl.where(mass == 0.0, 0.0, spent), 0))
    share = tl.where(block < blocks, share, float("inf"))

    # 2^-fits is a level at which every row keeps within its budget, 2^-fails may be none.
    fails = 0.0
    fits = octaves * 1.0
    for _ in range(halvings):
        middle = 0.5 * (fails + fits)
        small = share <= tl.exp2(-middle)
        over = 0
        for start in range(0, group_rows, rows_at_once):
            row = group * group_rows + start + tl.arange(0, rows_at_once)
            inside = (row < rows)[:, None] & (small & (block < blocks))[None, :]
            at = row[:, None] * row_stride + block[None, :].to(tl.int64) * block_stride
            lost = tl.sum(tl.load(masses + at, mask=inside, other=0.0), 1)
            allowed = tl.load(budget + row * budget_stride, mask=row < rows, other=0.0)
            over += tl.sum(tl.where(lost > allowed, 1, 0), 0)
        fails = tl.where(over > 0, middle, fails)
        fits = tl.where(over > 0, fits, middle)

    kept = ((share > tl.exp2(-fits)) & (block < blocks)).to(tl.int32)
    place = tl.cumsum(kept, 0) - 1
    tl.store(listed + group * blocks + place, block, mask=kept != 0)
    tl.store(length + group, tl.sum(kept, 0))


@jit
def listed_product(
    e: tl.tensor,
    weight: tl.tensor,
    listed: tl.tensor,
    length: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    vocab: tl.tensor,
    width: tl.tensor,
    listed_stride: tl.tensor,
    e_stride: tl.tensor,
    weight_stride: tl.tensor,
    parts: tl.constexpr,
    block_vocab: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_width: tl.constexpr,
    tile_depth: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """``partial[part]`` = e @ weight over the part's share of the group's list."""
    part = tl.program_id(1)
    group = tl.program_id(2).to(tl.int64)
    row = group * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(0) * tile_width + tl.arange(0, tile_width)
    count = tl.load(length + group)
    first, last = count * part // parts, count * (part + 1) // parts
    steps: tl.constexpr = block_vocab // tile_depth

    total = tl.zeros([tile_rows, tile_width], tl.float32)
    for step in tl.range(first * steps, last * steps, num_stages=stages):
        block = tl.load(listed + group * listed_stride + step // steps)
        entry = block * block_vocab + (step % steps) * tile_depth + tl.arange(0, tile_depth)
        left = tl.load(
            e + row[:, None] * e_stride + entry[None, :],
            mask=(row < rows)[:, None] & (entry < vocab)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + entry[:, None].to(tl.int64) * weight_stride + column[None, :],
            mask=(entry < vocab)[:, None] & (column < width)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")

    out = partial + (part * tl.cast(rows, tl.int64) + row[:, None]) * width + column[None, :]
    tl.store(out, total, mask=(row < rows)[:, None] & (column < width)[None, :])
