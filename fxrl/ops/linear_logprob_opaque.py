"""The opaque ops under ``fxrl::linear_logprob``, each with its eager reference and its shapes.

``linear_logprob_forward``   values, and the gradient vectors that the backward will only scale
``linear_logprob_scale``     the backward of a frozen head: incoming scalars times saved vectors
``linear_logprob_backward``  the backward that recomputes each tile: hidden, head, temperature

The reference runs on every device, in tiles of rows; nothing of size [N, V] exists. A device's own
kernels are given to ``attach``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxrl.ops.linear_logprob_arguments import (
    BACKWARD_SCHEMA,
    FORWARD_SCHEMA,
    BackwardArguments,
    ForwardArguments,
    ForwardResult,
    Gradients,
)
from fxrl.ops.linear_logprob_checks import check_sizes, check_target
from fxrl.ops.linear_logprob_math import ReferenceTiles
from fxrl.ops.linear_logprob_matmul import full_precision
from fxrl.ops.linear_logprob_tiles import backward_tiles, forward_tiles

Forward = Callable[[ForwardArguments], ForwardResult]
Backward = Callable[[BackwardArguments], Gradients]
Scale = Callable[[Tensor, Tensor, torch.dtype], Tensor]
_Op = Callable[..., tuple[Tensor, ...]]

_SCALE_BYTES = 16 * 2**20


def reference_forward(arguments: ForwardArguments) -> ForwardResult:
    """The specification of ``linear_logprob_forward``."""
    return forward_tiles(arguments, ReferenceTiles(arguments.head).forward(arguments))


def reference_backward(arguments: BackwardArguments) -> Gradients:
    """The specification of ``linear_logprob_backward``."""
    return backward_tiles(arguments, ReferenceTiles(arguments.head).backward(arguments))


def _forward_op(run: Forward) -> _Op:
    """``run`` with the op's positional arguments, checked, as the dtypes of its operands say."""

    def op(*positional: Any) -> tuple[Tensor, ...]:
        arguments = ForwardArguments.unpack(positional)
        check_sizes(arguments.head)
        check_target(arguments.head)
        with torch.autocast(arguments.head.hidden.device.type, enabled=False), full_precision():
            return run(arguments).pack()

    return op


def _backward_op(run: Backward) -> _Op:
    def op(*positional: Any) -> tuple[Tensor, ...]:
        arguments = BackwardArguments.unpack(positional)
        with torch.autocast(arguments.head.hidden.device.type, enabled=False), full_precision():
            return run(arguments).pack(arguments)

    return op


linear_logprob_forward = torch.library.custom_op(
    "fxrl::linear_logprob_forward",
    _forward_op(reference_forward),
    mutates_args=(),
    schema=FORWARD_SCHEMA,
)
linear_logprob_backward = torch.library.custom_op(
    "fxrl::linear_logprob_backward",
    _backward_op(reference_backward),
    mutates_args=(),
    schema=BACKWARD_SCHEMA,
)


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


def attach(device_type: str, forward: Forward, backward: Backward, scale: Scale) -> None:
    """Run these instead of the reference for tensors of a device.

    The first two find sizes checked, autocast off and products in full precision.
    """
    linear_logprob_forward.register_kernel(device_type, _forward_op(forward))
    linear_logprob_backward.register_kernel(device_type, _backward_op(backward))
    linear_logprob_scale.register_kernel(device_type, scale)


@linear_logprob_forward.register_fake
def _(*positional: Any) -> tuple[Tensor, ...]:
    return ForwardArguments.unpack(positional).new_result(torch.empty).pack()


@linear_logprob_scale.register_fake
def _(grads: Tensor, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    return vectors.new_empty(vectors.shape[1:], dtype=dtype)


@linear_logprob_backward.register_fake
def _(*positional: Any) -> tuple[Tensor, ...]:
    arguments = BackwardArguments.unpack(positional)
    hidden, weight, _, bias, temperature, *_ = arguments.head

    def like(tensor: Tensor | None, wanted: bool) -> Tensor:
        if wanted and tensor is not None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=hidden.device)
        return hidden.new_empty(0)

    return (
        like(hidden, arguments.want_hidden),
        like(weight, arguments.want_weight),
        like(bias, arguments.want_bias),
        like(temperature, arguments.want_temperature),
    )
