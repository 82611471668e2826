"""Decode attention over a paged KV cache: the launch, its scratch and its checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from fxrl.errors import FxrlError
from fxrl.kernels.decode_attention_split import attend

_QUERIES = (torch.bfloat16, torch.float16)
_INTERPRETED_PROCESSORS = 3  # on the CPU, where Triton's interpreter stands in for the device


class DecodeAttentionError(FxrlError, ValueError):
    """An argument of ``decode_attention`` does not fit; the message says which and the cure."""


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How the work is cut; results depend on it in their last bits only.

    tile: keys of one step, a power of two of at least 16.
    warps, stages: of a program, and tiles it has in flight.
    programs_per_sm: the grid is this times the number of multiprocessors.
    min_tiles: a split has at least so many tiles, or merging would cost more than it saves.
    slack: by how many percent a split may grow so that each program has one item.
    max_tiles, rounds: a program whose share is above ``max_tiles`` gets it in up to ``rounds``
        items; the programs that are done first take what is left.
    early: launch while the kernel ahead in the stream ends (needs compute capability 9).
    """

    tile: int = 16
    warps: int = 1
    stages: int = 3
    programs_per_sm: int = 8
    min_tiles: int = 4
    slack: int = 100
    max_tiles: int = 64
    rounds: int = 4
    early: bool = False


def default_tuning(group: int, head_dim: int, device: torch.device) -> DecodeTuning:
    """What measured best on an H200 for 2 query heads a KV head of 128; others scale its registers.

    NOTE [Why a program is one warp]
    It never waits for another warp, and while one of a multiprocessor's eight starts or ends, seven
    have loads in flight. Two programs of four warps and 64 keys are 3 % faster where 32 sequences
    are equally long and 35 % slower where they are not: there are too few to share odd lengths.
    """
    width = max(16, triton.next_power_of_2(head_dim))
    warps = max(1, max(16, triton.next_power_of_2(group)) * width // 2048)
    tile = max(16, 2048 // width)
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return DecodeTuning(
        tile=tile,
        warps=min(8, warps),
        programs_per_sm=max(1, 8 // warps),
        min_tiles=max(1, 64 // tile),
        max_tiles=1024 // tile,
        early=early,
    )


class DecodeWorkspace:
    """Scratch of ``decode_attention``, which calls on one stream may share, of any CUDA graph.

    ``arrived`` counts what is taken and finished; it is zero between calls, as the last one to
    count resets it.
    """

    def __init__(
        self,
        rows: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        tuning: DecodeTuning | None = None,
    ) -> None:
        """For batches of up to ``rows`` with these heads (fewer heads of less width fit too)."""
        self.tuning = tuning or default_tuning(q_heads // kv_heads, head_dim, device)
        processors = _INTERPRETED_PROCESSORS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.programs = processors * self.tuning.programs_per_sm
        floats = self._floats(rows, q_heads, kv_heads, head_dim)
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1 + rows * kv_heads, dtype=torch.int32, device=device)

    def _floats(self, rows: int, q_heads: int, kv_heads: int, head_dim: int) -> int:
        splits = rows + -(-self.programs * self.tuning.rounds // kv_heads)
        width = int(triton.next_power_of_2(head_dim)) + 2  # accumulator, maximum and sum
        return splits * q_heads * width

    def check(self, rows: int, q_heads: int, kv_heads: int, head_dim: int) -> None:
        """DecodeAttentionError if a call of this size does not fit."""
        fits = self._floats(rows, q_heads, kv_heads, head_dim) <= self.partial.numel()
        if not fits or rows * kv_heads >= self.arrived.numel():
            raise DecodeAttentionError(
                f"{rows} rows of {q_heads} query and {kv_heads} KV heads of {head_dim} do not fit "
                "the workspace: make it for the largest batch and head count"
            )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> Tensor:
    """Attention of each sequence's newest token to all keys in its cache (that token's included).

    One launch (a second, of zeros, without ``workspace``), no wait for the device; the grid does
    not depend on the lengths, so a CUDA graph may replay it with others.

    Args:
        q: ``[R, Hq, D]`` bf16 or fp16, D contiguous and at most 256.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]``, any strides with D contiguous
            (vLLM's NHD and HND), ``q``'s dtype or float8_e4m3fn; Hq is a multiple of Hkv,
            block_size a power of two.
        block_table: ``[>= R, max_blocks]`` int32; ``block_table[r, i]`` holds the block of tokens
            ``i block_size`` to ``(i + 1) block_size - 1`` of sequence r (in range, not checked).
        seq_lens: ``[>= R]`` int32 on the device. 0 reads nothing and gives zeros.
        scale: of q k^T, e.g. ``D ** -0.5``.
        out: ``[R, Hq, D]`` with D contiguous, written and returned; made if None.
        window: only the last so many keys (0: all).
        softcap: scores become ``softcap tanh(scores / softcap)`` (0: unchanged).
        k_scale, v_scale: fp32 with one element; what quantized keys and values are multiplied by.
        workspace: scratch to reuse; in CUDA graphs it saves a launch.

    Returns:
        ``out``. Sums are float32; the same arguments on the same GPU give the same bits.

    Raises:
        DecodeAttentionError: for shapes, dtypes, strides or devices other than these.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    _check(q, k_cache, v_cache, block_table, seq_lens, out, window, softcap)
    rows, q_heads, dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    if rows == 0:
        return out
    if workspace is None:
        workspace = DecodeWorkspace(rows, q_heads, kv_heads, dim, q.device)
    workspace.check(rows, q_heads, kv_heads, dim)
    group, tuning = q_heads // kv_heads, workspace.tuning
    with torch.cuda.device(q.device.index if q.is_cuda else -1):
        attend[(workspace.programs,)](
            q, k_cache, v_cache, block_table, seq_lens, out, k_scale, v_scale,
            workspace.partial, workspace.arrived, rows, tuning.min_tiles,
            tuning.slack, tuning.max_tiles, tuning.rounds, float(scale),
            q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
            block_table.stride(0), out.stride(0), out.stride(1),
            softcap=float(softcap), window=int(window), kv_heads=kv_heads, group=group,
            group_padded=max(16, triton.next_power_of_2(group)), head_dim=dim,
            dim_padded=max(16, triton.next_power_of_2(dim)), block_size=block_size,
            tile=tuning.tile,
            rows_padded=triton.next_power_of_2(rows), stages=tuning.stages, early=tuning.early,
            num_warps=tuning.warps, launch_pdl=tuning.early,
        )  # fmt: skip
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    window: int,
    softcap: float,
) -> None:
    if q.dim() != 3 or q.dtype not in _QUERIES or not 1 <= q.shape[2] <= 256:
        raise DecodeAttentionError(
            f"q {tuple(q.shape)} {q.dtype}: must be [R, Hq, D <= 256] of {_QUERIES}"
        )
    if window < 0 or softcap < 0:
        raise DecodeAttentionError(f"window={window}, softcap={softcap}: must be at least 0")
    _check_cache("k_cache", k_cache, q, k_cache)
    _check_cache("v_cache", v_cache, q, k_cache)
    if out.shape != q.shape:
        raise DecodeAttentionError(f"out {tuple(out.shape)}: must be {tuple(q.shape)}, as q")
    for name, index, dims in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
        if index.dim() != dims or index.dtype != torch.int32 or index.shape[0] < q.shape[0]:
            raise DecodeAttentionError(
                f"{name} {tuple(index.shape)} {index.dtype}: must be int32 with {q.shape[0]} rows"
            )
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out}
    named |= {"block_table": block_table, "seq_lens": seq_lens}
    for name, tensor in named.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise DecodeAttentionError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension: must be 1"
            )
        if tensor.device != q.device:
            raise DecodeAttentionError(f"{name} is on {tensor.device}, q on {q.device}")


def _check_cache(name: str, cache: Tensor, q: Tensor, k_cache: Tensor) -> None:
    what = f"{name} {tuple(cache.shape)} {cache.dtype}"
    if cache.dim() != 4 or cache.shape[3] != q.shape[2] or cache.shape != k_cache.shape:
        raise DecodeAttentionError(f"{what}: must be [num_blocks, block_size, Hkv, {q.shape[2]}]")
    if cache.dtype not in (q.dtype, torch.float8_e4m3fn) or cache.dtype != k_cache.dtype:
        raise DecodeAttentionError(f"{what}: must be {q.dtype} or float8_e4m3fn, as k_cache")
    if q.shape[1] % cache.shape[2]:
        raise DecodeAttentionError(f"{what}: {q.shape[1]} query heads are no multiple of its heads")
    if cache.shape[1] & (cache.shape[1] - 1):
        raise DecodeAttentionError(f"{what}: the block size must be a power of two")
