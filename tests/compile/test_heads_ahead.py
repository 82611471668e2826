"""Heads that are called ahead are called as the step calls them."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import fxrl
from fxrl.compile.heads_ahead import begin_heads, heads_of
from fxrl.ops.linear_logprob.arguments import ForwardArguments


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the op's forward when it runs."""
    found, unpack = [], ForwardArguments.unpack

    def noted(arguments):
        one = unpack(arguments)
        if not isinstance(one.head.hidden, FakeTensor):
            found.append(one)
        return one

    monkeypatch.setattr(ForwardArguments, "unpack", noted)
    return found


class Model(nn.Module):
    def __init__(self, *, trained, bias):
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.head = nn.Linear(32, 96, bias=bias).requires_grad_(trained)

    def forward(self, ids):
        return self.head(self.embed(ids).tanh())


def log_probs(model, batch, temperature=1.0):
    logits = model(batch["ids"]).float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, batch["target"][..., None])[..., 0]


def plain(model, batch):
    return -log_probs(model, batch).mean()


def by_row(model, batch):
    return -log_probs(model, batch, batch["temperature"][..., None]).mean()


def with_entropy(model, batch):
    logp = torch.log_softmax(model(batch["ids"]), -1)
    return (logp.exp() * logp).sum(-1).mean() - log_probs(model, batch, 0.7).mean()


@pytest.mark.parametrize("loss", [plain, by_row, with_entropy])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("graded", [True, False], ids=["train", "score"])
def test_what_is_asked_ahead_is_what_the_step_asks(monkeypatch, asked, loss, trained, graded):
    ahead = []

    def begin(gm, examples):
        ahead.extend(heads_of(gm, examples))
        return begin_heads(gm, examples)

    monkeypatch.setattr("fxrl.compile.backend.begin_heads", begin)
    model = Model(trained=trained, bias=loss is plain)
    generator = torch.Generator().manual_seed(0)
    ids, target = (torch.randint(96, (3, 70), generator=generator) for _ in range(2))
    batch = {"ids": ids, "target": target, "temperature": torch.full((3, 70), 0.5)}
    passes = ("fuse-linear-logprob",)  # none that lets the head keep its exponentials
    config = fxrl.Config(min_saved_bytes=0, gpu_memory="9GiB", passes=passes)
    step = fxrl.optimize(model, loss, config)
    with torch.set_grad_enabled(graded):
        step(batch)
    assert not step.report.of_kind("missed"), step.report
    assert ahead
    assert len(ahead) == len(asked)
    for one, other in zip(ahead, asked, strict=True):
        assert (one.outputs, one.grad_outputs) == (other.outputs, other.grad_outputs)
        assert one.save_vectors == other.save_vectors
        assert one.head.weight is model.head.weight
        assert one.head.hidden.shape[0] == 64
        pairs = zip(one.head, other.head, strict=True)
        for field, (few, all_of_them) in zip(one.head._fields, pairs, strict=True):
            if not isinstance(few, torch.Tensor):
                assert few == all_of_them, field
                continue
            assert not isinstance(few, FakeTensor), field
            assert few.dtype == all_of_them.dtype, field
            assert few.dim() == all_of_them.dim(), field
            assert few.shape[1:] == all_of_them.shape[1:], field


def test_nothing_is_called_ahead_on_a_cpu(asked):
    step = fxrl.optimize(Model(trained=False, bias=False), plain, fxrl.Config(min_saved_bytes=0))
    ids = torch.ones(2, 9, dtype=torch.int64)
    step({"ids": ids, "target": ids})
    assert len(asked) == 1
