"""``fxrl.optimize``: what it refuses, before anything runs."""

import pytest
import torch

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
