"""A tile of rows of the loss head on Hopper, and the launches that fill the call's memory."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from fxrl.kernels.hopper import module
from fxrl.kernels.hopper.call import Call
from fxrl.kernels.hopper.rows import combine_blocks, finish_vectors, target_logits


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
            self.hidden,
            weight,
            self.target,
            bias,
            self.row_scale,
            self.target_t,
            self.shift,
            weight.shape[1],
            self.hidden.stride(0),
            weight.stride(0),
            cap=self.call.cap,
            has_bias=bias is not None,
            block=1024,
            num_warps=4,
        )

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
        block_rows = 32
        combine_blocks[(triton.cdiv(self.count, block_rows),)](
            self.call.partial(self.count),
            self.call.target_info(self.count),
            self.target_t,
            self.target,
            self.call.combined[:, self.rows],
            self.count,
            self.call.combined.stride(0),
            self.call.blocks,
            self.call.head.weight.shape[0],
            int(self.call.statistics > 2),
            tile_vocab=module.TILE_VOCAB,
            block_rows=block_rows,
            block_blocks=64,
            num_warps=8,
        )

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
            product,
            weight,
            self.target,
            call.combined[:, self.rows],
            call.slope[self.rows],
            self.target_t,
            self.row_scale,
            call.index[self.rows],
            vectors,
            call.combined.stride(0),
            all_rows,
            width,
            weight.stride(0),
            logprob_at=_place("logprob", names),
            lse_at=_place("lse", names),
            capped=call.cap != 0.0,
            block=block,
            num_warps=4,
        )

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
