"""FP8 products on tensor cores against the CPU's, which are exact but for float32 sums."""

import pytest
import torch

import fxrl.ops.dequantized  # noqa: F401  # defines its op
from fxrl import kernels
from fxrl.ops.fp8 import (
    RECIPES,
    measured_seconds,
    quantized_rows,
    quantized_weight,
    why_no_fp8,
)

pytestmark = pytest.mark.gpu
ops = torch.ops.fxrl
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _has_fp8():
    if why := why_no_fp8(GPU):
        pytest.skip(why)
    kernels.register()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [48, 160, 4096, 12288])
@pytest.mark.parametrize("block", [0, 128])
def test_rows_are_the_references_bit_for_bit(dtype, columns, block):
    """On a CPU, which divides by a number; on a GPU PyTorch multiplies by its reciprocal."""
    draw = torch.Generator(GPU).manual_seed(columns)
    x = torch.randn(9, columns + 8, generator=draw, device=GPU).mul(3).to(dtype)[:, 8:]
    x[2], x[3, 5], x[4, 7] = 0, float("nan"), float("inf")
    factors = (torch.rand(size, 1, generator=draw, device=GPU) for size in (columns, 1))
    for factor in (None, *factors):
        made = ops.rows_in_e4m3.default(x, factor, block)
        wanted = quantized_rows(x.cpu(), None if factor is None else factor.cpu(), block)
        for ours, reference in zip(made, wanted, strict=True):
            assert ours.shape == reference.shape
            assert torch.equal(
                ours.cpu().float().nan_to_num(1e9), reference.float().nan_to_num(1e9)
            )


def test_a_turned_weight_is_multiplied():
    draw = torch.Generator(GPU).manual_seed(0)
    weight, _ = quantized_weight(torch.randn(144, 320, generator=draw, device=GPU), "row")
    rows = torch.randn(33, 144, generator=draw, device=GPU).bfloat16()
    held = ops.rows_in_e4m3.default(rows, None, 0)
    made = ops.scaled_mm.default(*held, weight, None, True, torch.bfloat16)
    wanted = (held[0].float() * held[1]) @ weight.float()
    assert float((made - wanted).norm() / wanted.norm()) < 2**-8


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "rank"),
    [(256, 128, 256, 16), (333, 512, 384, 32), (129, 144, 272, 8), (300, 384, 1040, 100)],
)
@pytest.mark.parametrize("scaled", [True, False])
def test_an_adapter_is_added_to_a_product(rows, depth, columns, rank, scaled):
    """Whole tiles and parts of them, ranks of one step and of more; 100 lies too close for TMA."""
    draw = torch.Generator(GPU).manual_seed(rows)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, device=GPU).bfloat16()

    a, scale = ops.rows_in_e4m3.default(normal(rows, depth), None, 0)
    b, by_column = quantized_weight(normal(columns, depth), "row")
    left, right = normal(rows, rank + 8)[:, :rank], normal(columns, rank)
    weight_scale = by_column if scaled else None
    plain = (a.float() * scale) @ (b.float() * (by_column if scaled else 1)).t()
    for factor in (right.t(), right.t().contiguous()):
        made = ops.scaled_mm.default(a, scale, b, weight_scale, False, torch.bfloat16, left, factor)
        wanted = plain + left.float() @ right.float().t()
        assert float((made - wanted).norm() / wanted.norm()) < 2**-8


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gradient", ["fp8", "bf16"])
def test_a_linear_and_its_gradient(recipe, gradient):
    if (recipe, gradient) == ("block", "fp8"):
        pytest.skip("scales by block have no gradient in FP8")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(333, 512, generator=draw).bfloat16()
    weight = quantized_weight(torch.randn(384, 512, generator=draw), recipe)
    grad = torch.randn(333, 384, generator=draw).bfloat16()
    found = []
    for device in ("cpu", GPU):
        rows = x.to(device, copy=True).requires_grad_()
        held = [part.to(device) for part in weight]
        pair = ops.quantize_rows.default(rows, 128 if recipe == "block" else 0)
        made = ops.fp8_linear.default(rows, *pair, *held, gradient)
        made.backward(grad.to(device))
        found.append((made.detach().cpu().float(), rows.grad.cpu().float()))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.01


def test_times_are_measured():
    plain, fp8 = measured_seconds(GPU, "row", "fp8", 1000, 1024, 1024)
    assert plain > 0
    assert fp8 > 0
