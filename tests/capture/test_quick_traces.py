"""``nn.Module`` is left alone while a step is captured."""

import torch
from torch import Tensor, nn

import fxrl
from tests.capture.mixer import CONFIG, assert_matches_eager, fixed, make_batch, make_model


@torch.library.custom_op("fxrl_tests::seen_while_traced", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


def loss_fn(model, batch):
    logps = model(batch["ids"]).log_softmax(-1).gather(-1, batch["ids"][..., None])
    return logps.mean() + doubled(batch["adv"]).sum()


def test_no_trace_replaces_methods_of_modules():
    """Of a big model each replacement takes a look at all classes of modules there are."""
    tracing, methods = [], []

    @doubled.register_fake
    def _(x):
        tracing.append(torch.fx._symbolic_trace.is_fx_tracing())
        methods.append((nn.Module.__call__, nn.Module.__getattr__))
        return torch.empty_like(x)

    model = make_model()
    step = fxrl.optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    assert any(tracing)
    assert {*methods} == {(nn.Module.__call__, nn.Module.__getattr__)}
