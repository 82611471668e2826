"""What is put off while something is compiled, and is as it was behind it."""

import gc

import pytest
import torch
from torch._dynamo import funcname_cache, symbolic_convert
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode

import fxrl
from fxrl.capture import _torch
from fxrl.capture._torch import callback_handler, compiles_undisturbed
from fxrl.compile._torch import new_size, symbolic_mode


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


def test_equal_sizes_are_computed_with_once(monkeypatch):
    asked = []
    product = SymNode.mul
    counting = lambda a, b: asked.append((a, b)) or product(a, b)  # noqa: E731
    monkeypatch.setattr(SymNode, "mul", product)  # as it is found behind the test
    monkeypatch.setitem(_torch._OF_TWO_SIZES, "mul", counting)
    rows, columns = _sizes(6, 8)
    doubled = lambda x: x * (x.shape[0] * x.shape[1])  # noqa: E731
    traced = [make_fx(doubled, tracing_mode="symbolic")(torch.empty(8, 6)) for _ in range(2)]
    with compiles_undisturbed():
        callback_handler.run_start_callbacks(None)
        products = [rows * columns for _ in range(3)]
        assert len(asked) == 1
        assert len({id(one.node) for one in products}) == 3
        assert {(one.node.expr, one.node.hint) for one in products} == {(products[0].node.expr, 48)}
        assert [(rows * 2).node.pytype, (rows * 2.0).node.pytype] == [int, float]
        assert [int(a * b) for a, b in [_sizes(6, 9), _sizes(7, 8)]] == [54, 56]
        traced += [make_fx(doubled, tracing_mode="symbolic")(torch.empty(8, 6)) for _ in range(2)]
        assert isinstance(columns == rows + 2, torch.SymBool)
        assert (columns * 3).node._expr != (rows * 3 + 6).node._expr
        assert bool(columns == rows + 2)  # from here on it is
        assert (columns * 3).node._expr == (rows * 3 + 6).node._expr
    assert len({str(one.graph) for one in traced}) == 1


def _sizes(*numbers):
    """Symbols of an environment of their own."""
    mode = symbolic_mode()
    return [new_size(mode, f"size{place}", number) for place, number in enumerate(numbers)]
