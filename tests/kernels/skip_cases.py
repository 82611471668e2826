"""The product that leaves out blocks of the vocabulary, against the exact one and the reference.

``python skip_cases.py`` with ``TRITON_INTERPRET=1`` runs it without a GPU.
"""

import math
import sys
from pathlib import Path

import torch

from fxrl.ops.linear_logprob_skip import BLOCK_ROWS, BLOCK_VOCAB, block_masses, skippable

sys.path.insert(0, str(Path(__file__).parent))
from interpreted import mend_interpreter


def make_case(seed, rows, vocab, width, dtype, device):
    """Peaked rows ``e`` and their budgets; some rows are zero, have no budget, or share a peak."""
    gen = torch.Generator().manual_seed(seed)
    blocks = math.ceil(vocab / BLOCK_VOCAB)
    skew = torch.exp(-12 * torch.rand(1, blocks, generator=gen)).repeat_interleave(BLOCK_VOCAB, 1)
    skew = skew[:, :vocab]
    e = torch.rand(rows, vocab, generator=gen) * skew
    e[::7] = 0
    e[1::50, vocab // 2 :] = 0
    budget = e.sum(1) * 2 ** -(6 * torch.rand(rows, generator=gen))
    budget[1::50] = 0
    weight = torch.randn(vocab, width, generator=gen)
    return e.to(device, dtype), weight.to(device, dtype), budget.to(device)


def kept_mask(kept, group, blocks):
    """The listed blocks of a group as ``[B]`` bool; the list is in order and has no block twice."""
    chosen = kept.listed[group, : int(kept.length[group])].long()
    assert (chosen.diff() > 0).all()
    mask = torch.zeros(blocks, dtype=torch.bool, device=chosen.device)
    mask[chosen] = True
    return mask


def check_choice(masses, budget):
    """No row loses more than its budget, and hardly a block less than could be left out is."""
    from fxrl.kernels.linear_logprob_skip import kept_blocks

    kept = kept_blocks(masses, budget)
    for group, start in enumerate(range(0, masses.shape[0], BLOCK_ROWS)):
        rows = slice(start, start + BLOCK_ROWS)
        keep = kept_mask(kept, group, masses.shape[1])
        lost = masses[rows, ~keep].sum(1)
        assert (lost <= budget[rows] * (1 + 1e-5)).all()
        best = skippable(masses[rows], budget[rows, None] * 0.9)
        share = torch.where(masses[rows] == 0, 0, masses[rows] / budget[rows, None]).amax(0)
        level = share[best].amax() if best.any() else 0.0
        # what the reference leaves out of nine tenths of the budget, at a level 3 % lower
        assert not (keep & best & (share < 0.95 * level)).any()
    return kept


def check_product(seed, rows, vocab, width, dtype, device, rtol, parts=None):
    from fxrl.kernels.linear_logprob_skip import skipping_product

    e, weight, budget = make_case(seed, rows, vocab, width, dtype, device)
    masses = block_masses(e.float())
    kept = check_choice(masses, budget)
    if masses.shape[1] > 6 and rows:
        assert 0 < kept.length[0] < masses.shape[1]
    made = skipping_product(e, weight, masses, budget, parts=parts)
    assert made.dtype == torch.float32
    assert torch.equal(made, skipping_product(e, weight, masses, budget, parts=parts))
    truth = torch.zeros(rows, width, dtype=torch.float64, device=device)
    exact = e.double() @ weight.double()
    for group, start in enumerate(range(0, rows, BLOCK_ROWS)):
        block = slice(start, start + BLOCK_ROWS)
        keep = kept_mask(kept, group, masses.shape[1]).repeat_interleave(BLOCK_VOCAB)[:vocab]
        truth[block] = (e[block] * keep).double() @ weight.double()
    size = max(1.0, truth.abs().max().item() if truth.numel() else 0.0)
    torch.testing.assert_close(made.double(), truth, rtol=rtol, atol=rtol * size)
    if truth.numel():
        bound = budget.double()[:, None] * weight.double().abs().amax(0)
        assert ((made.double() - exact).abs() <= bound * (1 + 1e-5) + rtol * size).all()


def check_strided(device):
    """Rows of a wider buffer, a column slice of the head, transposed masses."""
    from fxrl.kernels.linear_logprob_skip import skipping_product

    e, weight, budget = make_case(3, 130, 600, 48, torch.float32, device)
    wide = torch.full((130, 1024), torch.nan, device=device)
    wide[:, :600] = e
    broad = torch.full((600, 80), torch.nan, device=device)
    broad[:, 16:64] = weight
    masses = block_masses(e)
    plain = skipping_product(e, weight, masses, budget)
    made = skipping_product(
        wide[:, :600],
        broad[:, 16:64],
        masses.t().contiguous().t(),
        budget.repeat_interleave(2)[::2],
    )
    assert torch.equal(made, plain)


def check_not_a_number(device):
    """A NaN in a mass keeps its block, one in a budget keeps every block that the row needs."""
    masses = torch.full((3, 5), 1e-6, device=device)
    budget = torch.ones(3, device=device)
    masses[1, 2] = torch.nan
    assert check_list(masses, budget) == [2]
    masses[1, 2] = 0.0
    budget[2] = torch.nan
    assert check_list(masses, budget) == [0, 1, 2, 3, 4]
    masses[2] = 0.0
    assert check_list(masses, budget) == []


def check_list(masses, budget):
    from fxrl.kernels.linear_logprob_skip import kept_blocks

    kept = kept_blocks(masses, budget)
    return kept.listed[0, : int(kept.length[0])].tolist()


def check_op(device):
    """The op's kernels with a tolerance: within the proven bound of themselves without."""
    from fxrl.kernels.linear_logprob import forward
    from fxrl.ops.linear_logprob_arguments import ForwardArguments
    from fxrl.ops.linear_logprob_head import LossHead

    gen = torch.Generator().manual_seed(0)
    rows, vocab, width = 3, 1100, 16
    hidden, weight = (
        torch.randn(rows, width, generator=gen),
        torch.randn(vocab, width, generator=gen),
    )
    hidden[:, 0], weight[:, 0] = 2, -torch.arange(1, vocab + 1).log()  # p ~ 1 / rank^2, and noise
    target = torch.randint(0, vocab, (rows,), generator=gen)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for softcap in (0.0, 30.0):
        head = LossHead(
            hidden.to(device, dtype), weight.to(device, dtype), target.to(device),
            softcap=softcap, chunk_tokens=2,
        )  # fmt: skip
        made = {}
        for tolerance in (0.0, 0.25):
            names = ("logprob", "lse")
            result = forward(ForwardArguments(head, names, names, True, tolerance))
            assert torch.equal(
                result.values["logprob"], made.setdefault("logprob", result.values["logprob"])
            )
            exact = made.setdefault("vectors", result.vectors).double()
            bound = -torch.expm1(result.values["logprob"].double())[:, None]
            bound = tolerance * bound * head.weight.double().abs().amax(0)
            rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
            error = (result.vectors.double() - exact).abs()
            assert (error <= bound + rounding * exact.abs().amax()).all()
        assert not torch.equal(result.vectors, made["vectors"])  # something was left out


def main():
    """In float16 and float32: the interpreter's product takes bfloat16 for integers."""
    mend_interpreter()
    for seed, (rows, vocab, width) in enumerate(
        [(0, 300, 16), (1, 1, 16), (5, 255, 16), (128, 257, 40), (130, 2000, 16), (7, 5001, 300)]
    ):
        check_product(seed, rows, vocab, width, torch.float32, "cpu", 1e-5, parts=1 + seed % 3)
    check_product(9, 40, 1500, 32, torch.float16, "cpu", 1e-5, parts=2)
    check_strided("cpu")
    check_not_a_number("cpu")
    check_op("cpu")
    print("all agree")


if __name__ == "__main__":
    main()
