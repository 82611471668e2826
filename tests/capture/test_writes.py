"""A forward that writes into its parameters or buffers: values, gradients and state are eager's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxrl.step import optimize
from tests.capture.mixer import (
    CONFIG,
    QUIET,
    WIDTH,
    Mixer,
    assert_matches_eager,
    assert_same,
    captures,
    fixed,
    fused,
    grads,
    make_batch,
    make_model,
    outcome,
    policy_loss,
    token_logps,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Writing(Mixer):
    """Runs ``write`` on the mixing layer before the forward."""

    def __init__(self, write: Callable[[nn.Linear], None]) -> None:
        super().__init__()
        self.write = write
        self.mix.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        self.write(self.mix)
        return super().forward(ids)


def clamp(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)


def through_data(layer: nn.Linear) -> None:
    layer.weight.data.mul_(0.9)


def copied_from_itself(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(layer.weight / layer.weight.norm())


def one_row(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[0] = 0.5
        layer.bias[1:3].zero_()


def twice(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.clamp_(-0.2, 0.2)
        layer.weight += layer.bias[:, None]


def a_view_of_data(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.data[:, 2].neg_()


def a_buffer(layer: nn.Linear) -> None:
    layer.seen.add_(layer.bias.detach())
    layer.seen[0] = 1


def by_argument(layer: nn.Linear) -> None:
    with torch.no_grad():
        nn.functional.relu(layer.weight, True)
        torch.chunk(input=layer.bias, chunks=2)[0].mul_(0.5)


def out_and_lists(layer: nn.Linear) -> None:
    with torch.no_grad():
        torch.mul(layer.weight, 0.9, out=layer.weight)
        torch._foreach_mul_([layer.weight, layer.bias], 0.9)


def other_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 0.9


def renormed(layer: nn.Linear) -> None:
    nn.functional.embedding(torch.tensor([0, 2]), layer.weight, max_norm=0.3)


@pytest.mark.parametrize(
    "write",
    [
        by_argument,
        out_and_lists,
        other_data,
        renormed,
        clamp,
        through_data,
        copied_from_itself,
        one_row,
        twice,
        a_view_of_data,
        a_buffer,
    ],
)
def test_a_forward_that_writes(write: Callable[[nn.Linear], None]) -> None:
    torch.manual_seed(0)
    model, eager = Writing(write), Writing(write)
    eager.load_state_dict(model.state_dict())
    step = optimize(model, policy_loss, CONFIG)
    for seed in range(2):
        batch = fixed(make_batch(seed=seed))
        losses = step(batch), policy_loss(eager, batch)
        for loss in losses:
            loss.backward()
        assert_same(losses[0].detach(), losses[1].detach())
        assert_same(grads(model), grads(eager))
        assert_same(model.state_dict(), eager.state_dict())
    assert fused(step)


def test_a_value_that_is_written_under_no_grad_passes_its_gradient_on() -> None:
    """The write is no part of the derivative: eager's tape does not know it."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["ids"]) * 1.5
        with torch.no_grad():
            logits.mul_(3)
            logits[..., :5].clamp_(max=0.1)
        return -token_logps(logits, batch["ids"]).mean()

    model = make_model()
    assert_matches_eager(optimize(model, loss_fn, QUIET), loss_fn, model, fixed(make_batch()))


def overwritten_infinities(logits: Tensor) -> Tensor:
    logits = logits.masked_fill(logits > 0.5, -torch.inf)
    with torch.no_grad():
        logits.masked_fill_(logits.isinf(), 0.0)
    return logits


def detached_in_place(logits: Tensor) -> Tensor:
    scale = logits.exp().mean()
    scale.detach_()
    return logits * scale


def into_what_is_returned(logits: Tensor) -> Tensor:
    total = torch.empty_like(logits)
    with torch.no_grad():
        torch.cumsum(logits, 1, out=total)
    return logits * total.sigmoid()


def into_fresh_zeros(logits: Tensor) -> Tensor:
    out = torch.zeros_like(logits).detach()
    out[:, 1:] = logits[:, 1:]
    half = out[..., :9]
    half.mul_(logits.mean())
    return out + half.sum()


@pytest.mark.parametrize(
    "change", [overwritten_infinities, detached_in_place, into_what_is_returned, into_fresh_zeros]
)
def test_gradients_of_what_is_written(change: Callable[[Tensor], Tensor]) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return -token_logps(change(model(batch["ids"])), batch["ids"]).mean()

    model = make_model()
    assert_matches_eager(optimize(model, loss_fn, QUIET), loss_fn, model, fixed(make_batch()))


def a_diagonal(logp: Tensor) -> Tensor:
    pairs = logp.exp() @ logp.exp().T
    pairs.fill_diagonal_(-1.0)
    return pairs.logsumexp(-1)


def strided(logp: Tensor) -> Tensor:
    logp = logp * 1.0
    window = logp.as_strided((2, 3), (1, 1), 1)
    first = logp.as_strided((2,), (logp.stride(0),))
    first += logp.mean()
    return logp.exp() + window.mean() + first.sum()


def strided_the_other_way(logp: Tensor) -> Tensor:
    logp = logp.T * 1.0
    logp.as_strided((2,), (2,), 1).mul_(2)
    return logp.exp()


@pytest.mark.parametrize("change", [a_diagonal, strided, strided_the_other_way])
def test_places_in_memory(change: Callable[[Tensor], Tensor]) -> None:
    """What is picked or written by strides, of log-probs that lie otherwise once rewritten."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return -change(token_logps(model(batch["ids"]), batch["ids"])).mean()

    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    assert fused(step)


class Mixing(torch.autograd.Function):
    """Whose backward mixes tokens, so that it stays one call."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.roll(1, 1)


def test_a_tensor_of_one_number() -> None:
    """What PyTorch traces with a Python number written in, it traces twice."""
    total = torch.zeros((), dtype=torch.float64)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logits = Mixing.apply(model(batch["ids"]))
        total.add_(batch["adv"].mean())
        return -token_logps(logits, batch["ids"]).mean()

    batch = fixed(make_batch())
    step = optimize(make_model(), loss_fn, QUIET)
    for number in (1, 2):
        step(batch).backward()
        torch.testing.assert_close(total, number * batch["adv"].mean())


def a_gradient_for_the_detached(logits: Tensor, scale: Tensor) -> Tensor:
    shared = logits * 2
    detached = shared.detach()
    detached.add_(scale.sum())
    return shared + detached


def zeros_that_are_read_too(logits: Tensor, scale: Tensor) -> Tensor:
    zeros = torch.zeros_like(logits)
    zeros.detach().add_(scale.sum())
    return logits + zeros


def data_that_was_read(logits: Tensor, scale: Tensor) -> Tensor:
    read = logits * scale.mean()
    logits.data.mul_(0.5)
    return read + logits


def data_that_is_viewed(logits: Tensor, scale: Tensor) -> Tensor:
    view = scale[:2]
    scale.data = scale.data * 0.5
    return logits * view.sum() * scale.sum()


def slopes_drawn(logits: Tensor, scale: Tensor) -> Tensor:
    return nn.functional.rrelu(logits, training=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (a_gradient_for_the_detached, "a detached tensor gets a gradient by a write"),
        (zeros_that_are_read_too, "a detached tensor gets a gradient by a write"),
        (data_that_was_read, "what autograd keeps of this call is written into"),
        (data_that_is_viewed, "given other data while views of what it had are in use"),
        (slopes_drawn, "the slopes that rrelu draws"),
    ],
)
def test_what_no_functional_graph_can_say_runs_as_written(
    change: Callable[[Tensor, Tensor], Tensor], reason: str
) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logits = change(model(batch["ids"]), model.mix.bias)
        return -token_logps(logits, batch["ids"]).mean()

    model, eager = make_model(), make_model()  # some write into the model
    step = optimize(model, loss_fn, QUIET)
    torch.manual_seed(0)
    got = outcome(step, model, fixed(make_batch()))
    torch.manual_seed(0)
    wanted = outcome(lambda batch: loss_fn(eager, batch), eager, make_batch())
    assert_same(got, wanted)
    assert any(reason in remark.reason for remark in step.report.of_kind("missed"))


def test_operators_whose_names_end_like_writes_are_none() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        chosen = (batch["adv"] > 0) & batch["mask"] | ~batch["mask"]
        logps = token_logps(model(batch["ids"]), batch["ids"])
        return -(logps * chosen).sum()

    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    assert fused(step)


def test_a_write_into_memory_that_another_tensor_shares() -> None:
    """A functional graph takes each of its inputs for one of its own."""

    def of_rows(model: nn.Module, batch: Any) -> Tensor:
        batch["all"].zero_()
        return policy_loss(model, batch) * (batch["row"].sum() + 2)

    def behind_a_break(model: nn.Module, batch: Any) -> Tensor:
        rows = batch["adv"] * 1
        row = rows.unbind(0)[1]
        torch._dynamo.graph_break()
        rows.zero_()
        return policy_loss(model, batch) * (row.sum() + 2)

    model = make_model()
    for loss in (of_rows, behind_a_break):
        step = optimize(model, loss, QUIET)
        for shared in (False, True, False):
            results = []
            for function in (partial(loss, model), step):
                rows = torch.arange(6, dtype=torch.float64).view(3, 2)
                row = rows[1] if shared else rows[1].clone()
                results.append(outcome(function, model, fixed(make_batch(all=rows, row=row))))
            assert_same(*results)
        reasons = [remark.reason for remark in step.report.of_kind("missed")]
        assert any("shares its memory with another one" in reason for reason in reasons)


@pytest.mark.parametrize("differentiated", [False, True])
def test_what_parts_of_a_loss_add_to_one_tensor_keeps_its_gradient(differentiated: bool) -> None:
    """Autograd records a write into what no parameter is, as a routed layer's sum of experts."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        ids = batch["ids"]
        total = torch.zeros(len(ids), dtype=torch.float64)
        if differentiated:
            total = total + model.embed.weight.mean()
        for weight in (2, 3):
            torch._dynamo.graph_break()
            total.mul_(weight).add_(token_logps(model(ids), ids).mean(1))
        torch._dynamo.graph_break()
        return -total.square().sum()

    model = make_model()
    step = optimize(model, loss_fn, QUIET)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    assert fused(step)


def test_log_probs_that_are_given_back_may_be_written_into() -> None:
    """As what gather gives; the fused head keeps its own for the backward."""

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        logps = token_logps(model(batch["ids"]), batch["ids"])
        return logps, {"first": logps[:, 0]}

    model, batch = make_model(), fixed(make_batch())
    step, results = optimize(model, loss_fn, QUIET), []
    for function in (partial(loss_fn, model), step):
        model.zero_grad()
        logps, told = function(batch)
        logps *= 0.5
        logps[batch["ids"][:, 1:] < 3] = 0.0
        with torch.no_grad():
            told["first"].clamp_(min=-1.0)
        (logps.sum() + told["first"].exp().sum()).backward()
        results.append((logps.detach(), grads(model)))
    assert_same(*results)
    assert fused(step)


def test_a_diagonal_that_is_filled_is_captured_once() -> None:
    """PyTorch writes it through ``as_strided``, whose numbers hold for one size."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logps = token_logps(model(batch["ids"]), batch["ids"])
        return (logps @ logps.T).fill_diagonal_(0.5).square().mean()

    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    for rows in (3, 4):
        assert_matches_eager(step, loss_fn, model, make_batch(rows))
    assert fused(step)
    assert captures(step) == 1
