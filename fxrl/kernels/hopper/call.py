"""A call of the loss head on Hopper: its rows, what their tiles share, and a tile's launches."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from fxrl.kernels.hopper import module
from fxrl.kernels.hopper.rows import COMBINED, combine_blocks, finish_vectors, target_logits
from fxrl.ops.linear_logprob.arguments import LossHead, Rows

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


class RowTile:
    """The rows ``rows`` of a call: ``hidden [R, H]``, and its part of what is said of them."""

    def __init__(self, call: Call, rows: slice) -> None:
        self.call, self.rows = call, rows
        self.hidden = call.hidden(rows)
        self.count = self.hidden.shape[0]
        self.target, self.row_scale = call.target[rows], call.row_scale[rows]
        self.target_t, self.shift = call.target_t[rows], call.shift[rows]
        self._arguments = module.Arguments(
            target=self.target.data_ptr(),
            row_scale=self.row_scale.data_ptr(),
            bias=None if call.bias is None else call.bias.data_ptr(),
            rows=self.count,
            rows_stride=self.count,
            k_steps=-(-self.hidden.shape[1] // module.TILE_DEPTH),
            row_pairs=-(-self.count // (module.TILE_ROWS * module.CLUSTER)),
            cap=call.cap,
        )

    def find_target(self) -> None:
        """Fills ``target_t`` and ``shift`` ``[R]``, which the statistics and their like need."""
        weight, bias = self.call.head.weight, self.call.bias
        target_logits[(self.count,)](
            self.hidden, weight, self.target, bias, self.row_scale, self.target_t, self.shift,
            weight.shape[1], self.hidden.stride(0), weight.stride(0),
            cap=self.call.cap, has_bias=bias is not None, block=1024, num_warps=4,
        )  # fmt: skip

    def statistics(self) -> None:
        """Fills the call's block statistics."""
        self._launch(module.STATISTICS, slice(0, self.call.head.weight.shape[0]), None, None)

    def exponentials(self, vocab: slice, out: Tensor) -> None:
        """The same for the entries ``vocab``, and ``out [R, C]`` = 2^(t - shift), targets 0."""
        self._launch(module.EXPONENTIALS, vocab, self.shift, out)

    def gradient(self, vocab: slice, coefficients: Tensor, out: Tensor, weighted: bool) -> None:
        """``out [R, C]``: the gradient of the raw logits of the entries ``vocab``."""
        self._launch(module.GRADIENT, vocab, coefficients, out, weighted)

    def combine(self) -> None:
        """Fills this tile's part of the call's ``combined`` from the block statistics."""
        call, block_rows = self.call, 32
        combine_blocks[(triton.cdiv(self.count, block_rows),)](
            call.partial(self.count), call.target_info(self.count), self.target_t, self.target,
            call.combined[:, self.rows], self.count, call.combined.stride(0), call.blocks,
            call.head.weight.shape[0], int(call.statistics > 2), tile_vocab=module.TILE_VOCAB,
            block_rows=block_rows, block_blocks=64, num_warps=8,
        )  # fmt: skip

    def weighted(self, vocab: slice) -> Tensor:
        """``[R]``: sum of gradient_v log2 p_v over the entries ``vocab`` of the last gradients."""
        blocks = slice(vocab.start // module.TILE_VOCAB, -(-vocab.stop // module.TILE_VOCAB))
        return self.call.partial(self.count)[0, blocks].sum(0)

    def finish(self, product: Tensor, names: tuple[str, ...], vectors: Tensor) -> None:
        """The ``vectors [K, N, H]`` of the values ``names`` at this tile's rows.

        Args:
            product: ``[R, H]`` float32, sum over v != y of 2^(t_v - shift) W_v.
            names: of "logprob" and "lse", in the order of ``vectors``.
            vectors: in the weight's dtype.
        """
        call, weight = self.call, self.call.head.weight
        _, all_rows, width = vectors.shape
        block = min(1024, triton.next_power_of_2(width))
        finish_vectors[(self.count, triton.cdiv(width, block))](
            product, weight, self.target, call.combined[:, self.rows], call.slope[self.rows],
            self.target_t, self.row_scale, call.index[self.rows], vectors,
            call.combined.stride(0), all_rows, width, weight.stride(0),
            logprob_at=_place("logprob", names), lse_at=_place("lse", names),
            capped=call.cap != 0.0, block=block, num_warps=4,
        )  # fmt: skip

    def _launch(
        self,
        mode: int,
        vocab: slice,
        per_row: Tensor | None,
        out: Tensor | None,
        weighted: bool = False,
    ) -> None:
        arguments: Any = self._arguments
        arguments.partial = self.call.partial(self.count).data_ptr()
        arguments.partial_stride = self.call.blocks * self.count
        arguments.target_info = self.call.target_info(self.count).data_ptr()
        pointer = None if per_row is None else per_row.data_ptr()
        arguments.shift = arguments.gradient = pointer
        arguments.vocab_begin, arguments.vocab_end = vocab.start, vocab.stop
        arguments.vocab_tiles = -(-(vocab.stop - vocab.start) // module.TILE_VOCAB)
        device = self.hidden.device.index
        moments = mode != module.GRADIENT and self.call.statistics > 2
        variant = (mode, self.call.bias is not None, self.call.cap != 0, moments, weighted)
        function = module.kernel(*variant, device)
        module.launch(function, mode, self.hidden, self.call.head.weight, out, arguments)


def _place(name: str, names: tuple[str, ...]) -> int:
    return names.index(name) if name in names else -1


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
