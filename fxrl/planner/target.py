"""What a GPU and its host can do: the figures behind every predicted second.

Rates are what kernels reach, not what a data sheet promises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

GiB = 2**30
_FP8_SINCE = (8, 9)


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of GPU."""

    name: str  # how the command line and reports call it
    gpu_bytes: int  # its memory
    product_flops: float  # FLOP/s of large bf16 matrix products
    # FLOP/s of causal attention, head size 128.
    attention_flops: float
    attention_backward_flops: float
    bandwidth: float  # bytes/s of GPU memory that elementwise kernels reach
    link: float  # bytes/s between GPU and host, each way at once
    launch: float = 4e-6  # seconds that a kernel takes at least
    fp8_flops: float = 0.0  # FLOP/s of large FP8 products; 0 where there are none
    peer_link: float = 24e9  # bytes/s from the other GPUs of a host, to all of them at once
    # Seconds at the start of a step until its host is ahead of it: guards and the first kernels.
    start: float = 5e-3


#: The H200's figures are measured (torch 2.11, cuDNN attention). Those of the others are their data
#: sheets', times the share of it that the H200 reaches: right to about a quarter. So are all rates
#: of FP8: twice those of bf16. The link between two H200s is measured, too (all-to-all, NVLink 4);
#: GPUs without NVLink reach each other as they reach the host.
TARGETS = {
    one.name: one
    for one in (
        Target("h200", 141 * 10**9, 690e12, 598e12, 518e12, 3.6e12, 54e9, 4e-6, 1380e12, 330e9),
        Target("h100", 80 * GiB, 690e12, 598e12, 518e12, 2.6e12, 54e9, 4e-6, 1380e12, 330e9),
        Target("b200", 180 * 10**9, 1650e12, 1100e12, 900e12, 6e12, 54e9, 4e-6, 3300e12, 660e9),
        Target("a100", 80 * GiB, 250e12, 190e12, 150e12, 1.5e12, 24e9, peer_link=220e9),
        Target("l40s", 48 * GiB, 230e12, 170e12, 130e12, 0.65e12, 24e9, fp8_flops=460e12),
        Target("rtx4090", 24 * GiB, 150e12, 130e12, 100e12, 0.75e12, 24e9, fp8_flops=300e12),
    )
}


def target_of(device: torch.device | None) -> Target:
    """What a GPU can do; without one, an H200, whose figures are measured.

    A GPU that no table knows is measured, which takes half a second.
    """
    if device is None:
        return TARGETS["h200"]
    name = torch.cuda.get_device_name(device).lower().replace(" ", "")
    known = next((one for key, one in TARGETS.items() if key in name), None)
    total = torch.cuda.get_device_properties(device).total_memory
    return replace(known or _measured(device, name), gpu_bytes=total)


@functools.cache
def _measured(device: torch.device, name: str) -> Target:
    h200 = TARGETS["h200"]
    a, big = (torch.empty(8192, n, dtype=torch.bfloat16, device=device) for n in (8192, 2**16))
    product = 2 * 8192**3 / _seconds(lambda: a @ a)
    bandwidth = 2 * big.nbytes / _seconds(lambda: big.add_(1))
    link = measured_link(device)
    part = product / h200.product_flops
    rates = part * h200.attention_flops, part * h200.attention_backward_flops
    fp8 = 2 * product if torch.cuda.get_device_capability(device) >= _FP8_SINCE else 0.0
    return Target(name, 0, product, *rates, bandwidth, link, fp8_flops=fp8)


def measured_link(device: torch.device) -> float:
    """Bytes per second from a GPU to pinned host memory. Raises ``RuntimeError`` if none can be
    pinned."""
    page = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    rest = torch.empty(2**28, dtype=torch.uint8, device=device)
    return page.numel() / _seconds(lambda: page.copy_(rest, non_blocking=True))


def _seconds(run: Callable[[], object]) -> float:
    """Seconds of one call, the least of five."""
    times = []
    for _ in range(6):  # the first warms up
        start, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times[1:])
