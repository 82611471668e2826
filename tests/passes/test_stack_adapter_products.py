"""``stack-adapter-products``: the same numbers, and the rows are read once."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from fxrl.ir.printer import print_graph
from fxrl.passes.stack_adapter_products import StackAdapterProducts
from tests.passes.lowered import draw, rewritten_by

aten = torch.ops.aten


def rewritten(function, *args):
    return rewritten_by(StackAdapterProducts(), function, *args)


def products(gm):
    return len(gm.graph.find_nodes(op="call_function", target=aten.mm.default))


def adapters(x, a, b, c):
    """Two adapters and a wide layer over rows that each looks at in its own way."""
    return F.linear(x, a), F.linear(x, b), F.linear(x, c)


def test_columns_of_one_product():
    gm, said = rewritten(adapters, draw(2, 200, 64), draw(4, 64), draw(2, 64), draw(160, 64))
    assert said == "2 narrow products of one operand in one"
    body = [line for line in print_graph(gm).splitlines() if "= input" not in line]
    assert_expected_inline(
        "\n".join(body),
        """\
%view = aten.view.default(%x_1, [400, 64]) : f64[400, 64]
%cat_default = aten.cat.default([%a_1, %b_1], 0) : f64[6, 64]
%permute_default = aten.permute.default(%cat_default, [1, 0]) : f64[64, 6]
%mm_default = aten.mm.default(%view, %permute_default) : f64[400, 6]
%slice_tensor = aten.slice.Tensor(%mm_default, 1, 0, 4) : f64[400, 4]
%clone_default = aten.clone.default(%slice_tensor, memory_format=contiguous_format) : f64[400, 4]
%slice_tensor_1 = aten.slice.Tensor(%mm_default, 1, 4, 6) : f64[400, 2]
%clone_default_1 = aten.clone.default(%slice_tensor_1, memory_format=contiguous_format) : f64[400, 2]
%_unsafe_view = aten._unsafe_view.default(%clone_default, [2, 200, 4]) : f64[2, 200, 4]
%_unsafe_view_1 = aten._unsafe_view.default(%clone_default_1, [2, 200, 2]) : f64[2, 200, 2]
%t_2 = aten.t.default(%c_1) : f64[64, 160]
%view_2 = aten.view.default(%x_1, [400, 64]) : f64[400, 64]
%mm_2 = aten.mm.default(%view_2, %t_2) : f64[400, 160]
%_unsafe_view_2 = aten._unsafe_view.default(%mm_2, [2, 200, 160]) : f64[2, 200, 160]
return %_unsafe_view, %_unsafe_view_1, %_unsafe_view_2""",
    )


def test_rows_of_one_product_in_the_gradients():
    def gradients(x, a, b, grad):
        with torch.enable_grad():
            live = [t.detach().requires_grad_() for t in (x, a, b)]
            made = F.linear(live[0], live[1]).sin() * F.linear(live[0], live[2])
            return torch.autograd.grad(made, live, grad)

    gm, _ = rewritten(gradients, draw(400, 64), draw(4, 64), draw(4, 64, seed=1), draw(400, 4))
    assert products(gm) == 4  # forward, both factors' gradients, and two of the rows


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (400, "2 narrow products of one operand in one"),
        (8, "copies of operands and results would cost more than reading again"),
    ],
)
def test_what_does_not_pay_stays(rows, said):
    gm, told = rewritten(lambda x, a, b: (x @ a, x @ b), draw(rows, 64), draw(64, 4), draw(64, 2))
    assert told == said
    assert products(gm) == (1 if rows == 400 else 2)


def test_one_that_needs_another_stays():
    def function(x, a):
        first = x @ a
        return first, x @ (a + first.sum())

    gm, said = rewritten(function, draw(400, 64), draw(64, 4))
    assert said == "one needs another's result"
    assert products(gm) == 2


def test_groups_that_need_each_other_stay_apart():
    def function(x, y, a, b):
        first, other = x @ a, y @ b
        return first, other, x @ (a + other.sum()), y @ (b + first.sum())

    gm, said = rewritten(function, draw(400, 64), draw(400, 64, seed=1), draw(64, 4), draw(64, 4))
    assert said.splitlines() == [
        "2 narrow products of one operand in one",
        "one needs another's result",
    ]
    assert products(gm) == 3


def test_wide_products_and_other_rows_stay():
    gm, said = rewritten(
        lambda x, y, a, b: (x @ a, y @ a, x @ b),
        draw(400, 64),
        draw(400, 64, seed=1),
        draw(64, 4),
        draw(64, 144),
    )
    assert (said, products(gm)) == ("", 3)
