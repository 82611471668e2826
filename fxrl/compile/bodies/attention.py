"""Which kernel runs a body's attention: the fastest of those that the user allows.

A body calls ``scaled_dot_product_attention``; when it is traced PyTorch chooses the kernel, and the
choice stays in the body. It depends on settings, which are part of the body's key (``allowed``),
and on sizes, which are guarded, so other settings and sizes get a body of their own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxrl.ops.masked_attention  # noqa: F401  # defines the op
from fxrl.analysis.attention import SDPA
from fxrl.ir.graph import is_call

aten = torch.ops.aten
#: The kernels that own their backward, with the names people know. The fall-back, softmax(QK)V op
#: by op, is not among them: nobody keeps its [T, T] probabilities.
KERNELS = {
    aten._scaled_dot_product_cudnn_attention.default: "cuDNN attention",
    aten._scaled_dot_product_flash_attention.default: "FlashAttention",
    aten._scaled_dot_product_efficient_attention.default: "memory-efficient attention",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "FlashAttention for CPUs",
    torch.ops.fxrl.masked_attention.default: "attention under a computed mask",
}
_FLAGS = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}
_HOPPER = (9, 0)


def calls_attention(gm: fx.GraphModule) -> bool:
    """Whether a body calls attention whose kernel is chosen when the body is traced."""
    return bool(gm.graph.find_nodes(op="call_function", target=SDPA))


def allowed() -> tuple[str, ...]:
    """What the user allows now (``torch.nn.attention.sdpa_kernel``), by name."""
    return tuple(backend.name for backend in _allowed())


def _allowed() -> list[SDPBackend]:
    """The fastest first."""
    return [backend for backend, enabled in _FLAGS.items() if enabled()]  # type: ignore[no-untyped-call]


def fastest(device: torch.device) -> AbstractContextManager[None]:
    """Let PyTorch take the fastest kernel of those that are allowed.

    NOTE [Why cuDNN first on Hopper]: causal, 32 heads of 128 over 8, 64k tokens, bf16: 598 TFLOP/s
    forward and 539 with backward, where FlashAttention 2, which PyTorch takes by itself, has 347
    and 326.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _HOPPER:
        return nullcontext()
    return sdpa_kernel(_allowed(), set_priority=True)


def kernels_of(gm: fx.GraphModule) -> list[str]:
    """The kernels that a traced body runs attention by, each once."""
    called = (name for node in gm.graph.nodes for op, name in KERNELS.items() if is_call(node, op))
    return list(dict.fromkeys(called))
