"""``time.perf_counter()`` between logits and log-probs: a clock is read where the graph runs.

A time that tracing read would be the trace's, so each call of a clock becomes an op, and what is
told or returned of it is the call's own. Forwards that run on a GPU are queued, as in eager.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CLOCKS: tuple[Callable[[], Any], ...] = (
    time.perf_counter,
    time.time,
    time.monotonic,
    time.process_time,
    time.perf_counter_ns,
    time.time_ns,
    time.monotonic_ns,
    time.process_time_ns,
)
"""What ``read_clock`` numbers."""


def _dtype(clock: int) -> torch.dtype:
    return torch.int64 if CLOCKS[clock].__name__.endswith("_ns") else torch.float64


# A tag of chance, so that no pass takes one reading for another or reads while it compiles.
@torch.library.custom_op(
    "fxrl::read_clock",
    mutates_args=(),
    schema="(int clock, int call) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _read_clock(clock: int, call: int) -> Tensor:
    return torch.tensor(CLOCKS[clock](), dtype=_dtype(clock))


@_read_clock.register_fake
def _(clock: int, call: int) -> Tensor:
    return torch.empty((), dtype=_dtype(clock))


read_clock = torch.ops.fxrl.read_clock.default
"""``CLOCKS[clock]()`` as a tensor of no dims; ``call`` tells calls of one graph apart."""
