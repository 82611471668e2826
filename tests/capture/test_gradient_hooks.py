"""Hooks on what a model returns: for a gradient that they never look at they cost no head."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxrl.capture.gradient_hooks import looks_away
from fxrl.step import optimize
from tests.capture.mixer import (
    CONFIG,
    QUIET,
    Mixer,
    assert_matches_eager,
    assert_same,
    captures,
    fused,
    grads,
    make_batch,
    policy_loss,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

calls: list[str] = []


def told(name: str, *_: Any) -> None:
    if name:
        calls.append(name)


def one(_: Tensor) -> None:
    calls.append("one")


def halved(grad: Tensor) -> Tensor:
    return grad * 0.5


def noted(grad: Tensor) -> None:
    calls.append(str(tuple(grad.shape)))


AWAY: dict[str, tuple[Any, str]] = {
    "what is given and all else": (partial(told, "partial"), "partial"),
    "one argument": (one, "one"),
    "a method": (None, "method"),
}


class Hooked(nn.Module):
    """Registers a hook on what its model returns, as a training library's wrapper does."""

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.model, self.hook = Mixer(), hook

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids)
        if logits.requires_grad:
            logits.register_hook(self.hook or self.told)
        return logits

    def told(self, _: Tensor) -> None:
        calls.append("method")


@pytest.mark.parametrize("case", AWAY)
def test_a_hook_that_looks_away_is_called_by_each_backward(case: str) -> None:
    hook, name = AWAY[case]
    model = Hooked(hook)
    step = optimize(model, policy_loss, CONFIG)
    for rows in (3, 4):
        calls.clear()
        assert_matches_eager(step, policy_loss, model, make_batch(rows))
        assert calls == [name, name], "once by eager's backward, once by the step's"
    assert fused(step)
    assert captures(step) == 1
    calls.clear()
    step(make_batch())
    assert not calls, "the backward calls it, not the forward"


def test_its_error_stops_the_backward() -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("call the library's own backward")

    step = optimize(Hooked(refuse), policy_loss, CONFIG)
    loss = step(make_batch())
    with pytest.raises(RuntimeError, match="own backward"):
        loss.backward()


@pytest.mark.parametrize("hook", [halved, noted])
def test_a_hook_that_looks_keeps_the_gradient_of_the_logits(hook: Any) -> None:
    """And so the logits, which is a miss; where torch cannot trace one, it runs as written."""
    model = Hooked(hook)
    step = optimize(model, policy_loss, QUIET)
    for rows in (3, 4):
        assert_matches_eager(step, policy_loss, model, make_batch(rows))
    assert not fused(step)
    missed = step.report.of_kind("missed")
    assert missed
    assert hook is noted or any("a hook gets the gradient" in remark.reason for remark in missed)


class Halved(Mixer):
    """Halves a gradient on its way to the embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embed(ids)))
        if hidden.requires_grad:
            hidden.register_hook(halved)
        return self.head(torch.sin(hidden) * hidden)


def test_a_backward_through_a_hook_may_run_again() -> None:
    model = Halved()
    step = optimize(model, policy_loss, QUIET)
    found = []
    for loss in (step(make_batch()), policy_loss(model, make_batch())):
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(grads(model))
    assert_same(*found)


def test_what_is_counted_behind_a_hook_is_kept() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        model.calls += 1  # type: ignore[operator, assignment]
        loss = policy_loss(model, batch)
        model.calls += 1  # type: ignore[operator, assignment]
        return loss

    model = Halved()
    model.calls = 0  # type: ignore[assignment]
    step = optimize(model, loss_fn, QUIET)
    for number in (2, 4):
        step(make_batch()).backward()
        assert model.calls == number


def generator(_: Tensor) -> Any:
    yield


def shadowed(grad: Tensor) -> None:
    def inner() -> Tensor:
        return grad

    inner()


@pytest.mark.parametrize(
    ("function", "given", "away"),
    [
        (told, 1, True),
        (told, 0, False),  # it reads its name
        (one, 0, True),
        (one, 1, False),  # takes no second
        (noted, 0, False),
        (halved, 0, False),
        (shadowed, 0, False),
        (generator, 0, False),
        (lambda _: 1, 0, False),
        (lambda _: None, 0, True),
    ],
)
def test_what_looks_away(function: Any, given: int, away: bool) -> None:
    assert looks_away(function.__code__, given) is away
