"""A tile of rows of the loss head on Hopper: its scratch, and the launches that fill it."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from fxrl.kernels.hopper import module
from fxrl.kernels.hopper.rows import (
    COMBINED,
    LOWEST_SHIFT,
    combine_blocks,
    finish_vectors,
    target_logits,
)
from fxrl.ops.linear_logprob_head import LossHead, Rows

_LOG2E = 1 / math.log(2)
_PAD = 8  # bf16 numbers in the 16 bytes that TMA wants a row to be a multiple of


class Scratch:
    """What the tiles of one call share: memory that the GEMM writes to, the bias as it reads it."""

    def __init__(self, head: LossHead, rows: int, statistics: int) -> None:
        self.blocks = -(-head.weight.shape[0] // module.TILE_VOCAB)
        self._partial = head.hidden.new_empty(statistics * self.blocks * rows, dtype=torch.float32)
        self._target_info = head.hidden.new_empty(2 * rows, dtype=torch.float32)
        self.statistics = statistics
        self.bias = None if head.bias is None else head.bias.float().contiguous()

    def partial(self, rows: int) -> Tensor:
        """``[statistics, blocks, rows]``, undefined."""
        count = self.statistics * self.blocks * rows
        return self._partial[:count].view(self.statistics, self.blocks, rows)

    def target_info(self, rows: int) -> Tensor:
        """``[2, rows]``, undefined."""
        return self._target_info[: 2 * rows].view(2, rows)


class RowTile:
    """Some rows of a head: ``hidden [R, H]``, ``target [R]``, and what they are multiplied by."""

    def __init__(self, head: LossHead, rows: Rows, scratch: Scratch) -> None:
        self._head, self._scratch, self.rows = head, scratch, rows
        self.hidden = head.hidden[rows]
        if not aligned(self.hidden):
            self.hidden = _padded(self.hidden)
        self.target = head.target[rows].contiguous()
        self.count = self.hidden.shape[0]
        self.target_t = self.shift = head.hidden.new_empty(0)
        self.slope = head.row_slope(rows).expand(self.count, 1).squeeze(1)
        factor = self.slope * (head.softcap / head.scale) if head.softcap else self.slope
        self.row_scale = (factor * _LOG2E).contiguous()
        self._bias = scratch.bias
        self._cap = head.scale / head.softcap if head.softcap else 0.0
        self._arguments = module.Arguments(
            target=self.target.data_ptr(),
            row_scale=self.row_scale.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            rows=self.count,
            rows_stride=self.count,
            k_steps=-(-head.hidden.shape[1] // module.TILE_DEPTH),
            row_pairs=-(-self.count // (module.TILE_ROWS * module.CLUSTER)),
            cap=self._cap,
        )

    def find_target(self) -> None:
        """Fills ``target_t`` and ``shift`` ``[R]``, which the statistics and their like need."""
        self.target_t, self.shift = self.row_scale.new_empty(2, self.count)
        weight = self._head.weight
        weight[:, 0].gather(0, self.target)  # asserts on the device that every target exists
        target_logits[(self.count,)](
            self.hidden,
            weight,
            self.target,
            self._bias,
            self.row_scale,
            self.target_t,
            self.shift,
            weight.shape[1],
            self.hidden.stride(0),
            weight.stride(0),
            cap=self._cap,
            has_bias=self._bias is not None,
            block=1024,
            num_warps=4,
        )

    def statistics(self) -> None:
        """Fills the scratch's block statistics."""
        self._launch(module.STATISTICS, slice(0, self._head.weight.shape[0]), None, None)

    def exponentials(self, vocab: slice, out: Tensor) -> None:
        """The same for the entries ``vocab``, and ``out [R, C]`` = 2^(t - shift), targets 0."""
        self._launch(module.EXPONENTIALS, vocab, self.shift, out)

    def gradient(self, vocab: slice, coefficients: Tensor, out: Tensor, weighted: bool) -> None:
        """``out [R, C]``: the gradient of the raw logits of the entries ``vocab``."""
        self._launch(module.GRADIENT, vocab, coefficients, out, weighted)

    def combine(self) -> Tensor:
        """``[len(COMBINED), R]`` from the block statistics."""
        combined = self.row_scale.new_empty(len(COMBINED), self.count)
        block_rows = 32
        combine_blocks[(triton.cdiv(self.count, block_rows),)](
            self._scratch.partial(self.count),
            self._scratch.target_info(self.count),
            self.target_t,
            self.target,
            combined,
            self.count,
            self._scratch.blocks,
            self._head.weight.shape[0],
            int(self._scratch.statistics > 2),
            tile_vocab=module.TILE_VOCAB,
            block_rows=block_rows,
            block_blocks=64,
            num_warps=8,
        )
        return combined

    def block_masses(self) -> Tensor:
        """``[R, blocks]`` (a view): sums of 2^(t - shift) over each block, targets left out."""
        partial = self._scratch.partial(self.count)
        rescale = torch.exp2(partial[0].ceil().clamp(min=LOWEST_SHIFT) - self.shift)
        return (partial[1] * rescale).t()

    def weighted(self, vocab: slice) -> Tensor:
        """``[R]``: sum of gradient_v log2 p_v over the entries ``vocab`` of the last gradients."""
        blocks = slice(vocab.start // module.TILE_VOCAB, -(-vocab.stop // module.TILE_VOCAB))
        return self._scratch.partial(self.count)[0, blocks].sum(0)

    def finish(
        self, product: Tensor, from_product: Tensor, from_target: Tensor, vectors: Tensor
    ) -> None:
        """``vectors [K, N, H]`` at this tile's rows, from ``product [R, H]`` and W_y."""
        index = self.rows
        if isinstance(index, slice):
            index = torch.arange(index.start, index.start + self.count, device=product.device)
        count, all_rows, width = vectors.shape
        block = min(1024, triton.next_power_of_2(width))
        finish_vectors[(self.count, triton.cdiv(width, block))](
            product,
            self._head.weight,
            self.target,
            from_product.contiguous(),
            from_target.contiguous(),
            index,
            vectors,
            self.count,
            all_rows,
            width,
            self._head.weight.stride(0),
            count=count,
            block=block,
            num_warps=4,
        )

    def target_slope(self) -> Tensor:
        """``[R]``: the softcap's derivative at the target; 1 without a softcap."""
        if not self._cap:
            return torch.ones_like(self.row_scale)
        z = self.target_t.unsqueeze(1) / _LOG2E
        return self._head.cap_slope(self.rows, z).squeeze(1)

    def _launch(
        self,
        mode: int,
        vocab: slice,
        per_row: Tensor | None,
        out: Tensor | None,
        weighted: bool = False,
    ) -> None:
        arguments: Any = self._arguments
        partial = self._scratch.partial(self.count)
        arguments.partial = partial.data_ptr()
        arguments.partial_stride = self._scratch.blocks * self.count
        arguments.target_info = self._scratch.target_info(self.count).data_ptr()
        pointer = None if per_row is None else per_row.data_ptr()
        arguments.shift = arguments.gradient = pointer
        arguments.vocab_begin, arguments.vocab_end = vocab.start, vocab.stop
        arguments.vocab_tiles = -(-(vocab.stop - vocab.start) // module.TILE_VOCAB)
        device = self.hidden.device.index
        moments = mode != module.GRADIENT and self._scratch.statistics > 2
        variant = (mode, self._bias is not None, self._cap != 0, moments, weighted)
        function = module.kernel(*variant, device)
        module.launch(function, mode, self.hidden, self._head.weight, out, arguments)


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
