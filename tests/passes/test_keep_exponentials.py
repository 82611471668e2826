"""``keep-exponentials``: trained heads that spare their backward the logits, where there is room."""

import pytest
import torch
from expecttest import assert_expected_inline

import fxrl
from fxrl.ir.plan import CutHead, CutLayer, Keep, Plan
from fxrl.ir.printer import print_graph
from fxrl.passes.fuse_linear_logprob import FuseLinearLogprob
from fxrl.passes.keep_exponentials import KeepExponentials
from tests.capture.mixer import (
    assert_matches_eager,
    make_batch,
    make_model,
    policy_loss,
    token_logps,
)
from tests.passes.lowered import lowered, plain

SITE = "0:head/mm.linear_logprob"
KEPT = Plan({SITE: CutHead("exponentials")})


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def fused(loss=policy_loss, *, trained=True):
    model = make_model()
    model.head.requires_grad_(trained)
    gm = lowered(lambda b: loss(model, b), make_batch())
    FuseLinearLogprob().run(gm)
    return gm


def heads(gm):
    """What is said of each head beside its inputs."""
    lines = [line for line in print_graph(gm).splitlines() if "fxrl.linear_logprob" in line]
    return [line.partition("outputs=")[2].partition(")")[0] for line in lines]


def test_applied():
    gm = fused()
    assert heads(gm) == ["'logprob', grad_outputs='logprob'"]
    report = KeepExponentials().run(gm, KEPT)
    assert heads(gm) == ["'logprob', grad_outputs='logprob', keep_exponentials=True"]
    assert_expected_inline(
        plain(report),
        """applied: keep-exponentials @ 0:head/mm.linear_logprob: keep: exponentials [18 x 61]; the backward makes no logits""",
    )


def test_nothing_is_asked_for():
    gm = fused()
    before = print_graph(gm)
    assert KeepExponentials().run(gm).remarks == ()
    assert print_graph(gm) == before


@pytest.mark.parametrize(
    ("choice", "reason"),
    [(CutLayer("inputs"), "is for another"), (Keep("as it is"), "as it is")],
    ids=["another site", "kept"],
)
def test_missed(choice, reason):
    gm = fused()
    before = print_graph(gm)
    (remark,) = KeepExponentials().run(gm, Plan({SITE: choice})).remarks
    assert remark.kind == "missed"
    assert reason in remark.reason
    assert print_graph(gm) == before


def with_entropy(model, batch):
    logp = torch.log_softmax(model(batch["ids"])[:, :-1], -1)
    return policy_loss(model, batch) + (logp.exp() * logp).sum(-1).mean()


def scored(model, batch):
    with torch.no_grad():
        return token_logps(model(batch["ids"]), batch["ids"]).mean()


@pytest.mark.parametrize(
    ("loss", "trained"), [(policy_loss, False), (with_entropy, True), (scored, True)]
)
def test_not_its_idiom(loss, trained):
    assert KeepExponentials().run(fused(loss, trained=trained), KEPT).remarks == ()


def two_forwards(model, batch):
    """Two heads over one weight, which is that of the embeddings, too."""
    reverse = batch | {"ids": batch["ids"].flip(1)}
    return policy_loss(model, batch) - 0.3 * policy_loss(model, reverse)


def with_figures(model, batch):
    logits = model(batch["ids"])
    logp = torch.log_softmax(logits[:, :-1], -1)
    entropy = -(logp.exp() * logp).sum(-1).detach()
    chosen = token_logps(logits, batch["ids"])
    return -(chosen * batch["mask"]).sum(), {"entropy": entropy.mean()}


def step_of(loss, plan=None, **options):
    config = fxrl.Config(min_saved_bytes=0, compile_regions=False, on_miss="error", **options)
    model = make_model()
    return model, fxrl.optimize(model, loss, config, plan=plan)


def kept(step):
    choices = step.plan.choices.values()
    return [choice.kept for choice in choices if isinstance(choice, CutHead)]


@pytest.mark.parametrize(
    ("loss", "count"), [(policy_loss, 1), (two_forwards, 2), (with_figures, 1)]
)
def test_numerics_and_gradients(loss, count):
    model, step = step_of(loss, gpu_memory="1GiB", host_memory="1GiB")
    for rows, length in ((3, 7), (2, 12), (5, 4)):
        assert_matches_eager(step, loss, model, make_batch(rows, length))
    assert kept(step) == ["exponentials"] * count
    assert len(step.captures) == 1
    applied = [r for r in step.report.of_kind("applied") if r.pass_name == "keep-exponentials"]
    assert len(applied) == count
    assert step.verify(make_batch())


def test_a_backward_runs_twice_and_gradients_add_up():
    model, step = step_of(policy_loss, gpu_memory="1GiB", host_memory="1GiB")
    batch = make_batch()
    loss = step(batch)
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    step(batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 3 * once[name])


def test_without_a_plan_nothing_is_kept():
    model, step = step_of(policy_loss)
    assert_matches_eager(step, policy_loss, model, make_batch())
    assert kept(step) == ["rows"]


def test_switched_off_and_told():
    plan = Plan({SITE: CutHead("rows")})
    model, step = step_of(policy_loss, plan, gpu_memory="1GiB", host_memory="1GiB")
    assert_matches_eager(step, policy_loss, model, make_batch())
    assert kept(step) == ["rows"]
    model, step = step_of(policy_loss, KEPT)
    assert_matches_eager(step, policy_loss, model, make_batch())
    assert kept(step) == ["exponentials"]
    assert Plan.from_json(step.plan.to_json()).choices == step.plan.choices
    assert f"{SITE}: trained head: exponentials are kept for the backward" in str(step.plan)


def planned(gpu_memory, rows=8, length=256):
    torch._dynamo.reset()
    _, step = step_of(policy_loss, gpu_memory=gpu_memory, host_memory="1GiB")
    return step.plan_for(make_batch(rows, length))


def test_only_what_the_plan_leaves_over_is_taken():
    room = planned("10GiB")
    need, exponentials = room.peak_gpu_bytes, 8 * 8 * 255 * 61
    short = planned(int((need - 1) / 0.97))
    assert [plan.choices[SITE].kept for plan in (room, short)] == ["exponentials", "rows"]
    assert need - short.peak_gpu_bytes > exponentials / 2
    assert room.step_seconds <= short.step_seconds


def test_a_longer_batch_that_leaves_no_room_keeps_none():
    batch = make_batch(8, 64)
    need = planned("10GiB", 8, 64).peak_gpu_bytes
    model, step = step_of(policy_loss, gpu_memory=int(need / 0.97) + 1, host_memory="1GiB")
    step(batch).backward()
    assert kept(step) == ["exponentials"]
    model.zero_grad()
    assert_matches_eager(step, policy_loss, model, make_batch(8, 70))
    assert kept(step) == ["rows"]
    assert_matches_eager(step, policy_loss, model, batch)
