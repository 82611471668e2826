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
"""

from __future__ import annotations

from typing import Literal

from fxrl.runtime.fast_attention import UNQUANTIZED
from fxrl.runtime.vllm_options import VllmOptions

AUTO_ROWS = 128
AUTO_CONTEXT = 4096
AUTO_CAPABILITY = (9, 0)


def place(
    options: VllmOptions, capability: tuple[int, int]
) -> Literal["CUSTOM", "FLASH_ATTN"] | None:
    """The member of vLLM's ``AttentionBackendEnum`` that fxrl's backend takes, or ``None``.

    Args:
        options: of the engine.
        capability: the GPU's, e.g. (9, 0).
    """
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
    )
    return "FLASH_ATTN" if measured else None
