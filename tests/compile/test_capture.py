"""Capture: how often a step compiles, what a graph break costs, what a second process reuses."""

import json
import os
import subprocess
import sys
import sysconfig
import types
import warnings
from pathlib import Path

import pytest
import torch

import fxrl
from tests.capture.mixer import assert_matches_eager, fixed

ROOT = Path(__file__).parents[2]


class Lm(torch.nn.Module):
    def __init__(self, vocab=60, hidden=8):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, hidden)
        self.head = torch.nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def entropy_loss(model, batch):
    """General enough to stay a region: no fast path computes the sum of squared log-probs."""
    logp = torch.log_softmax(model(batch["ids"]).float(), -1)
    return (logp.square().sum(-1) * batch["weight"]).mean()


def batch_of(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 60, (rows, length), generator=generator),
        "weight": torch.rand(rows, length, generator=generator),
    }


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def step_for(model, loss_fn=entropy_loss, **options):
    settings = {"min_saved_bytes": 0, "chunk_tokens": 8, "compile_regions": False} | options
    return fxrl.optimize(model, loss_fn, fxrl.Config(**settings))


class Attending(Lm):
    scale = 0.5

    def forward(self, ids):
        x = self.embed(ids)[:, None]
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=self.scale)
        return self.head(x[:, 0])


def test_a_scale_of_attention_that_changes():
    model = Attending().double()
    step = step_for(model, on_miss="error")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Raw SymFloat")
        for scale in (0.5, 0.25, 4.0, 0.25):
            model.scale = scale
            loss = step(batch_of(2, 7))
            torch.testing.assert_close(loss, entropy_loss(model, batch_of(2, 7)), rtol=1e-6, atol=0)


def in_parts(model, batch):
    """In parts of as many rows as there are, which libraries take for the default."""
    rows = len(batch["ids"])
    parts = [
        entropy_loss(model, {name: batch[name][start : start + rows] for name in batch})
        for start in range(0, rows, rows)
    ]
    return torch.stack(parts).mean()


@pytest.mark.parametrize(("loss_fn", "count"), [(entropy_loss, 10), (in_parts, 3)])
def test_ten_shapes_take_two_captures(loss_fn, count):
    model = Lm()
    step = step_for(model, loss_fn)
    shapes = [(2, 7), (3, 9), (4, 16), (1, 5), (5, 5), (8, 3), (2, 33), (1, 9), (6, 6), (7, 2)]
    for shape in shapes[:count]:
        assert_matches_eager(step, loss_fn, model, batch_of(*shape), tol=1e-5)
    assert len(step.captures) <= 2


class Ways:
    """``opt_einsum``, which torch asks where it is installed."""

    @staticmethod
    def contract_path(equation, *operands, shapes=False, **how):
        sizes = operands if shapes else [one.shape for one in operands]
        assert all(int(size) for one in sizes for size in one)
        return [(0, 1)] * (len(operands) - 1), None


def weighted_in_one_product(model, batch):
    logps = model(batch["ids"]).log_softmax(-1).gather(-1, batch["ids"][..., None])[..., 0]
    return torch.einsum("bt,bt,bt->b", logps, batch["weight"], logps.detach()).mean()


def test_an_einsum_of_three_is_captured_once_with_opt_einsum_installed(monkeypatch):
    own = torch.backends.opt_einsum
    installed = {"_opt_einsum": Ways, "enabled": True, "strategy": "auto"}
    for name, value in installed.items():
        monkeypatch.setitem(own.get_opt_einsum.__globals__, name, value)
    monkeypatch.setattr(own, "is_available", lambda: True)
    model = Lm()
    step = step_for(model, weighted_in_one_product, on_miss="error")
    for shape in [(2, 7), (3, 9), (4, 5)]:
        batch = batch_of(*shape)
        assert_matches_eager(step, weighted_in_one_product, model, batch, tol=1e-5)
    assert len(step.captures) == 1


def test_sizes_that_the_caller_marks_as_static_are_constants():
    model = Lm()
    step = step_for(model)
    for number, shape in enumerate([(2, 7), (3, 9)], 1):
        assert_matches_eager(step, entropy_loss, model, fixed(batch_of(*shape)), tol=1e-5)
        assert len(step.captures) == number


def test_a_graph_break_is_worked_around_and_reported():
    def broken(model, batch):
        hidden = torch.tanh(model.embed(batch["ids"]))
        torch._dynamo.graph_break()
        logp = torch.log_softmax(model.head(hidden).float(), -1)
        return (logp.square().sum(-1) * batch["weight"]).mean()

    model = Lm()
    step = step_for(model, broken)
    assert_matches_eager(step, broken, model, batch_of(2, 7), tol=1e-5)
    (remark,) = [r for r in step.report.remarks if "graph break" in r.reason]
    assert "test_capture.py:" in remark.source
    assert [r for r in step.report.remarks if r.kind == "applied"]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("wrong", [None, "text", [3], {}])
def test_a_batch_that_is_none_costs_the_next_one_nothing(wrong, begun):
    """Dynamo leaves a function out for good in which it met what ends it at its first op."""
    step = step_for(Lm(), on_miss="error")
    if begun:
        step(batch_of(2, 7))
    with pytest.raises((TypeError, KeyError)):
        step(wrong)
    step(batch_of(2, 7)).backward()
    step(batch_of(3, 9)).backward()
    assert [capture.running for capture in step.captures] == [True]
    assert repr(step) == "<TrainStep of entropy_loss over Lm, captures: 1>"
    with pytest.raises(AttributeError, match="a step is no module, its model is one: step"):
        step.state_dict()
    assert not hasattr(step, "anything_else")


def test_a_dump_holds_every_stage(tmp_path):
    step = step_for(Lm(), compile_regions=True)
    step(batch_of(2, 7)).backward()
    folder = step.dump(tmp_path).parent / "capture_0"
    assert "batch.ids" in (folder / "inputs.txt").read_text()
    assert "log_softmax" in (folder / "00_dynamo.py").read_text()
    assert {"forward.py", "backward.py"} <= {path.name for path in (folder / "aot").iterdir()}
    assert "fxrl.region" not in next(folder.glob("01_*.before.txt")).read_text()
    assert "fxrl.region" in max(folder.glob("*.after.txt")).read_text()
    (region,) = (folder / "regions").iterdir()
    assert "aten.mm" in (region / "vjp.txt").read_text()
    code = (region / "generated" / "vjp.py").read_text()
    assert "def call" in code
    assert 'extern "C"' in code, "the kernels stand in the wrapper"


_SECOND_PROCESS = """
import json, sys, torch
sys.path.insert(0, {root!r})
from torch._dynamo.utils import counters
from fxrl.ir.printer import print_graph
from tests.compile.test_capture import Lm, batch_of, step_for
torch.manual_seed(0)
step = step_for(Lm(), compile_regions=True)
step(batch_of(2, 7)).backward()
counts = counters["inductor"]
made = [sorted(step.captures[0].kernels), print_graph(step.captures[0].rewritten.gm)]
print(json.dumps([made, counts["fxgraph_cache_miss"], counts["fxgraph_cache_hit"]]))
"""


def test_a_second_process_finds_the_first_ones_code(tmp_path):
    def compile_in_a_process():
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
            "PYTHONHASHSEED": "random",
        }
        done = subprocess.run(
            [sys.executable, "-c", _SECOND_PROCESS.format(root=str(ROOT))],
            capture_output=True, text=True, env=environment, check=True, timeout=300,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])

    made, misses, hits = compile_in_a_process()
    assert (misses, hits) == (2, 0)  # cold: forward and vjp
    assert compile_in_a_process() == [made, 0, 2]  # warm; the same ids and the same printed graph


WIDTH = """
import functools

@functools.lru_cache
def known(tensor):
    return 8.0

def width(tensor):
    return known(tensor)
"""


@pytest.mark.parametrize("owner", ["library", "system", "user"])
def test_a_cache_that_is_traced_through_is_told_to_its_owner(owner, tmp_path, monkeypatch):
    """Nobody can act on a library's own; a warning of the user's code is the user's."""
    folders = {"library": sysconfig.get_path("purelib"), "system": tmp_path / "dist-packages"}
    folder = folders.get(owner, tmp_path)
    module = types.ModuleType(f"code_of_{owner}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(WIDTH, f"{folder}/{module.__name__}.py", "exec"), vars(module))

    def loss(model, batch):
        return (loss := entropy_loss(model, batch)) / module.width(loss)

    before = warnings.filters[:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step_for(Lm(), loss)(batch_of(2, 5))
    told = [str(warning.message) for warning in caught if "lru_cache" in str(warning.message)]
    assert len(told) == (owner == "user")
    assert warnings.filters == before
