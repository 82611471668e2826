"""fxrl's decode attention as a backend of vLLM: built from vLLM's FlashAttention classes.

``make_backend`` derives from the classes that it is given, so this file needs no vLLM. Where every
sequence of a step has one new token, attention runs ``decode``; everything else (prefill, mixed
steps, cascades, ALiBi, sinks, encoder layers, quantized caches) runs what was derived from.

NOTE [Why full CUDA graphs are for decoding only]
A graph keeps the branch that its capture took. FlashAttention 3 captures mixed steps as well and
says so to vLLM; here a graph of one-token steps must never replay a mixed one. The builder
therefore announces ``UNIFORM_SINGLE_TOKEN_DECODE``, and vLLM then runs mixed steps piecewise, as
its default mode does anyway. What ``decode`` reads inside a graph lies in vLLM's own buffers, at
addresses that stay: ``seq_lens`` (0 in rows that pad the batch) and ``block_table``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fxrl.runtime.engine import EngineError

UNQUANTIZED = ("auto", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class FlashClasses:
    """vLLM's own, from ``vllm.v1.attention.backends.flash_attn`` and ``...attention.backend``.

    backend, impl, builder: ``FlashAttentionBackend``, ``FlashAttentionImpl``,
        ``FlashAttentionMetadataBuilder``.
    decode_graphs: ``AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE``.
    """

    backend: Any
    impl: Any
    builder: Any
    decode_graphs: Any

    @classmethod
    def of(cls, flash_attn: Any, support: Any) -> FlashClasses:
        """Of the module and of ``AttentionCGSupport``."""
        return cls(
            flash_attn.FlashAttentionBackend,
            flash_attn.FlashAttentionImpl,
            flash_attn.FlashAttentionMetadataBuilder,
            support.UNIFORM_SINGLE_TOKEN_DECODE,
        )


def make_backend(
    classes: FlashClasses,
    decode: Callable[..., Tensor],
    make_workspace: Callable[[int, int, int], Any],
    *,
    max_rows: int,
    name: str = "CUSTOM",
) -> type:
    """A class for ``register_backend(AttentionBackendEnum[name], <its import path>)``.

    Args:
        classes: what to derive from.
        decode: ``fxrl.kernels.decode_attention.decode_attention``.
        make_workspace: of (query heads, KV heads, head dimension), for up to ``max_rows`` rows, on
            the device; called once for each such triple while the model is built. The layers alone
            hold what it returns (by weak references else), so that it goes when they go.
        max_rows: most sequences in a step; larger steps are vLLM's.
        name: the member of vLLM's enumeration, which looks its backends up by it.
    """
    workspaces: WeakValueDictionary[tuple[int, int, int], Any] = WeakValueDictionary()
    pair = _pair_dimension(classes.backend)
    base_impl: Any = classes.impl
    base_builder: Any = classes.builder
    base_backend: Any = classes.backend

    class FastImpl(base_impl):  # type: ignore[misc]
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
            window = None
            if self.fxrl_workspace is not None and attn_metadata is not None and not scaled:
                window = _decode_window(self, query, attn_metadata, max_rows)
            if window is None:
                result: Tensor = super().forward(
                    layer, query, key, value, kv_cache, attn_metadata, output,
                    output_scale, output_block_scale,
                )  # fmt: skip
                return result
            rows = attn_metadata.seq_lens.shape[0]
            k_cache, v_cache = _keys_and_values(kv_cache, pair, self.head_size)
            decode(
                query[:rows],
                k_cache,
                v_cache,
                attn_metadata.block_table,
                attn_metadata.seq_lens,
                self.scale,
                output.view(output.shape[0], self.num_heads, self.head_size)[:rows],
                window=window,
                softcap=float(self.logits_soft_cap or 0.0),
                workspace=self.fxrl_workspace,
            )
            return output

    class FastBuilder(base_builder):  # type: ignore[misc]
        _cudagraph_support = classes.decode_graphs

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

    class FastBackend(base_backend):  # type: ignore[misc]
        @staticmethod
        def get_name() -> str:
            return name

        @staticmethod
        def get_impl_cls() -> type:
            return FastImpl

        @staticmethod
        def get_builder_cls() -> type:
            return FastBuilder

        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return False  # how a sequence is split depends on the others' lengths

    return FastBackend


def _layer_fits(impl: Any) -> bool:
    """What of a layer is fixed: decided once."""
    attn_type = getattr(impl.attn_type, "value", impl.attn_type)
    return (
        attn_type == "decoder"
        and impl.alibi_slopes is None
        and getattr(impl, "sinks", None) is None
        and impl.kv_cache_dtype in UNQUANTIZED
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
        and query.dtype in (torch.bfloat16, torch.float16)
        and rows <= min(max_rows, query.shape[0])
    )
    if not plain:
        return None
    given = getattr(metadata, "sliding_window", None)
    left, right = impl.sliding_window if given is None else given
    if right > 0:
        return None
    return int(left) + 1 if left >= 0 else 0


def _pair_dimension(backend: Any) -> int | None:
    """Where a cache has keys beside values in a dimension of 2 (vLLM 0.25), else None."""
    shape_of = getattr(backend, "get_kv_cache_shape", None)
    shape: tuple[int, ...] = () if shape_of is None else shape_of(7, 16, 3, 64)
    return shape.index(2) if 2 in shape else None


def _keys_and_values(kv_cache: Tensor, pair: int | None, head_size: int) -> tuple[Tensor, Tensor]:
    """Two views ``[blocks, tokens, heads, D]`` of vLLM's cache."""
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
