"""``fxrl.optimize``: what it refuses, before anything runs."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fxrl
from fxrl.errors import ConfigError


def loss_fn(model, batch):
    return model(batch).sum()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("qwen3", loss_fn), "model is a str"),
        ((torch.nn.Linear(2, 2), "grpo"), "loss_fn is a str"),
        (
            (torch.nn.Linear(2, 2), loss_fn, fxrl.Config(passes=("fuse-logprob",))),
            "'fuse-logprob' is unknown; the passes are",
        ),
    ],
)
def test_a_wrong_argument_is_named_at_once(arguments, words):
    with pytest.raises(ConfigError, match=words):
        fxrl.optimize(*arguments)


def test_a_step_without_a_loss_head_is_the_loss_itself():
    model = torch.nn.Linear(3, 2)
    batch = torch.randn(4, 3)
    step = fxrl.optimize(model, loss_fn)
    loss = step(batch)
    torch.testing.assert_close(loss, loss_fn(model, batch), rtol=0, atol=0)
    assert step.report.remarks == ()


def test_a_graph_that_cannot_be_lowered_keeps_its_checkpointing(monkeypatch):
    """It runs as written, the report says why, and checkpointed bodies still save nothing."""

    def broken(*args, **kwargs):
        raise NotImplementedError("no lowering today")

    monkeypatch.setattr("fxrl.compile.backend.lower", broken)
    model = torch.nn.Linear(3, 7)

    def checkpointed(model, batch):
        return checkpoint(lambda x: model(x).exp().sin(), batch, use_reentrant=False).sum()

    batch = torch.randn(4, 3)
    step = fxrl.optimize(model, checkpointed, fxrl.Config(on_miss="ignore"))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = step(batch)
    assert not [t for t in saved if t.shape == (4, 7)]
    (remark,) = step.report.of_kind("missed")
    assert "no lowering today" in remark.reason
    found = torch.autograd.grad(loss, model.weight)
    truth = torch.autograd.grad(checkpointed(model, batch), model.weight)
    torch.testing.assert_close(found, truth)
