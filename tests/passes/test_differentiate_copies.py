"""``differentiate-copies``: what is written, in the dtype, shape and layout of what it overwrites."""

import pytest
import torch
from expecttest import assert_expected_inline

from fxrl.ir.printer import print_graph
from fxrl.passes.differentiate_copies import DifferentiateCopies
from tests.passes.lowered import call, lowered


def into_a_slice(x, y):
    out = torch.zeros_like(y)
    out[:, 1:] = x * 2
    return out.sum()


def whole(x, y):
    out = torch.empty_like(x)
    out.copy_(x * 2)
    return out.sum()


def cast_and_expanded(x, y):
    out = torch.zeros(3, 4, dtype=torch.float32)
    out.copy_(x[0] * 2)
    return out.view(-1).square().sum()


def turned(x, y):
    out = torch.zeros(4, 3, dtype=x.dtype).t()
    out.copy_(x)
    return out.t().view(12).square().sum()


def from_another_layout(x, y):
    out = torch.zeros(4, 3, dtype=x.dtype)
    out.copy_(x.t())
    return out.view(12).square().sum()


def one_at_a_time(x, y):
    out = torch.zeros(3, dtype=x.dtype)
    for i in range(3):
        out[i] = x[i].mean()
    return out.square().sum()


def over_what_is_trained(x, y):
    out = y.clone()
    out[1:, 0] = x[1:, 0]
    return out.square().sum()


def number(x, y):
    out = x * 1
    out[:, 2] = 7.0
    return out.square().sum()


CASES = [
    into_a_slice, whole, cast_and_expanded, turned, from_another_layout, one_at_a_time,
    over_what_is_trained, number,
]  # fmt: skip


def inputs():
    g = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (3, 5))
    made = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_numbers_and_gradients(function):
    x, y = inputs()
    gm = lowered(function, x, y, respelled=False)
    assert "aten.copy.default" in print_graph(gm) or function is number
    DifferentiateCopies().run(gm)
    assert "aten.copy.default" not in print_graph(gm)
    found, wanted = call(gm, x=x, y=y), function(x, y)
    torch.testing.assert_close(found, wanted)
    for leaf in (x, y):
        one = torch.autograd.grad(found, leaf, retain_graph=True, allow_unused=True)[0]
        other = torch.autograd.grad(wanted, leaf, retain_graph=True, allow_unused=True)[0]
        torch.testing.assert_close(one, other)


def test_applied():
    gm = lowered(cast_and_expanded, *inputs(), respelled=False)
    report = DifferentiateCopies().run(gm)
    assert_expected_inline(
        print_graph(gm),
        """\
%x = input : f64[3, 4]
%select = aten.select.int(%x, 0, 0) : f64[4]
%mul = aten.mul.Tensor(%select, 2) : f64[4]
%_to_copy_default = aten._to_copy.default(%mul, dtype=f32) : f32[4]
%expand_default = aten.expand.default(%_to_copy_default, [3, 4]) : f32[3, 4]
%clone_default = aten.clone.default(%expand_default, memory_format=contiguous_format) : f32[3, 4]
%view_1 = aten.view.default(%clone_default, [-1]) : f32[12]
%pow_1 = aten.pow.Tensor_Scalar(%view_1, 2) : f32[12]
%sum_1 = aten.sum.default(%pow_1) : f32[]
return %sum_1""",
    )
    assert_expected_inline(
        "\n".join(map(str, report.remarks)),
        """analysis: differentiate-copies @ 0:loss/copy [tests/passes/test_differentiate_copies.py:26]: what is copied is read where it was copied to""",
    )
