"""``triton.jit`` for typed code, and where to launch: what every kernel here shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, which without a type of its own would hide those of the kernels.

    What it returns is launched as ``kernel[grid](...)``.
    """
    return triton.jit(function)


def jit_unspecialized(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """``jit`` that makes no compilation of its own for a 1, or a multiple of 16, in ``names``."""
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=names)
    return decorate


def on_device(tensor: Tensor) -> torch.cuda.device:
    """Triton launches on the current device, whichever its tensors are on."""
    return torch.cuda.device(tensor.device.index if tensor.is_cuda else -1)
