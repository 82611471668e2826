"""The backward that makes the logits' gradient: its coefficients per row, and the loop for dW.

With w_k the incoming gradient of value k times scale / T, the gradient of the raw logit v != y is

    p (a + b log2 p + c p) + d        a = w_lse - w_entropy entropy - 2 w_p2 sum_p2 - w_logprob
                                      b = -w_entropy ln 2    c = 2 w_p2    d = w_mean / V

times the softcap's slope; the target's entry is made apart, so that 1 - p_y is never subtracted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fxrl.kernels.hopper import plan
from fxrl.kernels.hopper.call import Call
from fxrl.kernels.hopper.products import add_product
from fxrl.kernels.hopper.tile import RowTile
from fxrl.ops.linear_logprob_arguments import BackwardArguments
from fxrl.ops.linear_logprob_checks import DIFFERENTIABLE
from fxrl.ops.linear_logprob_head import LossHead, Rows, slices

_LOG2E, _LN2 = 1 / math.log(2), math.log(2)


def coefficients(arguments: BackwardArguments) -> Tensor:
    """``[8, N]`` float32: log2-sum-exp, a, b, c, d, the gradient at the target, log2 p_y, and
    what a temperature's gradient adds to its weighted sum."""
    logprob, lse, entropy, sum_p2 = arguments.values
    logprob = logprob.clamp(min=-1e6)  # of a banned target: 0 * log 0 is 0
    zero = torch.zeros_like(lse)
    on = dict.fromkeys(DIFFERENTIABLE, zero)
    on |= {name: w.squeeze(1) for name, w in arguments.weights(slice(None)).items()}
    entropy = zero if entropy is None else entropy
    sum_p2 = zero if sum_p2 is None else sum_p2
    p = torch.exp(logprob)
    mean = on["mean_logit"] / arguments.head.weight.shape[0]
    by_p = on["lse"] - on["entropy"] * entropy - 2 * on["sum_p2"] * sum_p2
    at_target = p * (by_p - on["entropy"] * logprob + 2 * on["sum_p2"] * p)
    at_target = at_target - on["logprob"] * torch.expm1(logprob) + mean
    return torch.stack(
        [
            lse * _LOG2E,
            by_p - on["logprob"],
            -_LN2 * on["entropy"],
            2 * on["sum_p2"],
            mean,
            at_target,
            logprob * _LOG2E,
            (on["lse"] + on["mean_logit"]) * lse,
        ]
    )


def temperature_gradient(head: LossHead, weighted: Tensor, of_rows: Tensor) -> Tensor:
    """``[R]`` from the kernel's sum_v gradient_v log2 p_v ``[R]``; ``of_rows``: coefficients."""
    return -(_LN2 * weighted + of_rows[7]) / head.scale


class VocabLoop:
    """dW a chunk of the vocabulary at a time: no float32 copy of the head's size exists.

    NOTE [Why dW goes by vocabulary and dH by rows]
    Each sums over what the other loops over. With all rows' gradient of a chunk in memory its dW
    is one product, and dH, [N, H] in float32, is what accumulates; the other way round it would be
    dW, [V, H] in float32, gigabytes.
    """

    def __init__(
        self,
        head: LossHead,
        steps: plan.Plan,
        by_row: Tensor,
        selected: Tensor | None,
        *,
        weighted: bool,
    ) -> None:
        count = by_row.shape[1]
        self._index: Rows = slice(None)
        if selected is not None:
            self._index = selected
            temperature = head.temperature
            if temperature is not None and temperature.dim() and temperature.shape[0] > 1:
                temperature = temperature[selected]
            head = head._replace(
                hidden=head.hidden[selected],
                target=head.target[selected],
                temperature=temperature,
            )
        self._head, self._by_row, self._weighted = head, by_row, weighted
        self._rows, self._step = min(count, steps.rows), steps.vocab
        self._grad = head.hidden.new_empty(self._rows, self._step)
        self._weighted_sum = by_row.new_zeros(count)
        self._tile_rows = plan.launch_rows(head.hidden.shape[1])
        call = Call(head, None, self._tile_rows, 1)
        self._pieces = [(piece, self._tiles(piece, call)) for piece in slices(count, self._rows)]

    def _tiles(self, piece: slice, call: Call) -> list[tuple[slice, RowTile, Tensor]]:
        """Rows within the piece, their tile and their coefficients; made once for all chunks."""
        made = []
        for inner in slices(piece.stop - piece.start, self._tile_rows):
            rows = slice(piece.start + inner.start, piece.start + inner.stop)
            made.append((inner, RowTile(call, rows), self._by_row[:, rows].contiguous()))
        return made

    def run(self, d_weight: Tensor, d_hidden: Tensor | None, d_temperature: Tensor | None) -> None:
        """Fills the three; see ``fxrl.kernels.hopper.head.backward``."""
        hidden, weight = self._head.hidden, self._head.weight
        whole = len(self._pieces) == 1
        sums = self._by_row.new_empty(hidden.shape if d_hidden is not None else (0,))
        piece_sum = self._by_row.new_empty((0,) if whole else (self._step, weight.shape[1]))
        for vocab in slices(weight.shape[0], self._step):
            total = piece_sum[: vocab.stop - vocab.start]
            for piece, tiles in self._pieces:
                grad = self._gradient(piece, tiles, vocab)
                if d_hidden is not None:
                    add_product(sums[piece], grad, weight[vocab], begin=vocab.start == 0)
                if whole:
                    torch.mm(grad.t(), hidden, out=d_weight[vocab])
                else:
                    add_product(total, grad.t(), hidden[piece], begin=piece.start == 0)
            if not whole:
                d_weight[vocab] = total.to(d_weight.dtype)
        if d_hidden is not None:
            d_hidden[self._index] = sums.to(d_hidden.dtype)
        if d_temperature is not None:
            made = temperature_gradient(self._head, self._weighted_sum, self._by_row)
            d_temperature[self._index] = made

    def _gradient(
        self, piece: slice, tiles: list[tuple[slice, RowTile, Tensor]], vocab: slice
    ) -> Tensor:
        """``[rows of piece, entries of vocab]`` (scratch)."""
        out = self._grad[: piece.stop - piece.start, : vocab.stop - vocab.start]
        for inner, tile, of_tile in tiles:
            tile.gradient(vocab, of_tile, out[inner], self._weighted)
            if self._weighted:
                self._weighted_sum[piece][inner] += tile.weighted(vocab)
        return out
