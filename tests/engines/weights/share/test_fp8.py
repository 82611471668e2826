"""What scales of FP8 weights mean, and what tells that weights are a checkpoint's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxrl.engines.weights.share.fp8 import logical, why_not_quantized
from fxrl.ops.fp8 import BLOCK, dequantized, read_scale, scale_of_rows
from tests.engines.weights.share.fake_vllm import FP8, per_block, per_channel, per_tensor


def quantized(rows, columns, make=per_channel, seed=0):
    """An [N, K] weight, its FP8 values as [N, K] and its scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1).add(0.1)
    tensors = make(weight)
    values = logical(tensors.pop("weight"))
    (scales,) = tensors.values()
    return weight, values, read_scale(scales, weight.shape)


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    start=st.integers(0, 200),
    seed=st.integers(0, 2**16),
)
def test_any_blocks_and_rows_of_them(rows, columns, start, seed):
    draw = torch.Generator().manual_seed(seed)
    whole = start + rows
    values = torch.randn(whole, columns, generator=draw).to(FP8)
    blocks = torch.rand(-(-whole // BLOCK), -(-columns // BLOCK), generator=draw) + 0.5
    spread = blocks[torch.arange(whole)[:, None] // BLOCK, torch.arange(columns) // BLOCK]
    exact = values.double() * spread.double()
    scale = read_scale(blocks, values.shape)
    assert torch.equal(dequantized(values, scale, torch.float64), exact)
    part = scale_of_rows(scale, whole, start, rows)
    assert torch.equal(dequantized(values[start:], part, torch.float64), exact[start:])
    half = dequantized(values, scale, torch.bfloat16)
    assert torch.equal(half, exact.float().bfloat16()), "one rounding, of the float32 product"
    if start % BLOCK == 0:
        assert part.untyped_storage().data_ptr() == blocks.untyped_storage().data_ptr()


@pytest.mark.parametrize("make", [per_channel, per_tensor, per_block])
@pytest.mark.parametrize("shape", [(256, 128), (200, 150), (1, 7)])
def test_the_bound_holds_for_any_correct_rounding(make, shape):
    for seed in range(3):
        weight, values, scale = quantized(*shape, make, seed)
        weight[:, : shape[1] // 3] *= 1e-5  # into the subnormal numbers
        tensors = make(weight)
        values = logical(tensors.pop("weight"))
        scale = read_scale(next(iter(tensors.values())), weight.shape)
        assert why_not_quantized(values, scale, weight) == ""


@pytest.mark.parametrize("make", [per_channel, per_tensor, per_block])
def test_the_bound_catches_one_wrong_value(make):
    weight, values, scale = quantized(200, 150, make)
    for step in (1, -1):  # the next FP8 number is a whole step away
        wrong = values.clone()
        row, column = divmod(int(weight.abs().argmax()), 150)
        wrong.view(torch.uint8)[row, column] -= 1
        assert "not the checkpoint's rounded" in why_not_quantized(wrong, scale, weight)
        assert "not the checkpoint's" in why_not_quantized(values.roll(step, 0), scale, weight)
    nan = values.clone()
    nan.view(torch.uint8)[3, 3] = 0x7F
    assert why_not_quantized(nan, scale, weight)


def test_weights_that_were_rounded_again_for_scales_of_powers_of_two():
    """As vLLM does for DeepGEMM; with other scales so large an error stays an error."""
    weight, values, scale = quantized(256, 256, per_block)
    once = dequantized(values, scale, torch.float32)
    power = torch.exp2(scale.log2().ceil())
    unit = dequantized(torch.ones(256, 256), power, torch.float32)
    twice = (once / unit).to(torch.float8_e4m3fn)
    error = (weight - dequantized(twice, power, torch.float32)).abs()
    assert (error > 2**-4 * weight.abs() * 1.01).any()  # else this shows nothing
    assert why_not_quantized(twice, power, weight) == ""
    assert "not the checkpoint's rounded" in why_not_quantized(twice, power, weight * 1.3)
    slightly = power * (1 + 2**-20)
    assert "not the checkpoint's rounded" in why_not_quantized(twice, slightly, weight)


def test_what_scales_mean():
    shape = torch.Size((256, 384))
    assert read_scale(torch.ones(()), shape).shape == (1, 1)
    assert read_scale(torch.ones(256), shape).shape == (256, 1)
    assert read_scale(torch.ones(2, 3).bfloat16(), shape).dtype == torch.float32
    with pytest.raises(ValueError, match="which is neither one, nor one a row, nor"):
        read_scale(torch.ones(3, 2), shape)
    with pytest.raises(ValueError, match=r"torch\.int32"):
        read_scale(torch.ones(2, 3, dtype=torch.int32), shape)
