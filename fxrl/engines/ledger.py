"""Who holds the GPU's memory, before and after each transition of the engine.

Every entry splits the whole device into columns that add up to it::

    weights | kv_cache | engine_other | trainer | unused | outside | free

``engine_other`` is vLLM's graphs, workspace and buffers, ``unused`` what PyTorch's allocator holds
and no tensor uses, ``outside`` the CUDA context, libraries and other processes.

NOTE [How trainer and engine are told apart]
Weights and KV cache live in pools that vLLM tags, so their bytes are known exactly. Everything
else of both sides comes from the one caching allocator of the process, which cannot tell them
apart; what it held right after vLLM was built, less what it held before, is vLLM's and stays (its
graphs and buffers are fixed then), the rest is the trainer's.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch

from fxrl.config import MiB
from fxrl.ir.remark import format_bytes
from fxrl.ir.table import cell, open_table, plain_text

log = logging.getLogger(__name__)
COLUMNS = {
    "weights": "vLLM's weights",
    "kv_cache": "vLLM's KV cache",
    "engine_other": "vLLM's graphs and buffers",
    "trainer": "the trainer's tensors",
    "unused": "PyTorch's allocator, unused",
    "outside": "CUDA context and other processes",
    "free": "free",
}
TOLERANCE = 64 * MiB
"""How far the device's own count may be off: other processes, the context's growth."""


class TagBytes(NamedTuple):
    """What a tagged pool of vLLM's allocator holds: ``mapped`` of ``reserved`` bytes are there."""

    mapped: int
    reserved: int


Tags = Mapping[str, TagBytes]


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the memory, in bytes."""

    # Of the device, all processes counted.
    total: int
    free: int
    tags: Tags = field(default_factory=dict)  # vLLM's tagged pools
    allocated: int = 0  # PyTorch's tensors, those in tagged pools counted whether mapped or not
    reserved: int = 0  # what PyTorch's allocator holds, likewise

    def ordinary(self) -> tuple[int, int]:
        """(allocated, reserved) bytes that PyTorch has outside of vLLM's tagged pools.

        A pool's tensors may be a little less than its segments, of which only the latter are known;
        the first is too low by that constant, which cancels in every difference.
        """
        tagged = sum(tag.reserved for tag in self.tags.values())
        return self.allocated - tagged, self.reserved - tagged


class Probe:
    """Takes readings of a device; ``name`` says which, in words."""

    name: str

    def read(self) -> Reading:
        """A look at the memory now."""
        raise NotImplementedError

    def tags(self) -> Tags:
        """The engine's tagged pools alone, which costs no question to the driver."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Waits until what was asked of the device is done."""

    def empty_cache(self) -> None:
        """Gives back what PyTorch's allocator holds and nothing uses."""


class CudaProbe(Probe):
    """The current CUDA device, 0.1 ms a reading; ``tags`` asks vLLM's allocator for its pools."""

    def __init__(self, tags: Callable[[], Tags]) -> None:
        self._tags = tags
        self.name = torch.cuda.get_device_name()

    def read(self) -> Reading:
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        return Reading(
            total=total,
            free=free,
            tags=self.tags(),
            allocated=stats.get("allocated_bytes.all.current", 0),
            reserved=stats.get("reserved_bytes.all.current", 0),
        )

    def tags(self) -> Tags:
        return dict(self._tags())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


class CpuProbe(Probe):
    """Host memory, on a machine without GPU, where standby frees nothing. ``sizes`` gives the bytes
    of the engine's weights and KV cache, which are ordinary memory there."""

    name = "CPU (standby frees nothing here)"

    def __init__(self, sizes: Callable[[], Mapping[str, int]]) -> None:
        self._sizes = sizes

    def read(self) -> Reading:
        page = os.sysconf("SC_PAGE_SIZE")
        return Reading(
            total=os.sysconf("SC_PHYS_PAGES") * page,
            free=os.sysconf("SC_AVPHYS_PAGES") * page,
            tags=self.tags(),
        )

    def tags(self) -> Tags:
        return {name: TagBytes(size, 0) for name, size in self._sizes().items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """The device after one transition; sizes in bytes."""

    # ``"before load"``, ``"load"``, ``"generate"``, ``"release"``, ``"wake"``, ``"sync"``.
    event: str
    cycle: int  # how often the KV cache has been released by then
    seconds: float  # since the ledger was opened
    # vLLM's, as far as they are mapped.
    weights: int
    kv_cache: int
    # See the module.
    engine_other: int
    trainer: int
    unused: int
    outside: int
    free: int
    total: int  # the device's memory, the sum of all columns


class MemoryLedger:
    """Keeps the entries and judges them."""

    def __init__(self, probe: Probe, *, keep: int = 4096) -> None:
        self.probe = probe
        self.problems: list[str] = []
        self.cycle = 0
        self._entries: deque[Entry] = deque(maxlen=keep)
        self._start = time.monotonic()
        self._engine = (0, 0)  # allocated, reserved: vLLM's, outside of its pools
        self._before: Reading | None = None

    def before_load(self) -> Entry:
        """Call this right before vLLM is built."""
        self.probe.empty_cache()
        self._before = self.probe.read()
        return self._enter("before load", self._before)

    def loaded(self) -> Entry:
        """Call this right after vLLM was built: new memory is vLLM's."""
        assert self._before is not None, "before_load comes first"
        self.probe.empty_cache()
        reading = self.probe.read()
        now, before = reading.ordinary(), self._before.ordinary()
        self._engine = (now[0] - before[0], max(0, now[1] - before[1]))
        return self._enter("load", reading)

    def record(self, event: str) -> Entry:
        return self._enter(event, self.probe.read())

    def released(self, before: Entry, kv_bytes: int, *, frees: bool) -> Entry:
        """Record the release of the KV cache; too little freed is noted as a problem if ``frees``
        (on a CPU nothing is freed)."""
        self.cycle += 1
        after = self.record("release")
        freed = after.free - before.free
        if frees and freed < kv_bytes - TOLERANCE:
            text = (
                f"cycle {self.cycle}: releasing the KV cache freed {format_bytes(freed)} of "
                f"{format_bytes(kv_bytes)}; another process took the rest, or it is still mapped"
            )
            self.problems.append(text)
            log.warning("GPU memory: %s", text)
        return after

    def entries(self, event: str | None = None) -> list[Entry]:
        """The kept entries in order, all or those of one event."""
        return [e for e in self._entries if event is None or e.event == event]

    def given_back(self) -> int:
        """Bytes that PyTorch counts as allocated although nothing is mapped there: the KV cache's
        in standby. On a CPU 0."""
        return sum(max(0, tag.reserved - tag.mapped) for tag in self.probe.tags().values())

    def holders(self) -> str:
        """Who holds the device's memory now, in words, the largest first."""
        entry = self._entry("now", self.probe.read())
        held = {words: size for name, words in COLUMNS.items() if (size := getattr(entry, name))}
        ordered = sorted(held, key=lambda words: -held[words])
        return ", ".join(f"{words} {format_bytes(held[words])}" for words in ordered)

    def to_json(self) -> str:
        """JSON lines, one for each entry, then one with the problems if there are any."""
        lines = [json.dumps(asdict(entry)) for entry in self._entries]
        if self.problems:
            lines.append(json.dumps({"problems": self.problems}))
        return "\n".join(lines)

    def __str__(self) -> str:
        """A table of the last 20 entries, in GiB."""
        sizes = [name.replace("_", " ") for name in COLUMNS]
        table = open_table("event", "cycle", *sizes, right=("cycle", *sizes))
        for entry in list(self._entries)[-20:]:
            held = (f"{getattr(entry, name) / 2**30:.2f}" for name in COLUMNS)
            table.add_row(*map(cell, (entry.event, entry.cycle, *held)))
        lines = [f"GPU memory, GiB: {self.probe.name}", plain_text(table, 110)]
        return "\n".join([*lines, *(f"problem: {text}" for text in self.problems)])

    def _enter(self, event: str, reading: Reading) -> Entry:
        entry = self._entry(event, reading)
        self._entries.append(entry)
        return entry

    def _entry(self, event: str, reading: Reading) -> Entry:
        mapped = {name: tag.mapped for name, tag in reading.tags.items()}
        weights, kv_cache = mapped.pop("weights", 0), mapped.pop("kv_cache", 0)
        allocated, reserved = reading.ordinary()
        trainer = allocated - self._engine[0]
        engine = max(0, min(self._engine[1], reserved - trainer))
        known = weights + kv_cache + sum(mapped.values()) + reserved
        return Entry(
            event=event,
            cycle=self.cycle,
            seconds=round(time.monotonic() - self._start, 6),
            weights=weights,
            kv_cache=kv_cache,
            engine_other=engine + sum(mapped.values()),
            trainer=trainer,
            unused=reserved - trainer - engine,
            outside=reading.total - reading.free - known,
            free=reading.free,
            total=reading.total,
        )


def ledger_of(engine: object) -> MemoryLedger | None:
    """An engine's account of the GPU's memory; None where it keeps none."""
    return getattr(engine, "ledger", None)
