"""The dtype in which sums are taken, to be rounded once: float32, or what is wider."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def at_least_float32(values: Tensor) -> Tensor:
    """16-bit values as float32; float32 and float64 as they are."""
    return values.to(wide_dtype(values.dtype))
