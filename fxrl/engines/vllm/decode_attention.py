"""fxrl's decode attention inside vLLM: whether it runs, how vLLM finds it, and what it is made of.

``make_backend`` derives it from vLLM's FlashAttention classes as they are handed in, so this file
imports no vLLM. Where every sequence of a step has one new token, attention runs ``decode``;
everything else (prefill, mixed steps, cascades, ALiBi, sinks, encoder layers, caches in e5m2 or
with a scale for each head) runs what was derived from.

NOTE [Where the kernel runs unasked]
Completions of a prompt are what a rollout decodes, and their prompt's keys are read once for
several of them: 0.47 to 0.52 of FlashAttention 3's time for 64 to 256 sequences, 8 of each prompt,
on an H200. Inside vLLM, with Qwen3-8B's shape in FP8 with an FP8 cache, 7.7 ms a step of 256
sequences that had been 11.2, 5.3 and 7.1 with 128, 4.5 and 5.5 with 64. Where no two sequences
begin alike it took 0.27 to 0.96 of FlashAttention 3's time (``bench.decode_kernels``), but 1.05 to
1.07 for 140 of 1000 tokens, for 16 of 32768 and for 4 of 8000 with Qwen3-8B's heads, and 1.07 to
1.28 for one of 32768. So ``"auto"`` takes it on Hopper, for steps of up to ``AUTO_ROWS`` sequences
of engines with contexts of up to ``AUTO_CONTEXT``; all else is vLLM's. Near both limits at once it
was not timed.

It is registered in FlashAttention's own place then, which vLLM's registry allows: vLLM goes on
choosing by itself, and a model for which it chooses another backend (MLA, sinks, head sizes) never
meets the kernel. ``"fxrl"`` forces it, as vLLM's ``CUSTOM`` backend, for steps of any size.

NOTE [Why only while an engine is built]
vLLM's registry and its cache of choices belong to the process, an engine's options to one of its
engines. Layers look their backend up while they are built and keep its class from then on, so
``registered`` gives both back to vLLM as soon as the build is over: the next engine, or somebody
else's ``vllm.LLM``, finds nothing of this one's, and engines that are open at once do not meet. A
choice that was cached before would hide what is registered; hence an empty cache before, too.

NOTE [Why full CUDA graphs are for decoding only]
A graph keeps the branch that its capture took. FlashAttention 3 captures mixed steps as well and
says so to vLLM; here a graph of one-token steps must never replay a mixed one. The builder
therefore announces ``UNIFORM_SINGLE_TOKEN_DECODE``, and vLLM then runs mixed steps piecewise, as
its default mode does anyway. What ``decode`` reads inside a graph lies in vLLM's own buffers, at
addresses that stay: ``seq_lens`` (0 in rows that pad the batch) and ``block_table``. The schedule
is made inside the graph too, by the step's first layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fxrl.engines.engine import EngineError
from fxrl.engines.vllm.build import EngineLoadError
from fxrl.engines.vllm.options import HOPPER, VllmOptions
from fxrl.errors import TESTED

log = logging.getLogger(__name__)

CACHE = "_cached_get_attn_backend"
AUTO_ROWS = 512
AUTO_CONTEXT = 4096
_UNQUANTIZED = ("auto", "float16", "bfloat16")
_FP8 = ("fp8", "fp8_e4m3")


def place(
    options: VllmOptions, capability: tuple[int, int] | None
) -> Literal["CUSTOM", "FLASH_ATTN"] | None:
    """The member of vLLM's ``AttentionBackendEnum`` that fxrl's backend replaces, if any.
    ``capability`` is the GPU's, such as (9, 0); ``None`` without one."""
    if capability is None:
        return None
    if options.decode_attention == "fxrl":
        return "CUSTOM"
    measured = (
        options.decode_attention == "auto"
        and capability == HOPPER
        and options.max_model_len is not None
        and options.max_model_len <= AUTO_CONTEXT
        and options.tensor_parallel_size == 1  # other processes have a registry of their own
        and options.kv_cache_dtype in (*_UNQUANTIZED, *_FP8)
        and "backend" not in (options.attention_config or {})
        and "attention_backend" not in options.engine_args
    )
    return "FLASH_ATTN" if measured else None


def most_rows(place: str, current: Callable[[], Any]) -> int:
    """Most sequences in a step of fxrl's: see the first NOTE.

    Args:
        current: vLLM's ``get_current_vllm_config``, of the engine that is being built.
    """
    if place == "FLASH_ATTN":  # vLLM asks for its class outside of any config, too
        return AUTO_ROWS
    config = current()
    graphs = config.compilation_config.cudagraph_capture_sizes or ()
    rows: int = max((config.scheduler_config.max_num_seqs, *graphs))
    return rows


@contextmanager
def unknown(place: str, what: str) -> Iterator[None]:
    """Builds an engine of a vLLM whose choice of backends fxrl cannot take part in: with a warning,
    but where fxrl's attention was asked for."""
    problem = (
        f"this vLLM chooses its attention in a way that fxrl does not know ({what}), so fxrl's "
        "decode attention cannot be kept to one engine; set decode_attention='vllm' or use a "
        f"tested version: {', '.join(TESTED['vllm'])}"
    )
    if place != "FLASH_ATTN":
        raise EngineLoadError(problem)
    log.warning("%s; this engine decodes with vLLM's own", problem)
    yield


@contextmanager
def registered(
    member: Any, path: str, register: Callable[[Any, str], Any], selector: Any
) -> Iterator[None]:
    """Put fxrl's backend in the place of ``member`` while an engine is built, by vLLM's
    ``register_backend``. ``selector`` is the vLLM module that caches choices of backends.

    If somebody else has replaced FlashAttention already, theirs stays and a warning says so.
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


def make_backend(
    backend: Any,
    impl: Any,
    builder: Any,
    decode_graphs: Any,
    decode: Callable[..., Tensor],
    schedule: Callable[..., Any],
    make_workspace: Callable[[int, int, int], Any],
    *,
    max_rows: int,
    name: str = "CUSTOM",
) -> type:
    """A class for ``register_backend(AttentionBackendEnum[name], <its import path>)``.

    Args:
        backend, impl, builder: what to derive from, vLLM's ``FlashAttentionBackend``,
            ``FlashAttentionImpl`` and ``FlashAttentionMetadataBuilder``.
        decode_graphs: ``AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE``.
        decode, schedule: ``decode_attention`` and ``schedule_decode`` of ``fxrl.kernels``.
        make_workspace: of (query heads, KV heads, head dimension), for up to ``max_rows`` rows, on
            the device; called once for each such triple while the model is built. The layers alone
            hold what it returns (by weak references else), so that it goes when they go.
        max_rows: most sequences in a step; larger steps are vLLM's.
        name: the member of vLLM's enumeration, which looks its backends up by it.
    """
    pair = _pair_dimension(backend)
    fast = _implementation(impl, decode, schedule, make_workspace, pair, max_rows)
    made = _builder(builder, decode_graphs, max_rows)

    class FastBackend(backend):  # type: ignore[misc]
        @staticmethod
        def get_name() -> str:
            return name

        @staticmethod
        def get_impl_cls() -> type:
            return fast

        @staticmethod
        def get_builder_cls() -> type:
            return made

        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return False  # how a sequence is split depends on the others' lengths

    return FastBackend


def _implementation(
    impl: Any,
    decode: Callable[..., Tensor],
    schedule: Callable[..., Any],
    make_workspace: Callable[[int, int, int], Any],
    pair: int | None,
    max_rows: int,
) -> type:
    """The class of a layer's implementation."""
    workspaces: WeakValueDictionary[tuple[int, int, int], Any] = WeakValueDictionary()

    class FastImpl(impl):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fxrl_workspace: Any = None
            if _layer_fits(self):
                heads = (self.num_heads, self.num_kv_heads, self.head_size)
                self.fxrl_workspace = workspaces.get(heads)
                if self.fxrl_workspace is None:
                    self.fxrl_workspace = workspaces[heads] = make_workspace(*heads)

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            output_scale: Tensor | None = None,
            output_block_scale: Tensor | None = None,
        ) -> Tensor:
            scaled = output_scale is not None or output_block_scale is not None
            scales = window = None
            if self.fxrl_workspace is not None and attn_metadata is not None and not scaled:
                scales = _scales(self, layer, query)
                window = _decode_window(self, query, attn_metadata, max_rows)
            if scales is None or window is None:
                result: Tensor = super().forward(
                    layer, query, key, value, kv_cache, attn_metadata, output,
                    output_scale, output_block_scale,
                )  # fmt: skip
                return result
            rows = attn_metadata.seq_lens.shape[0]
            query = query[:rows]
            k_cache, v_cache = _keys_and_values(kv_cache, pair, self.head_size)
            tables = attn_metadata.block_table, attn_metadata.seq_lens
            common = {"window": window, "workspace": self.fxrl_workspace}
            make = partial(schedule, query, k_cache, *tables, **common)
            decode(
                query, k_cache, v_cache, *tables, self.scale,
                output.view(output.shape[0], self.num_heads, self.head_size)[:rows],
                softcap=float(self.logits_soft_cap or 0.0),
                schedule=_schedule(self, attn_metadata, window, make),
                **scales,
                **common,
            )  # fmt: skip
            return output

    return FastImpl


def _schedule(impl: Any, metadata: Any, window: int, make: Callable[[], Any]) -> Any:
    """The step's, kept on its metadata: one for all layers with equal heads, window and tables.

    A layer that asks again stands in another pass (a warm-up and its capture, a draft's next
    token), whose lengths may be others although the metadata is the same: it gets a new one. That
    it is launched in the pass itself puts it into the pass's CUDA graph.
    """
    kept = metadata.__dict__.setdefault("fxrl_schedules", {})
    key = id(impl.fxrl_workspace), window, metadata.block_table.data_ptr()
    schedule, readers = kept.get(key, (None, {id(impl)}))
    if id(impl) in readers:
        schedule, readers = make(), set()
    kept[key] = schedule, readers | {id(impl)}
    return schedule


def _builder(builder: Any, decode_graphs: Any, max_rows: int) -> type:
    """The class that makes a step's metadata."""

    class FastBuilder(builder):  # type: ignore[misc]
        _cudagraph_support = decode_graphs

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            # FlashAttention's schedule of a decode step has no reader here: three launches saved.
            ours = (
                common_attn_metadata.max_query_len == 1
                and common_prefix_len == 0
                and common_attn_metadata.num_reqs <= max_rows
            )
            return super().build(common_prefix_len, common_attn_metadata, fast_build or ours)

    return FastBuilder


def _layer_fits(impl: Any) -> bool:
    """Whether the fast kernel can compute a layer, as far as the layer alone decides it."""
    attn_type = getattr(impl.attn_type, "value", impl.attn_type)
    return (
        attn_type == "decoder"
        and impl.alibi_slopes is None
        and getattr(impl, "sinks", None) is None
        and impl.kv_cache_dtype in (*_UNQUANTIZED, *_FP8)
        and impl.head_size <= 256
        and not getattr(impl, "batch_invariant_enabled", False)
        and getattr(impl, "dcp_world_size", 1) <= 1
    )


def _decode_window(impl: Any, query: Tensor, metadata: Any, max_rows: int) -> int | None:
    """The step's window (0: all keys) if it is one of decoding only, else None."""
    rows = metadata.seq_lens.shape[0]
    plain = (
        metadata.max_query_len == 1
        and not metadata.use_cascade
        and metadata.causal is True
        and getattr(metadata, "mm_prefix_range_tensor", None) is None
        and getattr(metadata, "rswa_prefix_lens", None) is None
        and query.dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        and rows <= min(max_rows, query.shape[0])
    )
    if not plain:
        return None
    given = getattr(metadata, "sliding_window", None)
    left, right = impl.sliding_window if given is None else given
    if right > 0:
        return None
    return int(left) + 1 if left >= 0 else 0


def _scales(impl: Any, layer: Any, query: Tensor) -> dict[str, Tensor] | None:
    """What entries in FP8 are multiplied with, by ``decode``'s names; empty for a cache that has
    none, None if heads have scales of their own. vLLM hands queries over in FP8 or not."""
    if impl.kv_cache_dtype not in _FP8:
        return {}
    scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
    if query.dtype == torch.float8_e4m3fn:
        scales["q_scale"] = layer._q_scale
    return scales if all(scale.numel() == 1 for scale in scales.values()) else None


def _pair_dimension(backend: Any) -> int | None:
    """The dimension, of size 2, that separates keys from values in the cache (vLLM 0.25); None
    without one."""
    shape_of = getattr(backend, "get_kv_cache_shape", None)
    shape: tuple[int, ...] = () if shape_of is None else shape_of(7, 16, 3, 64)
    return shape.index(2) if 2 in shape else None


def _keys_and_values(kv_cache: Tensor, pair: int | None, head_size: int) -> tuple[Tensor, Tensor]:
    """Two views ``[blocks, tokens, heads, D]`` of vLLM's cache, which holds e4m3 as bytes."""
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    if pair is not None:
        return kv_cache.select(pair, 0), kv_cache.select(pair, 1)
    if kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * head_size:
        raise EngineError(
            f"vLLM's KV cache has shape {tuple(kv_cache.shape)}, which fxrl's decode attention "
            f"does not know for heads of {head_size}: let vLLM choose the attention backend"
        )
    # vLLM 0.32: [blocks, heads, tokens, keys and then values]
    by_token = kv_cache.transpose(1, 2)
    return by_token[..., :head_size], by_token[..., head_size:]
