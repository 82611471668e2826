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
from typing import Literal, get_args

import torch
from torch import Tensor

from fxrl.runtime.engine import EngineError

Place = Literal["device", "host"]
WantedPlace = Literal["auto", "device", "host"]

# What an automatic choice leaves free on the device: the merge's own scratch and a margin.
_MARGIN_BYTES = 2**29

# Pinned blocks are rounded up to a power of two, so the copy is cut into blocks of that size.
_BLOCK_BYTES = 2**28


class BackupError(EngineError):
    """There is no memory for a copy of the weights; they have not been touched."""


class WeightBackup:
    """Keeps the bytes of a fixed list of weights where there is room.

    Args:
        tensors: contiguous, on one device.
        wanted: ``"device"``, ``"host"``, or ``"auto"``: the device where it has the room at the
            time of ``save``, else the host.
    """

    def __init__(self, tensors: Sequence[Tensor], wanted: WantedPlace) -> None:
        if wanted not in get_args(WantedPlace):
            raise BackupError(f"backup={wanted!r} is unknown; use one of {get_args(WantedPlace)}")
        self._tensors, self._wanted = list(tensors), wanted
        self._num_bytes = sum(tensor.nbytes for tensor in tensors)
        self._on_device: DeviceBackup | None = None
        self._on_host: HostBackup | None = None
        self._host_sums: Tensor | None = None  # of the bytes that the host has

    @property
    def place(self) -> Place | None:
        """Where a copy lies now; the host's stays, the device's goes with ``release``."""
        if self._on_device is not None:
            return "device"
        return "host" if self._on_host is not None else None

    def save(self, sums: Tensor) -> None:
        """Copies the tensors; from the device to the host only where the host has other bytes.

        Args:
            sums: checksums of the tensors' present bytes.

        Raises:
            BackupError: no memory.
        """
        if self._choose() == "device":
            self._on_device = self._new_device_backup()
        if self._on_device is not None:
            self._on_device.save()
        elif self._host_sums is None or not torch.equal(sums, self._host_sums):
            # First use, or the frozen weights were changed on purpose since: copy them anew.
            self._on_host = self._on_host or self._new_host_backup()
            self._on_host.save()
            self._host_sums = sums

    def load(self) -> None:
        """Writes the saved bytes back."""
        backup = self._on_device or self._on_host
        assert backup is not None, "save() comes first"
        backup.load()

    def release(self) -> None:
        """Frees the device's copy."""
        self._on_device = None

    def _choose(self) -> Place:
        if self._wanted != "auto":
            return self._wanted
        free = free_device_bytes(self._tensors[0].device)
        return "device" if free is None or free >= self._num_bytes + _MARGIN_BYTES else "host"

    def _new_device_backup(self) -> DeviceBackup | None:
        """None where the memory is too fragmented for it and the host may do."""
        try:
            return DeviceBackup(self._tensors)
        except torch.OutOfMemoryError as error:
            if self._wanted == "auto":
                return None
            raise BackupError(
                f"no room for a backup of {self._num_bytes} bytes of weights on the device; give "
                "the KV cache less, or use backup='host'"
            ) from error

    def _new_host_backup(self) -> HostBackup:
        try:
            return HostBackup(self._tensors)
        except RuntimeError as error:  # what torch raises where the host's memory does not do
            raise BackupError(
                f"no room for a backup of {self._num_bytes} bytes of weights in pinned host memory "
                f"({str(error).splitlines()[0]}); use backup='device', or the engine's LoRA"
            ) from error


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
