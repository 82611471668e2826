"""Builds ``vllm.LLM`` out of options: environment, memory, arguments. Imports no vLLM.

NOTE [vLLM's environment variables]
``set_environment`` is the one place that sets any, and it sets only what has no argument:
``VLLM_ENABLE_V1_MULTIPROCESSING=0`` keeps vLLM's engine in this process (shared weights need it);
``VLLM_NO_USAGE_STATS`` (nothing is sent anywhere), ``VLLM_LOGGING_LEVEL`` and, where FlashInfer is
not installed, ``VLLM_USE_FLASHINFER_SAMPLER=0`` are set unless they are set already.

NOTE [Under torchrun]
torchrun tells its processes by ``TORCHELASTIC_USE_AGENT_STORE`` that it serves their rendezvous
itself. torch then takes every ``tcp://`` address for one that somebody else serves, also that by
which vLLM's engine in this process meets its own worker, and waits for it for half an hour. A rank
alone has no process group that vLLM would take instead, so while an engine is built torch reads
that nobody serves.

NOTE [Expandable segments]
``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` suits the trainer and may stay on: with the
tagged pools that standby needs, vLLM switches it off around its own pools and back on afterwards.
vLLM 0.25 looks for it under exactly that name, so where ``PYTORCH_ALLOC_CONF`` (PyTorch's newer
name) says it, the older name is set to the same: unnoticed, the pools would be built of expandable
segments, which cannot be unmapped and mapped again.

NOTE [Why gpu_memory_utilization is never tuned by hand]
vLLM takes a share of the whole GPU and fills all of it that weights, activations and graphs leave
with KV cache, whether that many tokens can ever be in flight or not. Here the share follows from
what is free and what the trainer keeps resident while vLLM generates, and the cache is cut to
what ``max_num_seqs`` sequences of ``max_model_len`` tokens can use: mapping memory back costs
4.7 ms/GiB at every wake (measured on an H200), and what is not mapped cannot run out.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fxrl.config import MiB, parse_bytes
from fxrl.engines.engine import EngineError
from fxrl.engines.ledger import MemoryLedger, Reading
from fxrl.engines.vllm.handle import VllmSymbols, free_unheld, unhook
from fxrl.engines.vllm.options import VllmOptions, engine_arguments
from fxrl.ir.remark import format_bytes

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class EngineLoadError(EngineError):
    """vLLM is missing or could not be built."""


def set_environment(options: VllmOptions) -> None:
    """Call this before vLLM is imported; see NOTE [vLLM's environment variables]."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", options.log_level)
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if "expandable_segments:True" in (general := os.environ.get("PYTORCH_ALLOC_CONF", "")):
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", general)


def forget_graph_pool(platform: Any) -> None:
    """vLLM keeps one pool of CUDA graphs for the process; each engine shall have its own.

    PyTorch refuses to capture into a pool whose graphs are gone while some memory of it is in use,
    and cuBLAS keeps workspaces of a capture: no engine could follow a closed one. An engine that is
    open keeps the pool that it has.
    """
    if getattr(platform, "_global_graph_pool", None) is not None:
        platform._global_graph_pool = None


def build_llm(
    symbols: VllmSymbols,
    options: VllmOptions,
    path: Path,
    seed: int,
    ledger: MemoryLedger,
    worker_cls: str,
    newest_worker: Callable[[], Any],
) -> Any:
    """A ``vllm.LLM`` of the checkpoint in ``path``. ``newest_worker()`` is the worker made last,
    ``None`` if it is gone or there was none."""
    arguments = engine_arguments(
        options,
        set(symbols.module.EngineArgs.__dataclass_fields__),
        model=str(path),
        seed=seed,
        device=symbols.device,
        utilization=utilization(options, ledger.probe.read()) if symbols.device == "cuda" else 0.0,
        worker_cls=worker_cls,
        has_tokenizer=any((path / name).is_file() for name in _TOKENIZER_FILES),
    )
    alone, before = not symbols.tags(), id(newest_worker())
    try:
        with _own_rendezvous():
            return symbols.module.LLM(**arguments)
    except Exception as error:  # vLLM raises all kinds; all mean the same here
        holders = ledger.holders()
        _release(error, newest_worker if alone else lambda: None, before)
        if isinstance(error, EngineError):
            raise
        raise EngineLoadError(
            f"vLLM could not load {str(path)!r} ({type(error).__name__}: {error}); "
            f"memory: {holders}"
        ) from error


@contextmanager
def _own_rendezvous() -> Iterator[None]:
    """See NOTE [Under torchrun]."""
    name = "TORCHELASTIC_USE_AGENT_STORE"
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before


def _release(error: BaseException, newest_worker: Callable[[], Any], before: int) -> None:
    """Free what a failed build has loaded; vLLM would refuse to load weights beside it.

    The traceback's frames hold it for as long as anybody keeps the error (a notebook keeps the last
    one), so they are cleared first; vLLM's worker empties its memory pools when it shuts down.
    ``newest_worker`` returns ``None`` if that would free another engine's pools; ``before`` is the
    ``id`` of the worker before the build, which belongs to an open engine.
    """
    worker = newest_worker()
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    if worker is not None and id(worker) != before:
        try:
            unhook(getattr(getattr(worker, "model_runner", None), "model", None))
            worker.shutdown()
        except Exception as second:  # what failed once may fail again; the first error counts
            log.warning("vLLM could not free what it had loaded (%s)", second)
    del worker
    free_unheld()


CONTEXT_BYTES = 512 * MiB
"""What the CUDA context, cuBLAS and NCCL take between our look at the free memory and vLLM's."""


class KvBudgetError(EngineError):
    """The KV cache does not fit beside everything else."""


def utilization(options: VllmOptions, reading: Reading) -> float:
    """vLLM's ``gpu_memory_utilization``: its share of the whole GPU, weights and cache together."""
    limit, allowed, reserve = "", reading.free, parse_bytes(options.trainer_reserve)
    if options.gpu_memory is not None:
        most = parse_bytes(options.gpu_memory)
        limit, allowed = f", gpu_memory={format_bytes(most)}", min(allowed, most - reading.reserved)
    left = allowed - reserve - CONTEXT_BYTES
    if left <= 0:
        raise KvBudgetError(
            f"vLLM has no GPU memory: {format_bytes(reading.free)} of "
            f"{format_bytes(reading.total)} free, {format_bytes(reading.reserved)} held by PyTorch "
            f"already{limit}, trainer_reserve={format_bytes(reserve)} and "
            f"{format_bytes(CONTEXT_BYTES)} for the CUDA context; free memory, raise gpu_memory or "
            "lower trainer_reserve"
        )
    return int(left / reading.total * 10_000) / 10_000  # down, so that vLLM's own check agrees


def cache_bytes(
    available: int,
    *,
    per_sequence: int,
    per_block: int,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Bytes for the KV cache: what can be used, or the ``available`` bytes that vLLM's profiling
    left. ``per_sequence`` is a sequence of ``max_model_len`` tokens in whole blocks, ``per_block``
    a block over all layers, of which vLLM keeps one as the null block."""
    need = per_sequence + per_block
    if available < need:
        tokens = max(0, (available - per_block)) * max_model_len // max(1, per_sequence)
        raise KvBudgetError(
            f"the KV cache has {format_bytes(available)} and one sequence of max_model_len="
            f"{max_model_len} tokens needs {format_bytes(need)} (about {tokens} tokens would fit); "
            "lower max_model_len or trainer_reserve, raise gpu_memory, or set kv_cache_dtype='fp8'"
        )
    return min(available, max_num_seqs * per_sequence + per_block)
