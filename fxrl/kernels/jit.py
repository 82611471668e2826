"""``triton.jit`` for typed code: without a type of its own it would hide those of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``; what it returns is launched as ``kernel[grid](...)``."""
    return triton.jit(function)
