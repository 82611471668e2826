"""A call of the loss head on Hopper: its rows, and the memory that their tiles share."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from fxrl.kernels.hopper import module
from fxrl.kernels.hopper.rows import COMBINED
from fxrl.ops.linear_logprob_head import LossHead, Rows

_LOG2E = 1 / math.log(2)
_PAD = 8  # bf16 numbers in the 16 bytes that TMA wants a row to be a multiple of


class Call:
    """The rows of a call, in the order in which its tiles take them, and what these share.

    NOTE [Why whatever is said of a row is made for all rows of a call]
    A tile of a small head takes the GPU half a millisecond, and operations on vectors of its rows
    take it a few microseconds each. At 65536 x 576 x 49152 scoring runs 18 kernels instead of 112,
    5.7 ms instead of 6.2, and a frozen head 145 instead of 377, 11.9 ms instead of 12.3.

    Args:
        head: of the call.
        selected: ``[n]`` int64, its rows; None is all of them.
        tile_rows: most rows of a tile.
        statistics: of each row and block of the vocabulary: 2, or 5 with moments.

    Attributes:
        count: n.
        blocks: of the vocabulary.
        target: ``[n]`` int64.
        slope: ``[n]`` float32, scale / T.
        row_scale: ``[n]`` float32, by which the epilogue multiplies f(logit); see loss_head.cu.
        cap: the epilogue's; 0 without a softcap.
        bias: ``[V]`` float32, or None.
        target_t, shift: ``[n]`` float32, written by ``RowTile.find_target``.
        combined: ``[len(COMBINED), n]`` float32, written by ``RowTile.combine``.
    """

    def __init__(
        self, head: LossHead, selected: Tensor | None, tile_rows: int, statistics: int
    ) -> None:
        self.head, self.statistics, self._selected = head, statistics, selected
        rows: Rows = slice(None) if selected is None else selected
        self.target = head.target[rows].contiguous()
        self.count = self.target.shape[0]
        self.slope = head.row_slope(rows).expand(self.count, 1).squeeze(1).contiguous()
        factor = self.slope * (head.softcap / head.scale) if head.softcap else self.slope
        self.row_scale = factor * _LOG2E
        self.cap = head.scale / head.softcap if head.softcap else 0.0
        self.bias = None if head.bias is None else head.bias.float().contiguous()
        self.blocks = -(-head.weight.shape[0] // module.TILE_VOCAB)
        pitch = -(-self.count // _PAD) * _PAD  # Triton compiles another kernel for odd pointers
        of_rows = self.slope.new_empty(2 + len(COMBINED), pitch)[:, : self.count]
        self.target_t, self.shift, self.combined = of_rows[0], of_rows[1], of_rows[2:]
        tile_rows = min(tile_rows, self.count)
        self._partial = self.slope.new_empty(statistics * self.blocks * tile_rows)
        self._target_info = self.slope.new_empty(2 * tile_rows)

    @cached_property
    def index(self) -> Tensor:
        """``[n]`` int64, the rows' places in the batch."""
        if self._selected is not None:
            return self._selected
        return torch.arange(self.count, device=self.target.device)

    def check_targets(self) -> None:
        """Asserts on the device that every target exists."""
        self.head.weight[:, 0].gather(0, self.target)

    def places(self, rows: slice) -> Rows:
        """Where ``rows`` of the call are in the batch."""
        return rows if self._selected is None else self._selected[rows]

    def hidden(self, rows: slice) -> Tensor:
        """``[R, H]``, as TMA can read it."""
        hidden = self.head.hidden[self.places(rows)]
        return hidden if aligned(hidden) else _padded(hidden)

    def partial(self, rows: int) -> Tensor:
        """``[statistics, blocks, rows]``, undefined."""
        count = self.statistics * self.blocks * rows
        return self._partial[:count].view(self.statistics, self.blocks, rows)

    def target_info(self, rows: int) -> Tensor:
        """``[2, rows]``, undefined."""
        return self._target_info[: 2 * rows].view(2, rows)

    def put(self, combined: str, out: Tensor) -> None:
        """Writes the rows' value of that name to their places in ``out [N]``."""
        value = self.combined[COMBINED.index(combined)]
        if self._selected is None:
            out.copy_(value)
        else:
            out[self._selected] = value.to(out.dtype)


def aligned(matrix: Tensor) -> bool:
    """Whether TMA can read it: entries side by side, rows apart and 16 bytes aligned."""
    return (
        matrix.stride(1) == 1
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.stride(0) % _PAD == 0
        and matrix.data_ptr() % (_PAD * matrix.element_size()) == 0
    )


def _padded(matrix: Tensor) -> Tensor:
    """A copy whose rows start 16 bytes aligned."""
    rows, width = matrix.shape
    padded = matrix.new_empty(rows, -(-width // _PAD) * _PAD)[:, :width]
    return padded.copy_(matrix)
