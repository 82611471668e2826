"""Which keys each program of ``decode_attention`` reads: the work list of a decode step.

1. ``find_prefixes``: of each sequence, how many of its leading blocks another one has as well, at
   most, and the first sequence that has them. A cache that shares prefixes (vLLM's) keeps a prompt
   once, and the block tables of its completions begin alike.
2. ``join_sets``: sequences whose longest common prefix is the same are cut into sets of up to
   ``members``, as many as a program has lanes for; a set reads its prefix once. Two prompts that
   begin alike (by a chat template) each keep sets of their own: the longest prefix decides.
3. ``cut_work``: a set's prefix and the rest of each sequence are cut into splits of about the same
   number of tiles. A split for one KV head is a work item.

NOTE [Why the work list is made on the device]
A CUDA graph freezes the grid, and lengths change at each replay. So a fixed number of programs
works off a list that is made from the lengths: a split has all tiles over the number of programs,
so that each gets one, or a fraction of that where there is much to do. That bounds the splits
(``DecodeWorkspace.further_splits``), whatever the lengths: the scratch is fixed too. The list holds
for all layers of a step, so none of its arithmetic is in a layer's attention.

NOTE [Why blocks are compared, not their contents or hashes]
Equal block numbers are equal memory: reading another sequence's is exact by construction, needs
nothing of the scheduler, and follows whatever it does from step to step. 256 tables of prompts of
512 tokens are compared in some microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxrl.errors import FxrlError
from fxrl.kernels.jit import jit, jit_unspecialized, on_device

_WARP = 32
"""Fewer rows are padded to a warp, and one kernel serves them all: vLLM makes a CUDA graph for each
of 1, 2, 4, 8, 16, 24 and 32, for which a compilation of its own took 1.6 s on an H200's host."""
_INTERPRETED_PROCESSORS = 3  # on the CPU, where Triton's interpreter stands in for the device
_COMPARED = 4096  # block numbers that a program of find_prefixes compares at a time


class DecodeAttentionError(FxrlError, ValueError):
    """An argument of ``decode_attention`` does not fit; the message says which and the cure."""


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How the work is cut; results depend on it in their last bits only.

    tile: keys of one step, a power of two of at least 16.
    warps, stages: of a program, and of its loop over tiles.
    programs_per_sm: the grid is this times the number of multiprocessors.
    min_tiles: a split, and a prefix that is read for several, has at least so many tiles, or
        merging would cost more than it saves.
    slack: by how many percent a split may grow so that each program has one item.
    max_tiles, rounds: a program whose share is above ``max_tiles`` gets it in up to ``rounds``
        items; the programs that are done first take what is left.
    early: launch while the kernel ahead in the stream ends (needs compute capability 9).
    """

    tile: int = 16
    warps: int = 1
    stages: int = 2
    programs_per_sm: int = 8
    min_tiles: int = 4
    slack: int = 100
    max_tiles: int = 64
    rounds: int = 4
    early: bool = False


def lanes_of(group: int) -> int:
    """Query vectors of a program for ``group`` query heads a KV head: a tensor core takes 16, and
    what the heads of one sequence leave free is for others of its set."""
    return max(16, int(triton.next_power_of_2(group)))


def members_of(group: int) -> int:
    """Most sequences of a set: as many as have lanes for all their heads."""
    return lanes_of(group) // group


def record_of(group: int) -> int:
    """int32 of a split in ``DecodeSchedule.work``: four, its sequences, and padding to a sector."""
    return -(-(4 + members_of(group)) // 8) * 8


def default_tuning(group: int, head_dim: int, device: torch.device) -> DecodeTuning:
    """What measured best on an H200 for 2 query heads a KV head of 128; others scale its registers.

    NOTE [Why a program is one warp]
    It never waits for another warp, and while one of a multiprocessor's eight starts or ends, seven
    have loads in flight. Two programs of four warps and 64 keys are 3 % faster where 32 sequences
    are equally long and 35 % slower where they are not: there are too few to share odd lengths.
    """
    width = max(16, triton.next_power_of_2(head_dim))
    warps = max(1, lanes_of(group) * width // 2048)
    tile = max(16, 2048 // width)
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return DecodeTuning(
        tile=tile,
        warps=min(8, warps),
        programs_per_sm=max(1, 8 // warps),
        min_tiles=max(1, 64 // tile),
        max_tiles=1024 // tile,
        early=early,
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecodeSchedule:
    """The work list of a step, int32 on the device. ``made_for`` is what it fits: rows, KV
    heads, query heads of each, block size, window, and where tables and lengths are.

    splits: ``[1]``, how many there are.
    work: ``[most splits, record_of(group)]``: for how many sequences a split is read (1, or a set's
        size), which of their partial results it makes, its keys' first position and end, and the
        sequences, of which the first one's block table is read.
    slots: ``[2, R]``: the place of a sequence's first partial result, and how many it has.
    """

    made_for: tuple[int, ...]
    splits: Tensor
    work: Tensor
    slots: Tensor


class DecodeWorkspace:
    """Scratch of ``decode_attention``, which calls on one stream may share, of any CUDA graph.

    ``arrived`` counts what is taken and finished; it is zero between calls, as the last one to
    count resets it.
    """

    def __init__(
        self,
        rows: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        tuning: DecodeTuning | None = None,
    ) -> None:
        """For batches of up to ``rows`` with these heads (fewer heads of less width fit too)."""
        self.tuning = tuning or default_tuning(q_heads // kv_heads, head_dim, device)
        processors = _INTERPRETED_PROCESSORS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.programs = processors * self.tuning.programs_per_sm
        floats = self._floats(rows, q_heads, kv_heads, head_dim)
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1 + rows * kv_heads, dtype=torch.int32, device=device)

    def further_splits(self, kv_heads: int) -> int:
        """How many splits there may be beyond one for each sequence and set, whatever the lengths:
        ``rounds`` for each program."""
        return -(-self.programs * self.tuning.rounds // kv_heads)

    def _floats(self, rows: int, q_heads: int, kv_heads: int, head_dim: int) -> int:
        # A sequence has one partial result of its own and one of its set, and a split makes one for
        # each sequence that it is read for.
        slots = 2 * rows + members_of(q_heads // kv_heads) * self.further_splits(kv_heads)
        width = int(triton.next_power_of_2(head_dim)) + 2  # accumulator, maximum and sum
        return slots * q_heads * width

    def check(self, rows: int, q_heads: int, kv_heads: int, head_dim: int) -> None:
        """DecodeAttentionError if a call of this size does not fit."""
        fits = self._floats(rows, q_heads, kv_heads, head_dim) <= self.partial.numel()
        if not fits or rows * kv_heads >= self.arrived.numel():
            raise DecodeAttentionError(
                f"{rows} rows of {q_heads} query and {kv_heads} KV heads of {head_dim} do not fit "
                "the workspace: make it for the largest batch and head count"
            )


def schedule_decode(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    window: int = 0,
    workspace: DecodeWorkspace,
) -> DecodeSchedule:
    """The work list of ``decode_attention`` with these arguments, of which only the shapes of ``q``
    and ``k_cache`` count; up to three launches, no wait. It holds until lengths or tables change.
    """
    rows, q_heads, _ = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    group, tuning = q_heads // kv_heads, workspace.tuning
    members = members_of(group)
    share = members > 1 and rows > 1 and window == 0
    padded = max(_WARP, triton.next_power_of_2(rows))
    empty = partial(torch.empty, dtype=torch.int32, device=seq_lens.device)
    # Each is aligned, whatever ``rows`` is: Triton compiles anew for a pointer that is not. A
    # program reads the split behind the last one.
    most = rows + rows // 2 + workspace.further_splits(kv_heads)
    work, splits = empty(most + 1, record_of(group)), empty(1)
    roster, slots = empty(rows, members), empty(2, rows)
    depth, first, leader, shared, led = empty(5, padded)
    warps = min(8, max(1, padded // 64))
    with on_device(seq_lens):
        if share:
            find_prefixes[(rows,)](
                block_table, seq_lens, depth, first, rows, block_table.stride(0),
                block_size=block_size, rows_padded=padded, columns=max(1, _COMPARED // padded),
                num_warps=4,
            )  # fmt: skip
            join_sets[(rows,)](
                depth, first, leader, shared, led, roster, rows, tuning.min_tiles * tuning.tile,
                members=members, block_size=block_size, rows_padded=padded, num_warps=1,
            )  # fmt: skip
        cut_work[(1,)](
            seq_lens, leader, shared, led, roster, splits, work, slots, first, rows,
            rows if share else 0, workspace.programs,
            tuning.min_tiles, tuning.slack, tuning.max_tiles, tuning.rounds,
            window=window, kv_heads=kv_heads, members=members, tile=tuning.tile,
            record=record_of(group), rows_padded=padded, num_warps=warps,
        )  # fmt: skip
    fits = made_for(q, k_cache, block_table, seq_lens, window)
    return DecodeSchedule(fits, splits, work, slots)


def made_for(
    q: Tensor, k_cache: Tensor, block_table: Tensor, seq_lens: Tensor, window: int
) -> tuple[int, ...]:
    """What a schedule fits; see ``DecodeSchedule``."""
    rows, q_heads, _ = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    addresses = block_table.data_ptr(), seq_lens.data_ptr()
    return rows, kv_heads, q_heads // kv_heads, block_size, window, *addresses


@jit_unspecialized("rows")
def find_prefixes(
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    depth: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    table_row: tl.tensor,
    block_size: tl.constexpr,
    rows_padded: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Of one sequence: how many leading full blocks it has in common with another, at most, and
    the first sequence that has those."""
    row = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, rows_padded)
    c = tl.arange(0, columns)
    mine = tl.load(seq_lens + row) // block_size
    full = tl.minimum(tl.load(seq_lens + r, mask=r < rows, other=0) // block_size, mine)
    others = (r < rows) & (r != row)
    common = tl.zeros([rows_padded], tl.int32)
    at = 0
    while at < mine:
        block = at + c
        own = tl.load(block_table + row * table_row + block, mask=block < mine, other=-1)
        alike = others & (common == at)
        theirs = tl.load(
            block_table + r.to(tl.int64)[:, None] * table_row + block[None, :],
            mask=alike[:, None] & (block[None, :] < full[:, None]), other=-2,
        )  # fmt: skip
        same = tl.min(tl.where(theirs == own[None, :], columns, c[None, :]), 1)
        common = tl.where(alike, at + same, common)
        at += columns
        at = tl.where(tl.max(common, 0) == at, at, mine)  # nobody is alike so far: the end
    deepest = tl.max(common, 0)
    tl.store(depth + row, deepest)
    tl.store(first + row, tl.min(tl.where((common == deepest) | (r == row), r, rows_padded), 0))


@jit_unspecialized("rows")
def join_sets(
    depth: tl.tensor,
    first: tl.tensor,
    leader: tl.tensor,
    shared: tl.tensor,
    led: tl.tensor,
    roster: tl.tensor,
    rows: tl.tensor,
    least: tl.tensor,
    members: tl.constexpr,
    block_size: tl.constexpr,
    rows_padded: tl.constexpr,
) -> None:
    """Of one sequence: its set's first sequence, the tokens that it has read with the set, and the
    size of the set that it leads itself (0: none).

    Sequences with equal ``depth`` and ``first`` have that many blocks in common: each has them in
    common with ``first``.
    """
    row = tl.program_id(0)
    r = tl.arange(0, rows_padded)
    blocks = tl.load(depth + row)
    alike = tl.load(depth + r, mask=r < rows, other=-1) == blocks
    alike &= tl.load(first + r, mask=r < rows, other=-1) == tl.load(first + row)
    place = tl.sum((alike & (r < row)).to(tl.int32), 0)
    start = place // members * members
    number = tl.cumsum(alike.to(tl.int32), 0) - 1
    leads = tl.min(tl.where(alike & (number == start), r, rows_padded), 0)
    size = tl.minimum(tl.sum(alike.to(tl.int32), 0) - start, members)
    together = (size > 1) & (blocks * block_size >= least)
    tl.store(leader + row, leads)
    tl.store(shared + row, tl.where(together, blocks * block_size, 0))
    tl.store(led + row, tl.where(together & (place == start), size, 0))
    if together:
        tl.store(roster + leads * members + place - start, row)


@jit_unspecialized("rows", "sharing")
def cut_work(
    seq_lens: tl.tensor,
    leader: tl.tensor,
    shared: tl.tensor,
    led: tl.tensor,
    roster: tl.tensor,
    total: tl.tensor,
    work: tl.tensor,
    slots: tl.tensor,
    scratch: tl.tensor,
    rows: tl.tensor,
    sharing: tl.tensor,
    programs: tl.tensor,
    min_tiles: tl.tensor,
    slack: tl.tensor,
    max_tiles: tl.tensor,
    rounds: tl.tensor,
    window: tl.constexpr,
    kv_heads: tl.constexpr,
    members: tl.constexpr,
    tile: tl.constexpr,
    record: tl.constexpr,
    rows_padded: tl.constexpr,
) -> None:
    """The splits of all sets' prefixes, then those of all sequences' rests. ``sharing``: how many
    rows have been through ``join_sets``, all or none."""
    x = tl.arange(0, 2 * rows_padded)
    rest = x >= rows_padded
    row = x % rows_padded
    length = tl.load(seq_lens + row, mask=row < rows, other=0)
    common = tl.load(shared + row, mask=row < sharing, other=0)
    size = tl.where(rest, 1, tl.load(led + row, mask=row < sharing, other=0))
    real = (row < rows) & (size > 0)
    start = tl.where(rest, common, 0)
    if window > 0:
        start = tl.maximum(length - window, 0)
    stop = tl.where(rest, length, common)
    base = start // tile * tile  # a tile lies in one block of the cache, or fills several
    tiles = tl.where(real, (stop - base + tile - 1) // tile, 0)
    splits = splits_of_rows(tiles, real, programs, kv_heads, min_tiles, slack, max_tiles, rounds)
    ends = tl.cumsum(splits, 0)
    tl.store(total, tl.sum(splits, 0))

    # A sequence's partial results: of its set's splits, then of its own.
    tl.store(scratch + row, splits, mask=(row < sharing) & (x < rows_padded))
    tl.debug_barrier()
    joined = rest & (common > 0)
    before = tl.load(scratch + tl.load(leader + row, mask=joined, other=0), mask=joined, other=0)
    results = tl.where(rest, splits + before, 0)
    tl.store(slots + row, tl.cumsum(results, 0) - results, mask=real & rest)
    tl.store(slots + rows + row, results, mask=real & rest)

    step = (tiles + splits - 1) // tl.maximum(splits, 1) * tile
    for j in range(tl.max(splits, 0)):
        write_split(
            work + (ends - splits + j) * record, j < splits, size, before + j,
            tl.maximum(base + j * step, start), tl.minimum(base + (j + 1) * step, stop),
            row, roster, members,
        )  # fmt: skip


@jit
def write_split(
    here: tl.tensor,
    live: tl.tensor,
    size: tl.tensor,
    nth: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    row: tl.tensor,
    roster: tl.tensor,
    members: tl.constexpr,
) -> None:
    """A split of each row that has one more; see ``DecodeSchedule.work``."""
    tl.store(here, size, mask=live)
    tl.store(here + 1, nth, mask=live)
    tl.store(here + 2, low, mask=live)
    tl.store(here + 3, high, mask=live)
    tl.store(here + 4, row, mask=live)
    for i in tl.static_range(1, members):
        joins = live & (i < size)
        tl.store(here + 4 + i, tl.load(roster + row * members + i, mask=joins), mask=joins)


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
    """Into how many splits each is cut; see NOTE [Why the work list is made on the device].

    An empty sequence (a row that pads a graph's batch) has one split: it writes zeros.
    """
    least = real.to(tl.int32)
    even = tl.maximum((tl.sum(tiles, 0) * kv_heads + programs - 1) // programs, min_tiles)
    if (even > max_tiles) | (tl.sum(least, 0) * kv_heads > programs):
        parts = tl.minimum((even + max_tiles - 1) // max_tiles, rounds)
        size = (even + parts - 1) // parts
        splits = (tiles + size // 2) // size  # the next item makes up for a longer one
    else:  # rounding up may leave a second item for a few: grow until there is one each
        size = even
        for _ in tl.static_range(3):
            items = tl.sum(tl.maximum((tiles + size - 1) // size, least), 0) * kv_heads
            excess = tl.maximum(items - programs, 0)
            size = tl.minimum(
                size + (size * excess + programs - 1) // programs, even + even * slack // 100
            )
        splits = (tiles + size - 1) // size
    return tl.maximum(splits, least)
