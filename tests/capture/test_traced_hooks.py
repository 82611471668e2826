"""Hooks that a loss or a model registers as it runs, and removes, are a part of the graph."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fxrl.step import optimize
from tests.capture.mixer import QUIET, assert_matches_eager, fused, make_batch, make_model
from tests.capture.mixer import policy_loss as mixers_loss
from tests.capture.test_repeated import HIDDEN, ONE, Model, check, loss_fn, make, once, optimized

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def a_result_is_kept(model, batch):
    kept = []
    handle = model.mix.register_forward_hook(lambda module, args, output: kept.append(output))
    loss = mixers_loss(model, batch)
    handle.remove()
    return kept[0].square().mean() + loss + mixers_loss(model, batch)


def an_argument_is_changed(model, batch):
    with model.mix.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)):
        changed = mixers_loss(model, batch)
    return changed + mixers_loss(model, batch)


def the_head_is_shifted_when_others_are(model, batch):
    def shifted(module, args, kwargs, output):
        return output + 1.0

    def doubled(module, args, output):
        return output * 2

    outer = model.head.register_forward_hook(doubled)
    try:
        hook = model.head.register_forward_hook(shifted, with_kwargs=True, always_call=True)
        with hook, torch.no_grad():
            reference = mixers_loss(model, batch)
        return mixers_loss(model, batch) - reference
    finally:
        outer.remove()


@pytest.mark.parametrize(
    "loss", [a_result_is_kept, an_argument_is_changed, the_head_is_shifted_when_others_are]
)
def test_hooks_that_are_removed_again_are_captured(loss):
    model = make_model()
    model.head.register_forward_hook(lambda module, args, output: output * 0.5)
    step = optimize(model, loss, QUIET)
    for given in (make_batch(), make_batch(4, 9, seed=2)):
        assert_matches_eager(step, loss, model, given)
    assert fused(step)
    assert len(step.captures) == 1
    assert not any("graph break" in remark.reason for remark in step.report.remarks)
    assert [len(module._forward_hooks) for module in model.modules()] == [0, 0, 0, 1, 0]


def test_a_hook_that_stays_is_there_behind_the_graph():
    def loss(model, batch):
        if not model.mix._forward_hooks:
            model.mix.register_forward_hook(lambda module, args, output: output * 2)
        return mixers_loss(model, batch)

    model, eager = make_model(), make_model()
    step = optimize(model, loss, QUIET)
    for given in (make_batch(), make_batch(4, 9, seed=2)):
        torch.testing.assert_close(step(given), loss(eager, given), rtol=1e-10, atol=1e-10)
    assert len(model.mix._forward_hooks) == 1
    assert any("a hook is registered as the step runs" in r.reason for r in step.report.remarks)


class Routed(Model):
    """As PEFT's Poly: its forward tells parts of each layer which tasks the rows are of."""

    def __init__(self, kind, depth=4):
        super().__init__(kind, depth)
        self.tasks = nn.Parameter(torch.randn(3, 1, HIDDEN))

    @contextmanager
    def told(self, tasks):
        moved = self.tasks[tasks]

        def hook(module, args, kwargs):
            return (args[0] + moved, *args[1:]), kwargs

        parts = [one for one in self.modules() if isinstance(one, nn.LayerNorm)]
        handles = [one.register_forward_pre_hook(hook, with_kwargs=True) for one in parts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forward(self, ids):
        with self.told(ids[:, 0] % 3):
            return super().forward(ids)


def test_parts_of_all_layers_have_the_hook_that_a_model_gives_them():
    model = make(model=Routed)
    step = optimized(model)
    check(step, model)
    assert once(step) == "4 layers were captured as 1"


def hooked(places, hook):
    """A loss with a hook, made anew for each call, on a part of some layers."""

    def loss(model, given):
        own = hook()
        parts = [model.layers[place].norm for place in places]
        handles = [part.register_forward_hook(own) for part in parts]
        found = loss_fn(model, given)
        for handle in handles:
            handle.remove()
        return found

    return loss


def doubling():
    return lambda module, args, output: output * 2


def counting():
    calls = []

    def hook(module, args, output):
        calls.append(1)
        return output * len(calls)

    return hook


def keeping_the_first():
    kept = None

    def hook(module, args, output):
        nonlocal kept
        kept = output.mean() if kept is None else kept
        return output + kept

    return hook


@pytest.mark.parametrize(
    ("places", "hook"),
    [([2], doubling), (range(4), counting), (range(4), keeping_the_first)],
)
def test_parts_of_layers_that_hooks_tell_apart(places, hook):
    model, loss = make(), hooked(places, hook)
    step = optimized(model, loss)
    check(step, model, loss)
    assert not once(step)


def test_layers_whose_own_results_hooks_keep_are_captured_once():
    def loss(model, given):
        kept = []
        handles = [
            layer.register_forward_hook(lambda module, args, output: kept.append(output))
            for layer in model.layers
        ]
        found = loss_fn(model, given)
        for handle in handles:
            handle.remove()
        return found + torch.stack(kept).square().mean()

    model = make()
    step = optimized(model, loss)
    check(step, model, loss, ONE)
    assert once(step) == "4 layers were captured as 1"
