"""What fxrl takes for granted of vLLM, one test for each; a new vLLM that breaks it fails here.

Everything that is not vLLM's documented interface is listed here by its name. (What only a GPU can
show is in ``test_vllm_gpu.py``.)
"""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def _vllm(vllm_process):
    """Every test here imports vLLM."""


def test_sampling_parameters_are_a_msgspec_struct_with_these_fields():
    from vllm import SamplingParams

    from fxrl.engines import SamplingParams as Ours
    from fxrl.engines.vllm.requests import sampling_arguments

    known = set(SamplingParams.__struct_fields__)
    given = sampling_arguments(Ours(), known, frozenset([2]))
    assert {"logprobs", "skip_clone", "detokenize"} <= given.keys()
    params = SamplingParams(seed=2**63 - 1, **given)
    assert params.clone().stop_token_ids is params.stop_token_ids  # no deep copy per request


def test_what_a_step_draws_has_these_fields():
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.engine.llm_engine import LLMEngine

    known = set(EngineCoreOutput.__struct_fields__)
    assert known >= {"request_id", "new_token_ids", "new_logprobs", "finish_reason"}
    assert {str(reason) for reason in FinishReason} >= {"stop", "length", "repetition", "abort"}
    assert "internal" in inspect.signature(LLMEngine.abort_request).parameters


def test_a_models_class_is_looked_at_in_this_process(monkeypatch):
    import vllm
    from vllm.model_executor.models import registry

    from fxrl.engines import VllmOptions
    from fxrl.engines.vllm import door

    def elsewhere(look):
        raise AssertionError("another process imports vLLM")

    monkeypatch.setattr(registry, "_run_in_subprocess", elsewhere)
    lazy = registry.ModelRegistry.models["Qwen3ForCausalLM"]
    monkeypatch.setattr(type(lazy), "_load_modelinfo_from_cache", lambda *_: None)
    monkeypatch.setattr(type(lazy), "_save_modelinfo_to_cache", lambda *_: None)
    with door.warm_up(VllmOptions(), SimpleNamespace(module=vllm, device="cpu")):
        assert lazy.inspect_model_cls().architecture == "Qwen3ForCausalLM"
    with pytest.raises(AssertionError, match="another process"):
        lazy.inspect_model_cls()


def test_an_engine_warms_up_with_what_rollouts_ask():
    import vllm
    from vllm.v1.worker.gpu import warmup

    from fxrl.engines import VllmOptions
    from fxrl.engines.vllm import door
    from fxrl.engines.vllm.sampler import is_plain

    def asked():
        return warmup.SamplingParams.for_sampler_warmup()

    assert not is_plain(asked(), vllm.SamplingParams(), 1000)
    with door.warm_up(VllmOptions(), SimpleNamespace(module=vllm, device="cuda")):
        assert is_plain(asked(), vllm.SamplingParams(), 1000)
        assert warmup.SamplingParams(temperature=0.0).temperature == 0
    assert warmup.SamplingParams is vllm.SamplingParams


def test_engine_arguments_are_fields():
    from vllm import EngineArgs

    from fxrl.engines import VllmOptions
    from fxrl.engines.vllm.options import OWNED_ENGINE_ARGS, engine_arguments

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    options = VllmOptions(
        max_model_len=8,
        max_num_batched_tokens=8,
        quantization="fp8",
        async_scheduling=True,
        max_lora_rank=8,
        attention_config={},
        compilation_config={},
    )
    for device in ("cpu", "cuda"):
        engine_arguments(
            options, known, model="m", seed=0, device=device, utilization=0.5, worker_cls="w",
            has_tokenizer=False,
        )  # fmt: skip
    assert OWNED_ENGINE_ARGS.keys() - known <= {"sleep_mode_backend"}  # 0.33 has that too


def test_the_kv_cache_is_released_natively():
    """Not so: the registered backend, which is then tried on the GPU."""
    from vllm import LLM

    assert callable(LLM.release_kv_cache_memory)
    assert "level" in inspect.signature(LLM.sleep).parameters
    assert "tags" in inspect.signature(LLM.wake_up).parameters


@pytest.mark.parametrize("aborted", [False, True])
def test_the_native_release_gets_as_far_as_the_worker(engine, aborted):
    """vLLM refuses it while its scheduler has anything left, finished requests included."""
    from fxrl.engines import SamplingParams

    llm = engine._handle.llm
    engine.generate([[5, 6]], SamplingParams(max_tokens=3))
    if aborted:
        with pytest.raises(ZeroDivisionError):
            engine.generate(
                [[5], [6]], SamplingParams(max_tokens=9), on_finished=lambda i, group: 1 / 0
            )
    engine._handle.drain(all_the_way=True)
    llm.sleep(level=0)
    with pytest.raises(RuntimeError, match="discard is not supported on CPU"):
        llm.release_kv_cache_memory()
    llm.wake_up(tags=["kv_cache"])
    assert not llm.llm_engine.is_sleeping()
    engine.generate([[5, 6]], SamplingParams(max_tokens=3))


def test_the_tagged_allocator_says_what_it_holds():
    from vllm.device_allocator import AllocationData
    from vllm.device_allocator.cumem import CuMemAllocator

    fields = {field.name for field in dataclasses.fields(AllocationData)}
    assert {"handle", "tag", "is_asleep"} <= fields
    assert CuMemAllocator.instance is None  # no GPU here, so nobody has made one
    assert "pointer_to_data" in inspect.getsource(CuMemAllocator.__init__)


def test_sleep_backends_can_be_registered_and_unmap_one_tag(monkeypatch):
    """The older way in, on vLLM's own classes with the memory made up."""
    from vllm.device_allocator import AllocationData, cumem
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from fxrl.engines.vllm import door

    class Config:
        enable_sleep_mode, sleep_mode_backend = True, "cumem"

    for _ in range(2):
        door._register_backend(Config)
    assert Config.sleep_mode_backend == door.BACKEND
    backend = SleepModeBackendFactory.create_backend(Config)
    made = {i: AllocationData((0, 10, i, i), tag) for i, tag in enumerate(("weights", "kv_cache"))}
    allocator = type("Allocator", (), {"pointer_to_data": made})()
    done = []
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", staticmethod(lambda: allocator))
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: done.append(("unmap", handle)))
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: done.append(("map", handle)))
    backend.suspend(1)
    assert backend.state() == "SUSPENDED"
    assert [one.is_asleep for one in made.values()] == [False, True]
    backend.resume(None)
    assert backend.state() == "RUNNING"
    assert done == [("unmap", (0, 10, 1, 1)), ("map", (0, 10, 1, 1))]


def test_attention_backends_can_be_registered_and_cleared_by_name():
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    assert callable(get_current_vllm_config)
    for name in ("FLASH_ATTN", "CUSTOM"):  # what fxrl.engines.vllm.decode_attention.place names
        member = AttentionBackendEnum[name]
        assert member.name == name
        assert not member.is_overridden()
        register_backend(member, "a.B")
        assert member.is_overridden()
        assert member.get_path() == "a.B"
        member.clear_override()
        assert not member.is_overridden()


def test_the_choice_of_an_attention_backend_is_cached_in_one_place_that_can_be_emptied():
    from vllm.v1.attention import selector

    from fxrl.engines.vllm.decode_attention import CACHE

    cached = getattr(selector, CACHE)
    assert callable(cached.cache_clear)
    assert f"return {CACHE}(" in inspect.getsource(selector.get_attn_backend)


def test_the_worker_is_found_by_its_path_and_sizes_the_cache():
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.worker_base import WorkerBase

    worker = resolve_obj_by_qualname("fxrl.engines.vllm.door.Worker")
    assert issubclass(worker, CPUWorker)
    assert issubclass(worker, WorkerBase)
    assert worker is resolve_obj_by_qualname("fxrl.engines.vllm.door.Worker")
    assert callable(CPUWorker.determine_available_memory)
    assert callable(CPUWorker.get_kv_cache_spec)


def test_what_a_built_engine_has(engine):
    handle = engine._handle
    assert hasattr(handle.engine.engine_core.engine_core, "batch_queue")
    assert isinstance(handle.worker.model_runner.get_model(), torch.nn.Module)
    assert handle.cpu_bytes()["kv_cache"] > 0
    assert callable(handle.worker.model_runner.reload_weights)
    assert handle.llm.reset_prefix_cache() is True


def test_the_lora_manager_has_what_an_adapter_needs(engine):
    from fxrl.engines.vllm.handle import adapter_manager

    manager = adapter_manager(engine._handle.worker)
    assert {"modules", "packed_modules", "model"} <= set(dir(manager))
    assert manager.lora_config.max_lora_rank == 8


def test_a_manager_elsewhere_is_an_error_that_says_so():
    from types import SimpleNamespace

    from fxrl.engines import EngineError
    from fxrl.engines.vllm.handle import adapter_manager

    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace()))
    with pytest.raises(EngineError, match="lacks add_adapter, remove_adapter"):
        adapter_manager(worker)


def test_kernels_keep_adapter_slots_in_these_tables():
    """Emptied when an engine is closed; a table by another name would hold its weights."""
    from vllm.lora.ops.triton_ops import utils

    from fxrl.engines.vllm.handle import SLOT_TABLES

    for name in SLOT_TABLES:
        assert isinstance(getattr(utils, name), dict)
