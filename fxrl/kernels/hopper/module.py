"""Compiles the GEMMs here with NVRTC, once per variant and machine, and launches the loss head's.

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
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxrl.errors import FxrlError

TILE_ROWS, TILE_VOCAB, TILE_DEPTH = 128, 256, 64
CLUSTER = 2
_STEP_BYTES = 2 * TILE_DEPTH
_THREADS = 384
_STAGES_BYTES = 4 * (TILE_ROWS + TILE_VOCAB) * _STEP_BYTES
_STAGED_BYTES = 4 * 64 * 64 * 2
_BARRIER_BYTES = 64

STATISTICS, EXPONENTIALS, GRADIENT = 0, 1, 2  # MODE


_HEADERS = ("gemm.cuh", "ptx.cuh")


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
        "the loss head, and adapters on products in FP8, take the slower routes of cuBLAS and "
        "Triton: NVRTC's bindings, which come with torch's own packages, are not installed; "
        + install_command(),
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
    defines = {"MODE": mode, "BIAS": bias, "CAP": cap, "MOMENTS": moments, "WEIGHTED": weighted}
    return loaded("loss_head", defines, device, shared_bytes(mode != STATISTICS))


def loaded(name: str, defines: dict[str, int], device: int, shared: int) -> Any:
    """The kernel ``name`` of ``name.cu``, compiled with these constants, on ``device``; a block of
    it takes ``shared`` bytes of shared memory."""
    from cuda.bindings import driver

    cubin = _cubin(name, tuple(f"-D{key}={int(value)}" for key, value in defines.items()))
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        library = _checked(driver.cuModuleLoadData(cubin))
        function = _checked(driver.cuModuleGetFunction(library, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, shared))
    return function


def launch(
    function: Any,
    mode: int,
    hidden: Tensor,
    weight: Tensor,
    out: Tensor | None,
    arguments: Arguments,
) -> None:
    """Runs ``function`` (of ``kernel(mode)``) on the current stream, as many clusters as there is
    room for on the device.

    ``hidden [R, H]``, ``weight [V, H]`` and ``out [R, C]`` are bf16 with rows aligned to 16 bytes;
    ``out`` is None for ``STATISTICS``.
    """
    maps = [
        tensor_map(hidden, TILE_ROWS),
        tensor_map(weight, TILE_VOCAB // CLUSTER),
        tensor_map(hidden if out is None else out, 64),
    ]
    tiles = arguments.row_pairs * arguments.vocab_tiles
    launch_tiles(function, maps, arguments, tiles, shared_bytes(mode != STATISTICS), hidden.device)


def launch_tiles(
    function: Any,
    maps: list[Any],
    arguments: ctypes.Structure,
    tiles: int,
    shared: int,
    device: torch.device,
) -> None:
    """Runs a kernel over tiles of 256 x 256, in as many clusters as the device has room for."""
    from cuda.bindings import driver

    pointers = [map_.getPtr() for map_ in maps] + [ctypes.addressof(arguments)]
    packed = (ctypes.c_void_p * len(pointers))(*(int(pointer) for pointer in pointers))
    clusters = min(tiles, multiprocessors(device.index) // CLUSTER)
    _checked(
        driver.cuLaunchKernel(
            function,
            *(clusters * CLUSTER, 1, 1),
            *(_THREADS, 1, 1),
            shared,
            torch.cuda.current_stream().cuda_stream,
            ctypes.addressof(packed),
            0,
        )
    )


def tensor_map(matrix: Tensor, box_rows: int) -> Any:
    """How TMA reads or writes boxes of ``box_rows`` x 128 bytes of a bf16 or FP8 matrix."""
    shape, size = tuple(matrix.shape), matrix.element_size()
    return _tensor_map(matrix.data_ptr(), shape, matrix.stride(0) * size, size, box_rows)


@lru_cache(2**14)  # what is allocated in a step lies where it lay in the last one
def _tensor_map(place: int, shape: tuple[int, int], stride: int, size: int, box_rows: int) -> Any:
    from cuda.bindings import driver

    rows, columns = shape
    types = driver.CUtensorMapDataType
    return _checked(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_UINT8
            if size == 1
            else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            place,
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(stride)],
            [driver.cuuint32_t(_STEP_BYTES // size), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def aligned(matrix: Tensor) -> bool:
    """Whether TMA can read it: entries side by side, rows apart and 16 bytes aligned."""
    return (
        matrix.stride(1) == 1
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.stride(0) * matrix.element_size() % 16 == 0
        and matrix.data_ptr() % 16 == 0
    )


@cache
def multiprocessors(device: int) -> int:
    """How many of them ``device`` has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_bytes(stores: bool) -> int:
    """Of a block, which ``stores`` its tile by way of shared memory or does not."""
    return _STAGES_BYTES + (_STAGED_BYTES if stores else 0) + _BARRIER_BYTES


@cache
def _cubin(name: str, defines: tuple[str, ...]) -> bytes:
    """Machine code for sm_90a; Triton's cache folder keeps it for the next process."""
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    file = f"{name}.cu"
    source, *headers = (Path(__file__).with_name(n).read_bytes() for n in (file, *_HEADERS))
    options = [b"--gpu-architecture=sm_90a", b"-std=c++17", *(d.encode() for d in defines)]
    version = _nvrtc_version()
    key = hashlib.sha256(b"\0".join([source, *headers, *options, version])).hexdigest()
    cached = get_cache_manager(key)
    if (path := cached.get_file(f"{name}.cubin")) is not None:
        return Path(path).read_bytes()
    names = [header.encode() for header in _HEADERS]
    program = _checked(nvrtc.nvrtcCreateProgram(source, file.encode(), len(names), headers, names))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaModuleError(f"NVRTC cannot compile {file}: {log.decode()}")
    cubin = b" " * int(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    cached.put(cubin, f"{name}.cubin", binary=True)
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
            f"{type(status).__name__} {status.name}; kernels for Hopper need a driver for the CUDA "
            "that torch was built with, see fxrl doctor"
        )
    return values[0] if len(values) == 1 else tuple(values)
