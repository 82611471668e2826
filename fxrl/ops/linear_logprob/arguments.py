"""What the ops of the loss head take and give, in one place for every implementation.

``LossHead`` and ``RowValues`` say the ops' arguments, names, types and defaults, once:
``schema_of`` writes them into the schemas, ``unpack`` makes the positional arguments of an opaque
op one value, which the reference and every device kernel receive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import torch
from torch import Tensor

from fxrl.dtypes import wide_dtype
from fxrl.ops.linear_logprob.matmul import slices

OUTPUTS = ("logprob", "lse", "entropy", "argmax_hit", "sum_p2", "mean_logit", "max_logit")
DIFFERENTIABLE = ("logprob", "lse", "entropy", "sum_p2", "mean_logit")
MADE_IN_FORWARD = ("logprob", "lse")

Rows: TypeAlias = slice | Tensor

_CPU_TILE_BYTES = 32 * 2**20
_GPU_TILE_BYTES = 320 * 2**20
_GPU_TILE_STEP = 128  # a GEMM's tile: rows beyond a multiple of it cost as much as a full one


class LossHead(NamedTuple):
    """The arguments that every op of the loss head begins with."""

    hidden: Tensor  # ``[N, H]``, floating
    weight: Tensor  # ``[V, H]`` in hidden's dtype
    target: Tensor  # ``[N]`` int64, in [0, V) where ``row_mask`` is True
    bias: Tensor | None = None  # ``[V]``
    temperature: Tensor | None = None  # ``[]``, ``[1]`` or ``[N]``, floating
    # ``[N]`` bool; a False row is not projected: value 0, gradient 0.
    row_mask: Tensor | None = None
    scale: float = 1.0  # of the raw logits
    softcap: float = 0.0  # 0 is none
    chunk_tokens: int = 0  # rows per tile; 0 is as many as keep a logits tile small

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The tensors that can have a gradient, in the order in which a backward returns them."""
        return self.hidden, self.weight, self.bias, self.temperature

    @property
    def trains_weights(self) -> bool:
        """Whether the weight or the bias has a gradient."""
        return any(t is not None and t.requires_grad for t in (self.weight, self.bias))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of logits, statistics and accumulated gradients."""
        return wide_dtype(self.hidden.dtype)

    def on_one_device(self) -> LossHead:
        """Move a temperature that is a single number from the CPU, where it may stay as everywhere
        in PyTorch."""
        if self.temperature is None or self.temperature.dim():
            return self
        return self._replace(temperature=self.temperature.to(self.hidden.device))

    def tile_rows(self) -> int:
        """Rows per tile: what the caller asked for, else what keeps one logits tile small.

        It must not depend on which outputs or gradients are wanted: a GEMM may round differently
        for another number of rows, and scoring has to be bitwise equal to training.
        """
        if self.chunk_tokens > 0:
            return self.chunk_tokens
        on_cpu = self.hidden.device.type == "cpu"
        budget = _CPU_TILE_BYTES if on_cpu else _GPU_TILE_BYTES
        rows = budget // (self.weight.shape[0] * self.dtype.itemsize)
        step = 16 if on_cpu or rows < _GPU_TILE_STEP else _GPU_TILE_STEP
        return max(1, rows // step * step if rows >= step else rows)

    def tiles(self, row_mask: Tensor | None) -> Iterator[Rows]:
        """Row selections that cover ``row_mask`` (all rows if None), at most a tile each."""
        selected = self.selected(row_mask)
        count = self.hidden.shape[0] if selected is None else selected.shape[0]
        for rows in slices(count, self.tile_rows()):
            yield rows if selected is None else selected[rows]

    def of(self, rows: Rows) -> LossHead:
        """The head of some rows."""
        temperature, mask = self.temperature, self.row_mask
        if temperature is not None and temperature.numel() > 1:
            temperature = temperature[rows]
        return self._replace(
            hidden=self.hidden[rows],
            target=self.target[rows],
            temperature=temperature,
            row_mask=None if mask is None else mask[rows],
        )

    def selected(self, row_mask: Tensor | None) -> Tensor | None:
        """Indices of the rows where ``row_mask`` is True; None is all rows, in and out."""
        return None if row_mask is None else row_mask.nonzero().squeeze(1)

    def row_temperature(self, rows: Rows) -> Tensor | None:
        """``[R, 1]`` or ``[1, 1]`` in the accumulation dtype."""
        if self.temperature is None:
            return None
        temperature = self.temperature.to(self.dtype).reshape(-1, 1)
        return temperature if temperature.shape[0] == 1 else temperature[rows]

    def row_slope(self, rows: Rows) -> Tensor:
        """``scale / T``, the row-wise part of dz/dx: ``[R, 1]`` or ``[1, 1]``."""
        temperature = self.row_temperature(rows)
        if temperature is None:
            return torch.full((1, 1), self.scale, dtype=self.dtype, device=self.hidden.device)
        return self.scale / temperature

    def cap_slope(self, rows: Rows, logits: Tensor) -> Tensor:
        """``1 - tanh^2`` where the transformed logits ``[R, 1]`` are ``logits``; with a softcap."""
        temperature = self.row_temperature(rows)
        capped = (logits if temperature is None else logits * temperature) / self.softcap
        return 1 - capped.clamp(-1, 1).square()


class RowValues(NamedTuple):
    """What the forward found per row ``[N]``; entropy and sum_p2 only where a gradient reads them.

    With the transformed logits z of a row: ``p_v = exp(z_v - lse)`` for v != y, ``p_y =
    exp(logprob)`` and ``1 - p_y = -expm1(logprob)``, so that no gradient needs the row's
    statistics a second time. ``lse`` is rounded to one part in 2^24, as every z_v is.
    """

    logprob: Tensor
    lse: Tensor
    entropy: Tensor | None
    sum_p2: Tensor | None

    def of(self, rows: Rows) -> RowValues:
        """The values of ``rows``, each ``[R, 1]``."""
        return RowValues._make(None if v is None else v[rows].unsqueeze(1) for v in self)


_HEAD, _VALUES = len(LossHead._fields), len(RowValues._fields)
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    int: "SymInt",
    str: "str",
    torch.dtype: "ScalarType",
}


def schema_of(fields: Any, *, with_defaults: bool = False) -> str:
    """Fields as arguments of an op, on request those with a default by keyword only."""
    made = []
    for name, hint in get_type_hints(fields).items():
        default = ""
        if with_defaults and name in fields._field_defaults:
            default = f"={fields._field_defaults[name]}"
            if "*" not in made:
                made.append("*")
        made.append(f"{_SCHEMA_TYPES[hint]} {name}{default}")
    return ", ".join(made)


def tensors(count: int) -> str:
    """What an op returns that gives so many tensors."""
    return f"({', '.join(['Tensor'] * count)})"


def parse_outputs(text: str) -> tuple[str, ...]:
    """``"logprob,entropy"`` as names; the empty text names none."""
    return tuple(name for name in text.split(",") if name)


def made_in_forward(weights_trained: bool, differentiated: Collection[str]) -> bool:
    """Whether the forward makes the gradients; see NOTE [Why the forward makes the gradient]."""
    return not weights_trained and {*differentiated} <= {*MADE_IN_FORWARD}


def in_order(names: Collection[str]) -> tuple[str, ...]:
    """Names of outputs in the order of ``OUTPUTS``."""
    return tuple(name for name in OUTPUTS if name in names)


def joined_outputs(names: Collection[str]) -> str:
    """Names as ``parse_outputs`` reads them."""
    return ",".join(in_order(names))


def vector_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which d value / d hidden is kept for the backward.

    NOTE [Why float16 vectors are kept in float32]
    A GradScaler multiplies the loss by 2^16 so that small gradients survive float16. The vectors
    are made before that factor is known: a confident token's would be flushed to zero.
    """
    return torch.float32 if dtype == torch.float16 else dtype


@dataclass(frozen=True, slots=True)
class ForwardArguments:
    """Arguments of ``linear_logprob_forward``."""

    head: LossHead
    outputs: tuple[str, ...]  # the values to compute, of ``OUTPUTS``
    grad_outputs: tuple[str, ...]  # those that are differentiated
    # Make ``d value / d hidden`` of each of ``grad_outputs``, which then are ``logprob``, ``lse``
    # or both; ``outputs`` holds both.
    save_vectors: bool

    @classmethod
    def unpack(cls, arguments: Sequence[Any]) -> ForwardArguments:
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
    """Results of ``linear_logprob_forward``."""

    # Every one of ``OUTPUTS``, ``[N]``; ``[0]`` if not asked for; 0 in a masked row.
    values: dict[str, Tensor]
    vectors: Tensor  # ``d grad_outputs[k] / d hidden`` as ``[K, N, H]``, or ``[0]``

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
        grads, *rest = arguments
        head, values = LossHead(*rest[:_HEAD]), RowValues(*rest[_HEAD : _HEAD + _VALUES])
        grad_outputs, *wants = rest[_HEAD + _VALUES :]
        return cls(grads, head, values, parse_outputs(grad_outputs), *wants)

    @property
    def wants(self) -> tuple[bool, bool, bool, bool]:
        """Which gradients are wanted, in the order of ``LossHead.trained``."""
        return self.want_hidden, self.want_weight, self.want_bias, self.want_temperature

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
    """What a backward fills; unwanted ones are ``[0]``."""

    hidden: Tensor  # ``[N, H]`` in hidden's dtype
    weight: Tensor  # ``[V, H]`` in the accumulation dtype, or rounded to the weight's already
    bias: Tensor  # ``[V]`` in the accumulation dtype
    temperature: Tensor  # ``[N]``, by row, in the accumulation dtype

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
