"""A vLLM that cannot be built: what the error says, and that what was loaded is let go."""

import dataclasses
import gc
import os
import socket
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fxrl.engines.engine import EngineError
from fxrl.engines.ledger import CpuProbe, MemoryLedger
from fxrl.engines.vllm.build import EngineLoadError, build_llm, forget_graph_pool
from fxrl.engines.vllm.handle import VllmSymbols
from fxrl.engines.vllm.options import VllmOptions
from tests.engines.vllm.test_handle import compiled_twice
from tests.engines.vllm.test_options import KNOWN


class NoRoomError(EngineError):
    """One of fxrl's own, raised by a worker inside vLLM."""


def built(tmp_path, llm, others=False, newest_worker=lambda: None):
    """What ``build_llm`` makes where ``llm`` stands for ``vllm.LLM``, beside another engine's
    weights if ``others``."""
    fields = SimpleNamespace(__dataclass_fields__=dict.fromkeys(KNOWN))
    module = SimpleNamespace(EngineArgs=fields, LLM=llm)
    unused = dict.fromkeys(field.name for field in dataclasses.fields(VllmSymbols))
    one = SimpleNamespace(tag="weights", handle=(0, 100), is_asleep=False)
    pools = SimpleNamespace(pointer_to_data={1: one} if others else {})
    given = {"module": module, "device": "cpu", "allocator": lambda: pools}
    symbols = VllmSymbols(**unused | given)
    ledger = MemoryLedger(CpuProbe(dict))
    options = VllmOptions(max_num_seqs=2)
    return build_llm(symbols, options, tmp_path, 7, ledger, "worker", newest_worker)


def failing(tmp_path, error, others=False, fails_again=False, early=False):
    """What a build raises that had loaded weights, a reference to these, and the shut-downs."""
    loaded, ended = [], []

    class Worker:
        def __init__(self):
            self.model_runner = SimpleNamespace(model=compiled_twice())
            self.model = weakref.ref(self.model_runner.model)

        def shutdown(self):
            self.model_runner.model = None
            gc.collect()
            ended.append("worker" if self.model() is None else "worker, its model is still held")
            if fails_again:
                raise RuntimeError("no worker")

    def start():
        weights = torch.randn(3)
        cycle = [weights]
        cycle.append(cycle)
        loaded.append(weakref.ref(weights))
        try:
            raise ValueError("the first of two")
        except ValueError as first:
            raise error from first

    def llm(**arguments):
        if not early:
            made.append(Worker())
        worker = SimpleNamespace(start=start)
        worker.start()

    made = [Worker()] if early else [None]
    try:
        built(tmp_path, llm, others, lambda: made[-1])
    except EngineError as raised:
        return raised, loaded[0], ended
    raise AssertionError("it was built")


def test_what_was_loaded_is_let_go_although_the_error_is_kept(tmp_path):
    cause = RuntimeError("no graph could be captured")
    kept, weights, ended = failing(tmp_path, cause)
    assert isinstance(kept, EngineLoadError)
    assert kept.__cause__ is cause
    assert weights() is None
    assert ended == ["worker"]  # and Dynamo's hooks, else its model were still held
    with pytest.raises(
        EngineLoadError, match=r"could not load .*RuntimeError: no graph could.*; memory: "
    ):
        raise kept


def test_an_error_of_our_own_stays_as_it_is(tmp_path):
    own = NoRoomError("no room")
    kept, weights, _ = failing(tmp_path, own)
    assert kept is own
    assert weights() is None


def test_an_engine_that_was_there_before_is_not_touched(tmp_path):
    _, weights, ended = failing(tmp_path, RuntimeError("one instance"), others=True)
    assert weights() is None
    assert not ended


def test_a_worker_that_was_there_before_is_not_touched(tmp_path):
    """Another engine's, without tagged pools; this build fails before it makes its own."""
    _, weights, ended = failing(tmp_path, RuntimeError("bad config"), early=True)
    assert weights() is None
    assert not ended


def test_a_worker_that_cannot_be_shut_down_hides_nothing(tmp_path, caplog):
    kept, weights, _ = failing(tmp_path, RuntimeError("no graph"), fails_again=True)
    assert "no graph" in str(kept)
    assert weights() is None
    assert "could not free what it had loaded (no worker)" in caplog.text


def test_the_processs_graph_pool_is_forgotten():
    class Platform:
        _global_graph_pool = (0, 3)

    forget_graph_pool(Platform)
    assert Platform._global_graph_pool is None
    forget_graph_pool(SimpleNamespace)  # a version without one
    assert not hasattr(SimpleNamespace, "_global_graph_pool")


def test_the_only_process_of_torchrun_meets_its_own_worker(tmp_path, monkeypatch):
    """torchrun's environment says that it serves every rendezvous; nobody serves vLLM's."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def llm(**_):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        where = f"tcp://127.0.0.1:{port}"
        return next(iter(dist.rendezvous(where, 0, 1, timeout=timedelta(seconds=2))))

    store, *_ = built(tmp_path, llm)
    store.set("met", "yes")
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
