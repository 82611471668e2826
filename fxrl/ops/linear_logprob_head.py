"""What ``fxrl::linear_logprob`` works on: the projected rows, the head, the logits' transform."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fxrl.ops.linear_logprob_matmul import accumulation_dtype

Rows: TypeAlias = slice | Tensor

#: ``LossHead`` and ``RowValues`` as the arguments of an op.
HEAD_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? temperature, "
    "Tensor? row_mask, float scale, float softcap, SymInt chunk_tokens"
)
VALUES_SCHEMA = "Tensor logprob, Tensor lse, Tensor? entropy, Tensor? sum_p2"

_CPU_TILE_BYTES = 32 * 2**20
_GPU_TILE_BYTES = 320 * 2**20
_GPU_TILE_STEP = 128  # a GEMM's tile: rows beyond a multiple of it cost as much as a full one


def slices(length: int, step: int) -> Iterator[slice]:
    """``range(length)``, ``step`` at a time."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def row_tiles(selected: Tensor | None, count: int, step: int) -> Iterator[Rows]:
    """The ``count`` rows ``selected`` (indices; None: the first ones), ``step`` at a time."""
    for rows in slices(count, step):
        yield rows if selected is None else selected[rows]


class LossHead(NamedTuple):
    """The arguments that every op of the loss head begins with, in the order of ``HEAD_SCHEMA``."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    temperature: Tensor | None = None
    row_mask: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    chunk_tokens: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of logits, statistics and accumulated gradients."""
        return accumulation_dtype(self.hidden.dtype)

    def tile_rows(self) -> int:
        """Rows per tile: what the caller asked for, else what keeps one logits tile small.

        It must not depend on which outputs or gradients are wanted: a GEMM may round differently
        for another number of rows, and scoring has to be bitwise equal to training.
        """
        if self.chunk_tokens > 0:
            return self.chunk_tokens
        on_cpu = self.hidden.device.type == "cpu"
        budget = _CPU_TILE_BYTES if on_cpu else _GPU_TILE_BYTES
        rows = budget // (self.weight.shape[0] * self.dtype.itemsize)
        step = 16 if on_cpu or rows < _GPU_TILE_STEP else _GPU_TILE_STEP
        return max(1, rows // step * step if rows >= step else rows)

    def tiles(self, row_mask: Tensor | None) -> Iterator[Rows]:
        """Row selections that cover ``row_mask`` (all rows if None), at most a tile each."""
        selected = self.selected(row_mask)
        count = self.hidden.shape[0] if selected is None else selected.shape[0]
        return row_tiles(selected, count, self.tile_rows())

    def selected(self, row_mask: Tensor | None) -> Tensor | None:
        """Indices of the rows where ``row_mask`` is True; None is all rows, in and out."""
        return None if row_mask is None else row_mask.nonzero().squeeze(1)

    def row_temperature(self, rows: Rows) -> Tensor | None:
        """``[R, 1]`` or ``[1, 1]`` in the accumulation dtype."""
        if self.temperature is None:
            return None
        temperature = self.temperature.to(self.dtype).reshape(-1, 1)
        return temperature if temperature.shape[0] == 1 else temperature[rows]

    def row_slope(self, rows: Rows) -> Tensor:
        """``scale / T``, the row-wise part of dz/dx: ``[R, 1]`` or ``[1, 1]``."""
        temperature = self.row_temperature(rows)
        if temperature is None:
            return torch.full((1, 1), self.scale, dtype=self.dtype, device=self.hidden.device)
        return self.scale / temperature

    def cap_slope(self, rows: Rows, logits: Tensor) -> Tensor:
        """``1 - tanh^2`` where the transformed logits ``[R, 1]`` are ``logits``; with a softcap."""
        temperature = self.row_temperature(rows)
        capped = (logits if temperature is None else logits * temperature) / self.softcap
        return 1 - capped.clamp(-1, 1).square()


class RowValues(NamedTuple):
    """What the forward found per row ``[N]``; entropy and sum_p2 only where a gradient reads them.

    With the transformed logits z of a row: ``p_v = exp(z_v - lse)`` for v != y, ``p_y =
    exp(logprob)`` and ``1 - p_y = -expm1(logprob)``, so that no gradient needs the row's
    statistics a second time. ``lse`` is rounded to one part in 2^24, as every z_v is.
    """

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None
    sum_p2: Tensor | None

    def of(self, rows: Rows) -> RowValues:
        """The values of ``rows``, each ``[R, 1]``."""

        def cut(value: Tensor) -> Tensor:
            return value[rows].unsqueeze(1)

        logprob, lse, entropy, sum_p2 = self
        return RowValues(
            cut(logprob),
            cut(lse),
            None if entropy is None else cut(entropy),
            None if sum_p2 is None else cut(sum_p2),
        )
