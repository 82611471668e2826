"""Where a step's seconds and its memory go.

| phase | what |
| --- | --- |
| ``generate`` | the engine draws completions |
| ``reward`` | decoding and reward functions, as far as they did not run beside ``generate`` |
| ``release`` | the engine gives its memory away |
| ``score`` | micro-batches, log-probabilities of the old policy and of the reference |
| ``train`` | loss, backward, optimizer |
| ``wake`` | the engine takes its memory back |
| ``sync`` | the new policy reaches the engine: hand-over, fold and restore of the adapter |
| ``other`` | the rest of the step |

NOTE [Honest seconds on a GPU]
Kernels run after the call that queued them. The device is waited for once at the end of each phase,
so that what a phase queued counts as its own. That costs nothing: each phase needs the one before.

NOTE [Which bytes]
On a GPU a phase has the most that PyTorch had allocated since the phase before it, less what the
engine had given back all through it: PyTorch counts a KV cache in standby as if it were there. A
CPU keeps no such mark, so there it is what the process has in memory at the phase's end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PHASES = ("generate", "reward", "release", "score", "train", "wake", "sync", "other")


class Clock:
    """Seconds and bytes by phase of one step; ``device`` is waited for at the end of each.

    ``given_back`` says how many of the bytes that PyTorch counts as allocated are not there now
    (``MemoryLedger.given_back``).
    """

    def __init__(self, device: torch.device, given_back: Callable[[], int] = lambda: 0) -> None:
        self.device, self._given_back = device, given_back
        self.seconds = dict.fromkeys(PHASES, 0.0)  # of each phase
        self.bytes: dict[str, int] = {}  # of those that there were: NOTE [Which bytes]
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the block as phase ``name``; a block that raises is not counted."""
        start, before = time.perf_counter(), self._given_back()
        yield
        used = self._used() - min(before, self._given_back())
        self.seconds[name] += time.perf_counter() - start
        self.bytes[name] = max(used, self.bytes.get(name, 0))

    def _used(self) -> int:
        """Bytes, 0 where the system does not say."""
        if self.device.type != "cuda":
            statm = Path("/proc/self/statm")
            pages = int(statm.read_text().split()[1]) if statm.exists() else 0
            return pages * os.sysconf("SC_PAGE_SIZE")
        import torch  # not above: what a run shows first has the phases' names and no PyTorch

        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        if peak:
            torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def move(self, source: str, target: str, seconds: float) -> None:
        """Counts ``seconds`` of phase ``source`` as ``target``'s."""
        moved = min(seconds, self.seconds[source])
        self.seconds[source] -= moved
        self.seconds[target] += moved

    def metrics(self) -> dict[str, float]:
        """``step_time``, the seconds since the step began, and ``time/<phase>``; what no phase has
        is ``other``."""
        total = time.perf_counter() - self._start
        known = sum(value for name, value in self.seconds.items() if name != "other")
        self.seconds["other"] = max(0.0, total - known)
        return {f"time/{name}": value for name, value in self.seconds.items()} | {
            "step_time": total
        }
