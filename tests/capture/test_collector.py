"""What is put off while something is compiled, and is as it was behind it."""

import gc
import weakref

import pytest
import torch
from torch._dynamo import funcname_cache, symbolic_convert

import fxrl
from fxrl.capture import _torch
from fxrl.capture._torch import callback_handler, compiles_undisturbed


def test_a_compilation_that_ends_behind_the_step_leaves_the_collector_on():
    with compiles_undisturbed():
        callback_handler.run_start_callbacks(None)  # of another thread
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize(("frozen", "aged"), [(False, False), (True, False), (False, True)])
def test_what_was_made_while_something_compiled_is_old(monkeypatch, frozen, aged):
    monkeypatch.setattr(_torch, "_AGED", [True] * aged)
    looked = []
    gc.freeze() if frozen else gc.unfreeze()
    with compiles_undisturbed():
        callback_handler.run_start_callbacks(None)
        made = [[]]
        gc.callbacks.append(lambda phase, _: looked.append(phase))
        callback_handler.run_end_callbacks(None)
        gc.callbacks.pop()
    assert any(one is made for one in gc.get_objects(generation=2))
    assert bool(looked) is (frozen or aged)
    assert bool(gc.get_freeze_count()) is frozen  # what is frozen on purpose stays so
    gc.freeze()  # as every test finds it


class Settings:
    def __getattribute__(self, name):
        return super().__getattribute__(name)


def test_a_first_loss_is_freed_with_its_step(monkeypatch):
    """It knows how large the weights are, which grow with a vocabulary."""
    monkeypatch.setattr(_torch, "_AGED", [])
    gc.unfreeze()

    def loss_fn(model, batch):
        scale = settings.scale if hasattr(settings, "scale") else 2.0
        return scale * model(batch["x"]).square().mean()

    model, settings = torch.nn.Embedding(4, 2), Settings()
    step = fxrl.optimize(model, loss_fn, fxrl.Config(on_miss="ignore"))
    loss = step({"x": torch.arange(4)})
    loss.backward()
    first = weakref.ref(loss)
    del loss
    assert first() is None
    model.weight.data, model.weight.grad = torch.ones(6, 2), None
    step({"x": torch.arange(6)}).backward()
    assert model.weight.grad.shape == (6, 2)
    gc.freeze()  # as every test finds it


def test_a_loss_is_freed_behind_a_capture_that_failed():
    """What was raised has the frames of all callers, and they the loss."""

    def loss_fn(model, x):
        with torch.compiler.set_stance("default"):  # which Dynamo forbids
            return model(x).square().mean()

    step = fxrl.optimize(torch.nn.Embedding(6, 2), loss_fn, fxrl.Config(on_miss="ignore"))

    def of_a_step():
        loss = step(torch.arange(6))
        return weakref.ref(loss)

    assert of_a_step()() is None
    assert "not captured" in str(step.report)


def test_what_is_frozen_is_counted_once(monkeypatch):
    """Python counts it object by object."""
    counted = []
    monkeypatch.setattr(_torch, "_AGED", [])
    monkeypatch.setattr(_torch.gc, "get_freeze_count", lambda: counted.append(1) or 1)
    for _ in range(2):
        with compiles_undisturbed():
            callback_handler.run_start_callbacks(None)
            callback_handler.run_end_callbacks(None)
    assert counted == [1]


def test_no_file_is_tokenized_for_a_log(monkeypatch):
    monkeypatch.setattr(funcname_cache, "_add_file", lambda name: pytest.fail(f"tokenizes {name}"))
    names = symbolic_convert.get_funcname

    def loss_fn(model, batch):
        return model(batch["x"]).square().mean()

    step = fxrl.optimize(torch.nn.Linear(4, 2), loss_fn, fxrl.Config(on_miss="ignore"))
    step({"x": torch.randn(3, 4)})
    assert step.captures
    assert symbolic_convert.get_funcname is names
