"""The opaque ops under ``fxrl::linear_logprob``, each with its eager reference and its shapes.

``linear_logprob_forward``   values, and the gradient vectors that the backward will only scale
``linear_logprob_scale``     the backward of a frozen head: incoming scalars times saved vectors
``linear_logprob_backward``  the backward that recomputes each tile: hidden, head, temperature

The reference runs on every device, in tiles of rows; nothing of size [N, V] exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fxrl.ops.linear_logprob_checks import OUTPUTS, check_sizes, check_target, parse_outputs
from fxrl.ops.linear_logprob_math import (
    LossHead,
    Tile,
    Workspace,
    evaluate,
    logit_grad,
    temperature_grad,
)
from fxrl.ops.linear_logprob_matmul import (
    accumulate_weight_grad,
    accumulation_dtype,
    backproject,
)

ForwardResult: TypeAlias = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]
BackwardResult: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]

_SCALE_BYTES = 16 * 2**20


def vector_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which d value / d hidden is kept for the backward.

    NOTE [Why float16 vectors are kept in float32]
    A GradScaler multiplies the loss by 2^16 so that small gradients survive float16. The vectors
    are made before that factor is known: a confident token's would be flushed to zero.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def reduce_to_temperature(per_row: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum a per-row temperature gradient ``[N]`` to the temperature's own shape."""
    if len(shape) == 0:
        return per_row.sum()
    return per_row.sum_to_size(shape)


@torch.library.custom_op("fxrl::linear_logprob_forward", mutates_args=())
def linear_logprob_forward(
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
    """The seven values, ``d value_k / d hidden`` ``[K, N, H]`` and ``d value_k / d T`` ``[K, N]``.

    K runs over ``grad_outputs``; what is not saved is empty.
    """
    head = LossHead(
        hidden, weight, target, bias, temperature, row_mask, scale, softcap, chunk_tokens
    )
    check_sizes(hidden, weight, target, bias, temperature, row_mask)
    check_target(target, row_mask, weight.shape[0])
    wanted = parse_outputs(outputs)
    saving = save_hidden_grad or save_temperature_grad
    names = parse_outputs(grad_outputs) if saving else ()
    factory = torch.empty if row_mask is None else torch.zeros
    results = new_forward(
        hidden, outputs, grad_outputs, save_hidden_grad, save_temperature_grad, factory
    )
    *values, vectors, factors = results
    space = Workspace(head)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in head.tiles(row_mask):
            tile = evaluate(head, rows, space, wanted, with_grad=bool(names))
            for name, value in zip(OUTPUTS, values, strict=True):
                if name in wanted:
                    value[rows] = tile.values[name].squeeze(1)
            for k, name in enumerate(names):
                weights = {name: head.row_slope(rows)}
                grad = logit_grad(tile, weights, space)
                if save_temperature_grad:
                    factors[k, rows] = temperature_grad(head, tile, weights, grad)
                if save_hidden_grad:
                    _through_cap_(tile, grad)
                    vectors[k, rows] = backproject(grad, weight).to(vectors.dtype)
    return results


@torch.library.custom_op("fxrl::linear_logprob_scale", mutates_args=())
def linear_logprob_scale(grads: Tensor, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """``sum_k grads[k, :, None] * vectors[k]`` as ``[N, H]``: wide arithmetic, rounded once."""
    _, num_rows, width = vectors.shape
    out = vectors.new_empty(num_rows, width, dtype=dtype)
    step = max(1, _SCALE_BYTES // max(1, width * grads.element_size()))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        out[rows] = (vectors[:, rows] * grads[:, rows, None]).sum(0).to(dtype)
    return out


@torch.library.custom_op("fxrl::linear_logprob_backward", mutates_args=())
def linear_logprob_backward(
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
    """Gradients of hidden, weight, bias, temperature for ``grads`` ``[K, N]``; unwanted: empty.

    dW is accumulated in one float32 (float64) ``[V, H]`` and rounded to ``weight``'s dtype once.
    """
    head = LossHead(
        hidden, weight, target, bias, temperature, row_mask, scale, softcap, chunk_tokens
    )
    names = parse_outputs(grad_outputs)
    space = Workspace(head)
    empty = hidden.new_zeros(0, dtype=head.dtype)
    d_hidden = hidden.new_zeros(hidden.shape if want_hidden else (0,))
    d_weight = empty.new_zeros(weight.shape if want_weight else (0,))
    d_bias = empty.new_zeros(weight.shape[0] if want_bias else 0)
    d_temperature = empty.new_zeros(hidden.shape[0] if want_temperature else 0)
    # A row whose incoming scalars are all zero contributes nothing: it is not projected again.
    live = (grads != 0).any(0)
    live = live if row_mask is None else live & row_mask
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in head.tiles(live):
            tile = evaluate(head, rows, space, names, with_grad=True)
            slope = head.row_slope(rows)
            weights = {name: grads[k, rows, None] * slope for k, name in enumerate(names)}
            grad = logit_grad(tile, weights, space)
            if want_temperature:
                d_temperature[rows] = temperature_grad(head, tile, weights, grad)
            _through_cap_(tile, grad)
            if want_hidden:
                d_hidden[rows] = backproject(grad, weight).to(hidden.dtype)
            if want_weight:
                accumulate_weight_grad(d_weight, grad, hidden[rows])
            if want_bias:
                d_bias += grad.sum(0)
    if want_temperature and temperature is not None:
        d_temperature = reduce_to_temperature(d_temperature, tuple(temperature.shape))
        d_temperature = d_temperature.to(temperature.dtype)
    if want_bias and bias is not None:
        d_bias = d_bias.to(bias.dtype)
    return d_hidden, d_weight.to(weight.dtype), d_bias, d_temperature


def _through_cap_(tile: Tile, grad: Tensor) -> None:
    if tile.cap_slope is not None:
        grad.mul_(tile.cap_slope)


def new_forward(
    hidden: Tensor,
    outputs: str,
    grad_outputs: str,
    save_hidden_grad: bool,
    save_temperature_grad: bool,
    factory: Callable[..., Tensor],
) -> ForwardResult:
    """Result tensors of ``linear_logprob_forward`` made by ``factory`` (zeros or empty)."""
    num_rows, width = hidden.shape
    wide, device = accumulation_dtype(hidden.dtype), hidden.device
    wanted, num_vectors = parse_outputs(outputs), len(parse_outputs(grad_outputs))

    def value(name: str) -> Tensor:
        dtype = torch.bool if name == "argmax_hit" else wide
        return factory(num_rows if name in wanted else 0, dtype=dtype, device=device)

    logprob, lse, entropy, argmax_hit, sum_p2, mean_logit, max_logit = map(value, OUTPUTS)
    vector_shape = (num_vectors, num_rows, width) if save_hidden_grad else (0,)
    factor_shape = (num_vectors, num_rows) if save_temperature_grad else (0,)
    vectors = factory(vector_shape, dtype=vector_dtype(hidden.dtype), device=device)
    factors = factory(factor_shape, dtype=wide, device=device)
    values = (logprob, lse, entropy, argmax_hit, sum_p2, mean_logit, max_logit)
    return (*values, vectors, factors)


@linear_logprob_forward.register_fake
def _(
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
    return new_forward(
        hidden, outputs, grad_outputs, save_hidden_grad, save_temperature_grad, torch.empty
    )


@linear_logprob_scale.register_fake
def _(grads: Tensor, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    return vectors.new_empty(vectors.shape[1:], dtype=dtype)


@linear_logprob_backward.register_fake
def _(
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
    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        if wanted and tensor is not None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=hidden.device)
        return hidden.new_empty(0)

    return (
        like(hidden, want_hidden),
        like(weight, want_weight),
        like(bias, want_bias),
        like(temperature, want_temperature),
    )
