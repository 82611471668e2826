"""Exact checksums of tensors' bytes, computed where the tensors are.

NOTE [Why a sum of integers]
A weight that two programs share must be proven to be the same bytes, often, on a GPU. A sum of
floats depends on the order of the reduction; a sum of the bits read as integers, modulo 2^64, does
not. Each row's sum is weighted by an odd number of its own, so rows that changed places are seen
too. It is a check against mistakes, not against an adversary.

NOTE [Why two of them]
``checksum`` takes tensors of any strides on any device, a handful of kernels each. Around every
rollout the same 200 weights are summed twice, so ``BitSums`` prepares what can be prepared once:
the factors and owners of all rows are made in the constructor, the bytes are read as 64-bit words,
and a measurement is one kernel a weight (one read at memory bandwidth) and three in all. A changed
row shows (an odd factor is invertible) unless its words sum to the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_KNUTH = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio: odd, its multiples spread over the bits


def bits(tensor: Tensor) -> Tensor:
    """The same memory read as integers of the same width, any strides.

    Raises:
        TypeError: an element is no 1, 2, 4 or 8 bytes (complex128).
    """
    if tensor.element_size() not in _INTEGERS:
        raise TypeError(f"checksum of {tensor.dtype}: elements of {tensor.element_size()} bytes")
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


@torch.no_grad()
def checksum_tensor(tensor: Tensor) -> Tensor:
    """``checksum`` as a 0-d int64 tensor on the tensor's device: no synchronisation."""
    rows = bits(tensor.reshape(1) if tensor.dim() == 0 else tensor)
    if rows.dim() > 1:
        rows = rows.sum(dim=tuple(range(1, rows.dim())), dtype=torch.int64)
    index = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int64)
    return (rows.to(torch.int64) * (index * _KNUTH | 1)).sum()


def checksum(tensor: Tensor) -> int:
    """A number in [-2^63, 2^63) that depends on every bit of the tensor and on its rows' order.

    The same for equal bytes on any device and with any strides; one synchronisation.
    """
    return int(checksum_tensor(tensor))


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """``checksum`` of each, with one synchronisation for each device instead of one a tensor."""
    found = {name: checksum_tensor(tensor) for name, tensor in tensors.items()}
    result: dict[str, int] = {}
    for device in {value.device for value in found.values()}:
        names = [name for name, value in found.items() if value.device == device]
        result |= zip(names, torch.stack([found[name] for name in names]).tolist(), strict=True)
    return {name: result[name] for name in found}


class BitSums:
    """A checksum for each of a fixed list of tensors.

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
