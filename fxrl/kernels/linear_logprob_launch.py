"""Launches the two passes over a logits tile: which tensors, which grid, which block."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fxrl.kernels.linear_logprob_tile import combine_statistics, gradient, partial_statistics
from fxrl.ops.linear_logprob_checks import DIFFERENTIABLE, OUTPUTS
from fxrl.ops.linear_logprob_math import LossHead, Rows

#: Columns of a row's statistics: the values, then what the gradient reads.
STATISTICS = (*OUTPUTS, "max_other", "log_sum", "p_factor", "p_others", "p_target")

_PARTIALS = 6
_BLOCK = 4096  # logits of one program, all in registers: no running maximum to correct
_LOGITS_PER_WARP = 512  # 16 a thread: four loads of 16 bytes in flight, and no spilled register


class TileKernels:
    """The two passes for the tiles of one ``LossHead``."""

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
        """``[R, len(STATISTICS)]`` of the raw ``logits [R, V]`` (contiguous) of ``rows``."""
        num_rows = logits.shape[0]
        target = self.head.target[rows].contiguous()
        # gather and not the kernel reads the target's logit: it asserts that the target exists.
        x_target = logits.gather(1, target.unsqueeze(1))
        partial = logits.new_empty(num_rows, self._splits, _PARTIALS)
        statistics = logits.new_empty(num_rows, len(STATISTICS))
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
            columns=len(STATISTICS),
            splits=self._splits,
            splits_block=triton.next_power_of_2(self._splits),
            num_warps=1,
            **options,
        )
        return statistics

    def logit_gradient(
        self, rows: Rows, logits: Tensor, statistics: Tensor, weights: Tensor, grad: Tensor
    ) -> None:
        """``grad [R, V]``, in its dtype, for ``weights [R, len(DIFFERENTIABLE)]``."""
        self._gradient(rows, logits, statistics, weights, grad, None)

    def temperature_gradient(
        self, rows: Rows, logits: Tensor, statistics: Tensor, weights: Tensor, grad: Tensor
    ) -> Tensor:
        """``logit_gradient``, and what it belongs to derived by the temperature ``[R]``."""
        weighted = logits.new_empty(logits.shape[0], self._splits)
        self._gradient(rows, logits, statistics, weights, grad, weighted)
        shift = weights[:, DIFFERENTIABLE.index("lse")] + weights[:, -1]
        lse = statistics[:, STATISTICS.index("lse")]
        return -(weighted.sum(1) + shift * lse) / self.head.scale

    def _gradient(
        self,
        rows: Rows,
        logits: Tensor,
        statistics: Tensor,
        weights: Tensor,
        grad: Tensor,
        weighted: Tensor | None,
    ) -> None:
        gradient[(logits.shape[0], self._splits)](
            logits,
            self.head.target[rows].contiguous(),
            statistics=statistics,
            weights=weights,
            grad=grad,
            weighted=weighted,
            wants_weighted=weighted is not None,
            splits=self._splits,
            columns=len(STATISTICS),
            block=self._block,
            num_warps=self._num_warps(),
            **self._options(rows),
        )

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
