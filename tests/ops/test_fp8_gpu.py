"""FP8 products on tensor cores against the CPU's, which are exact but for float32 sums."""

import pytest
import torch

import fxrl.ops.dequantized  # noqa: F401  # defines its op
from fxrl.ops.fp8 import RECIPES, measured_seconds, quantized_weight, why_no_fp8

pytestmark = pytest.mark.gpu
ops = torch.ops.fxrl
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _has_fp8():
    if why := why_no_fp8(GPU):
        pytest.skip(why)


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
