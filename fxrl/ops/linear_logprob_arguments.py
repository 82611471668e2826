"""What the opaque loss-head ops take and give, in one place for every implementation.

The schemas are written once, as text; ``unpack`` makes the positional arguments one value, which
the reference and every device kernel receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxrl.ops.linear_logprob_checks import OUTPUTS, parse_outputs
from fxrl.ops.linear_logprob_head import HEAD_SCHEMA, VALUES_SCHEMA, LossHead, Rows, RowValues

FORWARD_SCHEMA = (
    f"({HEAD_SCHEMA}, str outputs, str grad_outputs, bool save_vectors)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    f"(Tensor grads, {HEAD_SCHEMA}, {VALUES_SCHEMA}, str grad_outputs, "
    "bool want_hidden, bool want_weight, bool want_bias, bool want_temperature)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_HEAD, _VALUES = len(LossHead._fields), len(RowValues._fields)


def vector_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which d value / d hidden is kept for the backward.

    NOTE [Why float16 vectors are kept in float32]
    A GradScaler multiplies the loss by 2^16 so that small gradients survive float16. The vectors
    are made before that factor is known: a confident token's would be flushed to zero.
    """
    return torch.float32 if dtype == torch.float16 else dtype


@dataclass(frozen=True, slots=True)
class ForwardArguments:
    """Arguments of ``linear_logprob_forward``.

    Attributes:
        outputs: the values to compute, of ``OUTPUTS``.
        grad_outputs: those that are differentiated.
        save_vectors: make ``d value / d hidden`` of each of ``grad_outputs``, which then are
            ``logprob``, ``lse`` or both; ``outputs`` holds both.
    """

    head: LossHead
    outputs: tuple[str, ...]
    grad_outputs: tuple[str, ...]
    save_vectors: bool

    @classmethod
    def unpack(cls, arguments: Sequence[Any]) -> ForwardArguments:
        """From the op's positional arguments."""
        outputs, grad_outputs, save_vectors = arguments[_HEAD:]
        head = LossHead(*arguments[:_HEAD])
        return cls(head, parse_outputs(outputs), parse_outputs(grad_outputs), save_vectors)

    def new_result(self, factory: Callable[..., Tensor] | None = None) -> ForwardResult:
        """Result tensors to fill: zeros where a mask leaves rows out."""
        if factory is None:
            factory = torch.empty if self.head.row_mask is None else torch.zeros
        num_rows, width = self.head.hidden.shape
        dtype, device = self.head.hidden.dtype, self.head.hidden.device
        values = {
            name: factory(
                num_rows if name in self.outputs else 0,
                dtype=torch.bool if name == "argmax_hit" else self.head.dtype,
                device=device,
            )
            for name in OUTPUTS
        }
        shape = (len(self.grad_outputs), num_rows, width) if self.save_vectors else (0,)
        return ForwardResult(values, factory(shape, dtype=vector_dtype(dtype), device=device))


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Results of ``linear_logprob_forward``.

    Attributes:
        values: every one of ``OUTPUTS``, ``[N]``; ``[0]`` if not asked for; 0 in a masked row.
        vectors: ``d grad_outputs[k] / d hidden`` as ``[K, N, H]``, or ``[0]``.
    """

    values: dict[str, Tensor]
    vectors: Tensor

    def pack(self) -> tuple[Tensor, ...]:
        """As the op returns them."""
        return (*(self.values[name] for name in OUTPUTS), self.vectors)


@dataclass(frozen=True, slots=True)
class BackwardArguments:
    """Arguments of ``linear_logprob_backward``: ``grads [K, N]`` for ``grad_outputs``."""

    grads: Tensor
    head: LossHead
    values: RowValues
    grad_outputs: tuple[str, ...]
    want_hidden: bool
    want_weight: bool
    want_bias: bool
    want_temperature: bool

    @classmethod
    def unpack(cls, arguments: Sequence[Any]) -> BackwardArguments:
        """From the op's positional arguments."""
        grads, *rest = arguments
        head, values = LossHead(*rest[:_HEAD]), RowValues(*rest[_HEAD : _HEAD + _VALUES])
        grad_outputs, *wants = rest[_HEAD + _VALUES :]
        return cls(grads, head, values, parse_outputs(grad_outputs), *wants)

    def live_rows(self) -> Tensor:
        """``[N]`` bool. A row whose incoming scalars are all zero is not projected again."""
        live = (self.grads != 0).any(0)
        return live if self.head.row_mask is None else live & self.head.row_mask

    def weights(self, rows: Rows) -> dict[str, Tensor]:
        """``[R, 1]`` by name: the incoming scalar times the row's part of dz/dx, ``scale / T``."""
        slope = self.head.row_slope(rows)
        return {
            name: self.grads[k, rows].unsqueeze(1) * slope
            for k, name in enumerate(self.grad_outputs)
        }

    def new_gradients(self) -> Gradients:
        """Zeros to accumulate into."""
        hidden, weight = self.head.hidden, self.head.weight
        empty = hidden.new_zeros(0, dtype=self.head.dtype)
        return Gradients(
            hidden.new_zeros(hidden.shape if self.want_hidden else (0,)),
            empty.new_zeros(weight.shape if self.want_weight else (0,)),
            empty.new_zeros(weight.shape[0] if self.want_bias else 0),
            empty.new_zeros(hidden.shape[0] if self.want_temperature else 0),
        )


@dataclass(slots=True)
class Gradients:
    """What a backward fills; unwanted ones are ``[0]``.

    Attributes:
        hidden: ``[N, H]`` in hidden's dtype.
        weight: ``[V, H]`` in the accumulation dtype, or rounded to the weight's already.
        bias: ``[V]`` in the accumulation dtype.
        temperature: ``[N]``, by row, in the accumulation dtype.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    temperature: Tensor

    def pack(self, arguments: BackwardArguments) -> tuple[Tensor, ...]:
        """As the op returns them: each in its argument's shape and dtype."""
        _, weight, _, bias, temperature, *_ = arguments.head
        d_bias, d_temperature = self.bias, self.temperature
        if arguments.want_bias and bias is not None:
            d_bias = d_bias.to(bias.dtype)
        if arguments.want_temperature and temperature is not None:
            d_temperature = reduce_to_temperature(d_temperature, temperature)
        return self.hidden, self.weight.to(weight.dtype), d_bias, d_temperature


def reduce_to_temperature(per_row: Tensor, temperature: Tensor) -> Tensor:
    """Sum a per-row temperature gradient ``[N]`` to the temperature's own shape and dtype."""
    total = per_row.sum_to_size(temperature.shape) if temperature.dim() else per_row.sum()
    return total.to(temperature.dtype)
