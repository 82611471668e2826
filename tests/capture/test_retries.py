"""A capture that fails for what may pass is tried again, ever more seldom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxrl.compile.backend import Backend
from fxrl.step import optimize
from tests.capture.mixer import (
    QUIET,
    assert_matches_eager,
    fixed,
    fused,
    make_batch,
    make_model,
    policy_loss,
    token_logps,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FULL = OSError(28, "No space left on device")
PASSING = [FULL, MemoryError(), torch.OutOfMemoryError("no memory")]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What captures fail with, one after the other."""
    left: list[BaseException] = []

    def failing(self: Backend, *args: Any) -> Any:
        if left:
            raise left.pop(0)
        return right(self, *args)

    right = Backend._lowered
    monkeypatch.setattr(Backend, "_lowered", failing)
    return left


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_what_may_pass_is_tried_again(tried: list[BaseException], error: Exception) -> None:
    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, policy_loss, QUIET)
    tried.append(error)
    assert_matches_eager(step, policy_loss, model, batch)
    (missed,) = step.report.of_kind("missed")
    assert f"run as written ({type(error).__name__}" in missed.reason
    assert not step.captures
    assert_matches_eager(step, policy_loss, model, batch)
    assert fused(step)
    assert not step.report.of_kind("missed")


def test_ever_more_seldom(tried: list[BaseException]) -> None:
    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, policy_loss, QUIET)
    tried += [FULL] * 100
    calls = []
    for call in range(40):
        before = len(tried)
        step(batch)
        if len(tried) < before:
            calls.append(call)
    assert calls == [0, 1, 3, 7, 15, 31]
    assert len(step.report.of_kind("missed")) == 1


def test_what_recurs_by_itself_is_not_tried_again(tried: list[BaseException]) -> None:
    """It is told by the graph that runs as it is written."""
    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, policy_loss, QUIET)
    tried += [KeyError("mistake")] * 2
    for _ in range(4):
        step(batch)
    assert len(tried) == 1


def test_an_interrupted_capture_leaves_nothing(tried: list[BaseException]) -> None:
    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, policy_loss, QUIET)
    tried.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        step(batch)
    assert not step.captures
    assert_matches_eager(step, policy_loss, model, batch)
    assert fused(step)


def test_an_error_of_the_losss_own_that_is_gone(tried: list[BaseException]) -> None:
    """In code that runs as it is written between two graphs: it is not known whose error it is."""
    left = [ConnectionError("no answer")]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def ask() -> None:
        if left:
            raise left.pop()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logps = token_logps(model(batch["ids"]), batch["ids"])
        ask()
        return -logps.mean()

    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, loss, QUIET)
    step(batch)
    (missed,) = step.report.of_kind("missed")
    assert missed.reason.endswith("what is ahead of it ran twice in that call")
    assert_matches_eager(step, loss, model, batch)
    assert fused(step)
    assert not step.report.of_kind("missed")
