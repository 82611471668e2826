"""What torch makes of a given size, which it takes for a constant: ``linspace``, ``triu_indices``.

Each length would be captured anew, and a size that data says could not be at all. These ops are
torch's own, run with the size that there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_more: Any = torch.sym_max  # which have no types
_less: Any = torch.sym_min


def _op(name: str, own: Callable[..., Tensor], given: str, shape: Callable[..., Any]) -> Any:
    """``own`` as an op; ``shape`` tells its result's from what is ``given``."""

    def run(*args: Any) -> Tensor:
        *sizes, dtype, device = args
        return own(*sizes, dtype=dtype, device=device)

    def fake(*args: Any) -> Tensor:
        *sizes, dtype, device = args
        return torch.empty(shape(*sizes), dtype=dtype, device=device)

    schema = f"({given}, ScalarType dtype, Device device) -> Tensor"
    made = torch.library.custom_op(f"fxrl::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(fake)
    return getattr(torch.ops.fxrl, name).default


def _above(rows: Any, columns: Any, offset: Any) -> Any:
    """How many entries of a matrix are on a diagonal or above it."""
    widest = _more(columns - _more(offset, 0), 0)
    whole = _less(_more(-offset, 0), rows)  # rows of which all is above it
    fewer = _less(rows - whole, widest)  # rows of one entry less each
    return whole * columns + fewer * widest - fewer * (fewer - 1) // 2


def _below(rows: Any, columns: Any, offset: Any) -> Any:
    return rows * columns - _above(rows, columns, offset + 1)


_MATRIX = "SymInt row, SymInt col, SymInt offset"
_spaced = _op(
    "linspace", torch.linspace, "Scalar start, Scalar end, SymInt steps", lambda *of: of[-1]
)
_upper = _op("triu_indices", torch.triu_indices, _MATRIX, lambda *of: (2, _above(*of)))
_lower = _op("tril_indices", torch.tril_indices, _MATRIX, lambda *of: (2, _below(*of)))


# What is traced for torch's own: an empty tensor knows which dtype and device are the default.
def _linspace(start: Any, end: Any, steps: int, dtype: Any = None, device: Any = None) -> Tensor:
    like = torch.empty(0, dtype=dtype, device=device)
    made: Tensor = _spaced(start, end, steps, like.dtype, like.device)
    return made


def _indices(op: Any) -> Callable[..., Tensor]:
    def of_matrix(
        row: int, col: int, offset: int = 0, dtype: Any = torch.long, device: Any = None
    ) -> Tensor:
        like = torch.empty(0, dtype=dtype, device=device)
        made: Tensor = op(row, col, offset, like.dtype, like.device)
        return made

    return of_matrix


def _of_numbers(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """``torch.as_tensor(len(ids))``: of sizes torch knows ``tensor`` alone, and so of truths."""
    return torch.tensor(data, dtype=dtype, device=device)


SIZED: dict[Any, Callable[..., Tensor]] = {
    torch.as_tensor: _of_numbers,
    torch.asarray: lambda obj, *, dtype=None, device=None: _of_numbers(obj, dtype, device),
    torch.linspace: _linspace,
    torch.triu_indices: _indices(_upper),
    torch.tril_indices: _indices(_lower),
}
