"""What a step must carry besides a plain forward: everything a training loop does with a loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxrl.config import Config
from fxrl.errors import MissedRewriteError
from fxrl.ir.on_miss import MissedRewriteWarning, open_misses
from fxrl.ir.printer import print_graph
from fxrl.step import optimize
from tests.capture.mixer import (
    CONFIG,
    QUIET,
    assert_matches_eager,
    assert_same,
    captures,
    fixed,
    fused,
    grads,
    make_batch,
    make_model,
    policy_loss,
    token_logps,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# ---------------------------------------------------------------------------- uses of the result
def test_one_step_serves_every_use_of_its_loss() -> None:
    """Scaled, summed over steps, accumulated, differentiated twice over: one capture for all."""
    model, step = make_model(), None
    first, second = make_batch(), make_batch(4, 9, seed=2)
    step = optimize(model, policy_loss, CONFIG)

    uses: list[Callable[[Callable[[Any], Tensor]], None]] = [
        lambda f: (0.5 * f(first)).backward(),
        lambda f: (f(first) + f(second)).backward(),
        lambda f: [f(batch).div(2).backward() for batch in (first, second)] and None,
        lambda f: (lambda loss: (loss * loss.detach() + 3 * loss).backward())(f(first)),
    ]
    for use in uses:
        use(lambda batch: policy_loss(model, batch))
        wanted = grads(model)
        use(step)
        assert_same(grads(model), wanted)
    assert fused(step)
    assert captures(step) == 1


def test_tied_embeddings_get_one_gradient_of_both_uses() -> None:
    model = make_model()
    step = optimize(model, policy_loss, CONFIG)
    assert_matches_eager(step, policy_loss, model, fixed(make_batch()))
    assert model.head.weight is model.embed.weight


def test_scoring_without_grad_is_bitwise_the_training_log_probs() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logps = token_logps(model(batch["ids"]), batch["ids"])
        return (logps * batch["adv"]).mean(), {"logps": logps}

    model, batch = make_model(dtype=torch.float32), fixed(make_batch())
    step = optimize(model, loss_fn, CONFIG)
    loss, metrics = step(batch)
    with torch.no_grad():
        scored_loss, scored = step(batch)
    assert loss.requires_grad
    assert not scored_loss.requires_grad
    assert torch.equal(scored["logps"], metrics["logps"])


def test_gradients_that_are_switched_on_inside_of_no_grad() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad():
            return policy_loss(model, batch)

    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, loss_fn, QUIET)
    with torch.no_grad():
        loss = step(batch)
    loss.backward()
    wanted = grads(model)
    policy_loss(model, batch).backward()
    assert_same(wanted, grads(model))
    (told,) = step.report.of_kind("missed")
    assert "switched on inside of a call under no_grad" in told.reason
    assert told.source
    assert_matches_eager(step, loss_fn, model, batch)
    assert fused(step)


@pytest.mark.parametrize("unwatched", [torch.no_grad, torch.inference_mode])
def test_statistics_that_switch_gradients_on_by_themselves(unwatched: Any) -> None:
    """``torch.distributions`` does at what it computes at first use, whoever calls it."""

    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        policy = torch.distributions.Categorical(logits=model(batch["ids"])[:, :-1])
        logps = policy.log_prob(batch["ids"][:, 1:])
        return -logps.mean(), {"likeliest": policy.probs.amax(-1).mean()}

    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, loss_fn, CONFIG)
    with unwatched():
        assert_same(step(batch), loss_fn(model, batch))
    assert step.report.of_kind("applied")
    assert not open_misses(step.report)


def test_metrics_come_back_as_the_loss_names_them() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(batch["ids"])
        logps = token_logps(logits, batch["ids"])
        probs = torch.softmax(logits[:, :-1].detach(), -1)
        entropy = -(probs * probs.log()).sum(-1)
        return -logps.mean(), {"entropy": entropy.mean(), "logp/min": logps.detach().min()}

    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, loss_fn, CONFIG)
    _, wanted = loss_fn(model, batch)
    _, got = step(batch)
    assert list(got) == list(wanted)
    assert_same(got, wanted)
    assert not any(value.requires_grad for value in got.values())
    assert fused(step)


def test_batch_tensors_get_their_gradients() -> None:
    model = make_model()
    step = optimize(model, policy_loss, CONFIG)
    found = []
    for run in (lambda b: policy_loss(model, b), step):
        batch = fixed(make_batch())
        batch["adv"].requires_grad_(True)
        run(batch).backward()
        found.append(batch["adv"].grad)
    assert_same(found[1], found[0])
    assert found[0].abs().max() > 0


def test_all_masked_batch_gives_a_differentiable_zero() -> None:
    model = make_model()
    step = optimize(model, policy_loss, CONFIG)
    loss = step(fixed(make_batch(mask=torch.zeros(3, 6, dtype=torch.bool))))
    assert loss.item() == 0
    loss.backward()
    assert all(bool((gradient == 0).all()) for gradient in grads(model).values())


# ---------------------------------------------------------------------------- shapes and scalars
def test_ten_shapes_take_at_most_two_compilations() -> None:
    model = make_model()
    step = optimize(model, policy_loss, CONFIG)
    shapes = [(3, 7), (4, 7), (3, 12), (2, 5), (8, 3), (5, 9), (1, 6), (1, 11), (6, 4), (7, 21)]
    for rows, length in shapes:
        assert_matches_eager(step, policy_loss, model, make_batch(rows, length, seed=rows))
    assert captures(step) <= 2
    assert fused(step)


def test_a_first_batch_of_one_row_does_not_pin_the_batch_size() -> None:
    model = make_model()
    step = optimize(model, policy_loss, CONFIG)
    for rows, length in [(1, 5), (1, 8), (4, 6), (2, 9), (1, 3), (6, 11)]:
        assert_matches_eager(step, policy_loss, model, make_batch(rows, length))
    assert captures(step) <= 2


def test_a_temperature_that_changes_every_step_stays_fused() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return -token_logps(model(batch["ids"]) / batch["temperature"], batch["ids"]).mean()

    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    for temperature in (0.9, 0.8, 1.3, 0.7, 1.1):
        batch = fixed(make_batch(temperature=temperature))
        assert_matches_eager(step, loss_fn, model, batch)
    assert captures(step) <= 2
    for capture in step.captures:
        applied = capture.report.of_kind("applied")
        assert [remark.pass_name for remark in applied] == ["fuse-linear-logprob"]


# ---------------------------------------------------------------------------- modes and precision
def test_dropout_draws_eagers_numbers() -> None:
    model = make_model(dropout=0.4).train()
    step = optimize(model, policy_loss, CONFIG)
    batch = fixed(make_batch())
    step(batch)  # capture draws nothing that counts
    torch.manual_seed(5)
    wanted = policy_loss(model, batch)
    wanted.backward()
    wanted_grads = grads(model)
    torch.manual_seed(5)
    got = step(batch)
    got.backward()
    assert_same(got.detach(), wanted.detach())
    assert_same(grads(model), wanted_grads)
    torch.manual_seed(6)
    assert step(batch).item() != got.item()


def test_train_and_eval_are_two_captures_of_one_step() -> None:
    model = make_model(dropout=0.5).train()
    step = optimize(model, policy_loss, CONFIG)
    batch = fixed(make_batch())
    step(batch)
    model.eval()
    assert_matches_eager(step, policy_loss, model, batch)
    assert captures(step) == 2


@pytest.mark.parametrize(
    ("around", "inside"),
    [(True, False), (False, True), (True, True)],
    ids=["around the call", "inside the loss", "both"],
)
def test_autocast(around: bool, inside: bool) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        # accelerate asks for the cache of cast weights
        cast = torch.autocast("cpu", torch.bfloat16, cache_enabled=True)
        with cast if inside else nullcontext():
            logits = model(batch["ids"])
        return -token_logps(logits.float(), batch["ids"]).mean()

    model, batch = make_model(dtype=torch.float32), fixed(make_batch())
    step = optimize(model, loss_fn, CONFIG)
    truth = make_model()  # float64
    loss_fn_wide = -token_logps(truth(batch["ids"]), batch["ids"]).mean()
    loss_fn_wide.backward()
    reference = grads(truth)

    def error(run: Callable[[Any], Tensor]) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            loss = run(batch)
        loss.backward()
        found = grads(model)
        assert found["mix.weight"].dtype == torch.float32
        return max(float((found[n] - reference[n]).norm() / reference[n].norm()) for n in found)

    eager = error(lambda b: loss_fn(model, b))
    assert eager > 1e-4  # bf16 was in force
    assert error(step) < 1.3 * eager
    assert fused(step)


def test_grad_scaler_scales_and_skips() -> None:
    found = []
    for compiled in (False, True):
        model = make_model(dtype=torch.float32)

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                logits = model(batch["ids"])
            return -token_logps(logits.float(), batch["ids"]).mean() * batch["boost"]

        run = optimize(model, loss_fn, CONFIG) if compiled else lambda b, m=model: loss_fn(m, b)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales = []
        for boost in (1.0, float("inf"), 1.0):
            scaler.scale(run(fixed(make_batch(boost=torch.tensor(boost))))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        found.append((scales, model.mix.weight.detach()))
    assert found[0][0] == found[1][0] == [2.0**10, 2.0**9, 2.0**9]
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("anomalies", [False, True])
def test_a_checkpoint_around_the_first_call(anomalies: bool) -> None:
    """What is traced for the head's backward is nothing that the checkpoint is asked for again."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["ids"])[:, :-1]
        likeliest = torch.softmax(logits, -1).square().cumsum(-1).amax(-1)
        return (likeliest * batch["adv"]).mean() + policy_loss(model, batch)

    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, loss_fn, CONFIG)
    with torch.autograd.set_detect_anomaly(anomalies):
        found = checkpoint(step, batch, use_reentrant=False)
        found.backward()
    gradients = grads(model)
    wanted = loss_fn(model, batch)
    wanted.backward()
    assert_same(found, wanted)
    assert_same(gradients, grads(model))
    assert step.report.of_kind("applied")
    assert captures(step) == 1


# ---------------------------------------------------------------------------- several forwards
def test_dpo_with_two_forwards_fuses_both_heads() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        chosen = token_logps(model(batch["chosen"]), batch["chosen"]).sum(-1)
        rejected = token_logps(model(batch["rejected"]), batch["rejected"]).sum(-1)
        return -F.logsigmoid(0.1 * (chosen - rejected - batch["ref"])).mean()

    model = make_model()
    chosen, rejected = make_batch(3, 7)["ids"], make_batch(3, 9, seed=3)["ids"]
    batch = {"chosen": chosen, "rejected": rejected, "ref": make_batch()["adv"][:, 0]}
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, batch)
    assert len(step.report.of_kind("applied")) == 2


@pytest.mark.parametrize("unwatched", [torch.no_grad, torch.inference_mode])
def test_reference_model_under_no_grad(unwatched: Any) -> None:
    reference = make_model(seed=7)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logps = token_logps(model(batch["ids"]), batch["ids"])
        with unwatched():
            ref = token_logps(reference(batch["ids"]), batch["ids"])
        return ((ref - logps).exp() - (ref - logps) - 1 - logps).mean()

    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    (capture,) = step.captures
    assert print_graph(capture.rewritten.gm).count("fxrl.linear_logprob.default(") == 2
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_two_steps_on_one_model_are_independent() -> None:
    def other(model: nn.Module, batch: Any) -> Tensor:
        return policy_loss(model, batch) ** 2

    model, batch = make_model(), fixed(make_batch())
    first, second = optimize(model, policy_loss, CONFIG), optimize(model, other, CONFIG)
    for step, loss_fn in ((first, policy_loss), (second, other), (first, policy_loss)):
        assert_matches_eager(step, loss_fn, model, batch)
    assert captures(first) == captures(second) == 1


def test_frozen_parameters_may_change_between_steps() -> None:
    """Gradients are those of what is trainable now, whatever was when the step was captured."""
    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, policy_loss, CONFIG)
    for mix, embed in [(False, True), (True, True), (True, False), (False, True)]:
        model.mix.weight.requires_grad_(mix)
        model.embed.weight.requires_grad_(embed)
        assert_matches_eager(step, policy_loss, model, batch)
    assert fused(step)


# ---------------------------------------------------------------------------- what stays eager
def broken_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    logits = model(batch["ids"])
    torch._dynamo.graph_break()
    return -(token_logps(logits, batch["ids"]) * batch["adv"]).mean()


def test_a_graph_break_names_its_line_and_the_numbers_stay() -> None:
    model = make_model()
    step = optimize(model, broken_loss, QUIET)
    assert_matches_eager(step, broken_loss, model, fixed(make_batch()))
    (broken, *_) = [r for r in step.report.of_kind("missed") if r.pass_name == "capture"]
    line = broken_loss.__code__.co_firstlineno + 2
    assert broken.source.endswith(f"test_capture_features.py:{line}")
    assert captures(step) == 2  # the rest is still captured


def test_a_graph_whose_inputs_are_sizes_alone_is_lowered() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        weight = torch.full((len(batch["ids"]), 1), 0.5)
        torch._dynamo.graph_break()
        return policy_loss(model, batch | {"adv": batch["adv"] * weight})

    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    for rows in (2, 3, 5):
        assert_matches_eager(step, loss_fn, model, make_batch(rows=rows))
    assert not step.report.of_kind("missed")
    assert fused(step)


def test_what_cannot_be_lowered_names_its_line() -> None:
    """A library's op whose result shares memory, which no functional graph can hold."""
    with torch.library._scoped_library("fxrl_features", "FRAGMENT") as library:
        library.define("look(Tensor(a) x) -> Tensor(a)")
        library.impl("look", lambda x: x.view(x.shape), "CompositeExplicitAutograd")
        library.impl("look", lambda x: x.view(x.shape), "Meta")

        def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
            looked = torch.ops.fxrl_features.look(batch["adv"])
            return policy_loss(model, batch | {"adv": looked})

        step = optimize(make_model(), loss_fn, QUIET)
        step(fixed(make_batch()))
    (remark,) = step.report.of_kind("missed")
    line = loss_fn.__code__.co_firstlineno + 1
    assert remark.reason.startswith("the graph could not be lowered: ")
    assert remark.source.endswith(f"test_capture_features.py:{line}")


def test_on_miss() -> None:
    model, batch = make_model(), fixed(make_batch())

    def config(on_miss: Any) -> Config:
        return Config(min_saved_bytes=0, compile_regions=False, on_miss=on_miss)

    with pytest.raises(MissedRewriteError, match="graph break"):
        optimize(model, broken_loss, config("error"))(batch)
    with pytest.warns(MissedRewriteWarning, match="graph break"):
        optimize(model, broken_loss, config("warn"))(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MissedRewriteWarning)
        optimize(model, broken_loss, config("ignore"))(batch)
