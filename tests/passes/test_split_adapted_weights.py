"""Weights with an adapter's product added: which are split, what stays and why, equal numbers."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from fxrl.ir.printer import print_graph
from fxrl.passes.split_adapted_weights import SplitAdaptedWeights
from tests.passes.lowered import call, lowered
from tests.passes.test_respelling import assert_equals_eager, body, draw, reasons

OFFSETS = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second of three groups has no rows


def split(function, *args):
    gm = lowered(function, *args, respelled=False)
    report = SplitAdaptedWeights().run(gm)
    assert_equals_eager(gm, function, args)
    return gm, report


def test_the_rows_are_multiplied_by_the_factors():
    def adapted(x, w, b, a):
        return F.linear(x, w + 2.0 * (b @ a))

    gm, report = split(adapted, draw(3, 8), draw(6, 8), draw(6, 2), draw(2, 8))
    assert_expected_inline(
        reasons(report),
        """a product of rows with an adapter's factors, of rank 2: no sum of weight and adapter""",
    )
    assert report.remarks[0].kind == "applied"
    assert report.remarks[0].saved_bytes == 6 * 8 * 8
    assert_expected_inline(
        body(gm),
        """\
%transpose_int = aten.transpose.int(%a, -2, -1) : f64[8, 2]
%mm_default = aten.mm.default(%x, %transpose_int) : f64[3, 2]
%mul_tensor = aten.mul.Tensor(%mm_default, 2.0) : f64[3, 2]
%transpose_int_1 = aten.transpose.int(%b, -2, -1) : f64[2, 6]
%mm_default_1 = aten.mm.default(%mul_tensor, %transpose_int_1) : f64[3, 6]
%transpose_int_2 = aten.transpose.int(%w, -2, -1) : f64[8, 6]
%mm_default_2 = aten.mm.default(%x, %transpose_int_2) : f64[3, 6]
%add_tensor = aten.add.Tensor(%mm_default_2, %mm_default_1) : f64[3, 6]
return %add_tensor""",
    )


def test_experts_of_a_mixture():
    """As PEFT adapts them: the experts are the innermost dim of the second factor's memory."""

    def adapted(x, w, b, a, offs):
        b = b.view(16, 8, 3).permute(2, 0, 1)
        weight = torch.baddbmm(w, b, a.view(3, 8, 32), alpha=4)
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offs)

    sizes = ((5, 32), (3, 16, 32), (16, 24), (24, 32))
    x, w, b, a = (draw(*one).detach() for one in sizes)
    args = *(one.bfloat16().requires_grad_() for one in (x, w, b / 64, a)), OFFSETS
    gm = lowered(adapted, *args, respelled=False)
    (remark,) = SplitAdaptedWeights().run(gm).remarks
    assert remark.saved_bytes == 3 * 16 * 32 * 2
    assert_expected_inline(
        body(gm),
        """\
%view = aten.view.default(%b, [16, 8, 3]) : bf16[16, 8, 3]
%permute = aten.permute.default(%view, [2, 0, 1]) : bf16[3, 16, 8]
%view_1 = aten.view.default(%a, [3, 8, 32]) : bf16[3, 8, 32]
%transpose_int = aten.transpose.int(%view_1, -2, -1) : bf16[3, 32, 8]
%_grouped_mm_default = aten._grouped_mm.default(%x, %transpose_int, %offs) : bf16[5, 8]
%mul_tensor = aten.mul.Tensor(%_grouped_mm_default, 4) : bf16[5, 8]
%transpose_int_1 = aten.transpose.int(%permute, -2, -1) : bf16[3, 8, 16]
%clone_default = aten.clone.default(%transpose_int_1, memory_format=contiguous_format) : bf16[3, 8, 16]
%_grouped_mm_default_1 = aten._grouped_mm.default(%mul_tensor, %clone_default, %offs) : bf16[5, 16]
%transpose_int_2 = aten.transpose.int(%w, -2, -1) : bf16[3, 32, 16]
%_grouped_mm_default_2 = aten._grouped_mm.default(%x, %transpose_int_2, %offs) : bf16[5, 16]
%add_tensor = aten.add.Tensor(%_grouped_mm_default_2, %_grouped_mm_default_1) : bf16[5, 16]
return %add_tensor""",
    )
    found = call(gm, **dict(zip("xwba", args, strict=False)), offs=OFFSETS)
    exact = by_group(*(arg.detach().double() for arg in args[:4]))
    errors = [(one - exact).norm() for one in (found, adapted(*args))]
    assert errors[0] <= 1.1 * errors[1], "no further off than with a weight rounded to bf16"


def by_group(x, w, b, a):
    weights = w + 4 * b.view(16, 8, 3).permute(2, 0, 1) @ a.view(3, 8, 32)
    return torch.cat([x[:2] @ weights[0].T, x[2:] @ weights[2].T])


@pytest.mark.parametrize(
    "adapted",
    [
        lambda x, w, b, a: x @ torch.addmm(w, b, a, alpha=0.5).T,
        lambda x, w, b, a: x @ (b @ a * 3 + w).T,
        lambda x, w, b, a: x @ torch.add(w, b @ a, alpha=-2).T,
        lambda x, w, b, a: x @ (w - b @ a / 4).T,
        lambda x, w, b, a: x @ (w + (a.T @ b.T).T.view(6, 8)).T,
        lambda x, w, b, a: x @ (w.T + (b @ a).T * 0.3),
        lambda x, w, b, a: F.linear(x, w + b @ a, bias=b[:, 0]),
        lambda x, w, b, a: torch.stack([x @ (v := w + b @ a).T, x.sin() @ v.T]),
        lambda x, w, b, a: (x @ (v := w + b @ a).T) @ v,
    ],
)
def test_the_sum_may_be_spelled_otherwise(adapted):
    def made(x, w, b, a):
        return adapted(x, w, b, a)

    gm, report = split(made, draw(3, 8), draw(6, 8), draw(6, 2), draw(2, 8))
    assert [remark.kind for remark in report.remarks] == ["applied"]
    assert "[6, 8]" not in body(gm).replace("%w", ""), "nothing has the weight's shape"


@pytest.mark.parametrize(
    "adapted",
    [
        lambda x, w, b, a: torch.bmm(x, torch.baddbmm(w, b, a).mT),
        lambda x, w, b, a: x[0] @ (w + b @ a * 2)[1].T,
        lambda x, w, b, a: torch.bmm(x, (w + b @ a)[torch.tensor([2, 0, 2])].mT),
    ],
)
def test_matrices_of_a_stack(adapted):
    def made(x, w, b, a):
        return adapted(x, w, b, a)

    gm, report = split(made, draw(3, 4, 8), draw(3, 6, 8), draw(3, 6, 2), draw(3, 2, 8))
    assert [remark.kind for remark in report.remarks] == ["applied"]
    assert "aten.add.Tensor(%w" not in body(gm)


@pytest.mark.parametrize(
    ("adapted", "why"),
    [
        (lambda x, w, b, a: x @ (v := w + b @ a).T * v.norm(), "read by more than products"),
        (lambda x, w, b, a: x @ (v := w + b @ a).T + v[0, 0], "read by more than products"),
        (lambda x, w, b, a: x.float() @ (w + b @ a).T.float(), ""),  # the sum is rounded
        (lambda x, w, b, a: x @ (w + b.repeat(1, 2) @ a.repeat(2, 1)).T, ""),  # of no lower rank
        (lambda x, w, b, a: x @ (w + b[:, :1] * a[:1]).T, ""),  # no product makes what is added
        (lambda x, w, b, a: x @ torch.addmm(w[0], b, a).T, ""),  # a row is added to each
        (lambda x, w, b, a: x @ torch.addmm(w, b, a, beta=2).T, ""),
        (lambda x, w, b, a: (v := w + b @ a) @ v.T, "read by more than products"),
        (lambda x, w, b, a: (w + b @ a).sum() * x, ""),
        (lambda x, w, b, a: x @ (w.sin() + b @ a).T, ""),  # computed, as keys are
    ],
)
def test_what_stays(adapted, why):
    def made(x, w, b, a):
        return adapted(x, w, b, a)

    args = draw(3, 8), draw(6, 8), draw(6, 2), draw(2, 8)
    gm = lowered(made, *args, respelled=False)
    before = print_graph(gm)
    report = SplitAdaptedWeights().run(gm)
    assert [remark.kind for remark in report.remarks] == (["missed"] if why else [])
    assert why in reasons(report)
    assert print_graph(gm) == before


def test_grouped_products_ask_for_aligned_rows():
    def adapted(x, w, b, a, offs):
        return torch._grouped_mm(x, torch.baddbmm(w, b, a).transpose(-2, -1), offs=offs)

    def args(rank):
        sizes = ((5, 32), (3, 24, 32), (3, 24, rank), (3, rank, 32))
        return *(draw(*one).detach().bfloat16() for one in sizes), OFFSETS

    (refused,) = SplitAdaptedWeights().run(lowered(adapted, *args(4), respelled=False)).remarks
    assert refused.kind == "missed"
    assert refused.cure == "a rank that is a multiple of 8"
    gm = lowered(adapted, *args(8), respelled=False)
    assert [one.kind for one in SplitAdaptedWeights().run(gm).remarks] == ["applied"]


def test_rows_of_another_dtype_are_refused():
    def adapted(x, w, b, a):
        return x @ (w + (b @ a).float()).T

    sizes = ((3, 8), (6, 8), (6, 2), (2, 8))
    x, w, b, a = (draw(*one).detach() for one in sizes)
    gm = lowered(adapted, x.float(), w.float(), b, a, respelled=False)
    assert not SplitAdaptedWeights().run(gm).remarks, "what is added was rounded"
