"""Gives the KV cache's memory to the trainer and takes it back at the same addresses.

Only the KV cache goes: weights stay mapped (the trainer's model may be made of them) and so do CUDA
graphs, which hold addresses and nothing else. Works on objects it is handed; imports no vLLM.

NOTE [Which way in]
vLLM from 0.32 on has ``LLM.release_kv_cache_memory``. Before, sleeping discards or copies away
every pool, but the mechanism is pluggable: a backend registered under a name of ours unmaps the
one tag and ``LLM.sleep`` / ``LLM.wake_up`` stay what they are. On a CPU vLLM
frees nothing (``"calls only"``, also with ``standby=False``): the scheduler is paused, the prefix
cache dropped and the scheduler resumed, so that a run behaves the same everywhere.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fxrl.engines.engine import EngineError
from fxrl.engines.ledger import MemoryLedger, TagBytes
from fxrl.ir.remark import format_bytes

KV_TAG = "kv_cache"
Way = Literal["native", "backend", "calls only"]
_WAKE_TAGS: Mapping[Way, list[str] | None] = {
    "native": [KV_TAG],
    "backend": None,  # the backend knows; vLLM takes the weights for asleep too
    "calls only": ["scheduling"],
}


class WakeError(EngineError):
    """The KV cache's memory is not free. The engine stays in standby: free some, wake again."""


#: One mapping of vLLM's allocator (``AllocationData``): its ``handle`` (device, bytes, address,
#: chunk), its ``tag``, and whether it ``is_asleep``.
Allocation = Any


def unmap_tag(allocations: Iterable[Allocation], tag: str, unmap: Callable[[Any], None]) -> None:
    """Unmaps what ``tag`` has mapped; addresses stay reserved."""
    for allocation in allocations:
        if allocation.tag == tag and not allocation.is_asleep:
            unmap(allocation.handle)
            allocation.is_asleep = True


def map_tag(
    allocations: Iterable[Allocation],
    tag: str,
    create: Callable[[Any], None],
    unmap: Callable[[Any], None],
) -> None:
    """Maps fresh memory where ``unmap_tag`` took it; all of it or, on an error, none of it."""
    done: list[Allocation] = []
    try:
        for allocation in allocations:
            if allocation.tag == tag and allocation.is_asleep:
                create(allocation.handle)
                allocation.is_asleep = False
                done.append(allocation)
    except RuntimeError:
        for allocation in done:
            unmap(allocation.handle)
            allocation.is_asleep = True
        raise


@dataclass(slots=True)
class Standby:
    """Release and wake of one engine. ``drain`` finishes what vLLM has in flight (asynchronous
    scheduling runs ahead); ``timings`` gets the seconds of ``"release"`` and ``"wake"``."""

    llm: Any
    way: Way
    ledger: MemoryLedger
    drain: Callable[[], None]
    timings: dict[str, float]
    kv_bytes: int = 0

    def release(self) -> None:
        """Pauses the scheduler, drops the prefix cache, unmaps the KV cache."""
        self.drain()
        before = self.ledger.record("before release")
        start = time.perf_counter()
        if self.way == "backend":
            self.llm.sleep(level=1)
        else:
            self.llm.sleep(level=0)
            if self.way == "native":
                self.llm.release_kv_cache_memory()
            else:
                self.llm.reset_prefix_cache()
        self.timings["release"] = time.perf_counter() - start
        self.kv_bytes = before.kv_cache
        self.ledger.released(before, self.kv_bytes, frees=self.way != "calls only")

    def wake(self) -> None:
        """Map the KV cache, repair what vLLM keeps about it, resume the scheduler. Raises
        ``WakeError``, with nothing changed, if the memory is not there."""
        start = time.perf_counter()
        if self.way != "calls only":
            self._make_room()
        try:
            self.llm.wake_up(tags=_WAKE_TAGS[self.way])
        except RuntimeError as error:
            raise self._no_room(f"vLLM could not map it ({error})") from error
        self.timings["wake"] = time.perf_counter() - start
        self.ledger.record("wake")

    def _make_room(self) -> None:
        """Takes back what PyTorch's allocator merely holds, at the least cost that will do."""
        probe = self.ledger.probe
        probe.synchronize()
        for effort in range(3):
            if effort == 2:
                gc.collect()
            if effort:
                probe.empty_cache()
            if probe.read().free >= self.kv_bytes:
                return
        raise self._no_room("it is not free")

    def _no_room(self, why: str) -> WakeError:
        return WakeError(
            f"wake: the KV cache needs {format_bytes(self.kv_bytes)} of GPU memory and {why}; the "
            f"device has: {self.ledger.holders()}. The engine stays in standby: delete tensors of "
            "the trainer (gradients, activations, a batch) and wake again, or build the engine "
            "with a larger trainer_reserve or fewer max_num_seqs"
        )


def tag_bytes(allocations: Mapping[Any, Allocation]) -> dict[str, TagBytes]:
    """The bytes of every tag."""
    sizes: dict[str, TagBytes] = {}
    for allocation in allocations.values():
        mapped, reserved = sizes.get(allocation.tag, (0, 0))
        size = int(allocation.handle[1])
        here = 0 if allocation.is_asleep else size
        sizes[allocation.tag] = TagBytes(mapped + here, reserved + size)
    return sizes
