"""Checks of ``decode_attention`` on any device; as a script, under Triton's interpreter.

The reference is dense float64 attention over the gathered keys. Unused blocks and the unused rest
of used blocks hold NaN, so that reading what must not be read shows.
"""

import dataclasses
import math
import sys
from pathlib import Path

import torch

from fxrl.kernels.decode_attention import DecodeTuning, DecodeWorkspace, decode_attention

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

    def tensors(self):
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens


def make_case(
    lengths, *, q_heads=4, kv_heads=2, dim=64, block_size=16, dtype=torch.bfloat16,
    layout="NHD", device="cpu", seed=0,
):  # fmt: skip
    """Random keys and values in randomly ordered blocks; block 0 belongs to nobody."""
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
        mine = [owned.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        pair = torch.randn(2, n, kv_heads, dim, generator=gen).to(dtype)
        for i, block in enumerate(mine):
            part = pair[:, i * block_size : (i + 1) * block_size]
            cache[block, :, : part.shape[1]] = part.float()
        keys.append(pair[0].double())
        values.append(pair[1].double())
    cache = memory.to(device).to(dtype).permute(order)
    q = torch.randn(len(lengths), q_heads, dim, generator=gen).to(dtype) * 2
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    k_cache, v_cache = cache.unbind(1)
    return Case(q.to(device), k_cache, v_cache, table.to(device), seq_lens.to(device), keys, values)


def reference(case, scale, window=0, softcap=0.0):
    """``[R, Hq, D]`` in float64."""
    q = case.q.double().cpu()
    out = torch.zeros_like(q)
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        first = max(0, len(keys) - window) if window else 0
        if len(keys) == first:
            continue
        group = q.shape[1] // keys.shape[1]
        k = keys[first:].repeat_interleave(group, 1)
        v = values[first:].repeat_interleave(group, 1)
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
    options = {"window": window, "softcap": softcap}
    space = DecodeWorkspace(rows, q_heads, kv_heads, dim, device, tuning)
    got = decode_attention(*case.tensors(), scale, workspace=space, **options)
    out = torch.full_like(got, 7.0)
    again = decode_attention(*case.tensors(), scale, out, workspace=space, **options)
    assert again is out
    assert torch.equal(got, again)
    assert not space.arrived.any()
    want = reference(case, scale, window, softcap)
    # Probabilities are rounded to q's dtype before they meet the values, and so is the result.
    step = torch.finfo(case.q.dtype).eps
    torch.testing.assert_close(got.double().cpu(), want, rtol=step, atol=2 * step)
    return got


def main():
    """In float16: the interpreter's product takes bfloat16 for integers."""
    mend_interpreter()
    half = torch.float16
    small = DecodeTuning(tile=16, warps=1, stages=1, min_tiles=1)
    mixed = [0, 1, 16, 17, 33, 150, 0]
    check(make_case(mixed, dtype=half), tuning=small)
    check(make_case([200], dtype=half), tuning=small)
    check(
        make_case([70, 40], q_heads=6, kv_heads=1, dim=96, layout="HND", dtype=half), tuning=small
    )
    check(make_case([50, 90], q_heads=2, kv_heads=2, dtype=half), tuning=small)
    check(make_case([100, 20, 0], dtype=half), tuning=small, window=37, softcap=5.0)
    check(
        make_case([100, 20], block_size=64, dtype=half), tuning=DecodeTuning(tile=32, min_tiles=1)
    )
    print("all agree")


if __name__ == "__main__":
    sys.exit(main())
