"""Fp8Linear against explicit dequantization in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxrl.engines.weights.share.fp8 import (
    Fp8Linear,
    Fp8Scale,
    dequantize,
    logical,
    read_scale,
    why_not_quantized,
)
from tests.engines.weights.share.fake_vllm import FP8, per_block, per_channel, per_tensor

BLOCK = 128


def quantized(rows, columns, make=per_channel, seed=0):
    """An [N, K] weight, its FP8 values as [N, K] and its scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1).add(0.1)
    tensors = make(weight)
    values = logical(tensors.pop("weight"))
    (scales,) = tensors.values()
    scale = read_scale(scales, weight.shape, (BLOCK, BLOCK))
    assert isinstance(scale, Fp8Scale), scale
    return weight, values, scale


def slow_dequantize(values, scale):
    rows, columns = values.shape
    out = torch.empty(rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            s = scale.values[(scale.shift + i) // scale.rows, j // scale.columns]
            out[i, j] = float(values[i, j].double()) * float(s)
    return out


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    start=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_dequantize_any_blocks_and_parts(rows, columns, block, start, seed):
    generator = torch.Generator().manual_seed(seed)
    whole_rows = start + rows
    values = torch.randn(whole_rows, columns, generator=generator).to(FP8)
    grid = (-(-whole_rows // block[0]), -(-columns // block[1]))
    scale = Fp8Scale(torch.rand(grid, generator=generator) + 0.5, *block)
    exact = slow_dequantize(values, scale)
    assert torch.equal(dequantize(values, scale, torch.float64), exact)
    part = scale.part(start, rows)
    assert torch.equal(dequantize(values[start:], part, torch.float64), exact[start:])
    assert part.values.data_ptr() >= scale.values.data_ptr()
    half = dequantize(values, scale, torch.bfloat16)
    assert torch.equal(half, exact.float().bfloat16())  # one rounding, of the float32 product


@pytest.mark.parametrize("make", [per_channel, per_tensor, per_block])
@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_gradient(make, bias):
    _, values, scale = quantized(200, 150, make)
    exact = dequantize(values, scale, torch.float64)
    offset = nn.Parameter(torch.randn(200, dtype=torch.float64)) if bias else None
    layer = Fp8Linear(values, scale, offset, torch.bfloat16)
    x = torch.randn(3, 5, 150, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    torch.testing.assert_close(out, F.linear(x, exact, offset))
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(x.grad, grad @ exact)
    assert layer.weight.grad is None
    assert not layer.weight.requires_grad
    if bias:
        torch.testing.assert_close(offset.grad, grad.sum((0, 1)))


def test_nothing_of_the_weights_size_is_kept_for_backward():
    _, values, scale = quantized(256, 256)
    layer = Fp8Linear(values, scale, None, torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(2, 256, requires_grad=True))
    assert {t.data_ptr() for t in saved} == {values.data_ptr(), scale.values.data_ptr()}


def test_a_write_between_forward_and_backward_is_refused():
    """Autograd's version counter is the storage's: a stale gradient cannot slip through."""
    _, values, scale = quantized(16, 16)
    layer = Fp8Linear(values, scale, None, torch.bfloat16)
    out = layer(torch.randn(2, 16, requires_grad=True)).sum()
    values.copy_(torch.ones(16, 16))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_it_is_a_view_and_sees_updates():
    _, values, scale = quantized(64, 32)
    layer = Fp8Linear(values.narrow(0, 16, 32), scale.part(16, 32), None, torch.bfloat16)
    assert layer.weight.data_ptr() == values[16].data_ptr()
    before = dequantize(layer.weight, layer.scale, torch.float32)
    scale.values.mul_(2)
    assert torch.equal(dequantize(layer.weight, layer.scale, torch.float32), 2 * before)
    assert "one scale for 1 x 32" in repr(layer)


@pytest.mark.parametrize("make", [per_channel, per_tensor, per_block])
@pytest.mark.parametrize("shape", [(256, 128), (200, 150), (1, 7)])
def test_the_bound_holds_for_any_correct_rounding(make, shape):
    for seed in range(3):
        weight, values, scale = quantized(*shape, make, seed)
        weight[:, : shape[1] // 3] *= 1e-5  # into the subnormal numbers
        tensors = make(weight)
        values = logical(tensors.pop("weight"))
        scale = read_scale(next(iter(tensors.values())), weight.shape, (BLOCK, BLOCK))
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
    once = dequantize(values, scale, torch.float32)
    power = Fp8Scale(torch.exp2(scale.values.log2().ceil()), BLOCK, BLOCK)
    unit = dequantize(torch.ones(256, 256), power, torch.float32)
    twice = (once / unit).to(torch.float8_e4m3fn)
    error = (weight - dequantize(twice, power, torch.float32)).abs()
    assert (error > 2**-4 * weight.abs() * 1.01).any()  # else this shows nothing
    assert why_not_quantized(twice, power, weight) == ""
    assert "not the checkpoint's rounded" in why_not_quantized(twice, power, weight * 1.3)
    slightly = Fp8Scale(power.values * (1 + 2**-20), BLOCK, BLOCK)
    assert "not the checkpoint's rounded" in why_not_quantized(twice, slightly, weight)


def test_scales_that_are_refused():
    shape = torch.Size((256, 384))
    assert read_scale(torch.ones(()), shape, (BLOCK, BLOCK)).rows == 256
    assert read_scale(torch.ones(256), shape, (BLOCK, BLOCK)).rows == 1
    assert read_scale(torch.ones(2, 3), shape, (BLOCK, BLOCK)).columns == BLOCK
    assert "neither one" in read_scale(torch.ones(3, 2), shape, (BLOCK, BLOCK))
    assert "torch.int32" in read_scale(torch.ones(2, 3, dtype=torch.int32), shape, (BLOCK, BLOCK))


def test_dynamo_traces_it():
    """The train step is captured whole; a custom autograd function must not break the graph."""
    _, values, scale = quantized(64, 32)
    layer = Fp8Linear(values, scale, None, torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 32, requires_grad=True)
    out = compiled(x)
    torch.testing.assert_close(out, layer(x))
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(layer(x).sum(), x)[0])
