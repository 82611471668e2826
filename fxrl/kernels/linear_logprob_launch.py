"""Launches the passes over a logits tile: which tensors, which grid, which block."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fxrl.kernels.linear_logprob_tile import (
    combine_statistics,
    gradient,
    partial_statistics,
    probabilities,
)
from fxrl.ops.linear_logprob_checks import DIFFERENTIABLE, OUTPUTS
from fxrl.ops.linear_logprob_head import LossHead, Rows

#: Columns of what the gradient reads of a row: the forward's values, then weights by output.
ROW_DATA = ("logprob", "lse", "entropy", "sum_p2", "p_others", *DIFFERENTIABLE)

_PARTIALS = 6
_BLOCK = 4096  # logits of one program, all in registers: no running maximum to correct
_LOGITS_PER_WARP = 512  # 16 a thread: four loads of 16 bytes in flight, and no spilled register


class TileKernels:
    """The passes for the tiles of one ``LossHead``."""

    def __init__(self, head: LossHead) -> None:
        self.head = head
        self._vocab = head.weight.shape[0]
        self._block: int = min(_BLOCK, max(16, triton.next_power_of_2(self._vocab)))
        self._splits: int = triton.cdiv(self._vocab, self._block)
        self._bias = None if head.bias is None else head.bias.to(head.dtype).contiguous()
        self._temperature: Tensor | None = None
        if head.temperature is not None:
            per_row = head.temperature.to(head.dtype).reshape(-1)
            self._temperature = per_row.expand(head.hidden.shape[0])

    def row_statistics(self, rows: Rows, logits: Tensor) -> Tensor:
        """``[R, len(OUTPUTS)]``, in that order, of the raw contiguous ``logits [R, V]``."""
        num_rows = logits.shape[0]
        target = self.head.target[rows].contiguous()
        # gather and not the kernel reads the target's logit: it asserts that the target exists.
        x_target = logits.gather(1, target.unsqueeze(1))
        partial = logits.new_empty(num_rows, self._splits, _PARTIALS)
        statistics = logits.new_empty(num_rows, len(OUTPUTS))
        options = self._options(rows)
        partial_statistics[(num_rows, self._splits)](
            logits,
            x_target,
            target,
            partial=partial,
            partials=_PARTIALS,
            block=self._block,
            splits=self._splits,
            num_warps=self._num_warps(),
            **options,
        )
        combine_statistics[(num_rows,)](
            x_target,
            target,
            partial=partial,
            statistics=statistics,
            partials=_PARTIALS,
            columns=len(OUTPUTS),
            splits=self._splits,
            splits_block=triton.next_power_of_2(self._splits),
            num_warps=1,
            **options,
        )
        return statistics

    def probabilities(self, rows: Rows, logits: Tensor, lse: Tensor, prob: Tensor) -> None:
        """``prob [R, V]``, in its dtype: p_v times the softcap's slope, 0 at the target."""
        probabilities[(logits.shape[0], self._splits)](
            logits,
            self.head.target[rows].contiguous(),
            lse=lse.contiguous(),
            prob=prob,
            block=self._block,
            num_warps=self._num_warps(),
            **self._options(rows),
        )

    def logit_gradient(
        self, rows: Rows, logits: Tensor, row_data: Tensor, grad: Tensor, *, with_temperature: bool
    ) -> Tensor | None:
        """``grad [R, V]``, in its dtype, for ``row_data [R, len(ROW_DATA)]``.

        Returns what it belongs to derived by the temperature, ``[R]``, if asked.
        """
        weighted = logits.new_empty(logits.shape[0], self._splits) if with_temperature else None
        gradient[(logits.shape[0], self._splits)](
            logits,
            self.head.target[rows].contiguous(),
            row_data=row_data,
            grad=grad,
            weighted=weighted,
            wants_weighted=with_temperature,
            splits=self._splits,
            columns=len(ROW_DATA),
            block=self._block,
            num_warps=self._num_warps(),
            **self._options(rows),
        )
        if weighted is None:
            return None
        first = len(ROW_DATA) - len(DIFFERENTIABLE)
        shift = row_data[:, first + DIFFERENTIABLE.index("lse")] + row_data[:, -1]
        return -(weighted.sum(1) + shift * row_data[:, 1]) / self.head.scale

    def _num_warps(self) -> int:
        return max(1, self._block // _LOGITS_PER_WARP)

    def _options(self, rows: Rows) -> dict[str, Any]:
        temperature = None if self._temperature is None else self._temperature[rows]
        return {
            "bias": self._bias,
            "temperature": temperature,
            "temperature_stride": 0 if temperature is None else temperature.stride(0),
            "vocab": self._vocab,
            "scale": float(self.head.scale),
            "softcap": float(self.head.softcap),
            "lowest": torch.finfo(self.head.dtype).min,
            "has_bias": self._bias is not None,
            "has_temperature": temperature is not None,
        }
