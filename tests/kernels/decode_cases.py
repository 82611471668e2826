"""Checks of ``decode_attention`` on any device; as a script, under Triton's interpreter.

The reference is dense float64 attention over the gathered keys. Unused blocks and the unused rest
of used blocks hold NaN, so that reading what must not be read shows.
"""

import dataclasses
import math
import sys
from pathlib import Path

import torch

from fxrl.kernels.decode_attention import decode_attention
from fxrl.kernels.decode_schedule import DecodeTuning, DecodeWorkspace, schedule_decode

sys.path.insert(0, str(Path(__file__).parent))
from interpreted import mend_interpreter


@dataclasses.dataclass
class Case:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    keys: list
    values: list
    scales: dict

    def tensors(self):
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens


def make_case(
    lengths, *, q_heads=4, kv_heads=2, dim=64, block_size=16, dtype=torch.bfloat16,
    layout="NHD", device="cpu", seed=0, prefixes=(), cached=None,
):  # fmt: skip
    """Random keys and values in randomly ordered blocks; block 0 belongs to nobody.

    prefixes: (row, earlier row, blocks): the row begins with so many blocks of the earlier one.
    cached: the cache's dtype, if it is not the query's, ``dtype``; what is in FP8 has a scale.
    """
    cached = dtype if cached is None else cached
    kinds = {"q_scale": dtype, "k_scale": cached, "v_scale": cached}
    scales = {
        name: torch.tensor([0.75 + i / 2], device=device)
        for i, (name, kind) in enumerate(kinds.items())
        if kind.itemsize == 1
    }
    given = {row: (other, blocks) for row, other, blocks in prefixes}
    gen = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    total = sum(counts) + 3
    owned = (torch.randperm(total - 1, generator=gen) + 1).tolist()
    width = max([*counts, 1]) + 2
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    shape = (total, 2, block_size, kv_heads, dim)
    order = (0, 1, 2, 3, 4) if layout == "NHD" else (0, 1, 3, 2, 4)
    memory = torch.full([shape[i] for i in order], math.nan, dtype=torch.float32)
    cache = memory.permute(order)  # both orders are their own inverse
    keys, values = [], []
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        other, begun = given.get(row, (0, 0))
        mine = [*table[other, :begun].tolist(), *(owned.pop() for _ in range(count - begun))]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        pair = torch.randn(2, n, kv_heads, dim, generator=gen).to(cached)
        if begun:
            pair[0, : begun * block_size] = keys[other][: begun * block_size].to(cached)
            pair[1, : begun * block_size] = values[other][: begun * block_size].to(cached)
        for i, block in enumerate(mine):
            part = pair[:, i * block_size : (i + 1) * block_size]
            cache[block, :, : part.shape[1]] = part.float()
        keys.append(pair[0].double())
        values.append(pair[1].double())
    cache = memory.to(device).to(cached).permute(order)
    q = (torch.randn(len(lengths), q_heads, dim, generator=gen) * 2).to(dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    k_cache, v_cache = cache.unbind(1)
    return Case(
        q.to(device), k_cache, v_cache, table.to(device), seq_lens.to(device), keys, values, scales
    )


def reference(case, scale, window=0, softcap=0.0):
    """``[R, Hq, D]`` in float64."""
    q_scale, k_scale, v_scale = (
        case.scales[name].item() if name in case.scales else 1.0
        for name in ("q_scale", "k_scale", "v_scale")
    )
    q = case.q.double().cpu() * q_scale
    out = torch.zeros_like(q)
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        first = max(0, len(keys) - window) if window else 0
        if len(keys) == first:
            continue
        group = q.shape[1] // keys.shape[1]
        k = keys[first:].repeat_interleave(group, 1) * k_scale
        v = values[first:].repeat_interleave(group, 1) * v_scale
        scores = torch.einsum("hd,nhd->hn", q[row], k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return out


def check(case, *, tuning=None, scale=None, window=0, softcap=0.0):
    """Against the reference, twice in a row with one workspace, bit for bit the same."""
    rows, q_heads, dim = case.q.shape
    kv_heads, device = case.k_cache.shape[2], case.q.device
    scale = dim**-0.5 if scale is None else scale
    options = {"window": window, "softcap": softcap, **case.scales}
    space = DecodeWorkspace(rows, q_heads, kv_heads, dim, device, tuning)
    space.partial.fill_(math.nan)
    got = decode_attention(*case.tensors(), scale, workspace=space, **options)
    out = torch.full_like(got, 7.0)
    again = decode_attention(*case.tensors(), scale, out, workspace=space, **options)
    assert again is out
    assert torch.equal(got, again)
    assert not space.arrived.any()
    want = reference(case, scale, window, softcap)
    # Probabilities are rounded to the products' dtype, q's or fp16, before they meet the values,
    # and the result to its own.
    step = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double().cpu(), want, rtol=step, atol=2 * step)
    return got


def reads(case, *, tuning=None, window=0):
    """What the schedule has read: (first key, end, rows that it is read for) of each split."""
    rows, q_heads, dim = case.q.shape
    space = DecodeWorkspace(rows, q_heads, case.k_cache.shape[2], dim, case.q.device, tuning)
    made = schedule_decode(
        case.q, case.k_cache, case.block_table, case.seq_lens, window=window, workspace=space
    )
    work = made.work[: made.splits.item()].tolist()
    return [(low, high, rows[:size]) for size, _, low, high, *rows in work]


def keys_read(case, **options):
    """How many keys are read in all; each row's are read once, by whatever splits."""
    seen = [[] for _ in case.keys]
    total = 0
    for low, high, rows in reads(case, **options):
        total += high - low
        for row in rows:
            seen[row] += range(low, high)
    window = options.get("window") or max(len(k) for k in case.keys)
    for keys, read in zip(case.keys, seen, strict=True):
        assert sorted(read) == list(range(max(0, len(keys) - window), len(keys)))
    return total


#: Rows 0, 1, 3, 7 and 8 begin alike for 6 blocks, 2, 4 and 6 for 4; 5 begins like 0 for one.
FAMILIES = [(1, 0, 6), (3, 0, 6), (4, 2, 4), (5, 0, 1), (6, 4, 4), (7, 0, 6), (8, 3, 6)]
LENGTHS = [130, 96, 70, 100, 64, 40, 65, 97, 111, 0, 5]


def check_prefixes(q_heads, kv_heads, spared, *, dim=64, device="cpu", dtype=torch.float16):
    """``spared``: how many keys are not read again."""
    small = DecodeTuning(stages=1, min_tiles=1)
    case = make_case(
        LENGTHS, q_heads=q_heads, kv_heads=kv_heads, dim=dim, dtype=dtype, prefixes=FAMILIES,
        device=device,
    )  # fmt: skip
    check(case, tuning=small)
    assert sum(LENGTHS) - keys_read(case, tuning=small) == spared
    assert keys_read(case, window=37) == keys_read(case, tuning=small, window=37)
    dear = dataclasses.replace(small, min_tiles=5)  # more keys than four blocks
    assert sum(LENGTHS) - keys_read(case, tuning=dear) == max(0, spared - 128)


def main():
    """In float16: the interpreter's product takes bfloat16 for integers."""
    mend_interpreter()
    half = torch.float16
    small = DecodeTuning(tile=16, warps=1, stages=1, min_tiles=1)
    mixed = [0, 1, 16, 17, 33, 150, 0]
    check(make_case(mixed, dtype=half), tuning=small)
    check(make_case([200], dtype=half), tuning=small)
    check(make_case([700], dtype=half), tuning=small)  # more splits than are merged at once
    check(
        make_case([70, 40], q_heads=6, kv_heads=1, dim=96, layout="HND", dtype=half), tuning=small
    )
    check(make_case([50, 90], q_heads=2, kv_heads=2, dtype=half), tuning=small)
    check(make_case([100, 20, 0], dtype=half), tuning=small, window=37, softcap=5.0)
    check(
        make_case([100, 20], block_size=64, dtype=half), tuning=DecodeTuning(tile=32, min_tiles=1)
    )
    fp8 = torch.float8_e4m3fn
    for query in (half, fp8):
        check(make_case(mixed, dtype=query, cached=fp8), tuning=small)
        check(
            make_case([100, 20, 0], dtype=query, cached=fp8), tuning=small, window=37, softcap=5.0
        )
    check_prefixes(4, 2, 4 * 96 + 2 * 64, dim=16)
    check_prefixes(10, 2, 3 * 96 + 2 * 64, dim=16)  # three of a set: no power of two
    check_prefixes(16, 1, 0, dim=16)
    print("all agree")


if __name__ == "__main__":
    sys.exit(main())
