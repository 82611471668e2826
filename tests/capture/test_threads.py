"""Steps of several threads: each as exact as alone, and no capture more than alone."""

from __future__ import annotations

import contextvars
import threading

import torch

from fxrl.step import TrainStep, optimize
from tests.capture.mixer import (
    CONFIG,
    assert_same,
    captures,
    grads,
    make_batch,
    make_model,
    policy_loss,
)


def test_two_threads_train_beside_each_other() -> None:
    """Warmed and cold: one step is captured while the other one runs."""
    torch._dynamo.reset()
    models = [make_model(seed, dtype=torch.float32) for seed in range(3)]
    steps = [optimize(model, policy_loss, CONFIG) for model in models]
    for step in steps[:2]:
        step(make_batch()).backward()
    wanted = []
    for model in models:
        model.zero_grad()
        for seed in range(20):
            policy_loss(model, make_batch(seed=seed)).backward()
        wanted.append(grads(model))
    errors: list[Exception] = []

    def train(step: TrainStep) -> None:
        try:
            for seed in range(20):
                step(make_batch(seed=seed)).backward()
        except Exception as error:  # a thread's error would be printed and lost
            errors.append(error)

    threads = [threading.Thread(target=train, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for model, expected in zip(models, wanted, strict=True):
        assert_same(grads(model), expected, 1e-4)
    assert [captures(step) for step in steps] == [1, 1, 1]
    assert torch._dynamo.config.skip_nnmodule_hook_guards, "the process's settings are put back"


def test_calls_leave_nothing_in_the_context_of_their_thread() -> None:
    """As a context manager with a variable of its own does, for good, at every call."""
    step = optimize(make_model(0), policy_loss, CONFIG)
    held = []
    for _ in range(3):
        step(make_batch()).backward()
        held.append(len(contextvars.copy_context()))
    assert held[1] == held[2]
