"""``verify`` on steps with products in FP8: right ones pass, and mistakes are found and blamed."""

import pytest
import torch
from torch import nn

import fxrl
from fxrl.inspect import verify
from fxrl.inspect.emulate import Emulation
from fxrl.ir.graph import shape_of
from fxrl.models import quantize
from fxrl.ops.fp8 import RECIPES, quantized_weight
from fxrl.ops.rounded import RoundedWeight
from fxrl.passes import fp8_lora
from tests.capture.mixer import fixed
from tests.passes.layered import ids_batch, square_loss
from tests.passes.test_fp8_lora import gated

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
    monkeypatch.setattr(verify, "LEAST_COSINE", 0.99999)
    note, below = verified(model).notes
    assert "7 of them are below 0.99999; Config(pass_options={'fp8-lora': {'skip': [" in below
    assert "'blocks.0.qkv.q'" in below
    skip = {"fp8-lora": {"skip": ["blocks.0.qkv"]}}
    found = verified(model, pass_options=skip)
    assert found.ok
    assert told(found.notes[0])[0] == "4"


#: By what a product may be off at least for a step of so many roundings to be wrong.
MISTAKES = {torch.float32: 0.05, torch.bfloat16: 0.3}


@pytest.mark.parametrize("dtype", MISTAKES)
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
