"""Checks of ``fused_sample`` on any device; run as a script, they run under Triton's interpreter.

The reference is float64. A drawn sample is judged by Pearson's chi-square, whose tail comes from
the Wilson-Hilferty cube root; all draws are functions of fixed seeds, so a verdict is final.
"""

import math
import sys

import torch

from fxrl.kernels import sample
from fxrl.kernels.sample import fused_sample

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def reference(logits, temperature):
    """Log-probabilities ``[R, V]`` in float64."""
    divisor = torch.where(temperature == 0, 1.0, temperature).double()
    return (logits.double() / divisor[:, None]).log_softmax(-1)


def check_values(rows, vocab, dtype, device, *, stride=0):
    """Log-prob, greedy token and independence of the batch, on random logits."""
    gen = torch.Generator().manual_seed(rows * 1000003 + vocab)
    wide = torch.randn(rows, vocab + stride, generator=gen) * 4
    wide[torch.rand(wide.shape, generator=gen) < 0.2] = -math.inf
    wide[:, vocab // 2] = 1.0
    wide = wide.to(device, dtype)
    logits = wide[:, :vocab]
    choices = torch.tensor([1.0, 0.0, 0.7, 1.8, 0.05])
    temperature = choices[torch.randint(0, 5, (rows,), generator=gen)].to(device)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=gen).to(device)
    positions = torch.randint(0, 2**40, (rows,), generator=gen).to(device)
    tokens, logprobs = fused_sample(logits, temperature, seeds, positions)
    want = reference(logits, temperature)
    assert tokens.dtype == torch.int64
    assert logprobs.dtype == torch.float32
    at_token = want.gather(1, tokens[:, None])[:, 0]
    assert torch.isfinite(at_token).all()  # -inf never wins
    torch.testing.assert_close(logprobs.double(), at_token, rtol=2e-6, atol=2e-6)
    greedy = temperature == 0
    assert torch.equal(tokens[greedy], logits[greedy].float().argmax(-1))
    if rows:
        keep = torch.randperm(rows, generator=gen)[: max(1, rows // 3)].to(device)
        again = fused_sample(
            wide[keep][:, :vocab],  # as the rows were: the order of a sum depends on alignment
            temperature,
            seeds,
            positions,
            state_rows=keep,
            position_rows=keep.int(),
        )
        assert torch.equal(again[0], tokens[keep])
        assert torch.equal(again[1], logprobs[keep])


def draw(logits, temperature, count, device, *, seed=5, first=0):
    """``count`` tokens of one row of logits at consecutive positions."""
    rows = logits.to(device).expand(count, -1)
    return fused_sample(
        rows,
        torch.full((count,), temperature, device=device),
        torch.full((count,), seed, device=device),
        torch.arange(first, first + count, device=device),
    )[0]


def sigmas(observed, expected):
    """How many standard deviations the chi-square of the counts lies above its mean."""
    assert expected.min() >= 5, expected.min()
    freedom = len(expected) - 1
    chi = ((observed - expected) ** 2 / expected).sum().item()
    spread = 2 / (9 * freedom)
    return ((chi / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def check_distribution(logits, temperature, draws, chunk, device):
    """Counts of every token; the rare ones are pooled until 20 of a bin are expected."""
    p = reference(logits[None], torch.tensor([temperature]))[0].exp()
    counts = torch.zeros(len(p), dtype=torch.double)
    for first in range(0, draws, chunk):
        tokens = draw(logits, temperature, min(chunk, draws - first), device, first=first)
        counts += tokens.cpu().bincount(minlength=len(p))
    order = p.argsort(descending=True)
    expected, observed = (p[order] * draws), counts[order]
    assert observed[expected == 0].sum() == 0
    bins = (expected.flip(0).cumsum(0) / 20).floor().flip(0)  # rare tokens share a bin
    alone = expected >= 20
    label = torch.where(alone, -torch.arange(1, len(p) + 1).double(), bins)
    _, label = label.unique(return_inverse=True)
    pooled = torch.zeros(2, int(label.max()) + 1, dtype=torch.double)
    pooled.index_add_(1, label, torch.stack([observed, expected]))
    keep = pooled[1] >= 5
    found = sigmas(pooled[0][keep], pooled[1][keep])
    assert abs(found) < 4, (temperature, found)
    return counts


def check_independence(count, device):
    """Neighbouring positions, and neighbouring seeds, give independent tokens."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1] if count > 10000 else [0.6, 0.4])
    size = len(p)
    tokens = draw(p.log(), 1.0, count, device)
    other = draw(p.log(), 1.0, count, device, seed=6)
    expected = (p[:, None] * p).double().flatten() * count
    for a, b in ((tokens[:-1], tokens[1:]), (tokens, other)):
        counts = (a * size + b).cpu().bincount(minlength=size**2).double()
        found = sigmas(counts, expected * counts.sum() / count)
        assert abs(found) < 4, found
    high = draw(p.log(), 1.0, 16, device, first=2**32)  # all 64 bits of a position count
    assert not torch.equal(tokens[:16], high)
    assert not torch.equal(tokens[:16], draw(p.log(), 1.0, 16, device, seed=5 + 2**32))


def check_special(device):
    """Ties, rows without a distribution, and neighbours that such rows leave alone."""
    vocab = sample.BLOCK * 2 + 3
    x = torch.full((6, vocab), -math.inf, device=device)
    x[0, vocab - 1] = 1.0
    x[1, 3] = math.nan
    x[2, vocab - 2] = math.inf
    x[4, [5, vocab - 3]] = 2.0  # equal in two blocks: the first one
    x[5, [6, 7]] = 2.0
    temperature = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], device=device)
    zeros = torch.zeros(6, dtype=torch.int64, device=device)
    tokens, logprobs = fused_sample(x, temperature, zeros, zeros)
    assert tokens[0] == vocab - 1
    assert logprobs[0] == 0
    assert logprobs[1:4].isnan().all()
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert tokens[4:].tolist() == [5, 6]
    torch.testing.assert_close(logprobs[4:].cpu(), torch.full((2,), -math.log(2)))


def main():
    from interpreted import mend_interpreter

    mend_interpreter()
    for rows, vocab in ((0, 7), (1, 1), (3, 5), (2, 9001)):
        for dtype in FLOATS if vocab < 10 else FLOATS[:2]:
            check_values(rows, vocab, dtype, "cpu", stride=3)
    check_special("cpu")
    sample.BLOCK = 16  # several blocks in a small vocabulary
    gen = torch.Generator().manual_seed(1)
    check_distribution(torch.randn(20, generator=gen), 0.8, 250, 250, "cpu")
    check_independence(100, "cpu")
    print("all agree")


if __name__ == "__main__":
    sys.exit(main())
