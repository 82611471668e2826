"""``triton.jit`` for typed code: without a type of its own it would hide those of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``; what it returns is launched as ``kernel[grid](...)``."""
    return triton.jit(function)


def jit_unspecialized(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """``jit`` that makes no compilation of its own for a 1, or a multiple of 16, in ``names``."""
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=names)
    return decorate
