"""What a user may decide about vLLM, and how it becomes vLLM's own arguments; no vLLM needed.

NOTE [Why so few named options]
Named are those that fxrl itself reads, or that an RL run is likely to change. Every other argument
of vLLM goes through ``engine_args`` under vLLM's own name and is checked against the fields of the
installed version's ``EngineArgs``, so nothing of vLLM is out of reach and no typo is swallowed.
``gpu_memory_utilization`` is neither: it follows from what is free and what the trainer keeps
(``fxrl/engines/vllm/build.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import torch

from fxrl.config import Size, parse_bytes
from fxrl.engines.engine import EngineError
from fxrl.errors import ConfigError, did_you_mean
from fxrl.options import Options, Positive, above


class VllmOptionError(EngineError, ConfigError):
    """An option of the vLLM engine is unknown, out of range, or fxrl's own business."""


OWNED_ENGINE_ARGS: Mapping[str, str] = MappingProxyType(
    {
        "model": "it is VllmEngine's first argument",
        "seed": "it is VllmEngine's own argument, from which each sample's seed follows",
        "logprobs_mode": "the trainer needs log-probabilities at the sampling temperature",
        "gpu_memory_utilization": "it follows from the free memory; set gpu_memory or "
        "trainer_reserve instead",
        "kv_cache_memory_bytes": "the KV cache's size follows from max_num_seqs, max_model_len and "
        "the free memory; set gpu_memory instead",
        "num_gpu_blocks_override": "the KV cache's size follows from max_num_seqs, max_model_len "
        "and the free memory; set gpu_memory instead",
        "enable_sleep_mode": "standby needs it; set standby=False to go without",
        "enable_cumem_allocator": "standby needs it; set standby=False to go without",
        "sleep_mode_backend": "standby releases the KV cache alone, which needs fxrl's own",
        "worker_cls": "fxrl's worker sizes the KV cache",
        "enable_lora": "set max_lora_rank instead",
        "max_loras": "one policy is trained, so one adapter is served",
        "generation_config": "stop tokens and sampling parameters come from fxrl alone",
        "distributed_executor_backend": "it follows from tensor_parallel_size and from torchrun",
        "skip_tokenizer_init": "it follows from whether the model's folder has a tokenizer",
        "use_tqdm_on_load": "nothing is printed but by the command line",
        "disable_log_stats": "nothing reads vLLM's statistics",
        "data_parallel_size": "one engine serves one trainer",
    }
)
"""Arguments of ``EngineArgs`` that fxrl sets itself, and why."""

_NAMED_BY_VLLM = (
    "max_model_len",
    "max_num_batched_tokens",
    "quantization",
    "attention_config",
    "compilation_config",
    "async_scheduling",
)


HOPPER = (9, 0)
"""The compute capability of the GPUs on which what decodes unasked was measured."""

MOST_SEQUENCES = 1024
"""Of a run at once: beyond it a decode step's time and the sampler's memory grow with them."""


@dataclass(frozen=True, slots=True)
class VllmOptions(Options):
    """How the vLLM engine is built.

    Attributes:
        max_model_len: tokens of the longest prompt and completion together. ``None`` is, in a run,
            the longest prompt of the data plus ``sampling.max_tokens``, else the model's own.
        max_num_seqs: sequences decoded at once; more are queued. ``None`` is, in a run, all
            completions of a step, 1024 at most, else 256. With ``max_model_len`` it bounds the KV
            cache, and waking takes 4.7 ms for each GiB of it, so do not ask for more than a step's
            completions.
        max_num_batched_tokens: prompt tokens of one prefill step; ``None`` is vLLM's own.
        dtype: type of weights and activations. ``"auto"`` is, in a run, the one that the trainer
            computes in, else the checkpoint's (vLLM makes float32 ones half precision then).
        kv_cache_dtype: type of the KV cache: ``"auto"``, ``"fp8"``, ... as vLLM names them. FP8
            halves the cache and adds to the difference between sampling and training
            log-probabilities.
        quantization: way to quantize the weights, e.g. ``"fp8_per_channel"``; ``None`` is the
            checkpoint's own.
        tensor_parallel_size: GPUs of one engine. Above 1 vLLM runs in processes of its own, so
            weights cannot be shared and are copied at each update.
        enforce_eager: no CUDA graphs and no compilation: a quicker start and slower decoding.
        enable_prefix_caching: sharing of a prompt's prefill among its samples.
        async_scheduling: scheduling of a step while the GPU runs the one before; ``None`` is vLLM's
            own choice.
        fused_sampler: tokens and their log-probabilities come from fxrl's one-pass kernel where
            temperature alone shapes the distribution (vLLM's V2 runner on a GPU, one rank); other
            requests and settings take vLLM's own sampler.
        decode_steps: steps in which each running sequence takes one token are scheduled by fxrl, as
            vLLM would and with less of the host's time, with the vLLM versions that fxrl knows.
        decode_layers: on Hopper, layers are compiled to keep a norm's row in registers, and FP8
            products of narrow layers leave their scales to the norm that reads them, with the vLLM
            versions that fxrl knows. See decode_layers.py.
        decode_attention: steps of one new token a sequence run through fxrl's kernel instead of
            vLLM's FlashAttention: with ``"auto"`` where that was measured to be faster (Hopper, up
            to 512 sequences, ``max_model_len`` up to 4096), with ``"fxrl"`` always, with ``"vllm"``
            never. See NOTE [Where the kernel runs unasked] in decode_attention.py.
        attention_config: vLLM's, e.g. ``{"backend": "FLASH_ATTN"}``.
        compilation_config: vLLM's, a mapping or a mode's number.
        max_lora_rank: slots for an adapter of this rank and vLLM's LoRA kernels, which cost 25 to
            35 % of decoding; ``None`` has none, adapters are then folded into the weights. A run
            with ``quantization`` and an adapter has them unasked: few bits round a fold away.
        gpu_memory: most that this process may hold of the GPU while it generates, bytes or
            ``"75GiB"``; ``None`` is what is free.
        trainer_reserve: kept free of KV cache while generating, for what the trainer keeps resident
            then: adapter, optimizer state, buffers.
        cpu_kv_cache: most for the KV cache on a machine without GPU.
        generate_timeout_s: a call of ``generate`` that takes longer is aborted between two steps
            and raises (one that hangs within a step is only reported, in the log); ``None`` waits
            for ever.
        standby: whether the KV cache's memory can be given to the trainer; ``False`` lets vLLM
            allocate as usual.
        log_level: least level of what vLLM's own log shows (its warnings are many and rarely about
            the run).
        engine_args: further arguments of vLLM's ``EngineArgs`` by vLLM's names.

    Raises:
        VllmOptionError: a value is out of range; the message has reason and cure.
    """

    unfit: ClassVar[type[ConfigError]] = VllmOptionError

    max_model_len: Positive | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    tensor_parallel_size: Positive = 1
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    fused_sampler: bool = True
    decode_steps: bool = True
    decode_layers: bool = True
    decode_attention: Literal["auto", "vllm", "fxrl"] = "auto"
    attention_config: Mapping[str, Any] | None = None
    compilation_config: Mapping[str, Any] | int | None = None
    max_lora_rank: Positive | None = None
    gpu_memory: Size | None = None
    trainer_reserve: Size = "2GiB"
    cpu_kv_cache: Size = "1GiB"
    generate_timeout_s: Annotated[float, above(0, "use None to wait for ever")] | None = None
    standby: bool = True
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "ERROR"
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        if self.decode_attention == "fxrl" and "backend" in (self.attention_config or {}):
            yield (
                "decode_attention='fxrl' is an attention backend of its own; leave "
                "attention_config.backend away"
            )
        own = {item.name for item in fields(self)}
        for name in self.engine_args:
            if name in own:
                yield f"engine_args: {name!r} is an option of its own, use it"
            elif name in OWNED_ENGINE_ARGS:
                yield f"engine_args: {name!r} is fxrl's own: {OWNED_ENGINE_ARGS[name]}"

    @property
    def num_sequences(self) -> int:
        """``max_num_seqs``; outside of a run 256 where it is left open."""
        return self.max_num_seqs or 256


def check_names(what: str, names: Collection[str], known: Collection[str]) -> None:
    """Refuses names that vLLM does not know."""
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise VllmOptionError(f"{what}: the installed vLLM knows no {name!r}{near}")


def engine_arguments(
    options: VllmOptions,
    known: Collection[str],
    *,
    model: str,
    seed: int,
    device: str,
    utilization: float,
    worker_cls: str,
    has_tokenizer: bool,
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``.

    ``known`` are the fields of the installed ``EngineArgs``, ``utilization`` is vLLM's share of the
    GPU (``build.utilization``), ``worker_cls`` the import path of the worker class. Raises
    ``VllmOptionError`` for an option that the installed version does not have.
    """
    check_names("vllm.engine_args", options.engine_args.keys(), known)
    single = options.tensor_parallel_size == 1
    arguments: dict[str, Any] = {
        "model": model,
        "seed": seed,
        "dtype": options.dtype,
        "max_num_seqs": options.num_sequences,
        "kv_cache_dtype": options.kv_cache_dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling defaults and no EOS ids from the checkpoint
        "distributed_executor_backend": _executor(single),
        "skip_tokenizer_init": not has_tokenizer,
        "disable_log_stats": True,
        "worker_cls": worker_cls,
        "use_tqdm_on_load": False,
    }
    for name in _NAMED_BY_VLLM:
        if (value := getattr(options, name)) is not None:
            arguments[name] = dict(value) if isinstance(value, Mapping) else value
    if options.decode_attention == "fxrl" and device != "cpu":
        arguments["attention_config"] = dict(options.attention_config or {}) | {"backend": "CUSTOM"}
    if options.max_lora_rank is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": options.max_lora_rank}
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = parse_bytes(options.cpu_kv_cache)
        if options.max_num_batched_tokens is None:
            # Of a prompt in parts vLLM turns the request's generator back, which CPU's cannot do.
            arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = utilization
        if options.standby:
            arguments["enable_sleep_mode"] = True
    arguments |= dict(options.engine_args)
    check_names("vllm options", arguments.keys(), known)
    return arguments


def _executor(single: bool) -> str:
    """How vLLM runs its model. Of several ranks each has its own engine, which must take the rank's
    GPU and join the process group that there is; ``"uni"`` would take GPU 0 and make one."""
    ranks = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if ranks and not single:
        raise VllmOptionError(
            "vllm.tensor_parallel_size is above 1, and fxrl train has several ranks, each with an "
            "engine of its own; leave it out"
        )
    return "external_launcher" if ranks else "uni" if single else "mp"
