"""Compiles ``loss_head.cu`` with NVRTC, once per variant and machine, and launches it.

NOTE [Why CUDA C++ here and not Triton]
The loss head is bound by the tensor cores: it is as fast as its matrix product, and what the
epilogue adds must hide behind it. At 16384 x 4096 x 151936 on an H200 (cuBLAS 29.0 ms) this GEMM
takes 28.1 ms without its epilogue, 29.3 with it, 30.5 without multicast; the general route, whose
Triton passes read the logits from memory, 35.5 to 39.4. Triton 3.6 has no warp specialization on
Hopper that keeps one warpgroup's epilogue under the other's product, its Gluon no multicast, and
neither says in which scope a barrier is released, which was worth 4.5 ms. NVRTC and the driver's
bindings are installed with torch's CUDA builds on Linux: nothing to install, no compiler to find.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxrl.errors import FxrlError

TILE_ROWS, TILE_VOCAB, TILE_DEPTH = 128, 256, 64
CLUSTER = 2
_THREADS = 384
_STAGES_BYTES = 4 * (TILE_ROWS + TILE_VOCAB) * TILE_DEPTH * 2
_STAGED_BYTES = 4 * 64 * 64 * 2
_BARRIER_BYTES = 64

STATISTICS, EXPONENTIALS, GRADIENT = 0, 1, 2  # MODE


_SOURCES = ("loss_head.cu", "ptx.cuh")


class CudaModuleError(FxrlError):
    """NVRTC or the driver refused; the message is theirs."""


class Arguments(ctypes.Structure):
    """``struct Arguments`` of ``loss_head.cu``."""

    _fields_ = (
        ("target", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("target_info", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("partial_stride", ctypes.c_longlong),
        ("rows", ctypes.c_int),
        ("rows_stride", ctypes.c_int),
        ("vocab_begin", ctypes.c_int),
        ("vocab_end", ctypes.c_int),
        ("k_steps", ctypes.c_int),
        ("row_pairs", ctypes.c_int),
        ("vocab_tiles", ctypes.c_int),
        ("cap", ctypes.c_float),
    )


@cache
def available() -> bool:
    """Whether the bindings of the driver and of NVRTC are installed; if not, a warning, once."""
    if find_spec("cuda") is not None and find_spec("cuda.bindings") is not None:
        return True
    warnings.warn(
        "the loss head takes the slower route of cuBLAS and Triton: NVRTC's bindings, which come "
        f"with torch's own packages, are not installed; {install_command()}",
        stacklevel=2,
    )
    return False


def install_command() -> str:
    """For the CUDA that torch was built with."""
    major = (torch.version.cuda or "13").split(".")[0]
    nvrtc = "nvidia-cuda-nvrtc" if int(major) >= 13 else f"nvidia-cuda-nvrtc-cu{major}"
    return f"pip install 'cuda-bindings=={major}.*' '{nvrtc}=={major}.*'"


@cache
def kernel(mode: int, bias: bool, cap: bool, moments: bool, weighted: bool, device: int) -> Any:
    """The compiled variant, loaded on ``device``, ready for ``launch``."""
    from cuda.bindings import driver

    defines = {"MODE": mode, "BIAS": bias, "CAP": cap, "MOMENTS": moments, "WEIGHTED": weighted}
    cubin = _cubin(tuple(f"-D{name}={int(value)}" for name, value in defines.items()))
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        library = _checked(driver.cuModuleLoadData(cubin))
        function = _checked(driver.cuModuleGetFunction(library, b"loss_head"))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, _shared_bytes(mode)))
    return function


def launch(
    function: Any,
    mode: int,
    hidden: Tensor,
    weight: Tensor,
    out: Tensor | None,
    arguments: Arguments,
) -> None:
    """Runs ``function`` on the current stream, as many clusters as the device has room for.

    Args:
        function: what ``kernel`` returned for ``mode``.
        mode: ``STATISTICS``, ``EXPONENTIALS`` or ``GRADIENT``.
        hidden: ``[R, H]`` bf16, rows 16 bytes aligned.
        weight: ``[V, H]`` bf16, rows 16 bytes aligned.
        out: ``[R, C]`` bf16, rows 16 bytes aligned; None for ``STATISTICS``.
        arguments: pointers and sizes.
    """
    from cuda.bindings import driver

    maps = [
        tensor_map(hidden, TILE_ROWS),
        tensor_map(weight, TILE_VOCAB // CLUSTER),
        tensor_map(hidden if out is None else out, 64),
    ]
    pointers = [map_.getPtr() for map_ in maps] + [ctypes.addressof(arguments)]
    packed = (ctypes.c_void_p * len(pointers))(*(int(pointer) for pointer in pointers))
    tiles = arguments.row_pairs * arguments.vocab_tiles
    clusters = min(tiles, multiprocessors(hidden.device.index) // CLUSTER)
    _checked(
        driver.cuLaunchKernel(
            function,
            *(clusters * CLUSTER, 1, 1),
            *(_THREADS, 1, 1),
            _shared_bytes(mode),
            torch.cuda.current_stream().cuda_stream,
            ctypes.addressof(packed),
            0,
        )
    )


def tensor_map(matrix: Tensor, box_rows: int) -> Any:
    """How TMA reads or writes boxes of ``box_rows`` x 64 entries of a bf16 matrix."""
    from cuda.bindings import driver

    rows, columns = matrix.shape
    return _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            matrix.data_ptr(),
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(matrix.stride(0) * matrix.element_size())],
            [driver.cuuint32_t(TILE_DEPTH), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


@cache
def multiprocessors(device: int) -> int:
    """How many of them ``device`` has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _shared_bytes(mode: int) -> int:
    staged = 0 if mode == STATISTICS else _STAGED_BYTES
    return _STAGES_BYTES + staged + _BARRIER_BYTES


@cache
def _cubin(defines: tuple[str, ...]) -> bytes:
    """Machine code for sm_90a; Triton's cache folder keeps it for the next process."""
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    source, header = (Path(__file__).with_name(name).read_bytes() for name in _SOURCES)
    options = [b"--gpu-architecture=sm_90a", b"-std=c++17", *(d.encode() for d in defines)]
    version = _nvrtc_version()
    key = hashlib.sha256(b"\0".join([source, header, *options, version])).hexdigest()
    cached = get_cache_manager(key)
    if (path := cached.get_file("loss_head.cubin")) is not None:
        return Path(path).read_bytes()
    names = [name.encode() for name in _SOURCES]
    program = _checked(nvrtc.nvrtcCreateProgram(source, names[0], 1, [header], names[1:]))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaModuleError(f"NVRTC cannot compile loss_head.cu: {log.decode()}")
    cubin = b" " * int(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    cached.put(cubin, "loss_head.cubin", binary=True)
    return cubin


def _nvrtc_version() -> bytes:
    from cuda.bindings import nvrtc

    try:
        return repr(_checked(nvrtc.nvrtcVersion())).encode()
    except (RuntimeError, OSError) as error:  # what the bindings raise without the library
        raise CudaModuleError(f"NVRTC cannot be loaded ({error}); {install_command()}") from error


def _checked(returned: tuple[Any, ...]) -> Any:
    status, *values = returned
    if int(status):
        raise CudaModuleError(
            f"{type(status).__name__} {status.name}; the loss head needs a driver for the CUDA "
            "that torch was built with, see fxrl doctor"
        )
    return values[0] if len(values) == 1 else tuple(values)
