"""Products of several forwards joined: what becomes one product, what stays, and equal numbers."""

import pytest
import torch
from expecttest import assert_expected_inline

from fxrl.ir.printer import print_graph
from fxrl.passes.join_products import JoinProducts
from fxrl.passes.rebatch_loops import RebatchLoops
from tests.passes.lowered import lowered
from tests.passes.test_respelling import assert_equals_eager, body, draw, reasons


def logits(rows, weight, first=None, last=None):
    return (rows @ weight.T)[:, first:last].float().double() / 0.9


def test_a_refused_loop_leaves_no_readers():
    """``rebatch-loops`` tries parts of one tensor first, and begins with what it then gives up."""

    def joined(x, w):
        a, b = x.split(2)
        return torch.cat([logits(a + 1, w), logits(b - 1, w)])

    args = draw(4, 3, 4), draw(7, 4, seed=2)
    gm = lowered(joined, *args, respelled=False)
    assert "not known to act" in reasons(RebatchLoops().run(gm))
    assert JoinProducts().run(gm).remarks
    assert_equals_eager(gm, joined, args)


def test_two_forwards_are_one_product():
    def joined(x, y, w):
        return torch.cat([x @ w.T, y @ w.T]).log_softmax(-1)

    args = draw(2, 3, 4), draw(5, 3, 4, seed=1), draw(7, 4, seed=2)
    gm = lowered(joined, *args, respelled=False)
    report = JoinProducts().run(gm)
    assert_equals_eager(gm, joined, args)
    assert_expected_inline(
        reasons(report), """the rows of 2 products with one weight are one product's"""
    )
    assert_expected_inline(
        body(gm),
        """\
%permute = aten.permute.default(%w, [1, 0]) : f64[4, 7]
%view = aten.view.default(%x, [6, 4]) : f64[6, 4]
%view_1 = aten.view.default(%y, [15, 4]) : f64[15, 4]
%cat_default = aten.cat.default([%view, %view_1]) : f64[21, 4]
%mm_default = aten.mm.default(%cat_default, %permute) : f64[21, 7]
%reshape_default = aten.reshape.default(%mm_default, [-1, 3, 7]) : f64[7, 3, 7]
%_log_softmax = aten._log_softmax.default(%reshape_default, -1, False) : f64[7, 3, 7]
return %_log_softmax""",
    )


@pytest.mark.parametrize(
    "join",
    [
        lambda x, y, w: torch.cat([logits(x, w, last=-1), logits(y, w, last=-1)]),
        lambda x, y, w: torch.stack([logits(x, w), logits(y, w)]),
        lambda x, y, w: torch.cat([(x @ w.T + w[:, 0]).flatten(0, 1), (y @ w.T + w[:, 0]).flatten(0, 1)]),
        lambda x, y, w: torch.cat([torch.nn.functional.linear(i, w, w[:, 0]) for i in (x, y)]),
        lambda x, y, w: torch.cat([(i @ w.T)[:, 1] for i in (x, y)]),
        lambda x, y, w: torch.cat([(x @ w.T)[:, -1:], (y @ w.T)[:, :-1]], 1),
        lambda x, y, w: torch.cat([(x @ w.T)[:1], (y @ w.T)[1:]]),
        lambda x, y, w: torch.cat([(x[:1] @ w.T)[:, -1:].expand(2, -1, -1), y @ w.T], 1),
    ],
)  # fmt: skip
def test_what_stands_between_is_computed_of_all(join):
    def joined(x, y, w):
        return join(x, y, w)

    args = draw(2, 3, 4), draw(2, 3, 4, seed=1), draw(7, 4, seed=2)
    gm = lowered(joined, *args, respelled=False)
    assert JoinProducts().run(gm).remarks
    assert_equals_eager(gm, joined, args)
    assert sum(".mm" in line or ".addmm" in line for line in body(gm).splitlines()) == 1


@pytest.mark.parametrize(
    "join",
    [
        lambda x, y, w: torch.cat([x @ w.T, y @ (w * 2).T]),  # two weights
        lambda x, y, w: torch.cat([x @ w.T / 0.9, y @ w.T / 0.8]),  # not computed alike
        lambda x, y, w: torch.cat([x @ w.T, y @ w.T], -1),  # along the classes
        lambda x, y, w: torch.cat([(x @ w.T)[..., 1:], (y @ w.T)[..., 1:]], 1),  # not all classes
        lambda x, y, w: torch.cat([(x @ w.T).mT.contiguous().mT, y @ w.T], 1),
        lambda x, y, w: torch.cat([z := x @ w.T, z]),  # one product twice
        lambda x, y, w: torch.cat([(x @ w.T).cumsum(0), (y @ w.T).cumsum(0)]),
        lambda x, y, w: torch.cat([z := x @ w.T, y @ w.T]) * z.mean(),  # read apart, too
        lambda x, y, w: torch.cat([x @ w[:2].T, y @ w[:2].T]),  # it does not widen its rows
    ],
)
def test_other_joins_stay(join):
    def joined(x, y, w):
        return join(x, y, w)

    gm = lowered(joined, draw(2, 3, 4), draw(2, 3, 4, seed=1), draw(7, 4, seed=2), respelled=False)
    before = print_graph(gm)
    assert not JoinProducts().run(gm).remarks
    assert print_graph(gm) == before
