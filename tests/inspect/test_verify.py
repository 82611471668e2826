"""``verify`` on steps that are right, wrong in each possible way, or broken."""

import json
import math
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from fxrl.errors import ConfigError, VerificationError
from fxrl.inspect.compare import VerifyReport, VerifyRow
from fxrl.inspect.evaluate import EvaluationError, TruthError
from fxrl.inspect.verify import verify_step
from fxrl.ir.table import plain_text


class Toy(nn.Module):
    """A head over an embedding; ``key_bias`` has a gradient of zero by mathematics."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 23, bias=False)
        self.key_bias = nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, ids):
        return self.head(self.drop(self.norm(self.embed(ids)))) + self.key_bias


def loss_fn(model, batch):
    logps = model(batch["ids"]).log_softmax(-1)
    logp = logps.gather(-1, batch["y"][:, None])[:, 0] * batch["w"]
    return -(logp * batch["m"]).mean(), {"logp": logp.mean().detach(), "n": batch["m"].sum()}


def make(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    model = Toy(dropout).to(dtype)
    batch = {
        "ids": torch.randint(0, 23, (40,)),
        "y": torch.randint(0, 23, (40,)),
        "w": torch.rand(40, dtype=dtype).requires_grad_(),
        "m": (torch.rand(40) > 0.2).to(dtype),
    }
    return model, batch


def chunked(model, batch, chunks=4):
    """The right loss by another route: rows in chunks, log-sum-exp instead of log-softmax."""
    logits = model(batch["ids"])
    parts = []
    for z, y in zip(logits.chunk(chunks), batch["y"].chunk(chunks), strict=True):
        parts.append(z.gather(-1, y[:, None])[:, 0] - z.logsumexp(-1))
    logp = torch.cat(parts) * batch["w"]
    return -(logp * batch["m"]).mean(), {"logp": logp.mean().detach(), "n": batch["m"].sum()}


def verify(model, batch, step_loss=chunked, user_loss=loss_fn, **options):
    return verify_step(model, user_loss, lambda b: step_loss(model, b), batch, **options)


def row(report, name):
    return next(r for r in report.rows if r.name == name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reference", ["auto", "eager", "float32", "float64"])
def test_a_right_step(dtype, reference):
    report = verify(*make(dtype), reference=reference)
    assert report.ok, str(report)
    report.raise_if_failed()
    half = dtype in (torch.bfloat16, torch.float16)
    wider = reference if half or (dtype, reference) == (torch.float32, "float64") else "eager"
    assert report.reference == {"auto": "float32" if half else "eager"}.get(reference, wider)
    names = {r.name for r in report.rows}
    assert {"loss", "logp", "n", "batch['w']", "embed.weight", "norm.bias"} <= names
    assert {"norm.running_mean", "norm.num_batches_tracked", "all gradients"} <= names
    assert not {"unused", "frozen"} & names
    asked = reference in ("auto", "eager", report.reference)
    assert [note for note in report.notes if "is no wider than" not in note] == []
    assert asked == (report.notes == ())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "factor"), [("embed.weight", 1.05), ("norm.bias", 0.9), ("batch['w']", -1.0)]
)
def test_one_wrong_gradient(dtype, name, factor):
    model, batch = make(dtype)

    def wrong(model, batch):
        leaf = batch["w"] if name == "batch['w']" else model.get_parameter(name)
        handle = leaf.register_hook(lambda grad: grad * factor)
        handles.append(handle)
        return loss_fn(model, batch)

    handles = []
    report = verify(model, batch, wrong)
    for handle in handles:
        handle.remove()
    assert not report.ok
    assert {r.name for r in report.failed} - {"all gradients"} == {name}
    assert row(report, name).rel == pytest.approx(abs(factor - 1), rel=0.2)


def scaled(where, factor):
    def wrong(model, batch):
        loss, metrics = loss_fn(model, batch)
        if where == "loss":
            return loss + (loss.detach() * (factor - 1)), metrics
        return loss, metrics | {where: metrics[where] * factor}

    return wrong


@pytest.mark.parametrize("where", ["loss", "logp", "n"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_wrong_value_with_right_gradients(where, dtype):
    report = verify(*make(dtype), scaled(where, 1.001))
    assert [r.name for r in report.failed] == [where]


def test_float64_tolerances_are_the_contract():
    report = verify(*make())
    assert row(report, "loss").tolerance == 1e-9
    assert row(report, "embed.weight").tolerance == 1e-7
    assert not verify(*make(), scaled("loss", 1 + 1e-8)).ok


def test_a_missing_metric_and_one_too_many():
    def other(model, batch):
        loss, metrics = loss_fn(model, batch)
        return loss, {"logp": metrics["logp"], "extra": torch.tensor(1.0)}

    report = verify(*make(), other)
    assert {r.name: r.note for r in report.failed} == {
        "n": "missing in the step, shape () in eager",
        "extra": "shape () in the step, missing in eager",
    }


def test_a_missing_gradient():
    def detached(model, batch):
        return loss_fn(model, batch | {"w": batch["w"].detach()})

    failed = row(verify(*make(), detached), "batch['w']")
    assert not failed.ok
    assert failed.note == "no gradient in the step"
    assert failed.rel == pytest.approx(1.0)


def test_a_gradient_too_many():
    def more(model, batch):
        loss, metrics = loss_fn(model, batch)
        return loss + (model.unused - model.unused.detach()).sum(), metrics

    failed = row(verify(*make(), more), "unused")
    assert not failed.ok
    assert failed.note == "no gradient in eager"


def test_zeros_for_a_missing_gradient_are_no_error():
    def zeros(model, batch):
        loss, metrics = loss_fn(model, batch)
        return loss + (0 * model.unused).sum(), metrics

    report = verify(*make(), zeros)
    assert report.ok
    assert row(report, "unused").note == "no gradient in eager"


def test_a_step_that_forgets_the_buffers():
    def frozen_norm(model, batch):
        model.norm.momentum, momentum = 0.0, model.norm.momentum
        try:
            return loss_fn(model, batch)
        finally:
            model.norm.momentum = momentum

    report = verify(*make(), frozen_norm)
    assert {r.name: r.note for r in report.failed} == {
        name: "missing in the step, shape (16,) in eager"
        for name in ("norm.running_mean", "norm.running_var")
    }


def poisoned(value):
    def loss(model, batch):
        return loss_fn(model, batch | {"w": batch["w"] * torch.tensor(value)})

    return loss


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_same_not_finite_numbers_on_both_sides(value):
    report = verify(*make(), poisoned(value), poisoned(value))
    assert report.ok, str(report)
    assert report.notes == ("the loss of this batch is nan, in eager, too",)
    assert not math.isfinite(verify(*make(), poisoned(value)).rows[0].rel)


def test_no_gradient_on_both_sides():
    def detached(model, batch):
        return loss_fn(model, batch)[0].detach()

    report = verify(*make(), detached, detached)
    assert report.ok, str(report)
    assert report.notes == (
        "no parameter gets a gradient, in eager either: only the loss was compared",
    )


@pytest.mark.parametrize("side", ["step", "eager"])
def test_nan_on_one_side(side):
    losses = (poisoned(math.nan), loss_fn) if side == "step" else (loss_fn, poisoned(math.nan))
    report = verify(*make(), *losses)
    assert not report.ok
    assert row(report, "loss").rel == math.inf
    assert json.loads(report.to_json())["rows"][0]["rel"] == "inf"


def test_all_zero_gradients():
    model, batch = make()
    batch["m"] = torch.zeros(40, dtype=torch.float64)
    assert verify(model, batch).ok


def test_dropout_agrees_from_one_seed():
    model, batch = make(dropout=0.5)
    assert verify(model, batch).ok


def test_dropout_that_differs_is_noted():
    def other_seed(model, batch):
        torch.manual_seed(99)
        return loss_fn(model, batch)

    model, batch = make(dropout=0.5)
    report = verify(model, batch, other_seed)
    assert not report.ok
    assert any("draws random numbers" in note for note in report.notes)


def test_random_numbers_leave_no_wider_reference():
    report = verify(*make(torch.bfloat16, dropout=0.5))
    assert report.reference == "eager"
    assert report.notes[0].startswith("random numbers may depend on the dtype")


def test_nothing_is_left_behind():
    model, batch = make()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    batch["w"].grad = torch.full_like(batch["w"], 7.0)
    held = {name: (p, p.grad) for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def messy(model, batch):
        torch.rand(3), random.random(), np.random.rand()
        model.eval()
        model.norm.train()
        batch.pop("unseen", None)
        batch["more"] = 1
        return loss_fn(model, batch)

    verify(model, batch, messy, messy)
    assert all(p is held[n][0] and p.grad is held[n][1] for n, p in model.named_parameters())
    assert all((p.grad == 7).all() for p in model.parameters())
    assert (batch["w"].grad == 7).all()
    assert set(batch) == {"ids", "y", "w", "m"}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), rng[0])
    assert random.getstate() == rng[1]
    assert (np.random.get_state()[1] == rng[2]).all()


def test_state_comes_back_after_an_error():
    model, batch = make()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    mean = model.norm.running_mean.clone()

    def fails(model, batch):
        loss_fn(model, batch)
        raise RuntimeError("out of luck")

    with pytest.raises(
        VerificationError, match=r"fails where eager runs: RuntimeError: out of luck"
    ):
        verify(model, batch, fails)
    assert torch.equal(model.norm.running_mean, mean)
    assert (model.head.weight.grad == 1).all()


def test_a_batch_tensor_inside_another_graph_is_left_alone():
    model, batch = make()
    source = torch.rand(40, dtype=torch.float64, requires_grad=True)
    batch["w"] = source * 2
    assert verify(model, batch).ok
    batch["w"].sum().backward()  # its graph is still whole
    assert (source.grad == 2).all()


def test_eager_that_fails():
    def fails(model, batch):
        raise KeyError("advantages")

    words = r"fails in eager.*KeyError: 'advantages', at .*test_verify.py:\d+; "
    with pytest.raises(VerificationError, match=words):
        verify(*make(), loss_fn, fails)


@dataclass
class Output:
    loss: torch.Tensor
    kl: torch.Tensor


class Both(NamedTuple):
    loss: torch.Tensor
    kl: torch.Tensor


@pytest.mark.parametrize(
    ("returned", "name"),
    [
        (lambda loss, kl: {"loss": loss, "kl": kl, "kind": "grpo"}, "kl"),
        (lambda loss, kl: {"loss": loss, "parts": {"kl": [kl, 3]}}, "parts.kl.[0]"),
        (Output, "kl"),
        (Both, "kl"),
        (lambda loss, kl: (loss, "grpo", kl), "[2]"),
        (lambda loss, kl: (loss, {"kl": kl}), "kl"),
    ],
)
def test_what_a_loss_may_return(returned, name):
    """The number that is called loss, or comes first; what else there is is compared, too."""

    def loss_by(right):
        def either(model, batch):
            loss, metrics = loss_fn(model, batch)
            return returned(loss, right * metrics["logp"])

        return either

    for wrong in (1.0, 1.001):
        report = verify(*make(), loss_by(wrong), loss_by(1.0))
        assert [r.name for r in report.failed] == [name] * (wrong > 1)


@pytest.mark.parametrize("result", [torch.ones(3), 1.0, {"logits": torch.ones(())}, None])
def test_no_scalar_loss(result):
    with pytest.raises(EvaluationError, match="cure: return a scalar loss"):
        verify(*make(), loss_fn, lambda model, batch: result)


def test_a_loss_that_writes_into_the_batch():
    def writes(model, batch):
        batch["m"].mul_(0.5)
        return loss_fn(model, batch)

    with pytest.raises(EvaluationError, match=r"writes into batch\['m'\]"):
        verify(*make(), loss_fn, writes)


def test_an_optimizer_in_backward():
    model, batch = make()
    handle = model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(EvaluationError, match=r"head\.weight has a post-accumulate-grad hook"):
        verify(model, batch)
    handle.remove()
    assert verify(model, batch).ok


def test_a_loss_without_gradients():
    with torch.no_grad():
        report = verify(*make())
    assert report.ok
    assert {r.kind for r in report.rows} == {"loss", "metric", "buffer"}


def test_unknown_reference():
    with pytest.raises(ConfigError, match="reference='fp32' is not one of"):
        verify(*make(), reference="fp32")


def test_half_precision_must_be_as_near_the_truth_as_eager():
    """A step that rounds once more in each place differs from eager as much as from the truth."""

    def coarse(model, batch):
        def round_(grad):
            return grad + 0.1 * grad.abs().mean() * torch.ones_like(grad)

        logits = model(batch["ids"])
        logits.register_hook(round_)
        logp = logits.log_softmax(-1).gather(-1, batch["y"][:, None])[:, 0] * batch["w"]
        return -(logp * batch["m"]).mean(), loss_fn(model, batch)[1]

    report = verify(*make(torch.bfloat16), coarse)
    assert not report.ok
    assert report.reference == "float32"
    assert row(report, "all gradients").rel > 2 * row(report, "all gradients").eager_rel


def test_float32_in_the_step_is_nearer_the_truth_than_eager():
    def wide(model, batch):
        logps = model(batch["ids"]).float().log_softmax(-1)
        logp = logps.gather(-1, batch["y"][:, None])[:, 0] * batch["w"]
        return -(logp * batch["m"]).mean(), {"logp": logp.mean().detach(), "n": batch["m"].sum()}

    report = verify(*make(torch.bfloat16), wide)
    assert report.ok, str(report)
    total = row(report, "all gradients")
    assert total.rel < total.eager_rel


def test_half_precision_model_that_cannot_be_widened():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(x.to(torch.bfloat16))

    model = Stubborn().to(torch.bfloat16)

    def loss(model, batch):
        return model(batch).float().log_softmax(-1)[:, 0].mean()

    report = verify(model, torch.randn(5, 4), loss, loss)
    assert report.ok
    assert report.reference == "eager"
    assert "no wider reference: in torch.float32 the loss fails" in report.notes[0]
    with pytest.raises(TruthError, match=r"in torch\.float32 the loss fails"):
        verify(model, torch.randn(5, 4), loss, loss, reference="float32")


def test_autocast_inside_the_loss_is_seen():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))

    def cast(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).float().log_softmax(-1)[:, 0].mean()

    report = verify(model, torch.randn(6, 8), cast, cast)
    assert report.ok
    assert report.notes == (
        "no wider reference: a module computes in torch.bfloat16 even when torch.float32 comes in",
    )
    assert row(report, "0.weight").tolerance > 1e-2


def test_autocast_outside_is_switched_off_for_the_truth():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))

    def loss(model, batch):
        return model(batch).float().log_softmax(-1)[:, 0].mean()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = verify(model, torch.randn(6, 8), loss, loss)
    assert report.ok
    assert report.reference == "float32"
    total = row(report, "all gradients")
    assert total.rel == total.eager_rel > 1e-4


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr("fxrl.inspect.evaluate.host_free", lambda: 1000)
    report = verify(*make(torch.bfloat16))
    assert report.reference == "eager"
    assert "on cpu, which has 1000 B left" in report.notes[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_zero_by_mathematics(dtype, seed):
    """``key_bias`` shifts all logits: its gradient is rounding noise in both runs."""
    model, batch = make(dtype)
    torch.manual_seed(seed)
    batch["w"] = torch.rand(40, dtype=dtype).requires_grad_()
    report = verify(model, batch)
    assert report.ok, str(report)
    assert row(report, "key_bias").max_abs < 0.01


def test_a_loss_that_is_a_module():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))

        def forward(self, model, batch):
            return self.scale * loss_fn(model, batch)[0]

    model, batch = make(torch.bfloat16)
    loss = Scaled()
    report = verify_step(model, loss, lambda b: loss(model, b), batch)
    assert report.reference == "float32"
    assert row(report, "loss_fn.scale").ok
    assert loss.scale.grad is None


class FakeStep:
    """A step of three rewrites, of which some are wrong."""

    def __init__(self, model, wrong, disabled=frozenset(), error=None):
        self.model, self.wrong, self.disabled, self.error = model, wrong, disabled, error
        self.captures = ()

    def __call__(self, batch):
        self.captures = (
            SimpleNamespace(
                running=True,
                rounded=list,
                lowered=None,
                rewrites=[("p", site) for site in "abc"],
            ),
        )
        loss, metrics = chunked(self.model, batch)
        active = self.wrong - self.disabled
        if active and self.error:
            raise self.error
        return loss * (1 + 0.01 * len(active)), metrics

    def without(self, rewrites):
        disabled = {site for _, site in rewrites}
        return FakeStep(self.model, self.wrong, self.disabled | disabled, self.error)


@pytest.mark.parametrize("wrong", ["b", "c", "ac", "abc"])
def test_blame_names_the_wrong_rewrite(wrong):
    model, batch = make()
    report = verify_step(model, loss_fn, FakeStep(model, set(wrong)), batch)
    assert not report.ok
    assert report.blame == tuple(f"p @ {site}" for site in wrong)
    assert f"to blame: {', '.join(report.blame)}" in str(report)
    with pytest.raises(VerificationError, match=f"to blame: p @ {wrong[0]}"):
        report.raise_if_failed()


def test_blame_for_a_step_that_raises():
    model, batch = make()
    step = FakeStep(model, {"b"}, error=RuntimeError("kernel"))
    with pytest.raises(VerificationError, match=r"kernel; to blame: p @ b$") as caught:
        verify_step(model, loss_fn, step, batch)
    assert caught.value.__cause__ is step.error


def test_no_blame_where_nothing_can_be_left_out():
    model, batch = make()
    assert verify(model, batch, scaled("loss", 2)).notes == (
        "nothing was rewritten, so no rewrite can be blamed",
    )


def test_a_capture_that_is_wrong_on_its_own():
    class WrongCapture(FakeStep):
        def without(self, rewrites):
            return self

    model, batch = make()
    report = verify_step(model, loss_fn, WrongCapture(model, {"b"}), batch)
    assert report.blame == ()
    assert "the capture is to blame" in report.notes[0]


REPORT = VerifyReport(
    ok=False,
    rows=(
        VerifyRow("loss", "loss", 1e-3, 2e-3, 4e-2, True, 1e-3),
        *(
            VerifyRow(f"l{i}.weight", "gradient", 1e-6, i * 1e-4, 0.1, True, 1e-2)
            for i in range(20)
        ),
        VerifyRow("head.weight", "gradient", 0.5, 0.9, 0.1, False, 1e-2, "no gradient in the step"),
        VerifyRow("all gradients", "total", math.nan, 0.3, 0.1, False, 1e-2),
    ),
    blame=("mm_14",),
    reference="float32",
    notes=("something to know",),
)


def test_table():
    assert_expected_inline(
        plain_text(REPORT, 100),
        """\
value           kind       max abs       rel   eager's rel   tolerance   verdict
----------------------------------------------------------------------------------------------------
all gradients   total          nan   3.0e-01       1.0e-02     1.0e-01   WRONG
head.weight     gradient   5.0e-01   9.0e-01       1.0e-02     1.0e-01   WRONG     no gradient in
                                                                                   the step
loss            loss       1.0e-03   2.0e-03       1.0e-03     4.0e-02   ok
l19.weight      gradient   1.0e-06   1.9e-03       1.0e-02     1.0e-01   ok
l18.weight      gradient   1.0e-06   1.8e-03       1.0e-02     1.0e-01   ok
l17.weight      gradient   1.0e-06   1.7e-03       1.0e-02     1.0e-01   ok
l16.weight      gradient   1.0e-06   1.6e-03       1.0e-02     1.0e-01   ok
l15.weight      gradient   1.0e-06   1.5e-03       1.0e-02     1.0e-01   ok
l14.weight      gradient   1.0e-06   1.4e-03       1.0e-02     1.0e-01   ok
l13.weight      gradient   1.0e-06   1.3e-03       1.0e-02     1.0e-01   ok
l12.weight      gradient   1.0e-06   1.2e-03       1.0e-02     1.0e-01   ok
l11.weight      gradient   1.0e-06   1.1e-03       1.0e-02     1.0e-01   ok
l10.weight      gradient   1.0e-06   1.0e-03       1.0e-02     1.0e-01   ok
l9.weight       gradient   1.0e-06   9.0e-04       1.0e-02     1.0e-01   ok
and 9 more, all ok and nearer

FAILED: 2 of 23 values miss a float32 run of the model; to blame: mm_14
note: something to know""",
    )


def test_table_against_eager_has_no_column_for_eager():
    assert "eager's rel" not in plain_text(VerifyReport(True, REPORT.rows[:1]), 100)


def test_json():
    fields = json.loads(REPORT.to_json())
    assert fields["ok"] is False
    assert fields["blame"] == ["mm_14"]
    assert fields["rows"][-1]["max_abs"] == "nan"
    assert fields["rows"][0]["rel"] == 2e-3


def test_only_a_failure_raises():
    with pytest.raises(VerificationError, match="2 of 23 values miss a float32 run"):
        REPORT.raise_if_failed()
    VerifyReport(True, REPORT.rows[:1]).raise_if_failed()


def test_in_80_columns_names_and_numbers_stay_whole():
    """A parameter of an adapter has 70 characters; folded into a column of 8 nobody reads it."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    row = VerifyRow(name, "gradient", 0.12, 0.5, 0.018, False, 2e-4, "no gradient in the step")
    text = plain_text(VerifyReport(False, (row,), reference="float32"), 80)
    assert max(map(len, text.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert name in lines
    assert "kind max abs rel eager's rel tolerance verdict" in lines
    assert "gradient 1.2e-01 5.0e-01 2.0e-04 1.8e-02 WRONG" in lines
    assert "no gradient in the step" in lines
