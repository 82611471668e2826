"""``verify`` on steps with products in FP8: right ones pass, and mistakes are found and blamed."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxrl
from fxrl.inspect import calibrate
from fxrl.inspect.emulate import Emulation
from fxrl.ir.graph import shape_of
from fxrl.models import quantize
from fxrl.ops.fp8 import RECIPES, quantized_weight
from fxrl.ops.rounded import RoundedWeight
from fxrl.passes import fp8_lora
from tests.capture.mixer import fixed
from tests.passes.layered import ids_batch, square_loss
from tests.passes.test_fp8_lora import gated
from tests.rows import rows

aten, ops = torch.ops.aten, torch.ops.fxrl


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def verified(model, **options):
    config = {"precision": "fp8", "on_miss": "ignore", "compile_regions": False} | options
    return fxrl.optimize(model, square_loss, fxrl.Config(**config)).verify(fixed(ids_batch()))


RIGHT = [
    (torch.float64, None),
    (torch.float32, "fp8"),
    (torch.bfloat16, None),
    (torch.bfloat16, "nf4"),
]


@pytest.mark.parametrize(("dtype", "held"), RIGHT)
def test_a_right_step(dtype, held):
    model = gated(2).to(dtype)
    if held == "nf4":
        model = gated(2, width=64, wide=128).to(dtype)
    if held:
        quantize(model, held)
    found = verified(model)
    assert found.ok, str(found)
    assert ("rounded as the step is" in found.reference) == (held != "nf4")
    if dtype == torch.float64:
        assert max(row.rel for row in found.rows) < 1e-9, "the very same roundings"


def told(note):
    return note.partition(" products in FP8: cosine with those in full ")


def test_how_near_each_product_comes_and_how_to_leave_those_that_are_far(monkeypatch):
    model = gated(1).float()
    note = verified(model).notes[0]
    count, _, cosines = told(note)
    least, middle = (float(words.partition(" ")[0]) for words in cosines.split(", "))
    assert (count, 0.99 < least <= middle < 0.9999) == ("7", True), note
    monkeypatch.setattr(calibrate, "LEAST_COSINE", 0.99999)
    note, below = verified(model).notes
    assert "7 of them are below 0.99999; with Config(pass_options={'fp8-lora': {'skip': [" in below
    assert "'blocks.0.qkv.q'" in below
    skip = {"fp8-lora": {"skip": ["blocks.0.qkv"]}}
    found = verified(model, pass_options=skip)
    assert found.ok
    assert told(found.notes[0])[0] == "4"


def step_of(model, **options):
    config = fxrl.Config(precision="fp8", on_miss="ignore", compile_regions=False)
    return fxrl.optimize(model, square_loss, replace(config, **options))


def nearness_of(step):
    batch = fixed(ids_batch())
    step(batch)
    weights = [weight for capture in step.captures for weight in capture.rounded()]
    with Emulation(weights):
        square_loss(step.model, batch).backward()
    return calibrate.nearness(weights)


def test_calibrated_no_product_is_far():
    """Of those whose gradient alone was, that alone is in full; what a user asked for stays."""
    model = gated(2).float()
    asked = {"skip": ["blocks.0.down"], "recipe": "tensor"}
    step = step_of(model, pass_options={"fp8-lora": asked, "tile-tokens": {}})
    before = nearness_of(step)
    least = 0.99934
    assert step.calibrate(fixed(ids_batch()), least_cosine=0.9) == step.config
    nothing = step.calibrate(fixed(ids_batch()), least_cosine=1.0)
    assert not nearness_of(fxrl.optimize(model, square_loss, nothing))
    config = step.calibrate(fixed(ids_batch()), least_cosine=least)
    far = {one.module for one in before if one.product < least}
    far_behind = {one.module for one in before if one.gradient < least} - far
    assert far
    assert far_behind
    assert config.pass_options["tile-tokens"] == {}
    options = config.pass_options["fp8-lora"]
    assert options["recipe"] == "tensor"
    assert options["skip"][0] == "blocks.0.down"
    assert far <= {*options["skip"]}
    assert far_behind <= {*options["skip"], *options["wide_gradients"]}
    step = fxrl.optimize(model, square_loss, config)
    near = nearness_of(step)
    assert {one.module for one in near} == {one.module for one in before} - {*options["skip"]}
    assert min(min(one.product, one.gradient) for one in near) >= least
    assert step.verify(fixed(ids_batch())).ok
    told = [r.site for r in step.report.of_kind("applied") if "in the model's dtype" in r.reason]
    told = {site.partition(":")[2].rpartition("/")[0] for site in told}
    assert told == {*options["wide_gradients"]} - {*options["skip"]}


NOT_CALIBRATED = [
    ({"precision": "bf16"}, 0.999, "precision='bf16': only products in FP8 are calibrated"),
    ({}, 1.5, "least_cosine=1.5 is no cosine in (0, 1], such as 0.999"),
]


@pytest.mark.parametrize(("options", "least", "why"), NOT_CALIBRATED)
def test_what_cannot_be_calibrated(options, least, why):
    with pytest.raises(fxrl.errors.ConfigError) as raised:
        step_of(gated(1), **options).calibrate(fixed(ids_batch()), least_cosine=least)
    assert why in str(raised.value)


#: By what a product may be off at least for a step of so many roundings to be wrong.
MISTAKES = {torch.float32: 0.05, torch.bfloat16: 0.3}


@pytest.mark.parametrize("dtype", rows(MISTAKES, [torch.bfloat16]))
def test_a_mistake_is_found_and_blamed(dtype, monkeypatch):
    right = fp8_lora._swap

    def wrong(product, weight, gradient):
        right(product, weight, gradient)
        for made in product.graph.find_nodes(op="call_function", target=ops.fp8_linear.default):
            if shape_of(made.args[3]) == (32, 48) and not made.meta.get("planted"):
                with product.graph.inserting_after(made):
                    other = product.graph.call_function(
                        aten.mul.Tensor, (made, 1 + MISTAKES[dtype])
                    )
                other.meta = dict(made.meta)
                made.meta["planted"] = True
                made.replace_all_uses_with(other, lambda user, other=other: user is not other)

    monkeypatch.setattr(fp8_lora, "_swap", wrong)
    found = verified(gated(1).to(dtype))
    assert not found.ok, str(found)
    assert found.blame == ("fp8-lora @ 0:blocks.0.down/mm",)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gradient", ["fp8", "bf16"])
def test_eager_rounds_as_the_op_does(recipe, gradient):
    """Whatever spells the product: the op's own numbers, from the emulation."""
    draw = torch.Generator().manual_seed(0)
    linear = nn.Linear(160, 144, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(3, 7, 160, generator=draw, dtype=torch.float64, requires_grad=True)
    made = quantized_weight(linear.weight, recipe)
    rounded = ops.quantize_rows.default(x.flatten(0, 1), 128 if recipe == "block" else 0)
    by_block = "bf16" if recipe == "block" else gradient
    expected = ops.fp8_linear.default(x.flatten(0, 1), *rounded, *made, by_block).view(3, 7, 144)
    expected = expected + linear.bias
    grad = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(expected, x, grad)
    spelled = {
        "linear": lambda: linear(x),
        "matmul": lambda: x @ linear.weight.t() + linear.bias,
        "expanded": lambda: torch.bmm(x, linear.weight.t().expand(3, -1, -1)) + linear.bias,
        "einsum": lambda: torch.einsum("btk,nk->btn", x, linear.weight) + linear.bias,
        "a copy": lambda: x @ linear.weight.double().clone().t() + linear.bias,
    }
    with Emulation([RoundedWeight(linear.weight, False, *made, gradient)]):
        for name, product in spelled.items():
            found = product()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)
            (ours,) = torch.autograd.grad(found, x, grad)
            torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12, msg=name)
