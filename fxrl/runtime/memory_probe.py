"""Looks at a machine's memory; the only file of the ledger that asks a device anything."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch


class TagBytes(NamedTuple):
    """What a tagged pool of vLLM's allocator holds: ``mapped`` of ``reserved`` bytes are there."""

    mapped: int
    reserved: int


Tags = Mapping[str, TagBytes]


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the memory, in bytes.

    Attributes:
        total, free: of the device, all processes counted.
        tags: vLLM's tagged pools.
        allocated: PyTorch's tensors, those in tagged pools counted whether mapped or not.
        reserved: what PyTorch's allocator holds, likewise.
    """

    total: int
    free: int
    tags: Tags = field(default_factory=dict)
    allocated: int = 0
    reserved: int = 0


class Probe(Protocol):
    """Something that takes readings."""

    @property
    def name(self) -> str:
        """The device, in words."""
        ...

    def read(self) -> Reading:
        """A look at the memory now."""
        ...

    def synchronize(self) -> None:
        """Waits until what was asked of the device is done."""
        ...

    def empty_cache(self) -> None:
        """Gives back what PyTorch's allocator holds and nothing uses."""
        ...


class CudaProbe:
    """The current CUDA device; 0.1 ms a reading.

    Args:
        tags: asks vLLM's allocator for its pools.
    """

    def __init__(self, tags: Callable[[], Tags]) -> None:
        self._tags = tags
        self.name = torch.cuda.get_device_name()

    def read(self) -> Reading:
        """See ``Probe``."""
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        return Reading(
            total=total,
            free=free,
            tags=dict(self._tags()),
            allocated=stats.get("allocated_bytes.all.current", 0),
            reserved=stats.get("reserved_bytes.all.current", 0),
        )

    def synchronize(self) -> None:
        """See ``Probe``."""
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """See ``Probe``."""
        torch.cuda.empty_cache()


class CpuProbe:
    """The host's memory, for a machine without GPU, where standby frees nothing.

    Args:
        sizes: of the engine's weights and KV cache, bytes; they are ordinary host memory.
    """

    name = "CPU (standby frees nothing here)"

    def __init__(self, sizes: Callable[[], Mapping[str, int]]) -> None:
        self._sizes = sizes

    def read(self) -> Reading:
        """See ``Probe``."""
        page = os.sysconf("SC_PAGE_SIZE")
        return Reading(
            total=os.sysconf("SC_PHYS_PAGES") * page,
            free=os.sysconf("SC_AVPHYS_PAGES") * page,
            tags={name: TagBytes(size, 0) for name, size in self._sizes().items()},
        )

    def synchronize(self) -> None:
        """See ``Probe``; nothing is asynchronous."""

    def empty_cache(self) -> None:
        """See ``Probe``; PyTorch's CPU allocator keeps nothing."""


def free_unheld() -> None:
    """Gives memory that nobody holds back to the device, after an engine is gone."""
    gc.unfreeze()  # vLLM freezes what exists after its start-up, cycles included
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
