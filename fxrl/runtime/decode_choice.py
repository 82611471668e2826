"""Whether fxrl's decode attention runs inside vLLM, and under which name vLLM finds it.

NOTE [Where the kernel runs unasked]
Inside vLLM on an H200 (Qwen3-1.7B, 32 sequences of up to 2048 tokens) a decode step takes 2.90 ms
with it and 3.08 ms with FlashAttention 3. Timed alone (``bench.decode_kernels``, FlashAttention 3
with as many splits as vLLM gives it) it needs 0.84 to 0.98 of its time for 1 to 128 sequences of
300 to 1870 tokens and a third for 32 of 16, but 1.1 from 140 sequences of 1000 tokens on, for 64
mixed ones of up to 6350 and for one of 32768. So ``"auto"`` takes it on Hopper, for steps of up to
``AUTO_ROWS`` sequences of engines with contexts of up to ``AUTO_CONTEXT``; all else is vLLM's. Near
both limits at once it was not timed.

It is registered in FlashAttention's own place then, which vLLM's registry allows: vLLM goes on
choosing by itself, and a model for which it chooses another backend (MLA, sinks, head sizes) never
meets the kernel. ``"fxrl"`` forces it, as vLLM's ``CUSTOM`` backend, for steps of any size.

NOTE [Why only while an engine is built]
vLLM's registry and its cache of choices belong to the process, an engine's options to one of its
engines. Layers look their backend up while they are built and keep its class from then on, so
``registered`` gives both back to vLLM as soon as the build is over: the next engine, or somebody
else's ``vllm.LLM``, finds nothing of this one's, and engines that are open at once do not meet. A
choice that was cached before would hide what is registered; hence an empty cache before, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fxrl.runtime.fast_attention import UNQUANTIZED
from fxrl.runtime.vllm_build import EngineLoadError
from fxrl.runtime.vllm_options import VllmOptions

log = logging.getLogger(__name__)

CACHE = "_cached_get_attn_backend"
AUTO_ROWS = 128
AUTO_CONTEXT = 4096
AUTO_CAPABILITY = (9, 0)


def place(
    options: VllmOptions, capability: tuple[int, int] | None
) -> Literal["CUSTOM", "FLASH_ATTN"] | None:
    """The member of vLLM's ``AttentionBackendEnum`` that fxrl's backend takes, or ``None``.

    Args:
        options: of the engine.
        capability: the GPU's, e.g. (9, 0); ``None`` without one.
    """
    if capability is None:
        return None
    if options.decode_attention == "fxrl":
        return "CUSTOM"
    measured = (
        options.decode_attention == "auto"
        and capability == AUTO_CAPABILITY
        and options.max_model_len is not None
        and options.max_model_len <= AUTO_CONTEXT
        and options.tensor_parallel_size == 1  # other processes have a registry of their own
        and options.kv_cache_dtype in UNQUANTIZED
        and "backend" not in (options.attention_config or {})
        and "attention_backend" not in options.engine_args
    )
    return "FLASH_ATTN" if measured else None


def most_rows(place: str, current: Callable[[], Any]) -> int:
    """Most sequences in a step of fxrl's: see the first NOTE.

    Args:
        current: vLLM's ``get_current_vllm_config``, of the engine that is being built.
    """
    if place == "FLASH_ATTN":
        return AUTO_ROWS
    config = current()
    graphs = config.compilation_config.cudagraph_capture_sizes or ()
    rows: int = max((config.scheduler_config.max_num_seqs, *graphs))
    return rows


@contextmanager
def unknown(place: str, what: str) -> Iterator[None]:
    """Builds an engine of a vLLM whose choice of backends fxrl cannot take part in.

    Raises:
        EngineLoadError: fxrl's attention was asked for; where it was not, a warning says so.
    """
    problem = (
        f"this vLLM chooses its attention in a way that fxrl does not know ({what}), so fxrl's "
        "decode attention cannot be kept to one engine; set decode_attention='vllm' or use a "
        "tested version: 0.25.1, 0.32.0"
    )
    if place != "FLASH_ATTN":
        raise EngineLoadError(problem)
    log.warning("%s; this engine decodes with vLLM's own", problem)
    yield


@contextmanager
def registered(
    member: Any, path: str, register: Callable[[Any, str], Any], selector: Any
) -> Iterator[None]:
    """fxrl's backend in ``member``'s place, for as long as an engine is built.

    Where somebody else has taken FlashAttention's place, it stays theirs, and a warning says so.

    Args:
        member: of vLLM's ``AttentionBackendEnum``.
        path: import path of fxrl's backend.
        register: vLLM's ``register_backend``.
        selector: vLLM's module ``vllm.v1.attention.selector``, which caches what it has chosen.

    Raises:
        EngineLoadError: as ``unknown`` does, where the selector's cache cannot be emptied.
    """
    forget = getattr(getattr(selector, CACHE, None), "cache_clear", None)
    if forget is None:
        with unknown(member.name, f"no vllm.v1.attention.selector.{CACHE}.cache_clear"):
            yield
        return
    theirs = member.get_path() if member.is_overridden() else None
    if theirs and member.name == "FLASH_ATTN":
        log.warning("%s stands in for vLLM's FlashAttention, so decode attention is its", theirs)
        yield
        return
    try:
        register(member, path)
        forget()
        yield
    finally:
        member.clear_override()
        if theirs:
            register(member, theirs)
        forget()
