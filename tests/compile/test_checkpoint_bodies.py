"""Checkpointed bodies: what the user's checkpointing saves, and bodies that are alike or not."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxrl
from fxrl.passes import REGISTRY
from tests.passes.layered import Block

aten = torch.ops.aten


class Tiny(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 64, bias=False)
        self._hidden = hidden
        self.double()

    def forward(self, ids):
        return self.head(self._hidden(self.embedding(ids), self.layer.weight))


def loss_fn(model, batch):
    return -torch.log_softmax(model(batch["ids"]), -1).gather(-1, batch["y"][..., None]).mean()


def made(hidden, **options):
    model = Tiny(hidden)
    config = fxrl.Config(compile_regions=False, min_saved_bytes=0, on_miss="ignore", **options)
    batch = {"ids": torch.randint(64, (3, 5)), "y": torch.randint(64, (3, 5))}
    return model, fxrl.optimize(model, loss_fn, config), batch


def keep_products(ctx, op, *args, **kwargs):
    keep = op is aten.mm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective(hidden, weight):
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    flat = hidden.flatten(0, 1)
    out = checkpoint(
        lambda x, w: torch.tanh(x @ w).sin(), flat, weight, use_reentrant=False, context_fn=contexts
    )
    return out.unflatten(0, hidden.shape[:2])


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is aten.mm.default
        return func(*args, **(kwargs or {}))


def products_of_backward(loss):
    with Products() as products:
        loss.backward()
    return products.count


def test_what_selective_checkpointing_saves_is_saved():
    model, step, batch = made(selective, passes=("restore-causal-attention",))
    wanted = products_of_backward(loss_fn(model, batch))
    assert products_of_backward(step(batch)) == wanted


def test_bodies_that_differ_in_strides_are_lowered_each():
    def square(x):
        return torch.tanh(x.contiguous().view(64)).view(8, 8) * 2

    def hidden(x, weight):
        weight = weight * 1
        first = checkpoint(square, weight, use_reentrant=False)
        return x @ first @ checkpoint(square, weight.t(), use_reentrant=False)

    model, step, batch = made(hidden)
    found, wanted = step(batch), loss_fn(model, batch)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert step.report.of_kind("applied"), "the rewritten graph runs"


def test_a_weight_that_is_written_after_a_checkpointed_call():
    """Run again, it reads the weight as it is then, as eager does."""

    class Writing(Tiny):
        def forward(self, ids):
            x = self.embedding(ids)
            x = x + checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False)
            with torch.no_grad():
                self.layer.bias.mul_(0.5)
            return self.head(x)

    model, eager = Writing(None), Writing(None)
    step = fxrl.optimize(model, loss_fn, fxrl.Config(compile_regions=False, on_miss="ignore"))
    batch = {"ids": torch.randint(64, (3, 5)), "y": torch.randint(64, (3, 5))}
    step(batch).backward()
    loss_fn(eager, batch).backward()
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-12)


class Counting(Block):
    """A layer that keeps statistics of what it has seen: once a call, and once a run again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("running", torch.zeros(8))

    def mlp(self, x):
        with torch.no_grad():
            self.running.lerp_(x.mean((0, 1)), 0.1)
        self.calls += 1
        return super().mlp(x) + self.running


class Averaging(Block):
    """Writes into a tensor, and captures as one graph."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(8))

    def mlp(self, x):
        with torch.no_grad():
            self.running.lerp_(x.mean((0, 1)), 0.1)
        return super().mlp(x) + self.running


class CountingModel(nn.Module):
    def __init__(self, whole, layer=Counting):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(8, 64, bias=False)
        self.whole = whole
        self.double()

    def forward(self, ids):
        return checkpoint(self.run, ids, use_reentrant=False) if self.whole else self.run(ids)

    def run(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x) if self.whole else checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("passes", [None, tuple(REGISTRY)], ids=["ops", "regions"])
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "model"])
def test_what_a_checkpointed_body_writes_is_written_as_often_as_in_eager(whole, passes):
    model, eager = CountingModel(whole), CountingModel(whole)
    config = fxrl.Config(compile_regions=False, min_saved_bytes=0, passes=passes, on_miss="ignore")
    step = fxrl.optimize(model, loss_fn, config)
    batch = {"ids": torch.randint(64, (3, 5)), "y": torch.randint(64, (3, 5))}
    for _ in range(2):
        step(batch).backward()
        loss_fn(eager, batch).backward()
        for found, wanted in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-10)


def with_a_graph_inside(model, batch):
    """Which AOTAutograd traces elsewhere, and of a body that runs again the values alone."""
    loss = loss_fn(model, batch)
    return torch.cond(loss > 0, lambda x: x * 2, lambda x: x * 3, (loss,))


def with_a_branch(model, batch):
    """At which a call begins anew."""
    loss = loss_fn(model, batch)
    if loss > batch["least"]:
        return loss * 2
    return loss


def with_a_check(model, batch):
    """Behind which the call is run as it is written."""
    loss = loss_fn(model, batch)
    try:
        if loss > batch["least"]:
            raise ValueError(f"a loss of {loss}")
    except ValueError:
        return loss * 2
    return loss


@pytest.mark.parametrize("passes", [None, ()], ids=["ops", "as written"])
@pytest.mark.parametrize("loss", [with_a_graph_inside, with_a_branch, with_a_check])
def test_a_call_that_begins_anew_writes_once(loss, passes):
    model, eager = CountingModel(False, Averaging), CountingModel(False, Averaging)
    config = fxrl.Config(compile_regions=False, min_saved_bytes=0, passes=passes, on_miss="ignore")
    step = fxrl.optimize(model, loss, config)
    batch = {"ids": torch.randint(64, (3, 5)), "y": torch.randint(64, (3, 5))}
    for least in (0.0, 100.0, 0.0):
        batch["least"] = torch.tensor(least)
        step(batch).backward()
        loss(eager, batch).backward()
        for found, wanted in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-10)


def told_to_require_grad(hidden, weight):
    def body(x, w):
        bias = torch.zeros_like(w[0])
        bias.requires_grad = True
        return torch.tanh(x @ w + bias), bias

    out, bias = checkpoint(body, hidden, weight, use_reentrant=False)
    return out * (2 if bias.requires_grad else 1) + bias


def test_a_tensor_that_a_checkpointed_function_makes_is_told_to_require_grad():
    model, step, batch = made(told_to_require_grad)
    loss = loss_fn(model, batch)
    torch.testing.assert_close(step(batch), loss, rtol=1e-10, atol=1e-10)
    trained = [model.embedding.weight, model.layer.weight, model.head.weight]
    wanted = torch.autograd.grad(loss, trained)
    got = torch.autograd.grad(step(batch), trained)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    assert len(step.captures) == 1
