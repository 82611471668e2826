"""Linears of 8 and 4 bits: exact against their own weight in full, never whole in the step."""

import copy

import pytest
import torch
from torch import nn

import fxrl
from fxrl.errors import ConfigError
from fxrl.ir.plan import CutLayer, Plan
from fxrl.models import ModelError, Quantization, QuantizedLinear, quantize
from fxrl.ops import dequantized as op
from fxrl.ops.dequantized import FORMATS, quantized, widened
from tests.capture.mixer import fixed
from tests.passes.layered import GatedBlock, ids_batch, make_stack, square_loss
from tests.rows import rows

#: Relative error of a normal weight.
ERRORS = {"fp8": 0.03, "int4": 0.12, "nf4": 0.1}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("transpose", [False, True])
def test_the_product_is_that_of_the_weight_in_full(format, transpose, monkeypatch):
    monkeypatch.setattr(op, "TILE", 128 * 192)  # several tiles
    weight = quantized(draw(320, 192), format)
    whole = widened(weight, format, torch.float64)
    rows = draw(7, 320 if transpose else 192, seed=1).requires_grad_()
    made = torch.ops.fxrl.dequantized_mm.default(rows, list(weight), format, transpose)
    expected = rows @ (whole if transpose else whole.t())
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    grad = draw(*made.shape, seed=2)
    ours, theirs = (torch.autograd.grad(y, rows, grad)[0] for y in (made, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_is_near_what_it_was_and_zero_stays_zero(format):
    weight = draw(64, 256)
    weight[3] = 0
    near = widened(quantized(weight, format), format, torch.float64)
    assert float((near - weight).norm() / weight.norm()) < ERRORS[format]
    assert not near[3].any()


def test_bytes_of_a_weight():
    bits = {f: 8 * sum(p.nbytes for p in quantized(draw(256, 1024), f)) / 2**18 for f in FORMATS}
    assert bits == {"fp8": 8 + 32 / 1024, "int4": 4.5, "nf4": 4.5}


def frozen(format):
    """Layers of width 64 with adapters, their Linears quantised; and a twin in full."""
    model = make_stack(2, block=GatedBlock, width=64, wide=128)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in (".a.", ".b.", "embed", "head")))
    twin = copy.deepcopy(model)
    quantize(model, format)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = widened([module.weight, module.weight_scale], format, torch.float64)
            twin.get_submodule(name).weight.data.copy_(weight)
    assert sum(isinstance(m, QuantizedLinear) for m in model.modules()) == 14
    return model, twin


PASSES = {"default": None, "tiles": ("outline-layers", "recompute", "tile-tokens")}
CASES = [(format, how) for format in FORMATS for how in PASSES]


@pytest.mark.parametrize(
    "case", rows(CASES, [("int4", "tiles"), ("fp8", "default"), ("nf4", "default")]), ids="-".join
)
def test_a_step_over_quantised_layers(case):
    format, passes = case[0], PASSES[case[1]]
    model, twin = frozen(format)
    cuts = {f"0:blocks.{i}": CutLayer("fewest", tile_tokens=3 * i) for i in range(2)}
    plan = Plan(cuts if passes else {})
    config = fxrl.Config(passes=passes, compile_regions=False, on_miss="error")
    step = fxrl.optimize(model, square_loss, config, plan=plan)
    made, expected = step(fixed(ids_batch())), square_loss(twin, ids_batch())
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    made.backward()
    expected.backward()
    wanted = {name: p.grad for name, p in twin.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                parameter.grad, wanted[name], rtol=1e-9, atol=1e-12, msg=name
            )
    assert all(capture.running for capture in step.captures) or not passes


def test_what_is_held_in_fp8_is_multiplied_in_fp8():
    """The same numbers as of the model in full, whose weights are quantised for the step."""
    model, twin = frozen("fp8")
    config = fxrl.Config(precision="fp8", compile_regions=False, on_miss="error")
    steps = [fxrl.optimize(each, square_loss, config) for each in (model, twin)]
    made, expected = (step(fixed(ids_batch())) for step in steps)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=0)
    remarks = steps[0].report.of_kind("applied")
    assert [r.reason.partition("FP8, ")[2] for r in remarks] == ["as it is held"] * 14


def test_the_backward_keeps_no_weight_in_full():
    model, _ = frozen("nf4")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        square_loss(model, ids_batch())
    sizes = {(64, 64), (128, 64), (64, 128)}
    assert not [x for x in kept if tuple(x.shape) in sizes and x.is_floating_point()]


def test_casting_and_moving_a_model_leave_the_weight_alone():
    model, _ = frozen("fp8")
    layer = next(m for m in model.modules() if isinstance(m, QuantizedLinear))
    before = layer.weight, layer.weight_scale
    model.to(torch.bfloat16)
    assert (layer.weight.dtype, layer.weight_scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert all(
        torch.equal(a.float(), b.float())
        for a, b in zip(before, (layer.weight, layer.weight_scale), strict=True)
    )


@pytest.mark.parametrize(
    ("recipe", "shape"), [("row", [256, 1]), ("tensor", [1, 1]), ("block", [2, 2])]
)
def test_options_say_how_and_which(recipe, shape):
    """Scales as asked for; what is skipped or small stays."""
    sizes = {"a": (256, 256), "b": (256, 384), "c": (16, 16)}
    model = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    weight, rows = model["a"].weight.detach(), torch.randn(5, 256)
    expected = model["a"](rows).detach()
    quantize(
        model.requires_grad_(False), Quantization("fp8", recipe, skip=("b",), least_values=2**10)
    )
    assert [type(m) for m in model.values()] == [QuantizedLinear, nn.Linear, nn.Linear]
    assert [*model["a"].weight_scale.shape] == shape
    assert not torch.equal(model["a"](rows), expected)
    torch.testing.assert_close(model["a"](rows), expected, rtol=0, atol=0.1)
    values, scale = quantized(weight, "fp8", recipe), (model["a"].weight, model["a"].weight_scale)
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(values, scale, strict=True))


def test_refused():
    with pytest.raises(ModelError, match="quantization='fp7' is not one of 'fp8', 'int4', 'nf4'"):
        quantize(nn.Linear(64, 64), "fp7")
    model = nn.Sequential(nn.Linear(96, 64)).requires_grad_(False)
    with pytest.raises(ModelError, match="'1' names no Linear of the model; known: 0"):
        quantize(nn.Sequential(nn.Linear(64, 64)), Quantization("fp8", skip=("1",)))
    with pytest.raises(ConfigError, match="recipe='block' is of FP8's scales, and nf4 has one for"):
        Quantization("nf4", "block")
    with pytest.raises(ConfigError, match=r"skip='k' is no list of names; write \['k'\]"):
        Quantization("fp8", skip="k")
    with pytest.raises(ModelError, match="0 has 96 inputs; nf4 takes multiples of 64; use 'fp8'"):
        quantize(model, "nf4")
    assert type(model[0]) is nn.Linear
