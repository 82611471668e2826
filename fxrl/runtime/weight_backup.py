"""A copy of the original bytes of weights that are about to be overwritten for a while.

NOTE [Why a copy and not the inverse]
Subtracting what was added does not give the weights back: round(round(W + D) - D) differs from W
wherever the first rounding lost a bit, and the differences pile up over thousands of steps. A copy
is exact by construction. On the device it is a read and a write at memory bandwidth (2.8 GB: about
1.5 ms on an H200) and lives only during the rollout. Where the KV cache leaves no room it lies in
pinned host memory: frozen weights do not change, so they go to the host once, and a restore only
reads (about 50 GB/s). Whether they changed after all is checked by checksum before each use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Place = Literal["device", "host"]

# Pinned blocks are rounded up to a power of two, so the copy is cut into blocks of that size.
_BLOCK_BYTES = 2**28


class DeviceBackup:
    """Clones on the tensors' own device, freed with this object."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = [torch.empty_like(tensor) for tensor in tensors]

    def save(self) -> None:
        """Copies the tensors' present bytes; waits for nothing."""
        torch.ops.aten._foreach_copy_.default(self._copies, self._tensors)

    def load(self) -> None:
        """Writes the saved bytes back; waits for nothing."""
        torch.ops.aten._foreach_copy_.default(self._tensors, self._copies)


class HostBackup:
    """The bytes in host memory, pinned where the tensors are on a GPU."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        pinned = tensors[0].is_cuda
        sizes = [tensor.nbytes for tensor in tensors]
        blocks = [
            torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in _blocks(sum(sizes))
        ]
        self._pairs: list[tuple[Tensor, Tensor]] = []
        block = at = 0
        for tensor in tensors:
            flat = tensor.detach().view(-1).view(torch.uint8)
            done = 0
            while done < flat.numel():
                if at == blocks[block].numel():
                    block, at = block + 1, 0
                count = min(flat.numel() - done, blocks[block].numel() - at)
                self._pairs.append((flat[done : done + count], blocks[block][at : at + count]))
                done, at = done + count, at + count

    def save(self) -> None:
        """Copies the tensors' present bytes to the host; waits for nothing."""
        for tensor, copy in self._pairs:
            copy.copy_(tensor, non_blocking=True)

    def load(self) -> None:
        """Writes the saved bytes back; waits for nothing."""
        for tensor, copy in self._pairs:
            tensor.copy_(copy, non_blocking=True)


def _blocks(total: int) -> list[int]:
    full, rest = divmod(total, _BLOCK_BYTES)
    return [_BLOCK_BYTES] * full + ([rest] if rest else [])


def free_device_bytes(device: torch.device) -> int | None:
    """What a new allocation on the device can get now; ``None`` for the CPU (no such limit)."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached
