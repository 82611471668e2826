"""The adapter inside the shared weights for the time of a rollout, and out again bit-exactly.

The engine and the trainer read the same storages. vLLM's LoRA kernels cost a quarter to a third of
a decode step; a weight that already holds W + scaling * B A costs nothing. So, around generation:

    with folded(Fold(model)):           # W' = round(float32(W) + scaling * B A), in place: to 16
                                        # bits by chance (fxrl.ops.dithered)
        completions = engine.generate(...)
    # here every weight has its old bytes again, which a checksum has confirmed

NOTE [Why a failed restore ends the run]
A weight that did not come back would be trained on as if it were the base model, and every later
rollout would fold onto it: an error that grows and shows nowhere. So the restore is checked on
bits, and after a mismatch the model can be neither folded nor silently used
(``require_sound(model)``); the only cure is to load the weights again.

NOTE [Why a copy and not the inverse]
Subtracting what was added does not give the weights back: round(round(W + D) - D) differs from W
wherever the first rounding lost a bit, and the differences pile up over thousands of steps. A copy
is exact by construction. On the device it is a read and a write at memory bandwidth (2.8 GB: about
1.5 ms on an H200) and lives only during the rollout. Where the KV cache leaves no room it lies in
pinned host memory: frozen weights do not change, so they go to the host once, and a restore only
reads (about 50 GB/s). Whether they changed after all is checked by checksum before each use.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.engines.engine import EngineError
from fxrl.engines.weights.lora.sites import (
    AdapterError,
    Merge,
    active_sites,
    adapted_layers,
    check_storages,
    lora_sites,
    merge_all,
    why_lost,
)
from fxrl.errors import HostMemoryError
from fxrl.ops.host_memory import pool_of
from fxrl.ops.out_of_memory import free_bytes

# By layer, so that it is found through every wrapper of the model: folded, or why it is lost.
_state: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_FOLDED = "folded"


class FoldError(EngineError):
    """The model cannot be folded, or apply and restore were called out of order."""


class RestoreError(EngineError):
    """Weights did not come back bit for bit; the model is unusable until it is loaded again."""


def require_sound(model: nn.Module) -> None:
    """Refuses a model of which any weight is not the base model's now."""
    for state in {_state[module] for module in model.modules() if module in _state}:
        if state != _FOLDED:
            raise RestoreError(state)
        raise FoldError("fold: the adapter is folded into the weights now; restore() first")


class Fold:
    """Folds a PEFT model's active adapter into its weights and restores them.

    The model has plain LoRA on linear layers; anything else raises ``AdapterError`` (see
    ``lora_sites``), and so does a weight that a second parameter reads too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sites = lora_sites(model)
        self._layers, self._configs = adapted_layers(model), _configs(model)
        self._weights = [site.weight for site in self._sites]
        check_storages(model, self._sites)
        self.names = tuple(site.name for site in self._sites)  # as in the checkpoint
        # Seconds of the last "fold" and "restore", device time included.
        self.timings: dict[str, float] = {}
        self._sums = BitSums(self._weights)
        self._backup = WeightBackup(self._weights)
        self._expected: Tensor | None = None  # sums of the bits while the backup is in use

    @property
    def is_applied(self) -> bool:
        """Whether the weights hold the adapter now."""
        return self._expected is not None

    @torch.no_grad()
    def apply(self) -> None:
        """Backs up and folds the adapters that are active now.

        Raises:
            FoldError: already applied, by this or another ``Fold`` of the model; or a weight in
                FP8 would lose too much of its adapter.
            BackupError: no memory for the backup; nothing has changed.
            RestoreError: an earlier restore failed.
            AdapterError: the active adapters have changed into something that cannot be folded.
        """
        require_sound(self._model)
        start = time.perf_counter()
        merges = self._merges()
        self._check_addresses()
        if why := why_lost(dict(zip(self.names, merges, strict=True))):
            raise FoldError(f"fold: {why}")
        try:
            sums = self._sums.measure()
            self._backup.save(sums)
            self._expected = sums
            self._mark(_FOLDED)
            merge_all(merges)
            self._wait()
        except BaseException:
            if self.is_applied:
                self.restore()
            self._backup.release()
            raise
        self.timings["fold"] = time.perf_counter() - start

    @torch.no_grad()
    def restore(self) -> None:
        """Write the original bytes back and check them. Raises ``FoldError`` if nothing is applied,
        ``RestoreError``, naming the modules, if a checksum differs."""
        if self._expected is None:
            raise FoldError("fold: nothing to restore; apply() comes first")
        start = time.perf_counter()
        expected, self._expected = self._expected, None
        interrupt = None
        try:
            wrong = self._load(expected)
        except KeyboardInterrupt as stop:  # it takes milliseconds: finish first
            interrupt, wrong = stop, self._load(expected)
        if wrong:
            raise self._poison(wrong, "the checksums differ")
        self._backup.release()
        self._mark(None)
        self.timings["restore"] = time.perf_counter() - start
        if interrupt is not None:
            raise interrupt

    def _load(self, expected: Tensor) -> list[str]:
        """Copies the backup back; the modules whose bits are not as expected."""
        try:
            self._check_addresses()
            self._backup.load()
            sums = torch.stack([self._sums.measure(), expected])
            now, before = sums.tolist()  # the one synchronisation
        except Exception as error:
            raise self._poison(self.names, str(error)) from error
        return [name for name, a, b in zip(self.names, now, before, strict=True) if a != b]

    def _merges(self) -> list[Merge]:
        """Read anew at every fold: the optimizer may have replaced factors, the user adapters."""
        # Walking the model takes 5 ms; its layers can only have changed if the adapters have.
        unchanged = _configs(self._model) == self._configs
        current = active_sites(self._layers) if unchanged else lora_sites(self._model)
        if tuple(site.name for site in current) != self.names:
            raise AdapterError(
                f"lora: the active adapters now change {len(current)} modules, not the "
                f"{len(self.names)} that this Fold was made for; make a new Fold"
            )
        pairs = zip(current, self._weights, strict=True)
        return [Merge.of(site, weight) for site, weight in pairs]

    def _check_addresses(self) -> None:
        for site, weight in zip(self._sites, self._weights, strict=True):
            now = site.weight
            if now.data_ptr() != weight.data_ptr() or now.shape != weight.shape:
                raise FoldError(
                    f"fold: {site.name} has another storage than when the Fold was made "
                    "(model.to(), or .data was replaced); make a new Fold"
                )

    def _mark(self, state: str | None) -> None:
        for site in self._sites:
            if state is None:
                _state.pop(site.layer, None)
            else:
                _state[site.layer] = state

    def _wait(self) -> None:
        if self._weights[0].is_cuda:
            torch.cuda.synchronize(self._weights[0].device)

    def _poison(self, names: Sequence[str], why: str) -> RestoreError:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        message = (
            f"fold: {shown} did not come back after the rollout ({why}); the base weights are "
            "lost. Stop, load the model again and resume from the last checkpoint"
        )
        self._mark(message)
        self._backup.release()
        return RestoreError(message)


@contextmanager
def folded(fold: Fold) -> Iterator[Fold]:
    """Folds for the time of a block, and restores also when the block raises."""
    fold.apply()
    try:
        yield fold
    finally:
        fold.restore()


def _configs(model: nn.Module) -> list[tuple[str, Any]]:
    return list(getattr(model, "peft_config", {}).items())


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class BitSums:
    """An exact checksum for each of a fixed list of tensors, computed where they are.

    NOTE [Why a sum of integers]
    A sum of floats depends on the order of the reduction; a sum of the bits read as integers,
    modulo 2^64, does not. Each row's sum is weighted by an odd number of its own, so rows that
    changed places are seen too, and so is a changed row (an odd factor is invertible) unless its
    words sum to the same. It is a check against mistakes, not against an adversary.
    Around every rollout the same 200 weights are summed twice, so what can be is prepared once: a
    measurement is one kernel a weight (one read at memory bandwidth) and three in all.

    Args:
        tensors: contiguous, not empty, on one device; their dim 0 is the rows.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._words = [_words(tensor) for tensor in tensors]
        rows = [words.shape[0] for words in self._words]
        device = tensors[0].device
        generator = torch.Generator().manual_seed(0x5EED)
        factors = torch.randint(-(2**62), 2**62, (sum(rows),), generator=generator) * 2 + 1
        self._factors = factors.to(device)
        owners = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
        self._owners = owners.to(device)
        self._sums = torch.empty_like(self._factors)
        self._parts = torch.split(self._sums, rows)

    @torch.no_grad()
    def measure(self) -> Tensor:
        """int64 [number of tensors], on the device; launches kernels and waits for nothing."""
        for words, part in zip(self._words, self._parts, strict=True):
            torch.sum(words, dim=1, dtype=torch.int64, out=part)
        total = self._sums.new_zeros(len(self._words))
        return total.index_add_(0, self._owners, self._sums.mul_(self._factors))


def _words(tensor: Tensor) -> Tensor:
    """The bytes as a matrix [rows, words] of the widest words that fit."""
    assert tensor.is_contiguous(), "the sum reads the storage in order"
    matrix = tensor.detach().reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)
    row_bytes = matrix.shape[1] * matrix.element_size()
    start = matrix.storage_offset() * matrix.element_size()
    word = next(w for w in _WORDS if row_bytes % w.itemsize == 0 and start % w.itemsize == 0)
    return matrix.view(word)


# What stays free on the device: the merge's own scratch and a margin.
_MARGIN_BYTES = 2**29


class BackupError(EngineError):
    """There is no memory for a copy of the weights; they have not been touched."""


class WeightBackup:
    """Keeps the bytes of a fixed list of weights: on the device where it has the room, during the
    rollout only; else in pinned host memory, for good."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._on_device: DeviceBackup | None = None
        self._on_host: HostBackup | None = None
        self._host_sums: Tensor | None = None  # of the bytes that the host has

    def save(self, sums: Tensor) -> None:
        """Copy the tensors; from the device to the host only if the host has other bytes, by their
        checksums ``sums``. Raises ``BackupError`` without memory."""
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

    def _new_device_backup(self) -> DeviceBackup | None:
        """None where the device has too little memory for it, or too fragmented."""
        free = free_bytes(self._tensors[0].device)
        if free is not None and free < self._num_bytes() + _MARGIN_BYTES:
            return None
        try:
            return DeviceBackup(self._tensors)
        except torch.OutOfMemoryError:
            return None

    def _new_host_backup(self) -> HostBackup:
        try:
            return HostBackup(self._tensors)
        except HostMemoryError as error:
            raise BackupError(
                f"no room for a backup of {self._num_bytes()} bytes of weights, neither on the "
                f"device nor in pinned host memory ({error.reason}); give the KV cache less, or "
                "use the engine's LoRA"
            ) from error

    def _num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)


class _Copies:
    """Memory, and a copy of it elsewhere, in pairs."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._originals, self._copies = ([*side] for side in zip(*pairs, strict=True))

    def save(self) -> None:
        """Copies the present bytes; waits for nothing."""
        torch.ops.aten._foreach_copy_.default(self._copies, self._originals, True)

    def load(self) -> None:
        """Writes the saved bytes back; waits for nothing."""
        torch.ops.aten._foreach_copy_.default(self._originals, self._copies, True)


class DeviceBackup(_Copies):
    """Clones on the tensors' own device, freed with this object."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__([(tensor, torch.empty_like(tensor)) for tensor in tensors])


class HostBackup(_Copies):
    """The bytes in host memory, pinned where the tensors are on a GPU."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        pool = pool_of(tensors[0].device)
        pages, pairs = pool.room_for(tensors)
        super().__init__(pairs)
        weakref.finalize(self, pool.take_back, pages)
