"""``inline-layers``: layers that were captured once become places of their own."""

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import fxrl
from fxrl.ir.bodies import CALL_LAYER, clone
from fxrl.ir.printer import print_graph
from fxrl.ir.region import region_calls
from fxrl.passes.inline_layers import InlineLayers
from fxrl.passes.outline_layers import OutlineLayers
from tests.passes.lowered import plain, runnable

CONFIG = fxrl.Config(passes=("recompute",), compile_regions=False)


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        x = torch.tanh(self.up(x))
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Scaled(Layer):
    """No layer equals the one before it."""

    def __init__(self, number):
        super().__init__(number)
        self.scale = 1.0 + number

    def forward(self, x):
        return super().forward(x) * self.scale


def captured(kind=Layer, depth=2):
    """The lowered graph of a model's loss, and the loss with its parameters."""
    torch.manual_seed(0)
    model = nn.ModuleList(kind(number) for number in range(depth)).double()

    def loss(model, x):
        x = x.sin()
        for layer in model:
            x = layer(x)
        return x.square().sum()

    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    step = fxrl.optimize(model, loss, CONFIG)
    step(x)
    (capture,) = step.captures
    return clone(capture.lowered), lambda: loss(model, x), [x, *model.parameters()]


def lines(gm):
    """The graph without its inputs; regions without their hashes."""
    kept = (line for line in print_graph(gm).splitlines() if "= input" not in line)
    return "\n".join(re.sub(r"'[0-9a-f]{16}'", "'...'", line) for line in kept)


def assert_equals_eager(gm, eager, leaves):
    (found,), wanted = runnable(gm)(*leaves), eager()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    pairs = [torch.autograd.grad(loss, leaves) for loss in (found, wanted)]
    torch.testing.assert_close(*pairs, rtol=1e-11, atol=1e-11)


def test_applied():
    gm, eager, leaves = captured()
    assert_expected_inline(
        lines(gm),
        """\
%sin = aten.sin.default(%batch) : f64[2, 3, 4]
%held_2 = @held_1
%fxrl_layer = torch.ops.higher_order.fxrl_layer(%held_2, %sin, %model.0.up.weight) : (f64[2, 3, 4])
%getitem = operator.getitem(%fxrl_layer, 0) : f64[2, 3, 4]
%held_3 = @held_1
%fxrl_layer_1 = torch.ops.higher_order.fxrl_layer(%held_3, %getitem, %model_1_up_weight) : (f64[2, 3, 4])
%getitem_1 = operator.getitem(%fxrl_layer_1, 0) : f64[2, 3, 4]
%pow_1 = aten.pow.Tensor_Scalar(%getitem_1, 2) : f64[2, 3, 4]
%sum_1 = aten.sum.default(%pow_1) : f64[]
return %sum_1

@held_1:
  %t = aten.t.default(%model.0.up.weight) : f64[4, 4]
  %view = aten.view.default(%given_x, [6, 4]) : f64[6, 4]
  %mm = aten.mm.default(%view, %t) : f64[6, 4]
  %_unsafe_view = aten._unsafe_view.default(%mm, [2, 3, 4]) : f64[2, 3, 4]
  %tanh = aten.tanh.default(%_unsafe_view) : f64[2, 3, 4]
  %scaled_dot_product_attention_default = aten.scaled_dot_product_attention.default(%tanh, %tanh, %tanh, is_causal=True) : f64[2, 3, 4]
  return %scaled_dot_product_attention_default""",
    )
    report = InlineLayers().run(gm)
    assert_expected_inline(
        lines(gm),
        """\
%sin = aten.sin.default(%batch) : f64[2, 3, 4]
%t = aten.t.default(%model.0.up.weight) : f64[4, 4]
%view = aten.view.default(%sin, [6, 4]) : f64[6, 4]
%mm = aten.mm.default(%view, %t) : f64[6, 4]
%_unsafe_view = aten._unsafe_view.default(%mm, [2, 3, 4]) : f64[2, 3, 4]
%tanh = aten.tanh.default(%_unsafe_view) : f64[2, 3, 4]
%scaled_dot_product_attention_default = aten.scaled_dot_product_attention.default(%tanh, %tanh, %tanh, is_causal=True) : f64[2, 3, 4]
%t_1 = aten.t.default(%model_1_up_weight) : f64[4, 4]
%view_1 = aten.view.default(%scaled_dot_product_attention_default, [6, 4]) : f64[6, 4]
%mm_1 = aten.mm.default(%view_1, %t_1) : f64[6, 4]
%_unsafe_view_1 = aten._unsafe_view.default(%mm_1, [2, 3, 4]) : f64[2, 3, 4]
%tanh_1 = aten.tanh.default(%_unsafe_view_1) : f64[2, 3, 4]
%scaled_dot_product_attention_default_1 = aten.scaled_dot_product_attention.default(%tanh_1, %tanh_1, %tanh_1, is_causal=True) : f64[2, 3, 4]
%pow_1 = aten.pow.Tensor_Scalar(%scaled_dot_product_attention_default_1, 2) : f64[2, 3, 4]
%sum_1 = aten.sum.default(%pow_1) : f64[]
return %sum_1""",
    )
    assert_expected_inline(
        plain(report), """analysis: inline-layers @ 0:0/fxrl_layer: 2 layers were captured as 1"""
    )
    assert_equals_eager(gm, eager, leaves)


def test_a_region_of_the_body_is_each_layers_own():
    gm, eager, leaves = captured()
    OutlineLayers().run(gm)
    assert [call.meta["region"].layer for call in region_calls(gm)] == ["0:0"]
    InlineLayers().run(gm)
    assert_expected_inline(
        lines(gm),
        """\
%sin = aten.sin.default(%batch) : f64[2, 3, 4]
%region_default = fxrl.region.default([%model.0.up.weight, %sin], '...', 0, []) : (f64[2, 3, 4])
%getitem_2 = operator.getitem(%region_default, 0) : f64[2, 3, 4]
%region_default_1 = fxrl.region.default([%model_1_up_weight, %getitem_2], '...', 0, []) : (f64[2, 3, 4])
%getitem_3 = operator.getitem(%region_default_1, 0) : f64[2, 3, 4]
%pow_1 = aten.pow.Tensor_Scalar(%getitem_3, 2) : f64[2, 3, 4]
%sum_1 = aten.sum.default(%pow_1) : f64[]
return %sum_1""",
    )
    assert [call.meta["region"].layer for call in region_calls(gm)] == ["0:0", "0:1"]
    assert_equals_eager(gm, eager, leaves)


@pytest.mark.parametrize("options", [{"depth": 1}, {"kind": Scaled}], ids=["single", "unequal"])
def test_missed_by_what_equals_no_other_layer(options):
    gm, eager, leaves = captured(**options)
    before = print_graph(gm)
    assert not gm.graph.find_nodes(op="call_function", target=CALL_LAYER)
    assert InlineLayers().run(gm).remarks == ()
    assert print_graph(gm) == before
    assert_equals_eager(gm, eager, leaves)
