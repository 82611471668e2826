"""W' = round(W + scaling * B A): the definition, and the GEMM that replaces it."""

import pytest
import torch

from fxrl.engines.weights.lora import sites as merging
from fxrl.engines.weights.lora.sites import Factors, Merge, merge_all, merge_reference


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pair(out, inner, rank, dtype, scaling):
    a = torch.randn(rank, inner) * 0.1
    b = torch.randn(out, rank) * 0.05
    return Factors(a.to(dtype), b.to(dtype), scaling)


def exact(merge):
    total = merge.weight.double()
    for f in merge.factors:
        delta = f.scaling * f.b.double() @ f.a.double()
        total = total + (delta.t() if merge.is_transposed else delta)
    return total


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_reference_rounds_once(weight, factors, transposed):
    shape = (24, 40) if transposed else (40, 24)
    merge = Merge(
        (torch.randn(shape) * 0.02).to(weight), (pair(40, 24, 4, factors, 1.7),), transposed
    )
    want = exact(merge)
    merge_reference(merge)
    eps = torch.finfo(weight).eps
    torch.testing.assert_close(merge.weight.double(), want, rtol=4 * eps, atol=6e-8)
    if weight.itemsize == 2:  # the nearest number, but where the sum lies between two
        assert (merge.weight != want.to(weight)).float().mean() < 5e-3


@pytest.mark.parametrize("scratch", [1, 2**24])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scalings", [(2.0,), (1.7,), (2.0, 2.0), (0.5, 1.7)])
def test_the_gemm_is_the_reference_but_for_ties(
    factors, scalings, transposed, scratch, monkeypatch
):
    """At most one unit in the last place, at the few numbers that lie between two."""
    monkeypatch.setattr(merging, "_SCRATCH_ELEMENTS", scratch)
    merges, references = [], []
    for out, inner, rank in [(48, 32, 4), (48, 32, 4), (64, 32, 8)]:
        shape = (inner, out) if transposed else (out, inner)
        weight = (torch.randn(shape) * 0.02).to(torch.bfloat16)
        pairs = tuple(pair(out, inner, rank, factors, s) for s in scalings)
        merges.append(Merge(weight, pairs, transposed))
        references.append(Merge(weight.clone(), pairs, transposed))
    merge_all(merges, by_gemm=True)
    for merge, reference in zip(merges, references, strict=True):
        want = exact(reference)
        merge_reference(reference)
        differs = merge.weight != reference.weight
        assert differs.float().mean() < 0.02
        worst = (merge.weight.double() - want).abs() / want.abs().clamp(min=1e-3)
        assert worst.max() < 2**-8


def test_splitting_matters():
    """bf16 factors alone would be an order of magnitude worse where the delta dominates."""
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    factors = pair(64, 64, 16, torch.float32, 1.0)
    ours, plain = weight.clone(), weight.clone()
    merge_all([Merge(ours, (factors,))], by_gemm=True)
    rounded = Factors(factors.a.bfloat16(), factors.b.bfloat16(), 1.0)
    merge_all([Merge(plain, (rounded,))], by_gemm=True)
    want = exact(Merge(weight, (factors,)))
    once = want.to(torch.bfloat16)
    assert (ours != once).float().mean() < 0.05
    assert (plain != once).float().mean() > 0.3


def test_autocast_changes_nothing():
    factors = pair(16, 16, 4, torch.float32, 2.0)
    inside, outside = (Merge(torch.ones(16, 16), (factors,)) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        merge_reference(inside)
    merge_reference(outside)
    assert torch.equal(inside.weight, outside.weight)
