"""A step inside of what differentiates, maps or compiles it: right, or a clear word."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fxrl import Config
from fxrl.errors import FxrlError, MissedRewriteError
from fxrl.step import TrainStep, optimize
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


def test_torch_compile_around_a_step_ends_its_graph_there() -> None:
    model, batch = make_model(), make_batch()
    step = optimize(model, policy_loss, CONFIG)

    def update(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return step(batch) * 2

    torch.compile(update, backend="eager")(batch).backward()
    found = grads(model)
    (policy_loss(model, batch) * 2).backward()
    assert_same(found, grads(model))
    assert fused(step)
    torch._dynamo.reset()  # torch 2.11 runs what it has compiled in parts, whole or not
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call it outside"):
        torch.compile(update, backend="eager", fullgraph=True)(batch)


TRANSFORMS = {
    "grad": lambda f, adv: torch.func.grad(f)(adv),
    "vmap": lambda f, adv: torch.func.vmap(f)(torch.stack([adv, adv * 2])),
    "jvp": lambda f, adv: torch.func.jvp(f, (adv,), (adv,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_around_a_step_runs_as_written_and_is_told(name: str) -> None:
    model, batch = make_model(), fixed(make_batch())

    def through(step: TrainStep, adv: torch.Tensor) -> object:
        return TRANSFORMS[name](lambda adv: step(batch | {"adv": adv}), batch["adv"])

    step = optimize(model, policy_loss, QUIET)
    assert_same(through(step, batch["adv"]), through(lambda b: policy_loss(model, b), batch["adv"]))
    (remark,) = step.report.of_kind("missed")
    assert "torch.func" in remark.reason
    assert "inside the loss" in remark.cure
    with pytest.raises(MissedRewriteError, match=r"torch\.func"):
        through(optimize(model, policy_loss, CONFIG), batch["adv"])
    assert_same(step(batch), policy_loss(model, batch))
    assert captures(step) == 1, "outside of the transform it is captured as ever"


class Squared(torch.autograd.Function):
    """With a second derivative that only its backward tells."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3 * ctx.saved_tensors[0]


def unseen(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.tanh(x).mean()
    return torch.tanh(x) * scale


Along = Callable[[Tensor], Tensor]
INSIDE: dict[str, Callable[[Along, Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(torch.tanh(x)).mean())(x),
    "no_grad": lambda f, x: torch.func.grad(lambda x: f(unseen(x)).mean())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(x.shape[0], x.shape[1] - 1).double())[0],
    "jacrev": lambda f, x: torch.func.jacrev(lambda s: f(x * s[:, None, None]).mean(1))(x[:, 0, 0]),
    "vmap of grad": lambda f, x: torch.func.vmap(
        torch.func.grad(lambda s, row: (row * s).sin().sum()), (None, 0)
    )(torch.ones((), dtype=x.dtype), f(x)),
    "function": lambda f, x: torch.func.grad(lambda x: f(Squared.apply(x)).mean())(x),
}


def written(x: Tensor) -> Tensor:
    x = torch.tanh(x) * 1
    x[:, 0] = 0
    return x


#: What a rewritten graph has no right derivative of.
AS_WRITTEN: dict[str, Callable[[Along, Tensor], Tensor]] = {
    "under no_grad": lambda f, x: f(
        x + torch.no_grad()(torch.func.grad(lambda x: f(torch.tanh(x)).mean()))(x)
    ),
    "write": lambda f, x: torch.func.grad(lambda x: f(written(x)).mean())(x),
}


@pytest.mark.parametrize("name", INSIDE | AS_WRITTEN)
def test_torch_func_inside_the_loss_has_its_gradients_and_theirs(name: str) -> None:
    """They were zeros where a pass had rewritten the graph: it was traced without autograd."""
    torch.manual_seed(0)
    head = nn.Linear(8, 61, bias=False)
    model = nn.Sequential(nn.Embedding(61, 8), head).double()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        def logps(hidden: Tensor) -> Tensor:
            scores = torch.log_softmax(model[1](hidden)[:, :-1], -1)
            return scores.gather(-1, ids[:, 1:, None]).squeeze(-1)

        hidden = model[0](ids)
        return (INSIDE | AS_WRITTEN)[name](logps, hidden).square().sum() - logps(hidden).mean()

    step = optimize(model, loss, Config(min_saved_bytes=0, on_miss="ignore"))
    for rows, length in ((2, 7), (3, 5)):
        assert_matches_eager(step, loss, model, torch.randint(0, 61, (rows, length)))
    assert fused(step) == (name in INSIDE)
    assert torch._C._functorch.peek_interpreter_stack() is None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mlp(self.norm(x)))


def test_forward_mode_inside_the_loss_is_over_when_its_capture_has_failed() -> None:
    """PyTorch has one level of it at most: what a failed trace left open was in everybody's way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(61, 8), Layer(), Layer(), Layer(), nn.Linear(8, 61)).double()

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logps = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])
        weights = {name: p.detach() for name, p in model.named_parameters()}
        along = {name: torch.ones_like(p) for name, p in weights.items()}

        def mean(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, weights, (ids,)).mean()

        _, tangent = torch.func.jvp(mean, (weights,), (along,))
        return -logps.mean() * tangent.detach()

    ids = torch.randint(0, 61, (2, 7))
    step = optimize(model, loss, QUIET)
    for _ in range(2):
        assert_matches_eager(step, loss, model, ids)
    torch.func.jvp(torch.sin, (ids.double(),), (ids.double(),))


def test_what_a_failed_trace_leaves_to_the_collector_sets_no_dispatch_keys() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(61, 8), Layer(), Layer(), Layer(), nn.Linear(8, 61)).double()

    def loss(model: nn.Sequential, ids: Tensor) -> Tensor:
        def logps(hidden: Tensor) -> Tensor:
            return torch.log_softmax(model[1:](hidden)[:, :-1], -1).gather(-1, ids[:, 1:, None])

        hidden = model[0](ids)
        value, tangent = torch.func.jvp(logps, (hidden,), (torch.ones_like(hidden),))
        return tangent.square().sum() - value.mean()

    keys = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    step = optimize(model, loss, QUIET)
    assert_matches_eager(step, loss, model, torch.randint(0, 61, (2, 7)))
    gc.collect()
    assert torch._C._dispatch_tls_local_exclude_set().raw_repr() == keys


def test_a_mode_that_sees_each_op_sees_those_of_the_loss_as_written() -> None:
    model, batch = make_model(), fixed(make_batch())
    step, eager = optimize(model, policy_loss, QUIET), partial(policy_loss, model)

    def counted(function: Callable[[Any], torch.Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            assert_same(function(batch), eager(batch))
        return counter.get_total_flops()

    assert counted(step) == counted(eager) > 0
    (remark,) = step.report.of_kind("missed")
    assert "TorchDispatchMode" in remark.reason
    assert_same(step(batch), eager(batch))
    assert captures(step) == 1


@pytest.mark.parametrize("passes", [None, ("chunk-vocab-region",)], ids=["fused", "region"])
def test_a_second_derivative_is_refused_with_a_cure(passes: tuple[str, ...] | None) -> None:
    model, batch = make_model(), fixed(make_batch())
    config = Config(min_saved_bytes=0, compile_regions=False, on_miss="ignore", passes=passes)
    step = optimize(model, policy_loss, config)
    (first,) = torch.autograd.grad(step(batch), [model.mix.weight], create_graph=True)
    assert step.report.of_kind("applied")
    with pytest.raises(FxrlError, match=r"no second derivative.*passes=\[\]"):
        first.square().sum().backward()

    plain = optimize(model, policy_loss, Config(passes=()))
    second = []
    for loss in (plain(batch), policy_loss(model, batch)):
        model.zero_grad()
        (first,) = torch.autograd.grad(loss, [model.mix.weight], create_graph=True)
        first.square().sum().backward()
        second.append(grads(model))
    assert_same(second[0], second[1])


def scaled(model: nn.Module, batch: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    return lambda scale: policy_loss(model, batch | {"adv": batch["adv"] * scale}), ONE


def squared_grad(**options: Any) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        loss, leaf = policy_loss(model, batch), [model.mix.weight]
        (gradient,) = torch.autograd.grad(loss, leaf, **options)
        return loss + gradient.square().sum()

    return loss


ONE = torch.ones((), dtype=torch.float64)
of = torch.autograd.functional
TWICE: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "grad": squared_grad(create_graph=True),
    "grad, told by a number": squared_grad(create_graph=1),
    "vjp": lambda m, b: of.vjp(*scaled(m, b), ONE, create_graph=True)[1],
    "jvp": lambda m, b: sum(of.jvp(*scaled(m, b), ONE)) + policy_loss(m, b),
    "hvp": lambda m, b: sum(of.hvp(*scaled(m, b), ONE)) + policy_loss(m, b),
    "hessian": lambda m, b: of.hessian(*scaled(m, b)) + policy_loss(m, b),
    "jacobian": lambda m, b: of.jacobian(*scaled(m, b), True),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_loss_that_differentiates_its_gradient_is_run_as_written(name: str) -> None:
    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, TWICE[name], QUIET)
    assert_matches_eager(step, TWICE[name], model, batch)
    (missed,) = step.report.of_kind("missed")
    assert "run as written (the loss differentiates its gradient again" in missed.reason
    assert "in a step of its own" in missed.cure


def test_a_gradient_that_is_differentiated_behind_a_break_is_of_all_of_the_loss() -> None:
    """What is ahead is rewritten by then, and has no second derivative: it runs again, and that is
    told."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logps = token_logps(model(batch["ids"]), batch["ids"])
        torch._dynamo.graph_break()
        (gradient,) = torch.autograd.grad(logps.mean(), [model.mix.weight], create_graph=True)
        return gradient.square().sum() - logps.mean()

    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, loss, QUIET)
    for _ in range(2):
        assert_matches_eager(step, loss, model, batch)
    (missed,) = step.report.of_kind("missed")
    assert missed.reason.endswith("what is ahead of it ran twice in that call")


class OneOfTwo(torch.autograd.Function):
    """Whose gradient depends on which of its outputs have one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        return first * 7 if second is None and first is not None else first


def decided_by_size(model: nn.Module, batch: Any) -> Tensor:
    with torch.set_grad_enabled(mode=len(batch["adv"]) < 3):
        extra = policy_loss(model, batch)
    with torch.inference_mode(mode=True):
        kept = policy_loss(model, batch)
    return policy_loss(model, batch) * kept.clone() + extra


TOLD: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "which outputs have a gradient": lambda m, b: OneOfTwo.apply(policy_loss(m, b))[0],  # type: ignore[no-untyped-call]
    "contexts by sizes": decided_by_size,
}


@pytest.mark.parametrize("name", TOLD)
def test_what_autograd_is_told_holds_in_the_graph(name: str) -> None:
    model = make_model()
    step = optimize(model, TOLD[name], QUIET)
    for rows in (2, 4):
        assert_matches_eager(step, TOLD[name], model, make_batch(rows))
    assert captures(step)
