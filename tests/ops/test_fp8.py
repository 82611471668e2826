"""FP8 products against the same in float64, rounding apart; what no op of PyTorch's own checks."""

import pytest
import torch
from torch.library import opcheck

import fxrl.ops.dequantized  # noqa: F401  # defines its op
from fxrl.ops.fp8 import RECIPES, QuantizeWeight, dequantized, quantized_weight, why_no_fp8

ops = torch.ops.fxrl
#: e4m3's smallest step below a power of two, halved: the most that rounding takes off a value.
_HALF_STEP = 2.0**-4


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_is_rounded_to_the_nearest(recipe):
    weight = draw(144, 160)
    values, scale = quantized_weight(weight, recipe)
    assert scale.shape == {"row": (144, 1), "tensor": (1, 1), "block": (2, 2)}[recipe]
    off = (dequantized(values, scale, torch.float64) - weight).abs()
    tiny = float(scale.max()) * 2.0**-9  # a subnormal's step
    assert bool((off <= _HALF_STEP * weight.abs() + tiny).all())
    assert QuantizeWeight(recipe).error(weight) == pytest.approx(0.026, rel=0.15)


@pytest.mark.parametrize("block", [0, 128])
def test_rows_are_scaled_by_their_own_largest(block):
    rows = draw(5, 160) * 10.0 ** torch.arange(-20, 30, 10, dtype=torch.float64)[:, None]
    rows[2] = 0
    near = dequantized(*ops.quantize_rows.default(rows, block), torch.float64)
    assert bool(
        (
            (near - rows).abs() <= _HALF_STEP * rows.abs() + rows.abs().amax(1)[:, None] * 2**-17
        ).all()
    )
    assert not near[2].any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(wrong):
    rows = draw(3, 32)
    rows[1, 4] = wrong
    values, scale = ops.quantize_rows.default(rows, 0)
    weight, weight_scale = quantized_weight(draw(16, 32), "row")
    made = ops.fp8_linear.default(rows, values, scale, weight, weight_scale, "fp8")
    assert made.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("recipe", RECIPES)
def test_fake_values_are_those_of_the_ops(recipe):
    weight, scale = quantized_weight(draw(48, 32), recipe)
    values, rows_scale = ops.quantize_rows.default(draw(5, 32), 0)
    checks = ("test_faketensor", "test_autograd_registration")  # its schema's has no float8
    given = (values, rows_scale, weight, scale, False, torch.bfloat16)
    low = (draw(5, 4, dtype=torch.bfloat16), draw(4, 48, dtype=torch.bfloat16))
    for adapter in ((), low):
        opcheck(ops.scaled_mm.default, (*given, *adapter), test_utils=checks)
    for block, factor in ((0, draw(160, 1)), (128, None)):
        opcheck(ops.rows_in_e4m3.default, (draw(5, 160), factor, block), test_utils=checks)
    rows = draw(5, 48).requires_grad_()
    opcheck(ops.dequantized_mm.default, (rows, [weight, scale], "fp8", True), test_utils=checks)


def test_a_cpu_stands_in_for_a_gpu():
    assert why_no_fp8(torch.device("cpu")) == ""
    assert "mps" in why_no_fp8(torch.device("mps"))
