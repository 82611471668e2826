"""Exact checksums of a fixed set of weights, cheap enough to take twice around every rollout.

NOTE [Why not ``checksum``]
``fxrl.runtime.checksum`` compares tensors of any strides on any device, a handful of kernels each.
Here the same 200 weights are summed at every step, so what can be prepared once is: the factors
and owners of all rows are made in the constructor, the bytes are read as 64-bit words, and a
measurement is one kernel a weight (one read at memory bandwidth) and three in all.

The sum: words per row, then rows with an odd random factor each, all modulo 2^64. Integer addition
does not depend on the order, so the kernels may reduce as they like. A changed row shows (an odd
factor is invertible) unless its words sum to the same; rows that changed places show as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


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
