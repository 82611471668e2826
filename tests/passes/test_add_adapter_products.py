"""``add-adapter-products``: the same numbers, and no adapter's output by itself."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx

from fxrl.compile.bodies.variants import build_region
from fxrl.ir.printer import print_graph
from fxrl.ops.fp8 import quantized_rows, quantized_weight
from fxrl.passes.add_adapter_products import AddAdapterProducts
from tests.compile.test_bodies import assert_equal, gradients, region_of
from tests.passes.lowered import draw, rewritten_by

aten, fxrl = torch.ops.aten, torch.ops.fxrl


def held(rows=6, depth=16, columns=32, seed=0):
    """Both sides of a product in FP8, with their scales."""
    weight = quantized_weight(draw(columns, depth, seed=seed), "row")
    return *quantized_rows(draw(rows, depth, seed=seed), None, 0), *weight


def fp8(*sides):
    return fxrl.scaled_mm.default(*sides, False, torch.float64)


def rewritten(function, *args):
    gm, said = rewritten_by(AddAdapterProducts(), function, *args)
    gm.graph.eliminate_dead_code()
    return gm, said


def wide_products(gm):
    """How many products by themselves make the 32 columns."""
    products = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    return sum(node.meta["val"].shape[-1] == 32 for node in products)


def test_an_adapter_beside_a_linear():
    def linear(x, a, b, *sides):
        return fp8(*sides).view(2, 3, 32) + F.linear(F.linear(x, a), b) * 0.5

    gm, said = rewritten(linear, draw(2, 3, 16), draw(4, 16), draw(32, 4), *held())
    assert said == "1 of 1 products are added inside FP8's"
    body = [line for line in print_graph(gm).splitlines() if "= input" not in line]
    assert_expected_inline(
        "\n".join(body),
        """\
%t = aten.t.default(%arg1_1) : f64[16, 4]
%view_1 = aten.view.default(%arg0_1, [6, 16]) : f64[6, 16]
%mm = aten.mm.default(%view_1, %t) : f64[6, 4]
%_unsafe_view = aten._unsafe_view.default(%mm, [2, 3, 4]) : f64[2, 3, 4]
%t_1 = aten.t.default(%arg2_1) : f64[4, 32]
%view_2 = aten.view.default(%_unsafe_view, [6, 4]) : f64[6, 4]
%mul_tensor = aten.mul.Tensor(%view_2, 0.5) : f64[6, 4]
%scaled_mm_default = fxrl.scaled_mm.default(%arg3_1, %arg4_1, %arg5_1, %arg6_1, False, f64, %mul_tensor, %t_1) : f64[6, 32]
%view_default = aten.view.default(%scaled_mm_default, [2, 3, 32]) : f64[2, 3, 32]
return %view_default""",
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1), (2, 1, 0, 3)])
def test_each_product_in_fp8_takes_one(order):
    """As in the rows' gradient, which is of two Linears and of two adapters."""

    def sums(a, b, c, d, *sides):
        parts = [fp8(*sides[:4]), a @ b, fp8(*sides[4:]), c @ d]
        first, *rest = (parts[i] for i in order)
        for part in rest:
            first = first + part
        return first

    pairs = [draw(6, 4), draw(4, 32), draw(6, 2), draw(2, 32)]
    gm, said = rewritten(sums, *pairs, *held(), *held(seed=1))
    assert (said, wide_products(gm)) == ("2 of 2 products are added inside FP8's", 0)


DEEP = "no product in FP8 is added as it is, and as wide as it is deep"
ADDED = "1 of {} products are added inside FP8's"


@pytest.mark.parametrize(
    ("function", "said", "left"),
    [
        (lambda y, a, b: y + a @ b + (a @ b) * 2, ADDED.format(2), 1),
        (lambda y, a, b: (y + a @ b, y), "", 1),
        (lambda y, a, b: (lambda low: (y + low, low))(a @ b), "", 1),
        (lambda y, a, b: y * (a @ b), "", 1),
        (lambda y, a, b: torch.add(y, a @ b, alpha=2), "", 1),
        (lambda y, a, b: y.float() + (a.float() @ b.float()), "", 1),
        (lambda y, a, b: y * 2 + a @ b, DEEP, 1),
        (
            lambda y, a, b: y + a.repeat(1, 65) @ b.repeat(65, 1),
            "no product beside it is of 256 columns or fewer",
            1,
        ),
    ],
    ids=["two adapters", "y read", "adapter read", "product", "alpha", "cast", "scaled", "wide"],
)
def test_what_stays(function, said, left):
    def of_sides(a, b, *sides):
        return function(fp8(*sides), a, b)

    gm, told = rewritten(of_sides, draw(6, 4), draw(4, 32), *held())
    assert (told, wide_products(gm)) == (said, left)


def test_a_deep_product_stays():
    gm, told = rewritten(
        lambda a, b, *sides: fp8(*sides) + a @ b, draw(6, 4), draw(4, 32), *held(depth=48)
    )
    assert (told, wide_products(gm)) == (DEEP, 1)


def test_an_adapter_is_added_once():
    def function(a, b, *sides):
        made = fxrl.scaled_mm.default(*sides, False, torch.float64, a, b)
        return made + a @ b

    gm, told = rewritten(function, draw(6, 4), draw(4, 32), *held())
    assert (told, wide_products(gm)) == ("", 1)


def test_both_halves_of_a_body():
    """Any number of rows; the gradients' products are adapters' too."""

    def linear(x, weight, scale, a, b):
        rows = x.flatten(0, 1)
        pair = fxrl.quantize_rows.default(rows, 0)
        made = fxrl.fp8_linear.default(rows, pair[0], pair[1], weight, scale, "fp8")
        return made.unflatten(0, (-1, 40)) + F.linear(F.linear(x, a), b) * 0.5

    def layer(x, w1, s1, w2, s2, a1, b1, a2, b2):
        gate, up = linear(x, w1, s1, a1, b1), linear(x, w2, s2, a2, b2)
        return [F.silu(gate) * up, gate - up]

    x = draw(5, 40, 32)
    weights = [part for seed in (0, 1) for part in quantized_weight(draw(32, 32, seed=seed), "row")]
    factors = [draw(4, 32), draw(32, 4), draw(4, 32, seed=1), draw(32, 4, seed=1)]
    given, needs = [x, *weights, *factors], (True, *[False] * 4, *[True] * 4)
    region = replace(region_of(layer, given, needs), forward=fx.symbolic_trace(layer))
    body = build_region(region, None)

    def run(live):
        return torch.ops.fxrl.region(live, body.key, 0, [])

    wanted = gradients(lambda live: layer(*live), given, needs)
    assert_equal(gradients(run, given, needs), wanted)
    for half in body.traced.graphs[:2]:
        added = half.graph.find_nodes(op="call_function", target=fxrl.scaled_mm.default)
        assert [len(node.args) for node in added] == [8, 8]
