"""Products with a frozen weight of 8 or 4 bits, which is widened in parts, and rows of one.

    torch.ops.fxrl.dequantized_mm(rows, [values, scale], format, transpose)
    torch.ops.fxrl.dequantized_rows(ids, [values, scale], format, dtype)

    format   values                            scale
    fp8      float8_e4m3fn [N, K]              float32, as in ``fxrl.ops.fp8``
    int4     uint8 [N, K/2], two codes each    float32 [N, K/64]: (code - 8) * scale
    nf4      uint8 [N, K/2], two codes each    float32 [N, K/64]: NF4[code] * scale

The product is ``rows weight^T``, or ``rows weight`` where ``transpose``, in the rows' dtype: that
of the weight rounded to it. Some rows or columns of the weight are widened at a time and forgotten;
the backward is the same product the other way round, and reads what the forward read.
``dequantized_rows`` is an embedding's lookup: what is found is widened, and nothing else. NF4 are
quantiles of a normal distribution (Dettmers et al. 2023, arXiv:2305.14314, appendix E).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fxrl.dtypes import wide_dtype
from fxrl.ops import check_rows, turned_backward
from fxrl.ops.fp8 import BLOCK, E4M3, Recipe, dequantized, quantized_weight
from fxrl.ops.linear_logprob.matmul import slices

Format = Literal["fp8", "int4", "nf4"]
FORMATS: tuple[Format, ...] = ("fp8", "int4", "nf4")
#: ``widened``, or a faster one.
Widen = Callable[[Sequence[Tensor], str, torch.dtype], Tensor]
#: Entries of a row that share a scale, in 4 bits.
GROUP = 64
#: Entries of a weight that are widened at a time: 32 MiB in float32.
TILE = 2**23
#: And that are quantised at a time.
_PART = 2**20
#: By a device's type: its own ``widened``, and the entries that it takes at a time.
_ATTACHED: dict[str, tuple[Widen, int]] = {}
# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


def quantized(weight: Tensor, format: Format, recipe: Recipe = "row") -> tuple[Tensor, Tensor]:
    """Values and scales of a weight [N, K]; ``recipe`` is the layout of the scales in FP8. Raises
    ``ValueError`` if, in 4 bits, K is no multiple of ``GROUP``.

    Works on some rows at a time, so that little is alive in float32 beside the result, unless a
    single scale is for all rows.
    """
    columns = weight.shape[1]
    if format != "fp8" and columns % GROUP:
        raise ValueError(f"a weight of {columns} columns is no multiple of {GROUP}")
    step = max(1, _PART // max(1, columns))
    if format == "fp8" and recipe != "row":
        step = len(weight) if recipe == "tensor" else -(-step // BLOCK) * BLOCK
    parts = [_quantized(rows, format, recipe) for rows in torch.split(weight, step)]
    values, scales = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(scales)


def _quantized(weight: Tensor, format: Format, recipe: Recipe) -> tuple[Tensor, Tensor]:
    if format == "fp8":
        return quantized_weight(weight, recipe)
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, GROUP)
    most = groups.abs().amax(2)
    if format == "int4":
        scale = most / 7
        codes = (groups / scale.clamp_min(2.0**-100)[..., None]).round().clamp(-8, 7) + 8
    else:
        scale, table = most, torch.tensor(NF4, device=weight.device)
        between = (table[1:] + table[:-1]) / 2
        codes = torch.bucketize(groups / scale.clamp_min(2.0**-100)[..., None], between)
    codes = codes.to(torch.uint8).view(rows, columns)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale


def widened(weight: Sequence[Tensor], format: str, dtype: torch.dtype) -> Tensor:
    """A weight [N, K] in ``dtype``."""
    values, scale = weight
    if format == "fp8":
        return dequantized(values, scale, dtype)
    codes = torch.stack((values & 15, values >> 4), -1).flatten(1)
    wide = wide_dtype(dtype)
    if format == "int4":
        numbers = codes.to(wide) - 8
    else:
        numbers = torch.tensor(NF4, dtype=wide, device=values.device)[codes.int()]
    groups = numbers.view(*scale.shape, GROUP).mul_(scale[..., None])
    return groups.view(codes.shape).to(dtype)


@torch.library.custom_op(
    "fxrl::dequantized_mm",
    mutates_args=(),
    schema="(Tensor rows, Tensor[] weight, str format, bool transpose) -> Tensor",
)
def dequantized_mm(rows: Tensor, weight: Sequence[Tensor], format: str, transpose: bool) -> Tensor:
    """See the module; rows are [M, K], or [M, N] with ``transpose``."""
    widen, entries = _ATTACHED.get(rows.device.type, (widened, TILE))
    out = rows.new_empty(rows.shape[0], sizes(weight, format)[int(transpose)])
    for parts, columns in _tiles(weight, format, transpose, entries):
        tile = widen(parts, format, rows.dtype)
        torch.mm(rows, tile if transpose else tile.t(), out=out[:, columns])
    return out


@dequantized_mm.register_fake
def _(rows: Tensor, weight: Sequence[Tensor], format: str, transpose: bool) -> Tensor:
    return rows.new_empty((rows.shape[0], sizes(weight, format)[int(transpose)]))


turned_backward(dequantized_mm)


@torch.library.custom_op(
    "fxrl::dequantized_rows",
    mutates_args=(),
    schema="(Tensor ids, Tensor[] weight, str format, ScalarType dtype) -> Tensor",
)
def dequantized_rows(
    ids: Tensor, weight: Sequence[Tensor], format: str, dtype: torch.dtype
) -> Tensor:
    """See the module; ``ids`` have any shape, and the result is [*ids, K] in ``dtype``. Raises
    ``IndexError``, on a CPU, if there is no such row."""
    (values, scale), flat = weight, ids.reshape(-1)
    check_rows(flat, len(values))
    if len(scale) > 1:
        scale = scale[flat // _share(scale, 0, len(values))]
    widen, _ = _ATTACHED.get(ids.device.type, (widened, TILE))
    # Looked up as bytes: a gather of float8 is not everywhere.
    found = values.view(torch.uint8)[flat].view(values.dtype)
    return widen([found, scale], format, dtype).view(*ids.shape, -1)


@dequantized_rows.register_fake
def _(ids: Tensor, weight: Sequence[Tensor], format: str, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, sizes(weight, format)[1]), dtype=dtype)


def attach(device_type: str, widen: Widen, entries: int) -> None:
    """Widen so, and so many entries at a time, where weights are on such a device."""
    _ATTACHED[device_type] = widen, entries


def read(
    weight: Sequence[Tensor],
    format: str,
    dtype: torch.dtype,
    step: int,
    reader: Callable[[slice, Tensor], None],
) -> None:
    """Call ``reader`` with a slice of a weight's rows and these rows in ``dtype``, ``step`` rows at
    a time (a multiple of 128, or all). The rows are freed when it returns."""
    values, whole = weight[0], len(weight[0])
    for at in slices(whole, step):
        rows = [_part(values, 0, at, whole), *weight[1:]]
        reader(at, widened_rows(rows, format, dtype, at, whole))


def widened_rows(
    weight: Sequence[Tensor], format: str, dtype: torch.dtype, at: slice, whole: int
) -> Tensor:
    """The rows ``at`` (beginning at a multiple of 128) of a weight of ``whole`` rows, in ``dtype``.
    ``weight`` holds the values of these rows, perhaps as bytes, and the scales of all."""
    values, scale = weight
    widen, _ = _ATTACHED.get(values.device.type, (widened, TILE))
    values = values.view(E4M3) if format == "fp8" else values
    return widen([values, _part(scale, 0, at, whole)], format, dtype)


def sizes(weight: Sequence[Tensor], format: str) -> tuple[Any, Any]:
    """Outputs and inputs of a weight."""
    rows, columns = weight[0].shape
    return rows, columns if format == "fp8" else 2 * columns


def _tiles(
    weight: Sequence[Tensor], format: str, transpose: bool, entries: int
) -> Iterator[tuple[list[Tensor], slice]]:
    """Parts of a weight, and the columns of the result that each gives."""
    dim, shape = int(transpose), sizes(weight, format)
    step = max(BLOCK, entries // max(1, shape[1 - dim]) // BLOCK * BLOCK)
    for at in slices(shape[dim], step):
        yield [_part(one, dim, at, shape[dim]) for one in weight], at


def _part(one: Tensor, dim: int, at: slice, whole: int) -> Tensor:
    """The codes or scales of a slice of ``whole`` entries; several entries may share one of them:
    two share a byte of codes, a group or a block shares a scale."""
    if one.shape[dim] == 1:
        return one
    share = _share(one, dim, whole)
    return one.narrow(dim, at.start // share, -(-(at.stop - at.start) // share))


def _share(one: Tensor, dim: int, whole: int) -> int:
    """The number of entries that share one code or scale."""
    return min(n for n in (1, 2, GROUP, BLOCK) if -(-whole // n) == one.shape[dim])
