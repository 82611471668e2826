"""Sizes that are equal in the first batch alone: later batches are right all the same."""

import pytest
import torch
from torch import nn

import fxrl

VOCAB, WIDTH = 64, 8


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.double()

    def forward(self, ids):
        return self.head(torch.tanh(self.layer(self.embedding(ids))))


def entropy(logits):
    logp = torch.log_softmax(logits, -1)
    return -(logp.exp() * logp).sum(-1).mean()


def first_six(model, batch):
    return entropy(model(batch["ids"])[..., :6, :])


def first_few(model, batch):
    return entropy(model(batch["ids"])[..., : batch["few"].shape[0], :])


def loss_and_gradient(model, loss):
    loss.backward()
    gradient = model.layer.weight.grad.clone()
    model.zero_grad()
    return loss.detach(), gradient


@pytest.mark.parametrize("rows", [(), (1,), (3,)], ids=["packed", "one row", "rows"])
@pytest.mark.parametrize("loss_fn", [first_six, first_few])
def test_a_slice_is_whole_only_where_it_is_always(loss_fn, rows):
    model = Tiny()
    options = fxrl.Config(compile_regions=False, min_saved_bytes=0, on_miss="ignore")
    step = fxrl.optimize(model, loss_fn, options)
    for length, few in ((6, 6), (9, 5), (12, 12)):
        batch = {"ids": torch.randint(VOCAB, (*rows, length)), "few": torch.ones(few)}
        got = loss_and_gradient(model, step(batch))
        wanted = loss_and_gradient(model, loss_fn(model, batch))
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    assert step.report.of_kind("applied")
