"""``fxrl::linear_logprob_forward`` and ``_backward`` on CUDA: cuBLAS products, Triton in between.

Same tiles of rows, same values and gradients as the reference, for every dtype and GPU; a tile's
scratch is its float32 logits and their gradient in the dtype that the next product takes. Heads in
bf16 on Hopper take the route of ``fxrl.kernels.hopper``, where it serves.

NOTE [Why the logits stay float32 and their gradient does not]
A log-prob is a small difference of logits of order ten: bf16 logits would put an error of 3e-2 on
it, a policy ratio's whole clip range. The gradient only enters a sum over the vocabulary that is
accumulated in float32; rounding its terms to bf16 costs up to 2^-8 of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from fxrl.kernels.hopper import head as hopper
from fxrl.kernels.jit import on_device
from fxrl.kernels.linear_logprob.tile import (
    combine_statistics,
    gradient,
    partial_statistics,
    picked_rows,
    probabilities,
    scaled_sum,
)
from fxrl.ops.linear_logprob.arguments import (
    DIFFERENTIABLE,
    OUTPUTS,
    BackwardArguments,
    ForwardArguments,
    ForwardResult,
    Gradients,
    LossHead,
    Rows,
    RowValues,
)
from fxrl.ops.linear_logprob.kept import Kept, may_keep, new_kept
from fxrl.ops.linear_logprob.matmul import backproject, product_dtype, project, slices
from fxrl.ops.linear_logprob.op import attach
from fxrl.ops.linear_logprob.reference import backward_tiles, forward_tiles

#: Columns of what the gradient reads of a row: the forward's values, then weights by output.
ROW_DATA = ("logprob", "lse", "entropy", "sum_p2", "p_others", *DIFFERENTIABLE)

_PARTIALS = 6
_BLOCK = 4096  # logits of one program, all in registers: no running maximum to correct
_LOGITS_PER_WARP = 512  # 16 a thread: four loads of 16 bytes in flight, and no spilled register


def register() -> None:
    """Attach the kernels to their ops for CUDA tensors."""
    attach("cuda", forward, backward, scale, keeping, pick)


def forward(arguments: ForwardArguments) -> ForwardResult:
    """See ``fxrl.ops.linear_logprob.reference.reference_forward``."""
    with on_device(arguments.head.hidden):
        if hopper.serves(arguments.head):
            return hopper.forward(arguments)
        return general_forward(arguments)


def keeping(arguments: ForwardArguments) -> Kept:
    """See ``fxrl.ops.linear_logprob.kept.reference_keeping``."""
    with on_device(arguments.head.hidden):
        if hopper.serves(arguments.head):
            return hopper.keeping(arguments)
        return general_keeping(arguments)


def backward(arguments: BackwardArguments) -> Gradients:
    """See ``fxrl.ops.linear_logprob.reference.reference_backward``."""
    with on_device(arguments.head.hidden):
        # A bias sums the gradient before it is rounded: the general route has that.
        if hopper.serves(arguments.head) and not arguments.want_bias:
            return hopper.backward(arguments)
        return general_backward(arguments)


def run_both(asked: ForwardArguments) -> None:
    """The forward, and what its backward runs but for products of a trained head; what they give is
    dropped. Whatever they compile and load is there afterwards."""
    head, count = asked.head, len(asked.grad_outputs)
    with torch.no_grad():
        result = forward(asked)
        grads = head.hidden.new_ones(count, head.hidden.shape[0], dtype=head.dtype)
        if asked.save_vectors:
            scale(grads, result.vectors, head.hidden.dtype)
        elif head.hidden.requires_grad and {"logprob", "lse"} <= {*asked.outputs}:
            made = (result.values[n] if n in asked.outputs else None for n in RowValues._fields)
            given = grads, head, RowValues._make(made), asked.grad_outputs
            by_temperature = head.temperature is not None and head.temperature.requires_grad
            backward(BackwardArguments(*given, True, False, False, by_temperature))
        if may_keep(head, {*asked.grad_outputs}):
            keeping(asked)


def scale(grads: Tensor, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """See ``fxrl.ops.linear_logprob.op.linear_logprob_scale``; one pass over the saved vectors."""
    count, rows, width = vectors.shape
    out = vectors.new_empty(rows, width, dtype=dtype)
    if out.numel() == 0:
        return out
    block = _block(width)
    with on_device(vectors):
        scaled_sum[(rows, triton.cdiv(width, block))](
            grads, vectors, out, width, *grads.stride(), *vectors.stride(),
            count=count, block=block, num_warps=_num_warps(block),
        )  # fmt: skip
    return out


def pick(matrix: Tensor, rows: Tensor) -> Tensor:
    """``matrix[rows]``, of a part of wider rows, as fast as memory goes."""
    width = matrix.shape[1]
    out = matrix.new_empty(rows.shape[0], width)
    block = _block(width)
    with on_device(matrix):
        picked_rows[(rows.shape[0], triton.cdiv(width, block))](
            matrix, rows, out, width, matrix.stride(0), block=block, num_warps=_num_warps(block)
        )
    return out


def general_forward(arguments: ForwardArguments) -> ForwardResult:
    """``forward`` for every dtype, size and GPU."""
    weight, save = arguments.head.weight, arguments.save_vectors
    passes = _TilePasses(arguments.head, product_dtype(weight) if save else None)

    def run(rows: Rows) -> tuple[Mapping[str, Tensor], Tensor | None]:
        logits = passes.project(rows)
        values = dict(zip(OUTPUTS, passes.row_statistics(rows, logits).unbind(1), strict=True))
        if not save:
            return values, None
        return values, backproject(passes.probabilities(rows, logits, values["lse"]), weight)

    return forward_tiles(arguments, run)


def general_keeping(arguments: ForwardArguments) -> Kept:
    """``keeping`` for every dtype, size and GPU."""
    head, kept = arguments.head, new_kept(arguments)
    values, exponentials, masses = kept
    passes = _TilePasses(head, exponentials.dtype)
    for rows in slices(head.hidden.shape[0], head.tile_rows()):
        logits = passes.project(rows)
        made = dict(zip(OUTPUTS, passes.row_statistics(rows, logits).unbind(1), strict=True))
        for name in arguments.outputs:
            values[name][rows] = made[name].to(values[name].dtype)
        target, logprob = head.target[rows].unsqueeze(1), made["logprob"].unsqueeze(1)
        at_target = torch.expm1(logprob)
        if head.softcap:
            at_target *= head.cap_slope(rows, logprob + made["lse"].unsqueeze(1))
        entries = passes.probabilities(rows, logits, made["lse"])
        exponentials[rows] = entries.scatter_(1, target, at_target.to(entries.dtype))
        masses[rows] = -head.row_slope(rows).squeeze(1)
    return kept


def general_backward(arguments: BackwardArguments) -> Gradients:
    """``backward`` for every dtype, size and GPU."""
    head, wanted = arguments.head, arguments.want_temperature
    # A bias sums the gradient itself: its terms are not rounded first.
    passes = _TilePasses(head, head.dtype if arguments.want_bias else product_dtype(head.weight))
    row_data = _row_data(arguments)

    def run(rows: Rows) -> tuple[Tensor, Tensor | None]:
        logits = passes.project(rows)
        return passes.logit_gradient(rows, logits, row_data[rows], with_temperature=wanted)

    return backward_tiles(arguments, run)


def _row_data(arguments: BackwardArguments) -> Tensor:
    """``[N, len(ROW_DATA)]``: what a row's gradient is made from; 0 for what is not given."""
    values = arguments.values
    data = values.lse.new_zeros(values.lse.shape[0], len(ROW_DATA))
    columns = {name: v for name, v in values._asdict().items() if v is not None}
    columns["p_others"] = -torch.expm1(values.logprob)
    for name, column in columns.items():
        data[:, ROW_DATA.index(name)] = column
    first = ROW_DATA.index("p_others") + 1
    for name, weight in arguments.weights(slice(None)).items():
        data[:, first + ROW_DATA[first:].index(name)] = weight.squeeze(1)
    return data


class _TilePasses:
    """The launches over a logits tile, and the scratch, that the tiles of one call share."""

    def __init__(self, head: LossHead, grad_dtype: torch.dtype | None) -> None:
        self._head = head
        self._vocab = head.weight.shape[0]
        shape = (min(head.tile_rows(), head.hidden.shape[0]), self._vocab)
        self._logits = head.hidden.new_empty(shape, dtype=head.dtype)
        self._grad = head.hidden.new_empty(0 if grad_dtype is None else shape, dtype=grad_dtype)
        self._block = _block(self._vocab)
        self._splits: int = triton.cdiv(self._vocab, self._block)
        self._bias = None if head.bias is None else head.bias.to(head.dtype).contiguous()
        self._temperature: Tensor | None = None
        if head.temperature is not None:
            per_row = head.temperature.to(head.dtype).reshape(-1)
            self._temperature = per_row.expand(head.hidden.shape[0])

    def project(self, rows: Rows) -> Tensor:
        """Raw logits ``[R, V]`` (scratch)."""
        hidden = self._head.hidden[rows]
        logits = self._logits[: hidden.shape[0]]
        project(hidden, self._head.weight, out=logits)
        return logits

    def row_statistics(self, rows: Rows, logits: Tensor) -> Tensor:
        """``[R, len(OUTPUTS)]``, in that order, of the raw ``logits [R, V]``."""
        num_rows = logits.shape[0]
        target = self._head.target[rows].contiguous()
        # gather and not the kernel reads the target's logit: it asserts that the target exists.
        x_target = logits.gather(1, target.unsqueeze(1))
        partial = logits.new_empty(num_rows, self._splits, _PARTIALS)
        statistics = logits.new_empty(num_rows, len(OUTPUTS))
        shared = {"partial": partial, "partials": _PARTIALS, "splits": self._splits}
        shared |= self._options(rows)
        partial_statistics[(num_rows, self._splits)](
            logits, x_target, target, block=self._block, num_warps=_num_warps(self._block),
            **shared,
        )  # fmt: skip
        combine_statistics[(num_rows,)](
            x_target, target, statistics=statistics, columns=len(OUTPUTS),
            splits_block=triton.next_power_of_2(self._splits), num_warps=1, **shared,
        )  # fmt: skip
        return statistics

    def probabilities(self, rows: Rows, logits: Tensor, lse: Tensor) -> Tensor:
        """``[R, V]`` (scratch): p_v times the softcap's slope, 0 at the target."""
        prob = self._grad[: logits.shape[0]]
        probabilities[(logits.shape[0], self._splits)](
            logits, self._head.target[rows].contiguous(), lse=lse.contiguous(), prob=prob,
            block=self._block, num_warps=_num_warps(self._block), **self._options(rows),
        )  # fmt: skip
        return prob

    def logit_gradient(
        self, rows: Rows, logits: Tensor, row_data: Tensor, *, with_temperature: bool
    ) -> tuple[Tensor, Tensor | None]:
        """``[R, V]`` (scratch) for ``row_data [R, len(ROW_DATA)]``.

        And, if asked, what it belongs to derived by the temperature, ``[R]``.
        """
        grad = self._grad[: logits.shape[0]]
        weighted = logits.new_empty(logits.shape[0], self._splits) if with_temperature else None
        gradient[(logits.shape[0], self._splits)](
            logits, self._head.target[rows].contiguous(), row_data=row_data, grad=grad,
            weighted=weighted, wants_weighted=with_temperature, splits=self._splits,
            columns=len(ROW_DATA), block=self._block, num_warps=_num_warps(self._block),
            **self._options(rows),
        )  # fmt: skip
        if weighted is None:
            return grad, None
        first = len(ROW_DATA) - len(DIFFERENTIABLE)
        shift = row_data[:, first + DIFFERENTIABLE.index("lse")] + row_data[:, -1]
        return grad, -(weighted.sum(1) + shift * row_data[:, 1]) / self._head.scale

    def _options(self, rows: Rows) -> dict[str, Any]:
        temperature = None if self._temperature is None else self._temperature[rows]
        return {
            "bias": self._bias,
            "temperature": temperature,
            "temperature_stride": 0 if temperature is None else temperature.stride(0),
            "vocab": self._vocab,
            "scale": float(self._head.scale),
            "softcap": float(self._head.softcap),
            "lowest": torch.finfo(self._head.dtype).min,
            "has_bias": self._bias is not None,
            "has_temperature": temperature is not None,
        }


def _block(width: int) -> int:
    """Entries of a row that one program takes."""
    return min(_BLOCK, max(16, int(triton.next_power_of_2(width))))


def _num_warps(block: int) -> int:
    return max(1, block // _LOGITS_PER_WARP)
