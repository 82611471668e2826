"""``merge-adapter-products``: the same numbers from fewer and narrower products."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx

from fxrl.ir.printer import print_graph
from fxrl.passes.merge_adapter_products import MergeAdapterProducts
from tests.passes.lowered import draw, rewritten_by

aten = torch.ops.aten


def adapted(x, w, a, b, scale):
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * scale


def gate_up(x, w1, a1, b1, w2, a2, b2):
    return F.silu(adapted(x, w1, a1, b1, 0.5)) * adapted(x, w2, a2, b2, 2.0)


def tidied(function, *args):
    """Graph before and after; checks that both give the function's own numbers."""
    gm, before, _ = rewritten(function, *args)
    return gm, before


def rewritten(function, *args):
    """The same, and what was said."""
    before = counts(make_fx(function, tracing_mode="fake")(*args))
    gm, said = rewritten_by(MergeAdapterProducts(), function, *args)
    return gm, before, said


def counts(gm):
    targets = [node.target for node in gm.graph.nodes]
    return {name: targets.count(op) for name, op in OPS.items()}


OPS = {
    "mm": aten.mm.default,
    "add": aten.add.Tensor,
    "cat": aten.cat.default,
    "mul": aten.mul.Tensor,
}


def adapter(inner, outer, rank=2):
    return draw(outer, inner), draw(rank, inner, seed=1), draw(outer, rank, seed=2)


def body(gm):
    """The graph without its inputs."""
    return "\n".join(line for line in print_graph(gm).splitlines() if "= input" not in line)


def test_a_wide_layer_and_its_adapter_become_one_product():
    gm, before, said = rewritten(adapted, draw(2, 200, 8), *adapter(8, 64), 0.3)
    assert before == {"mm": 3, "add": 1, "cat": 0, "mul": 1}
    assert_expected_inline(
        body(gm),
        """\
%view = aten.view.default(%x_1, [400, 8]) : f64[400, 8]
%cat_default_1 = aten.cat.default([%w_1, %b_1], 1) : f64[64, 10]
%permute_default = aten.permute.default(%cat_default_1, [1, 0]) : f64[10, 64]
%t_1 = aten.t.default(%a_1) : f64[8, 2]
%view_1 = aten.view.default(%x_1, [400, 8]) : f64[400, 8]
%mm_1 = aten.mm.default(%view_1, %t_1) : f64[400, 2]
%_unsafe_view_1 = aten._unsafe_view.default(%mm_1, [2, 200, 2]) : f64[2, 200, 2]
%view_2 = aten.view.default(%_unsafe_view_1, [400, 2]) : f64[400, 2]
%mul_tensor = aten.mul.Tensor(%view_2, 0.3) : f64[400, 2]
%cat_default = aten.cat.default([%view, %mul_tensor], 1) : f64[400, 10]
%mm_default = aten.mm.default(%cat_default, %permute_default) : f64[400, 64]
%_unsafe_view = aten._unsafe_view.default(%mm_default, [2, 200, 64]) : f64[2, 200, 64]
return %_unsafe_view""",
    )
    assert_expected_inline(said, """1 sums of products merged, 0 scales moved behind products""")


def test_layers_over_one_input_share_its_copy():
    gm, _ = tidied(gate_up, draw(400, 8), *adapter(8, 64), *adapter(8, 64, rank=3))
    found = counts(gm)
    assert (found["mm"], found["add"]) == (4, 0)
    left = [n for n in gm.graph.nodes if n.target is aten.cat.default and n.args[1] == 1]
    assert sum(n.args[0][0].meta["val"].shape[0] == 400 for n in left) == 1


@pytest.mark.parametrize("sizes", [(2, 200, 64, 8), (1, 4, 8, 64)], ids=["narrow", "few tokens"])
def test_what_does_not_pay_stays(sizes):
    rows, length, inner, outer = sizes
    gm, before, said = rewritten(adapted, draw(rows, length, inner), *adapter(inner, outer), 0.3)
    assert counts(gm) == before
    assert said == "no copy of operands costs less than the sums of products"


def test_results_that_others_read_stay():
    def function(x, w, a, b):
        delta = F.linear(F.linear(x, a), b)
        return F.linear(x, w) + delta, delta

    gm, _ = tidied(function, draw(400, 8), *adapter(8, 64))
    assert counts(gm)["cat"] == 0


def test_a_bias_is_no_summand_of_equal_shape():
    def function(x, w, a, b, bias):
        return x @ w.t() + bias + (x @ a.t()) @ b.t()

    gm, _ = tidied(function, draw(400, 8), *adapter(8, 64), draw(64))
    assert counts(gm)["add"] >= 1


def test_a_sum_that_needs_another_sum_shares_nothing():
    def function(x, w1, a1, b1, w2, a2, b2):
        first = adapted(x, w1, a1, b1, 1.0)
        inner = F.linear(first, a2)  # reads the first sum
        return first.sum() + (F.linear(x, w2) + F.linear(inner, b2)).sum()

    w1, a1, b1 = adapter(8, 64)
    tidied(function, draw(400, 8), w1, a1, b1, draw(64, 8, seed=3), draw(2, 64), draw(64, 2))


def test_twice_the_same_product():
    tidied(lambda x, w: x @ w.t() + x @ w.t(), draw(400, 8), draw(64, 8))

    def doubled(x, w):
        y = x @ w.t()
        return y + y

    tidied(doubled, draw(400, 8), draw(64, 8))


def test_numbers_are_multiplied_where_there_are_fewer():
    def function(grad, b, xa):
        scaled = grad.view(400, 64) * 0.25
        return scaled @ b, scaled.t() @ xa

    gm, _, said = rewritten(function, draw(2, 200, 64), draw(64, 2), draw(400, 2))
    assert_expected_inline(
        body(gm),
        """\
%view = aten.view.default(%grad_1, [400, 64]) : f64[400, 64]
%mm = aten.mm.default(%view, %b_1) : f64[400, 2]
%mul_tensor = aten.mul.Tensor(%mm, 0.25) : f64[400, 2]
%t_default = aten.t.default(%view) : f64[64, 400]
%mm_1 = aten.mm.default(%t_default, %xa_1) : f64[64, 2]
%mul_tensor_1 = aten.mul.Tensor(%mm_1, 0.25) : f64[64, 2]
return %mul_tensor, %mul_tensor_1""",
    )
    assert_expected_inline(said, """0 sums of products merged, 2 scales moved behind products""")


def test_the_gradients_of_an_adapted_layer():
    def gradients(x, w, a, b, grad):
        with torch.enable_grad():
            live = [t.detach().requires_grad_() for t in (x, a, b)]
            out = adapted(live[0], w, live[1], live[2], 0.5)
            return torch.autograd.grad(out, live, grad)

    tidied(gradients, draw(2, 200, 8), *adapter(8, 64), draw(2, 200, 64, seed=9))
    tidied(gradients, draw(2, 200, 64), *adapter(64, 8), draw(2, 200, 8, seed=9))
