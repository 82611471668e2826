"""How much of the GPU vLLM may take, and how large its KV cache is; numbers in, numbers out.

NOTE [Why gpu_memory_utilization is never tuned by hand]
vLLM takes a share of the whole GPU and fills all of it that weights, activations and graphs leave
with KV cache, whether that many tokens can ever be in flight or not. Here the share follows from
what is free and what the trainer keeps resident while vLLM generates, and the cache is cut to
what ``max_num_seqs`` sequences of ``max_model_len`` tokens can use: mapping memory back costs
4.7 ms/GiB at every wake (measured on an H200), and what is not mapped cannot run out.
"""

from __future__ import annotations

from fxrl.config import MiB
from fxrl.runtime.engine import EngineError

CONTEXT_BYTES = 512 * MiB
"""What the CUDA context, cuBLAS and NCCL take between our look at the free memory and vLLM's."""

GiB = 2**30


class KvBudgetError(EngineError):
    """The KV cache does not fit beside everything else."""


def utilization(
    *, total: int, free: int, held: int, gpu_memory: int | None, trainer_reserve: int
) -> float:
    """vLLM's ``gpu_memory_utilization``: its share of the whole GPU, weights and cache together.

    Args:
        total, free: bytes of the GPU.
        held: bytes that this process's PyTorch has reserved already.
        gpu_memory: the most that this process may hold; ``None`` is no limit.
        trainer_reserve: bytes of it kept for the trainer.

    Raises:
        KvBudgetError: nothing is left.
    """
    allowed = free if gpu_memory is None else min(free, gpu_memory - held)
    left = allowed - trainer_reserve - CONTEXT_BYTES
    if left <= 0:
        limit = "" if gpu_memory is None else f", gpu_memory={_gib(gpu_memory)}"
        raise KvBudgetError(
            f"vLLM has no GPU memory: {_gib(free)} of {_gib(total)} free, {_gib(held)} held by "
            f"PyTorch already{limit}, trainer_reserve={_gib(trainer_reserve)} and "
            f"{_gib(CONTEXT_BYTES)} for the CUDA context; free memory, raise gpu_memory or lower "
            "trainer_reserve"
        )
    return int(left / total * 10_000) / 10_000  # down, so that vLLM's own check agrees


def cache_bytes(
    available: int,
    *,
    per_sequence: int,
    per_block: int,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Bytes for the KV cache: what can be used, or what there is.

    Args:
        available: bytes that vLLM's profiling left for it.
        per_sequence: bytes of one sequence of ``max_model_len`` tokens, in whole blocks.
        per_block: bytes of one block over all layers; vLLM keeps one block as the null block.

    Raises:
        KvBudgetError: not even one sequence of ``max_model_len`` tokens fits.
    """
    need = per_sequence + per_block
    if available < need:
        tokens = max(0, (available - per_block)) * max_model_len // max(1, per_sequence)
        raise KvBudgetError(
            f"the KV cache has {_gib(available)} and one sequence of max_model_len="
            f"{max_model_len} tokens needs {_gib(need)} (about {tokens} tokens would fit); lower "
            "max_model_len or trainer_reserve, raise gpu_memory, or set kv_cache_dtype='fp8'"
        )
    return min(available, max_num_seqs * per_sequence + per_block)


def _gib(size: int) -> str:
    return f"{size / GiB:.2f} GiB"
