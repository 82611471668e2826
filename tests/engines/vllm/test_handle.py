"""What is used inside vLLM, on made-up objects: several ranks, draining, refused weights."""

import gc
import sys
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fxrl.engines import EngineError
from fxrl.engines.vllm.handle import VllmHandle, VllmSymbols
from fxrl.engines.vllm.requests import EngineFailedError


class Core:
    """A core with ``ahead`` steps in flight and finished requests that the worker has not heard."""

    def __init__(self, ahead=0, untold=0):
        self.batch_queue = [0] * ahead
        self.scheduler = SimpleNamespace(has_requests=lambda: self.untold > 0)
        self.untold, self.steps = untold, 0

    def step(self):
        self.steps += 1
        if self.batch_queue:
            self.batch_queue.pop()
        elif self.untold:
            self.untold -= 1
        return SimpleNamespace(outputs=[])


def make(core=None, ranks=1, rpc=None, max_lora_rank=None, model=None):
    core = core or Core()
    runner = SimpleNamespace(get_model=lambda: model or nn.Linear(2, 3))
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(
            engine_core=core, shutdown=lambda: None, get_output=lambda: core.step()
        ),
        model_executor=SimpleNamespace(driver_worker=worker if ranks == 1 else None),
    )
    llm = SimpleNamespace(llm_engine=engine, collective_rpc=rpc, reset_prefix_cache=lambda: True)
    params = SimpleNamespace(__struct_fields__=("n",))
    symbols = VllmSymbols(
        module=SimpleNamespace(SamplingParams=params),
        device="cpu",
        tokens_prompt=list,
        final_only="final",
        lora_request=None,
        lora_model=None,
        peft_helper=None,
        allocator=lambda: None,
        quiet_config=None,
    )
    return VllmHandle(llm, symbols, ranks, max_lora_rank)


def test_draining_ends_what_is_in_flight_and_no_more():
    core = Core(ahead=2, untold=1)
    make(core).drain()
    assert core.steps == 2
    make(core).drain(all_the_way=True)
    assert core.steps == 3
    make(core).drain(all_the_way=True)
    assert core.steps == 3


def test_what_never_drains_is_a_failure(monkeypatch):
    monkeypatch.setattr("fxrl.engines.vllm.handle.DRAIN_S", -1.0)
    with pytest.raises(EngineFailedError, match="it hangs"):
        make(Core(ahead=5)).drain()


def test_draining_a_broken_engine_is_a_failure():
    core = Core(ahead=1)

    def broken():
        raise RuntimeError("device lost")

    core.step = broken
    with pytest.raises(EngineFailedError, match="device lost"):
        make(core).drain()


def test_several_ranks_share_nothing_and_say_so(caplog):
    handle = make(ranks=2, max_lora_rank=8)
    with pytest.raises(EngineError, match=r"tensor_parallel_size=2: vLLM's model is in other"):
        handle.model()
    assert not list(handle.model_to_share().parameters())
    assert "all of them are copied at each update" in caplog.text
    assert "other processes" in handle.takes_adapters


def test_one_rank_shares_its_model():
    model = nn.Linear(4, 4)
    handle = make(model=model)
    assert handle.model_to_share() is model
    assert "max_lora_rank=None" in handle.takes_adapters
    assert make(max_lora_rank=8).takes_adapters == ""


def test_a_worker_elsewhere_is_an_error_that_says_so():
    handle = make()
    handle.engine.model_executor.driver_worker = None
    with pytest.raises(EngineError, match="keeps no worker at"):
        handle.model()


def test_weights_for_other_processes_are_a_list_on_the_host():
    seen = []

    def rpc(name, kwargs):
        seen.append((name, kwargs["weights_iterator"]))

    make(ranks=2, rpc=rpc).reload(iter([("a", torch.ones(2))]))
    ((name, weights),) = seen
    assert name == "reload_weights"
    assert [key for key, _ in weights] == ["a"]
    assert weights[0][1].device.type == "cpu"


def test_refused_weights_say_what_to_do():
    def rpc(name, kwargs):
        raise KeyError("model.nonsense")

    with pytest.raises(EngineError, match=r"KeyError.*nonsense.*give it all weights once more"):
        make(rpc=rpc).reload(iter([("model.nonsense", torch.ones(2))]))


def test_a_prefix_cache_that_is_not_dropped_is_an_error():
    handle = make()
    handle.llm.reset_prefix_cache = lambda: False
    with pytest.raises(EngineError, match="requests are still running"):
        handle.reset_prefix_cache()


HOOKS = OrderedDict()
"""Dynamo's, which holds what is in it."""


def compiled_twice():
    """A model with a module as vLLM compiles it: its class and its base have registered a hook."""

    class Compiled(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            for _ in range(2):
                self._bytecode_hook_handle = RemovableHandle(HOOKS)
                HOOKS[self._bytecode_hook_handle.id] = self.bytecode_hook

        def bytecode_hook(self, old, new):
            pass

    return nn.Sequential(nn.Linear(2, 2), Compiled())


def test_shutdown_lets_go_of_vllm_and_its_model():
    model = compiled_twice()
    handle, held = make(model=model), weakref.ref(model[1])
    HOOKS["another's"] = print
    del model
    handle.shutdown()
    assert handle.llm is None
    del handle
    gc.collect()
    assert held() is None
    assert HOOKS["another's"] is print


def test_shutdown_takes_its_own_adapter_slots_out_of_vllms_tables(monkeypatch):
    """An entry would hold the slots, and stand for a later engine's at the same address."""

    class Adapted(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.lora_a_stacked = (torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 2))
            self.lora_b_stacked = torch.randn(1, 1, 2, 4)

    model, other = nn.Sequential(Adapted()), torch.randn(4)
    slots = weakref.WeakSet([*model[0].lora_a_stacked, model[0].lora_b_stacked])
    a = {tuple(slot.data_ptr() for slot in model[0].lora_a_stacked): model[0].lora_a_stacked}
    b = {(model[0].lora_b_stacked.data_ptr(),): (0, model[0].lora_b_stacked[0])}
    tables = SimpleNamespace(_LORA_A_PTR_DICT=a | {(other.data_ptr(),): other}, _LORA_B_PTR_DICT=b)
    monkeypatch.setitem(sys.modules, "vllm.lora.ops.triton_ops.utils", tables)
    handle = make(model=model)
    del model, a
    handle.shutdown()
    del handle
    gc.collect()
    assert not slots
    assert (list(tables._LORA_A_PTR_DICT), b) == ([(other.data_ptr(),)], {})
