"""``gather-by-inverse``: the same gradients, and nothing is added up that need not be."""

import pytest
import torch
from expecttest import assert_expected_inline

from fxrl.ir.printer import print_graph
from fxrl.passes.gather_by_inverse import GatherByInverse
from tests.passes.lowered import draw, rewritten_by

SCORES = torch.randn(12, generator=torch.Generator().manual_seed(0))


def gradient(pick):
    """The gradient of rows that are picked by numbers made of scores."""

    def function(x, scores, grad):
        with torch.enable_grad():
            live = x.detach().requires_grad_()
            return torch.autograd.grad(live[pick(scores)], live, grad)[0]

    return function


def put_back(scores):
    """As transformers' mixtures do, without writes by now."""
    order = scores.argsort()
    return torch.empty_like(order).index_put([order], torch.arange(order.size(0)))


def scattered(scores):
    order = scores.argsort()
    return torch.zeros_like(order).scatter(0, order, torch.arange(12))


def rewritten(pick, rows=12):
    return rewritten_by(GatherByInverse(), gradient(pick), draw(rows, 3), SCORES, draw(12, 3))


def body(gm):
    return "\n".join(line for line in print_graph(gm).splitlines() if "= input" not in line)


def test_each_row_once():
    gm, said = rewritten(lambda scores: scores.argsort())
    assert said == "rows that a permutation took are taken back by its inverse"
    assert_expected_inline(
        body(gm),
        """\
%sort = aten.sort.default(%scores_1) : (f32[12], i64[12])
%getitem_1 = operator.getitem(%sort, 1) : i64[12]
%iota_default = prims.iota.default(12, start=0, step=1, dtype=i64, device=cpu, requires_grad=False) : i64[12]
%scatter_src = aten.scatter.src(%iota_default, 0, %getitem_1, %iota_default) : i64[12]
%index_tensor = aten.index.Tensor(%grad_1, [%scatter_src]) : f64[12, 3]
return %index_tensor""",
    )


def test_each_row_several_times():
    gm, _ = rewritten(lambda scores: put_back(scores) // 4, rows=3)
    assert_expected_inline(
        body(gm),
        """\
%sort = aten.sort.default(%scores_1) : (f32[12], i64[12])
%getitem_1 = operator.getitem(%sort, 1) : i64[12]
%index_tensor = aten.index.Tensor(%grad_1, [%getitem_1]) : f64[12, 3]
%view_default = aten.view.default(%index_tensor, [3, 4, 3]) : f64[3, 4, 3]
%sum_dim_int_list = aten.sum.dim_IntList(%view_default, [1]) : f64[3, 3]
return %sum_dim_int_list""",
    )


@pytest.mark.parametrize(
    "pick",
    [
        put_back,
        scattered,
        lambda scores: scores.argsort().argsort(),
        lambda scores: scores.argsort().argsort(descending=True),
        lambda scores: scores.argsort().to(torch.int8).argsort(),
        lambda scores: scores.sort(stable=True, descending=True).indices.int(),
        lambda scores: torch.div(scores.argsort(), 1, rounding_mode="floor"),
    ],
)
def test_orders_that_are_permutations(pick):
    gm, said = rewritten(pick)
    assert said
    assert "index_put.default(%new_zeros" not in print_graph(gm)


@pytest.mark.parametrize(
    ("pick", "rows"),
    [
        (lambda scores: scores.argsort(), 13),  # one of them is left out
        (lambda scores: scores.argsort() % 4, 12),
        (lambda scores: scores.argsort() // 5, 3),
        (lambda scores: scores.view(4, 3).argsort(1).flatten(), 12),
        (lambda scores: scores.argsort()[:, None].expand(12, 3).select(1, 0) // 2, 7),
        (lambda scores: (scores > 0).long(), 12),
        (
            lambda scores: (
                put_back(scores).index_put([scores.argsort()], torch.arange(12), True) // 2
            ),
            12,
        ),
    ],
)
def test_others_are_added(pick, rows):
    _, said = rewritten(pick, rows)
    assert said == ""


def test_sizes_are_equal_that_are_spelled_differently():
    def function(x, scores, grad):
        with torch.enable_grad():
            live = x.detach().requires_grad_()
            order = scores.flatten().argsort()
            grads = torch.cat([grad[:, 1:].flatten(0, 1), grad[:, 0]])  # b (t - 1) + b rows
            return torch.autograd.grad(live.flatten(0, 1)[order], live, grads)[0]

    x, scores, grad = draw(3, 4, 2), SCORES.view(3, 4), draw(3, 4, 2)
    _, said = rewritten_by(GatherByInverse(), function, x, scores, grad, sizes="symbolic")
    assert said


def test_rows_that_are_put_into_others_stay():
    def function(x, scores, rows):
        return x.index_put([scores.argsort()], rows, accumulate=True)

    _, said = rewritten_by(GatherByInverse(), function, draw(12, 3), SCORES, draw(12, 3))
    assert said == ""


def test_an_index_of_two_dims_stays():
    def function(x, scores, grad):
        with torch.enable_grad():
            live = x.detach().requires_grad_()
            return torch.autograd.grad(live[scores.argsort().view(4, 3)], live, grad)[0]

    _, said = rewritten_by(GatherByInverse(), function, draw(12, 3), SCORES, draw(4, 3, 3))
    assert said == ""


def test_one_number_for_all_rows_stays():
    def function(scores, one):
        return torch.zeros(12).double().index_put([scores.argsort()], one, accumulate=True)

    _, said = rewritten_by(GatherByInverse(), function, SCORES, draw(1)[0])
    assert said == ""


def test_an_inverse_of_other_numbers_is_none():
    def function(x, scores, grad):
        order, numbers = scores.argsort(), torch.arange(12.0)
        floats = torch.zeros(12).index_put([order], numbers)
        return gradient(lambda _: order)(x, scores, grad), floats

    gm, said = rewritten_by(GatherByInverse(), function, draw(12, 3), SCORES, draw(12, 3))
    assert said
    assert "aten.scatter.src" in print_graph(gm)
