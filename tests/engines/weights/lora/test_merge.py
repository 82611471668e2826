"""W' = W + scaling * B A, rounded once: to 16 bits by chance, and without a bias."""

import pytest
import torch

from fxrl.engines.weights.lora.sites import Factors, Merge, merge_all, merge_reference
from fxrl.ops.dithered import dithered


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
@pytest.mark.parametrize("scalings", [(1.7,), (0.5, 1.7)])
def test_it_rounds_once(weight, factors, transposed, scalings):
    shape = (24, 40) if transposed else (40, 24)
    pairs = tuple(pair(40, 24, 4, factors, scaling) for scaling in scalings)
    merge = Merge((torch.randn(shape) * 0.02).to(weight), pairs, transposed)
    want = exact(merge)
    merge_all([merge])
    eps = torch.finfo(weight).eps
    torch.testing.assert_close(merge.weight.double(), want, rtol=4 * eps, atol=6e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_takes_one_of_both_neighbours_and_the_mean_of_many_is_the_number(dtype):
    value = torch.randn(64).div(10)
    drawn = torch.stack([dithered(value, dtype, seed) for seed in range(4000)]).double()
    unit = torch.finfo(dtype).eps * value.abs().double().log2().floor().exp2()
    assert ((drawn - value).abs() < unit).all()
    assert all(len(each.unique()) <= 2 for each in drawn.T)
    standard_error = unit / 2 / 4000**0.5
    assert ((drawn.mean(0) - value).abs() < 4.5 * standard_error).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_the_dtype_has_stays(dtype):
    numbers = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, torch.nan, 2.0**-14])
    numbers = torch.cat([numbers, torch.randn(4096).to(dtype).float()])
    made = dithered(numbers, dtype, 3)
    assert torch.equal(made.float().nan_to_num(7.0), numbers.nan_to_num(7.0))
    assert torch.equal(made.signbit() & ~made.isnan(), numbers.signbit())


def test_a_small_change_is_there_on_average_and_the_same_each_time():
    """Each entry changes by a tenth of its unit, which the nearest would round away."""
    weight = torch.randn(256, 512).bfloat16() * 0.05
    a, b = torch.randn(1, 512), torch.randn(256, 1) * 1e-5
    merges = [Merge(weight.clone(), (Factors(a, b, 2.0),), seed=seed) for seed in (1, 1, 2)]
    delta = 2.0 * b.double() @ a.double()
    merge_all(merges)
    one, again, other = (merge.weight for merge in merges)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    change = one.double() - weight.double()
    nearest = (weight.double() + delta).bfloat16().double() - weight.double()
    along = [float((found * delta).sum() / delta.square().sum()) for found in (change, nearest)]
    assert abs(along[0] - 1) < 0.1
    assert along[1] < 0.5, "or this test shows nothing"


def test_autocast_changes_nothing():
    factors = pair(16, 16, 4, torch.float32, 2.0)
    inside, outside = (Merge(torch.ones(16, 16), (factors,)) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        merge_reference(inside)
    merge_reference(outside)
    assert torch.equal(inside.weight, outside.weight)
