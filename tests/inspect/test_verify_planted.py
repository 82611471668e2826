"""``verify`` against the real step: it passes what is right and blames a planted wrong rewrite."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxrl
from fxrl.ir.graph_pass import Applied, Normalisation, Pass, Site
from fxrl.passes import REGISTRY
from tests.capture.mixer import fixed
from tests.inspect.planted import plant_wrong_lowering

CONFIG = {"min_saved_bytes": 0, "chunk_tokens": 4, "compile_regions": False}


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 48, bias=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.embed(ids))))


def loss_fn(model, batch):
    logps = model(batch["ids"])[:, :-1].log_softmax(-1)
    picked = logps.gather(-1, batch["ids"][:, 1:, None])[..., 0]
    entropy = -(logps.exp() * logps).sum(-1)
    return -(picked * batch["adv"][:, None]).mean() - 0.01 * entropy.mean(), {
        "entropy": entropy.mean()
    }


@dataclass(frozen=True, slots=True)
class TanhSite(Site):
    """Where the plant acts."""


@dataclass(frozen=True)
class WrongTanh(Pass[TanhSite]):
    """A planted mistake: ``tanh(x)`` becomes ``tanh(1.001 x)``."""

    name: ClassVar[str] = "wrong-tanh"
    factor: ClassVar[float] = 1.001

    def match(self, gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
            yield TanhSite(node, 0)

    def rewrite(self, gm, site, choice):
        return self.respell(gm, site)

    def respell(self, gm, site):
        source = site.anchor.args[0]
        with gm.graph.inserting_before(site.anchor):
            scaled = gm.graph.call_function(torch.ops.aten.mul.Tensor, (source, self.factor))
        scaled.meta = dict(source.meta)
        site.anchor.replace_input_with(source, scaled)
        return Applied("tanh made wrong on purpose", 0)


@pytest.fixture
def setup():
    torch.manual_seed(0)
    model = Policy().double()
    batch = {"ids": torch.randint(0, 48, (3, 7)), "adv": torch.randn(3, dtype=torch.float64)}
    return model, fixed(batch)


def test_a_right_step_passes(setup):
    model, batch = setup
    report = fxrl.optimize(model, loss_fn, fxrl.Config(**CONFIG)).verify(batch)
    assert report.ok, str(report)
    assert {row.name for row in report.rows} >= {"loss", "entropy", "head.weight", "embed.weight"}


def test_a_planted_wrong_rewrite_is_caught_and_blamed(setup, monkeypatch):
    model, batch = setup
    monkeypatch.setitem(REGISTRY, WrongTanh.name, WrongTanh)
    step = fxrl.optimize(model, loss_fn, fxrl.Config(**CONFIG))
    report = step.verify(batch)
    assert [r.pass_name for r in step.report.of_kind("applied")] == [
        "fuse-linear-logprob",
        "wrong-tanh",
    ]
    assert not report.ok
    (blamed,) = report.blame
    assert "tanh" in blamed
    with pytest.raises(fxrl.errors.VerificationError, match="tanh"):
        report.raise_if_failed()


class RoundedPolicy(Policy):
    """Computes in float32 inside, whatever its weights are in, as norms of transformers do."""

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.embed(ids)).float()).to(self.head.weight.dtype))


class LastBit(WrongTanh):
    """No mistake: what is rounded to float32 may differ in its last bit."""

    name: ClassVar[str] = "last-bit"
    factor: ClassVar[float] = 1 + 2.0**-23


@pytest.mark.parametrize("planted", [LastBit, WrongTanh])
def test_a_model_in_float64_that_computes_in_float32(setup, monkeypatch, planted):
    """It is judged as float32 is, which finds a mistake all the same; metrics beside the loss do
    not make the loss coarser."""
    model, batch = RoundedPolicy().double(), setup[1]

    def loss(model, batch):
        loss, metrics = loss_fn(model, batch)
        return loss, metrics | {"half": loss.detach().bfloat16() * 2}

    monkeypatch.setitem(REGISTRY, planted.name, planted)
    report = fxrl.optimize(model, loss, fxrl.Config(**CONFIG)).verify(batch)
    assert report.ok == (planted is LastBit)
    assert all(planted.name in blamed for blamed in report.blame)
    tolerance = {row.name: row.tolerance for row in report.rows}
    assert 1e-7 < tolerance["loss"] < 1e-4 < tolerance["half"]


class WrongRespelling(WrongTanh, Normalisation[TanhSite]):
    """The same mistake by a pass that only respells: no report says that it won anything."""

    name: ClassVar[str] = "wrong-respelling"


@pytest.mark.parametrize(
    "also",
    [pytest.param((), marks=pytest.mark.slow), ("wrong-tanh",)],
    ids=["alone", "beside another"],
)
def test_a_wrong_normalising_pass_is_caught_and_blamed(setup, monkeypatch, also):
    """Whatever else is applied beside it is not suspected."""
    model, batch = setup
    for planted in (WrongRespelling, *([WrongTanh] if also else [])):
        monkeypatch.setitem(REGISTRY, planted.name, planted)
    report = fxrl.optimize(model, loss_fn, fxrl.Config(**CONFIG)).verify(batch)
    assert not report.ok
    assert report.blame == tuple(f"{name} @ 0:model/tanh" for name in ("wrong-respelling", *also))


def test_a_wrong_lowering_is_blamed_on_the_capture(setup, monkeypatch):
    """With every rewrite left out the lowered graph still runs, and is still wrong."""
    model, batch = setup
    plant_wrong_lowering(monkeypatch)
    report = fxrl.optimize(model, loss_fn, fxrl.Config(**CONFIG)).verify(batch)
    assert report.blame == ()
    assert "the capture is to blame" in report.notes[0]


def test_a_wrong_fused_head_is_caught_and_blamed(setup, monkeypatch):
    """A head that forgets its entropy's sign: the site of the fused pass is named."""
    model, batch = setup
    import fxrl.analysis.logprob.algebra as rules

    right = rules._product_total
    monkeypatch.setattr(
        rules, "_product_total", lambda algebra, form: algebra.scale(right(algebra, form), -1.0)
    )
    step = fxrl.optimize(model, loss_fn, fxrl.Config(**CONFIG))
    report = step.verify(batch)
    assert not report.ok
    (blamed,) = report.blame
    assert "mm" in blamed


def test_the_models_state_is_left_alone(setup):
    model, batch = setup
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fxrl.optimize(model, loss_fn, fxrl.Config(**CONFIG)).verify(batch)
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_functional_reference_is_another_formulation(setup):
    """The toy loss itself, by cross entropy: verify compares with something that is right."""
    model, batch = setup
    loss, _ = loss_fn(model, batch)
    logits = model(batch["ids"])[:, :-1]
    nll = F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    expected = (nll * batch["adv"][:, None]).mean() - 0.01 * entropy.mean()
    torch.testing.assert_close(loss, expected)
