"""Products in FP8 with one of low rank added in the epilogue: ``scaled_product.cu``."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxrl.kernels.hopper import module
from fxrl.kernels.jit import on_device

_TILE = 256
_DEPTH = 128  # e4m3 numbers of a step
_PAD = 8  # bf16 numbers in the 16 bytes that TMA wants a row of the result to be a multiple of


class Arguments(ctypes.Structure):
    """``struct Arguments`` of ``scaled_product.cu``."""

    _fields_ = (
        ("row_scale", ctypes.c_void_p),
        ("column_scale", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("k_steps", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("row_pairs", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
    )


def serves(a: Tensor, b: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether ``product`` multiplies what lies so: on Hopper, rows apart and 16 bytes aligned."""
    return (
        torch.cuda.get_device_capability(a.device) == (9, 0)
        and left.dtype == right.dtype == torch.bfloat16
        and b.shape[0] % _PAD == 0
        and all(one.numel() > 0 and module.aligned(one) for one in (a, b, left, right))
        and module.available()
    )


def product(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor | None, left: Tensor, right: Tensor
) -> Tensor:
    """``(a * scale_a) (b * scale_b)^T + left right^T`` in bf16, rounded once.

    ``a`` [M, K] and ``b`` [N, K] are e4m3 with float32 scales [M, 1] and [N, 1], contiguous (no
    ``scale_b`` stands for ones); ``left`` [M, R] and ``right`` [N, R] are bf16.
    """
    (rows, depth), columns = a.shape, b.shape[0]
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=a.device)
    maps = [
        module.tensor_map(a, module.TILE_ROWS),
        module.tensor_map(b, _TILE // module.CLUSTER),
        module.tensor_map(left, module.TILE_ROWS),
        module.tensor_map(right, _TILE // module.CLUSTER),
        module.tensor_map(out, 64),
    ]
    arguments = Arguments(
        row_scale=scale_a.data_ptr(),
        column_scale=None if scale_b is None else scale_b.data_ptr(),
        rows=rows,
        columns=columns,
        k_steps=-(-depth // _DEPTH),
        rank=left.shape[1],
        row_pairs=-(-rows // _TILE),
        column_tiles=-(-columns // _TILE),
    )
    function = _kernel(scale_b is not None, a.device.index)
    tiles = arguments.row_pairs * arguments.column_tiles
    with on_device(a):
        module.launch_tiles(function, maps, arguments, tiles, module.shared_bytes(True), a.device)
    return out


@cache
def _kernel(columns: bool, device: int) -> Any:
    defines = {"COLUMNS": int(columns)}
    return module.loaded("scaled_product", defines, device, module.shared_bytes(True))
