"""``fxrl::linear_logprob_forward`` and ``_backward`` on CUDA: cuBLAS products, Triton in between.

Same tiles of rows, same values and gradients as the reference; a tile's scratch is its float32
logits and its gradient in the dtype that the next product takes.

NOTE [Why the logits stay float32 and their gradient does not]
A log-prob is a small difference of logits of order ten: bf16 logits would put an error of 3e-2 on
it, a policy ratio's whole clip range. The gradient only enters a sum over the vocabulary that is
accumulated in float32; rounding its terms to bf16 costs 2^-9 of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxrl.kernels.linear_logprob_launch import STATISTICS, TileKernels
from fxrl.ops.linear_logprob_checks import (
    DIFFERENTIABLE,
    OUTPUTS,
    check_sizes,
    check_target,
    parse_outputs,
)
from fxrl.ops.linear_logprob_math import LossHead
from fxrl.ops.linear_logprob_matmul import accumulate_weight_grad, backproject, project
from fxrl.ops.linear_logprob_opaque import (
    BackwardResult,
    ForwardResult,
    linear_logprob_backward,
    linear_logprob_forward,
    new_forward,
    reduce_to_temperature,
)


def register() -> None:
    """Attach both kernels to their ops for CUDA tensors."""
    linear_logprob_forward.register_kernel("cuda", forward)
    linear_logprob_backward.register_kernel("cuda", backward)


def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    row_mask: Tensor | None,
    scale: float,
    softcap: float,
    outputs: str,
    grad_outputs: str,
    chunk_tokens: int,
    save_hidden_grad: bool,
    save_temperature_grad: bool,
) -> ForwardResult:
    """See ``fxrl.ops.linear_logprob_opaque.linear_logprob_forward``."""
    head = LossHead(
        hidden, weight, target, bias, temperature, row_mask, scale, softcap, chunk_tokens
    )
    check_sizes(hidden, weight, target, bias, temperature, row_mask)
    check_target(target, row_mask, weight.shape[0])
    saving = save_hidden_grad or save_temperature_grad
    names = parse_outputs(grad_outputs) if saving else ()
    results = new_forward(
        hidden,
        outputs,
        grad_outputs,
        save_hidden_grad,
        save_temperature_grad,
        torch.empty if row_mask is None else torch.zeros,
    )
    *values, vectors, factors = results
    tile = _TileLoop(head, _narrow_grad(head) if names else None)
    per_vector = [tile.weights({name: None}) for name in names]
    with _on_device(hidden), torch.autocast(hidden.device.type, enabled=False):
        for rows in head.tiles(row_mask):
            logits, statistics = tile.evaluate(rows)
            for name in parse_outputs(outputs):
                column = statistics[:, STATISTICS.index(name)]
                values[OUTPUTS.index(name)][rows] = column.to(values[OUTPUTS.index(name)].dtype)
            for k, weights in enumerate(per_vector):
                grad, on_temperature = tile.differentiate(
                    rows, logits, statistics, weights[rows], want_temperature=save_temperature_grad
                )
                if on_temperature is not None:
                    factors[k, rows] = on_temperature
                if save_hidden_grad:
                    vectors[k, rows] = _backproject(grad, weight, head.dtype).to(vectors.dtype)
    return results


def backward(
    grads: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    row_mask: Tensor | None,
    scale: float,
    softcap: float,
    grad_outputs: str,
    chunk_tokens: int,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
    want_temperature: bool,
) -> BackwardResult:
    """See ``fxrl.ops.linear_logprob_opaque.linear_logprob_backward``."""
    head = LossHead(
        hidden, weight, target, bias, temperature, row_mask, scale, softcap, chunk_tokens
    )
    empty = hidden.new_zeros(0, dtype=head.dtype)
    d_hidden = hidden.new_zeros(hidden.shape if want_hidden else (0,))
    d_weight = empty.new_zeros(weight.shape if want_weight else (0,))
    d_bias = empty.new_zeros(weight.shape[0] if want_bias else 0)
    d_temperature = empty.new_zeros(hidden.shape[0] if want_temperature else 0)
    live = (grads != 0).any(0)
    live = live if row_mask is None else live & row_mask
    # A bias sums the gradient itself: its terms are not rounded first.
    tile = _TileLoop(head, head.dtype if want_bias else _narrow_grad(head))
    names = parse_outputs(grad_outputs)
    weights = tile.weights(dict(zip(names, grads, strict=True)))
    with _on_device(hidden), torch.autocast(hidden.device.type, enabled=False):
        for rows in head.tiles(live):
            logits, statistics = tile.evaluate(rows)
            grad, on_temperature = tile.differentiate(
                rows, logits, statistics, weights[rows], want_temperature=want_temperature
            )
            if on_temperature is not None:
                d_temperature[rows] = on_temperature
            if want_hidden:
                d_hidden[rows] = _backproject(grad, weight, head.dtype).to(hidden.dtype)
            if want_weight:
                _accumulate_weight_grad(d_weight, grad, hidden[rows])
            if want_bias:
                d_bias += grad.sum(0)
    if want_temperature and temperature is not None:
        d_temperature = reduce_to_temperature(d_temperature, tuple(temperature.shape))
        d_temperature = d_temperature.to(temperature.dtype)
    if want_bias and bias is not None:
        d_bias = d_bias.to(bias.dtype)
    return d_hidden, d_weight.to(weight.dtype), d_bias, d_temperature


class _TileLoop:
    """Scratch and launches that the tiles of one call share."""

    def __init__(self, head: LossHead, grad_dtype: torch.dtype | None) -> None:
        self._head = head
        self._kernels = TileKernels(head)
        shape = (min(head.tile_rows(), head.hidden.shape[0]), head.weight.shape[0])
        self._logits = head.hidden.new_empty(shape, dtype=head.dtype)
        self._grad = head.hidden.new_empty(0 if grad_dtype is None else shape, dtype=grad_dtype)

    def weights(self, incoming: dict[str, Tensor | None]) -> Tensor:
        """``[N, K]``: what multiplies d value_k / d x, in the order of ``DIFFERENTIABLE``.

        ``incoming[name]`` is ``[N]`` (None: 1); names left out have weight 0.
        """
        head = self._head
        slope = head.row_slope(slice(None)).squeeze(1)
        weights = slope.new_zeros(head.hidden.shape[0], len(DIFFERENTIABLE))
        for name, grad in incoming.items():
            weights[:, DIFFERENTIABLE.index(name)] = slope if grad is None else slope * grad
        return weights

    def evaluate(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Raw logits ``[R, V]`` (scratch) and their row statistics."""
        hidden = self._head.hidden[rows]
        logits = self._logits[: hidden.shape[0]]
        project(hidden, self._head.weight, out=logits)
        return logits, self._kernels.row_statistics(rows, logits)

    def differentiate(
        self,
        rows: slice | Tensor,
        logits: Tensor,
        statistics: Tensor,
        weights: Tensor,
        *,
        want_temperature: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Gradient of the raw logits (scratch), and of the temperature by row if wanted."""
        grad = self._grad[: logits.shape[0]]
        arguments = (rows, logits, statistics, weights, grad)
        if want_temperature:
            return grad, self._kernels.temperature_gradient(*arguments)
        self._kernels.logit_gradient(*arguments)
        return grad, None


def _on_device(tensor: Tensor) -> torch.cuda.device:
    """Triton launches on the current device, whichever its tensors are on."""
    return torch.cuda.device(tensor.device.index if tensor.is_cuda else -1)


def _narrow_grad(head: LossHead) -> torch.dtype:
    """bf16 where a product takes it; see NOTE [Why float16 gradients are multiplied in float32]."""
    narrow = head.hidden.is_cuda and head.hidden.dtype == torch.bfloat16
    return torch.bfloat16 if narrow else head.dtype


def _backproject(grad: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """``grad @ weight`` accumulated and returned in ``wide``."""
    if grad.dtype == wide:
        return backproject(grad, weight)
    return torch.mm(grad, weight, out_dtype=wide)


def _accumulate_weight_grad(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """``total += grad^T @ hidden`` in ``total``'s dtype, in one product where CUDA has it."""
    if grad.dtype == total.dtype:
        accumulate_weight_grad(total, grad, hidden)
    else:
        torch.addmm(total, grad.t(), hidden, out_dtype=total.dtype, out=total)
