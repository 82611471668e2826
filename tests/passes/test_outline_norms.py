"""``outline-norms``: what is elementwise behind the layers becomes a region."""

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import fxrl
from fxrl.ir.printer import print_graph
from fxrl.ir.region import region_calls
from fxrl.passes.outline_layers import OutlineLayers
from fxrl.passes.outline_norms import OutlineNorms
from tests.capture.mixer import assert_matches_eager
from tests.passes.layered import Block, Stack, ids_batch, square_loss
from tests.passes.lowered import lowered, plain

ONLY = fxrl.Config(passes=("outline-norms",), compile_regions=False, on_miss="error")


class Normed(Stack):
    """With something between the last layer and the head."""

    def __init__(self, behind, layers=2):
        torch.manual_seed(0)
        super().__init__([Block() for _ in range(layers)])
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.behind = behind
        self.double()

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.behind(x, self.scale))


def rms(x, scale):
    wide = x.to(torch.float64)
    return scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def layer_norm(x, scale):
    return F.layer_norm(x, (8,)) * scale + 1


def last_rows(x, scale):
    return rms(x, scale)[:, 1:].tanh()


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def outlined(behind):
    model = Normed(behind)
    gm = lowered(lambda b: square_loss(model, b), ids_batch())
    OutlineLayers().run(gm)
    return gm, OutlineNorms().run(gm)


def test_applied():
    gm, report = outlined(rms)
    text = re.sub(r"'[0-9a-f]{16}'", "'ID'", print_graph(gm))
    text = re.sub(r"([%.])(_unsafe_)?view(_\d+)?", r"\1view", text)  # the head's differ by version
    lines = [line for line in text.splitlines() if "= input" not in line and "blocks." not in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
%embedding = aten.embedding.default(%model.embed.weight, %b_ids) : f64[2, 5, 8]
%getitem = operator.getitem(%region_default, 0) : f64[2, 5, 8]
%getitem_1 = operator.getitem(%region_default_1, 0) : f64[2, 5, 8]
%region_default_2 = fxrl.region.default([%getitem_1, %model.scale], 'ID', 0, []) : (f64[2, 5, 8])
%getitem_2 = operator.getitem(%region_default_2, 0) : f64[2, 5, 8]
%view = aten.view.default(%getitem_2, [10, 8]) : f64[10, 8]
%t_12 = aten.t.default(%model.head.weight) : f64[8, 3]
%addmm_4 = aten.addmm.default(%model.head.bias, %view, %t_12) : f64[10, 3]
%view = aten.view.default(%addmm_4, [2, 5, 3]) : f64[2, 5, 3]
%pow_4 = aten.pow.Tensor_Scalar(%view, 2) : f64[2, 5, 3]
%mean_3 = aten.mean.default(%pow_4) : f64[]
return %mean_3""",
    )
    assert_expected_inline(
        plain(report),
        """applied: outline-norms @ 0:model/pow: 6 ops behind the layers in a compiled body (saves 720 B)""",
    )


def two_norms(x, scale):
    """One for a head of its own, such as the predictor of a further token has."""
    return F.layer_norm(x, (8,)) @ F.layer_norm(x, (8,), scale).mT @ x


@pytest.mark.parametrize(
    "behind",
    [lambda x, scale: x, lambda x, scale: x * scale, two_norms],
    ids=["nothing", "one op", "two norms"],
)
def test_nothing_is_said_where_there_is_nothing_to_fuse(behind):
    gm, report = outlined(behind)
    assert not report.remarks
    assert len([n for n in gm.graph.nodes if "region" in str(n.target)]) == 2


def with_noise(x, scale):
    normed = rms(x, scale)
    return normed + F.dropout(normed, 0.5, training=True)


class Around(Normed):
    """Whose layers have their residual stream outside of them, gated: two ops behind each, around
    the next one."""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.behind(x, self.scale))


@pytest.mark.parametrize(
    ("model", "ops"), [(Normed(with_noise), [6]), (Around(rms), [2, 8])], ids=["noise", "layers"]
)
def test_it_ends_ahead_of_what_cannot_stand_in_it(model, ops):
    gm = lowered(lambda b: square_loss(model, b), ids_batch())
    OutlineLayers().run(gm)
    report = OutlineNorms().run(gm)
    assert [r.kind for r in report.remarks] == ["applied"] * len(ops)
    assert [int(r.reason.split()[0]) for r in report.remarks] == ops


@pytest.mark.parametrize(
    "model",
    [Normed(rms), Normed(layer_norm), Normed(last_rows), Around(rms)],
    ids=["rms", "layer_norm", "last_rows", "layers"],
)
def test_numbers_and_gradients_are_eagers(model):
    step = fxrl.optimize(model, square_loss, ONLY)
    assert_matches_eager(step, square_loss, model, ids_batch(3, 7), tol=1e-12)
    assert [r.site for r in step.report.remarks if r.pass_name == "outline-norms"]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("behind", [rms, layer_norm, last_rows])
def test_a_reference_without_gradients_runs_the_body_of_the_norm_that_is_trained(behind, trained):
    """So both have the same bits, whatever the compiler makes of it."""

    def loss_fn(model, batch):
        with torch.no_grad():
            reference = model(batch["ids"])
        return (model(batch["ids"]) - reference).exp().mean()

    model = Normed(behind, layers=3)
    model.scale.requires_grad_(trained)
    step = fxrl.optimize(model, loss_fn, ONLY)
    assert_matches_eager(step, loss_fn, model, ids_batch(), tol=1e-12)
    gm = lowered(lambda b: loss_fn(model, b), ids_batch())
    OutlineLayers().run(gm)
    OutlineNorms().run(gm)
    regions = [call.meta["region"] for call in region_calls(gm)]
    norms = [region.id for region in regions if not region.layer]
    assert len(norms) == 2
    assert len({*norms}) == 1


def test_what_a_loss_detaches_gets_no_gradient_of_a_norm_that_is_trained():
    def states(model, ids):
        x = model.embed(ids)
        for block in model.blocks:
            x = block(x)
        return x

    def loss_fn(model, batch):
        fixed = rms(states(model, batch["ids"].flip(1)), model.scale).detach() * 2
        return (rms(states(model, batch["ids"]), model.scale) * 2 @ fixed.mT).tanh().mean()

    model = Normed(rms)
    step = fxrl.optimize(model, loss_fn, ONLY)
    assert_matches_eager(step, loss_fn, model, ids_batch(), tol=1e-12)
