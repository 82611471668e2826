"""How much of the GPU and of the host a plan may use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from fxrl.config import Config, parse_bytes
from fxrl.distributed import ranks_of_host
from fxrl.planner.target import Target

#: Of a budget for the GPU, what PyTorch's allocator may hold without using it: memory that is
#: free, but not in one piece.
FRAGMENTS = 0.03
#: Of the host's free memory, what is left to everybody else.
_HOST_RESERVE = 0.2
#: Of the peak that was predicted where memory ran out, what the next plan goes without; but no more
#: than half of what plans decide about, or it would be the slowest at once. Predictions are within
#: 3 % of what PyTorch allocates (``bench/results/plan_predictions_h200.json``); fragments, and
#: others on the same GPU, are what else there is.
_TIGHTER = 0.1


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that a step may have allocated."""

    gpu_bytes: int  # weights and all else included, fragments taken off
    host_bytes: int  # pinned, for what layers keep
    given: bool  # whether the user named the GPU's; then a plan that does not fit is an error
    state_shards: int = 1  # ranks that share out the optimizer's states

    @classmethod
    def of(cls, config: Config, target: Target, device: torch.device | None) -> Budget:
        """The budget that the configuration names; otherwise what ``device`` (or, without one,
        ``target``) has."""
        if config.gpu_memory is not None:
            gpu = parse_bytes(config.gpu_memory, name="gpu_memory")
        else:
            gpu = target.gpu_bytes if device is None else gpu_room(device)
        if config.host_memory is not None:
            host = parse_bytes(config.host_memory, name="host_memory") // ranks_of_host()
        else:
            host = host_room()
        return cls(int(gpu * (1 - FRAGMENTS)), host, config.gpu_memory is not None)

    def tighter(self, peak: int, least: int, device: torch.device) -> Budget:
        """The budget after memory ran out under a plan with the predicted ``peak``; ``least`` bytes
        are alive at any moment under any plan."""
        peak = min(self.gpu_bytes, peak)
        gpu = peak - int(min(_TIGHTER * peak, (peak - least) / 2))
        if device.type == "cuda":
            gpu = min(gpu, int(gpu_room(device) * (1 - FRAGMENTS)))
        return replace(self, gpu_bytes=gpu, given=False)  # the smallest plan is worth a try


class Limits(NamedTuple):
    """The machine that a plan is made for."""

    target: Target  # what the GPU can do
    budget: Budget  # what may be used of it and of the host

    @classmethod
    def common(cls, each: Sequence[Limits]) -> Limits:
        """Limits from which ranks make equal plans: the least memory of any, and the first one's
        figures of the GPU, which differ a little if they are measured."""
        budgets = [one.budget for one in each]
        gpu, host = (min(getattr(b, name) for b in budgets) for name in ("gpu_bytes", "host_bytes"))
        shared = replace(budgets[0], gpu_bytes=gpu, host_bytes=host)
        return cls(each[0].target, replace(shared, given=all(b.given for b in budgets)))


def gpu_room(device: torch.device) -> int:
    """Bytes of a GPU that this process has or can get."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    return int(min(free + held, limit))


def host_room() -> int:
    """Bytes of host memory that this process may take: a share of what is free, divided among the
    ranks of the host."""
    return int(host_free() * (1 - _HOST_RESERVE)) // ranks_of_host()


def host_free() -> int:
    """Free bytes of host memory: the machine's, or its container's if that is less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return min(int(available) * 1024, _container_free())


#: Where a container's limits stand, and the names there (of control groups version 2, then 1): of
#: the limit, of what is used, and of the statistics' line for cached files, which give way.
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def _container_free() -> int:
    """Free bytes within the limit of this process's control group."""
    for *names, cached in _LIMITS:
        try:
            limit, used, statistics = (_CONTROL_GROUP.joinpath(n).read_text() for n in names)
        except OSError:
            continue
        if limit.strip() != "max":
            given_way = dict(line.split() for line in statistics.splitlines()).get(cached, 0)
            return max(0, int(limit) - int(used) + int(given_way))
    return 2**63
