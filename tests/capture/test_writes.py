"""A forward that writes into its parameters or buffers: values, gradients and state are eager's."""

from __future__ import annotations

from collections.abc import Callable
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
    fused,
    grads,
    make_batch,
    make_model,
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


@pytest.mark.parametrize(
    "write", [clamp, through_data, copied_from_itself, one_row, twice, a_view_of_data, a_buffer]
)
def test_a_forward_that_writes(write: Callable[[nn.Linear], None]) -> None:
    torch.manual_seed(0)
    model, eager = Writing(write), Writing(write)
    eager.load_state_dict(model.state_dict())
    step = optimize(model, policy_loss, CONFIG)
    for seed in range(2):
        batch = make_batch(seed=seed)
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
    assert_matches_eager(optimize(model, loss_fn, QUIET), loss_fn, model, make_batch())


def test_operators_whose_names_end_like_writes_are_none() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        chosen = (batch["adv"] > 0) & batch["mask"] | ~batch["mask"]
        logps = token_logps(model(batch["ids"]), batch["ids"])
        return -(logps * chosen).sum()

    model = make_model()
    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, make_batch())
    assert fused(step)
