"""``fxrl::linear_logprob_forward`` and ``_backward`` on CUDA: cuBLAS products, Triton in between.

Same tiles of rows, same values and gradients as the reference, for every dtype and GPU; a tile's
scratch is its float32 logits and their gradient in the dtype that the next product takes.

NOTE [Why the logits stay float32 and their gradient does not]
A log-prob is a small difference of logits of order ten: bf16 logits would put an error of 3e-2 on
it, a policy ratio's whole clip range. The gradient only enters a sum over the vocabulary that is
accumulated in float32; rounding its terms to bf16 costs up to 2^-8 of each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxrl.kernels.hopper import head as hopper
from fxrl.kernels.linear_logprob_launch import ROW_DATA, TileKernels
from fxrl.kernels.linear_logprob_scale import scale
from fxrl.ops.linear_logprob_arguments import (
    BackwardArguments,
    ForwardArguments,
    ForwardResult,
    Gradients,
)
from fxrl.ops.linear_logprob_checks import OUTPUTS
from fxrl.ops.linear_logprob_head import LossHead, Rows
from fxrl.ops.linear_logprob_matmul import backproject, product_dtype, project
from fxrl.ops.linear_logprob_opaque import attach
from fxrl.ops.linear_logprob_tiles import BackwardTile, ForwardTile, backward_tiles, forward_tiles


def register() -> None:
    """Attach the kernels to their ops for CUDA tensors."""
    attach("cuda", forward, backward, scale)


def forward(arguments: ForwardArguments) -> ForwardResult:
    """See ``fxrl.ops.linear_logprob_opaque.reference_forward``."""
    with _on_device(arguments.head.hidden):
        if hopper.serves(arguments.head):
            return hopper.forward(arguments, otherwise=general_forward)
        return general_forward(arguments)


def backward(arguments: BackwardArguments) -> Gradients:
    """See ``fxrl.ops.linear_logprob_opaque.reference_backward``."""
    with _on_device(arguments.head.hidden):
        # A bias sums the gradient before it is rounded: the general route has that.
        if hopper.serves(arguments.head) and not arguments.want_bias:
            return hopper.backward(arguments)
        return general_backward(arguments)


def general_forward(arguments: ForwardArguments) -> ForwardResult:
    """``forward`` for every dtype, size and GPU."""
    return forward_tiles(arguments, _forward_tile(arguments))


def general_backward(arguments: BackwardArguments) -> Gradients:
    """``backward`` for every dtype, size and GPU."""
    return backward_tiles(arguments, _backward_tile(arguments))


def _forward_tile(arguments: ForwardArguments) -> ForwardTile:
    """Values; with vectors also p in the product's dtype, and its product with the head."""
    head = arguments.head
    loop = _TileLoop(head, product_dtype(head.weight) if arguments.save_vectors else None)

    def run(rows: Rows) -> tuple[Mapping[str, Tensor], Tensor | None]:
        logits = loop.project(rows)
        values = dict(
            zip(OUTPUTS, loop.kernels.row_statistics(rows, logits).unbind(1), strict=True)
        )
        if not arguments.save_vectors:
            return values, None
        prob = loop.grad(logits)
        loop.kernels.probabilities(rows, logits, values["lse"], prob)
        return values, backproject(prob, head.weight)

    return run


def _backward_tile(arguments: BackwardArguments) -> BackwardTile:
    """The gradient of the raw logits in one pass over them."""
    head = arguments.head
    # A bias sums the gradient itself: its terms are not rounded first.
    loop = _TileLoop(head, head.dtype if arguments.want_bias else product_dtype(head.weight))
    row_data = _row_data(arguments)

    def run(rows: Rows) -> tuple[Tensor, Tensor | None]:
        logits = loop.project(rows)
        grad = loop.grad(logits)
        on_temperature = loop.kernels.logit_gradient(
            rows, logits, row_data[rows], grad, with_temperature=arguments.want_temperature
        )
        return grad, on_temperature

    return run


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


class _TileLoop:
    """Scratch and launches that the tiles of one call share."""

    def __init__(self, head: LossHead, grad_dtype: torch.dtype | None) -> None:
        self.kernels = TileKernels(head)
        self._head = head
        shape = (min(head.tile_rows(), head.hidden.shape[0]), head.weight.shape[0])
        self._logits = head.hidden.new_empty(shape, dtype=head.dtype)
        self._grad = head.hidden.new_empty(0 if grad_dtype is None else shape, dtype=grad_dtype)

    def project(self, rows: Rows) -> Tensor:
        """Raw logits ``[R, V]``."""
        hidden = self._head.hidden[rows]
        logits = self._logits[: hidden.shape[0]]
        project(hidden, self._head.weight, out=logits)
        return logits

    def grad(self, logits: Tensor) -> Tensor:
        """Scratch like ``logits`` in the gradient's dtype."""
        return self._grad[: logits.shape[0]]


def _on_device(tensor: Tensor) -> torch.cuda.device:
    """Triton launches on the current device, whichever its tensors are on."""
    return torch.cuda.device(tensor.device.index if tensor.is_cuda else -1)
