"""Products of rows with frozen weights in FP8 (e4m3), and what quantises both.

    fxrl::quantize_rows(x, block)            -> (values, scale)     x = values * scale, by row
    fxrl::fp8_linear(x, values, scale, weight, weight_scale, gradient) -> [T, N]
    fxrl::rows_in_e4m3(x, factor, block)     -> (values, scale)     the quantiser itself
    fxrl::scaled_mm(a, scale_a, b, scale_b, transpose, dtype,       the product itself, and what an
                    left, right)                                    adapter of low rank adds to it

    x [T, K]; values, weight [N, K] float8_e4m3fn; float32 scales:
    of rows        [T, 1], or [T, K/128] where ``block`` is 128
    of the weight  [N, 1] by output row, [1, 1], or [N/128, K/128] by block; sizes round up

``fp8_linear`` is ``(values * scale) (weight * weight_scale)^T``, accumulated in float32 and rounded
once to x's dtype. x itself is read by nobody: it stands there for its gradient, which is that of
the product as if x had not been rounded (a straight-through estimate). One ``quantize_rows`` serves
all products that read x.

The first two are composites: they run above autograd, and a graph that is traced holds the others.

NOTE [Why the quantiser is an op, and not arithmetic for the compiler to fuse]: a row's scale is
known when all of it was read. Inductor reads a row of thousands of values twice, which took five
times as long as memory does (0.25 ms for 16384 x 4096 in bf16, H200); a kernel that keeps the row
in registers reads it once. Fused with the norm before it, it would read nothing: of less worth than
that, since adapters read the rows in bf16 too.

NOTE [Why rows_in_e4m3 and scaled_mm are no custom_op]: its wrapper looks at every call whether a
result shares memory with an argument. A layer has two dozen such calls, and where a micro-batch has
4000 tokens they take the host longer than the GPU (30 of 80 us each on a server's CPU).

NOTE [Why the weight is not kept twice]: tensor cores contract FP8 along rows that lie in memory, so
dX = dY W wants W turned, which PyTorch's own recipes keep as a second copy with scales of its own:
as much memory as bf16. Here the scale of an output row, along which dX contracts, goes into dY
before dY is quantised: dX = quantize(dY * weight_scale) W. The values are turned for one product at
a time (one byte read and written for each 2 T FLOPs), and the gradient is that of the very weights
that the forward used. A weight with scales by block cannot do this, and takes ``gradient="bf16"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxrl.dtypes import at_least_float32, wide_dtype

aten = torch.ops.aten
#: How a weight's scales lie: one for each output row, for each block of 128 x 128, or one in all.
Recipe = Literal["row", "block", "tensor"]
RECIPES: tuple[Recipe, ...] = ("row", "block", "tensor")
E4M3 = torch.float8_e4m3fn
BLOCK = 128
MOST = torch.finfo(E4M3).max
#: Rows of smaller values than this times 448 are zero: their scale would be no normal float32.
LEAST = 2.0**-100


# ---------------------------------------------------------------------------- quantisers
def quantized_weight(weight: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """A weight [N, K] as e4m3 [N, K] and its float32 scales; rounded to the nearest."""
    if recipe == "block":
        rows, columns = weight.shape
        blocks = _blocked(weight)
        scale = _scale_of(blocks.abs().amax(dim=(1, 3)))
        values = _rounded(blocks, scale[:, None, :, None])
        return values.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scale
    wide = weight.float()
    scale = _scale_of(wide.abs().amax(1, keepdim=True) if recipe == "row" else wide.abs().amax())
    scale = scale.reshape(-1, 1)
    return _rounded(wide, scale).contiguous(), scale


@dataclass(frozen=True, slots=True)
class QuantizeWeight:
    """``quantized_weight`` with its options: equal ones do the same."""

    recipe: Recipe
    turned: bool = False  # the weight is [K, N]

    def __call__(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Values [N, K] and scales of a weight."""
        return quantized_weight(weight.t() if self.turned else weight, self.recipe)

    def error(self, weight: Tensor) -> float:
        """What rounding takes off an output, relative to it: root mean square over the outputs of
        the norms' ratio, so that a small one lost under a large one's scale counts as whole."""
        whole = (weight.t() if self.turned else weight).float()
        lost = (dequantized(*self(weight), torch.float32) - whole).square().sum(1)
        return float((lost / whole.square().sum(1).clamp_min(LEAST)).mean().sqrt())


def _blocked(weight: Tensor) -> Tensor:
    """``[N/128, 128, K/128, 128]`` in float32, filled up with zeros."""
    rows, columns = weight.shape
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK)
    padded = torch.nn.functional.pad(weight.float(), pad)
    rows, columns = (size // BLOCK for size in padded.shape)
    return padded.view(rows, BLOCK, columns, BLOCK)


def _scale_of(most: Tensor) -> Tensor:
    """Scales for values up to ``most``; a NaN or an infinity among them makes all values NaN."""
    return most.float().clamp_min(LEAST) / MOST


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp(-MOST, MOST).to(E4M3)


def scales_rows(scale: Tensor, weight: Tensor) -> bool:
    """Whether a weight's scales are by row, or one for all, and not by block."""
    return scale.shape[1] == 1 and (scale.shape[0] == 1 or scale.shape[0] == weight.shape[0])


def factors_out(scale_a: Tensor, b: Tensor, scale_b: Tensor | None) -> bool:
    """Whether a product's scales can be multiplied into its result: none varies along a row."""
    return scale_a.shape[1] == 1 and (scale_b is None or scales_rows(scale_b, b))


def dequantized(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``values * scale`` in ``dtype``; the scale of rows, of blocks or of all."""
    wide = values.to(wide_dtype(dtype))
    return wide.mul_(_spread(scale, values.shape)).to(dtype)


def requantized(weight: Tensor, scale: Tensor) -> Tensor:
    """A weight [N, K] as e4m3 of scales that there are: ``dequantized`` the other way round."""
    return _rounded(weight, _spread(scale, weight.shape))


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """A scale for each row or value."""
    for dim in (0, 1):
        if scale.shape[dim] not in (1, shape[dim]):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scale


def read_scale(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """The scales beside a weight [N, K], told by their shape: one number, [N] or [N, 1], or [ceil(N
    / 128), ceil(K / 128)]. Returns float32 [1, 1], [N, 1] or blocks; a view if they are float32
    already.

    Raises ``ValueError``, in words that begin "its scales", if they are none of these.
    """
    rows, columns = shape
    if scale.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"its scales are {scale.dtype}, not float32")
    wide = scale.float()
    if scale.numel() == 1:
        return wide.reshape(1, 1)
    if scale.numel() == rows and scale.shape[0] == rows:
        return wide.reshape(rows, 1)
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    if tuple(scale.shape) == blocks:
        return wide
    raise ValueError(
        f"its scales have shape {list(scale.shape)}, which is neither one, nor one a row, nor "
        f"{list(blocks)} blocks of {[BLOCK, BLOCK]}"
    )


def scale_of_rows(scale: Tensor, whole: int, start: int, length: int) -> Tensor:
    """Scales of ``length`` rows from row ``start`` of a weight of ``whole`` rows: a view, but where
    the rows begin inside a block; there each row has its own."""
    if scale.shape[0] == 1:
        return scale
    if scale.shape[0] == whole:
        return scale.narrow(0, start, length)
    if start % BLOCK == 0:
        return scale.narrow(0, start // BLOCK, -(-length // BLOCK))
    return scale.repeat_interleave(BLOCK, 0).narrow(0, start, length)


def quantized_rows(x: Tensor, factor: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Rows [T, K] in e4m3, and their scales: [T, 1], or [T, K/128] if ``block`` is 128. Columns are
    multiplied by ``factor``, [K, 1] or [1, 1] float32, before that; None is 1.

    Values are multiplied by the scale's reciprocal: a GPU has no exact division instruction, and
    the sequence that emulates it takes longer than reading and writing the values.
    """
    wide = at_least_float32(x)
    if factor is not None:
        wide = wide * factor.t()
    count, columns = x.shape
    run = block or columns
    padded = torch.nn.functional.pad(wide, (0, -columns % run))
    runs = padded.reshape(count, -(-columns // run), run)
    scale = _scale_of(runs.abs().amax(2))
    values = (runs * scale.reciprocal()[:, :, None]).clamp(-MOST, MOST).to(E4M3)
    return values.flatten(1)[:, :columns].contiguous(), scale


torch.library.define(
    "fxrl::rows_in_e4m3",
    "(Tensor x, Tensor? factor, int block) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("fxrl::rows_in_e4m3", "CompositeExplicitAutograd")(quantized_rows)


@torch.library.register_fake("fxrl::rows_in_e4m3")  # type: ignore[untyped-decorator]
def _(x: Tensor, factor: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    scales = -(-x.shape[1] // block) if block else 1
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((x.shape[0], scales), dtype=torch.float32)


torch.library.define("fxrl::quantize_rows", "(Tensor x, int block) -> (Tensor, Tensor)")


@torch.library.impl("fxrl::quantize_rows", "CompositeImplicitAutograd")
def _quantize_rows(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = torch.ops.fxrl.rows_in_e4m3.default(x.detach(), None, block)
    return made


# ---------------------------------------------------------------------------- the product
torch.library.define(
    "fxrl::scaled_mm",
    "(Tensor a, Tensor scale_a, Tensor b, Tensor? scale_b, bool transpose, ScalarType dtype, "
    "Tensor? left=None, Tensor? right=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl("fxrl::scaled_mm", "CompositeExplicitAutograd")
def scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor | None,
    transpose: bool,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    """``(a * scale_a) (b * scale_b)^T + left right`` of FP8 values, as ``dtype``: the reference for
    every device, since FP8 values are exact in float32 (float64 is accumulated in float64).

    ``a`` [M, K] has scales ``scale_a`` (see the module); the weight ``b`` is [N, K], or [K, N] if
    ``transpose``, and no ``scale_b`` stands for ones. ``left`` [M, R] and ``right`` [R, N] are in
    ``dtype``, or there is neither.
    """
    wide = wide_dtype(dtype)
    if not factors_out(scale_a, b, scale_b):
        a, scale_a = dequantized(a, scale_a, wide), scale_a.new_ones(1, 1)
        b, scale_b = dequantized(b, torch.ones(1, 1) if scale_b is None else scale_b, wide), None
    product = a.to(wide) @ (b.to(wide) if transpose else b.to(wide).t())
    product = product * scale_a
    made: Tensor = product if scale_b is None else product * scale_b.t()
    if left is not None and right is not None:
        made = made + left.to(wide) @ right.to(wide)
    return made.to(dtype)


@torch.library.register_fake("fxrl::scaled_mm")  # type: ignore[untyped-decorator]
def _(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Any, transpose: bool, dtype: Any, *_: Any
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[int(transpose)]), dtype=dtype)


# ---------------------------------------------------------------------------- the linear
torch.library.define(
    "fxrl::fp8_linear",
    "(Tensor x, Tensor values, Tensor scale, Tensor weight, Tensor weight_scale, str gradient)"
    " -> Tensor",
)


class _Linear(torch.autograd.Function):
    """``fp8_linear`` with the gradient of its rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        gradient: str,
    ) -> Tensor:
        ctx.save_for_backward(weight, weight_scale)
        ctx.gradient = gradient
        made: Tensor = torch.ops.fxrl.scaled_mm.default(
            values, scale, weight, weight_scale, False, x.dtype
        )
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        made = _gradient_of_rows(grad, weight, scale, ctx.gradient)
        return made, None, None, None, None, None


torch.library.impl("fxrl::fp8_linear", "CompositeImplicitAutograd", _Linear.apply)


def _gradient_of_rows(grad: Tensor, weight: Tensor, scale: Tensor, gradient: str) -> Tensor:
    made: Tensor
    if gradient == "bf16":
        made = torch.ops.fxrl.dequantized_mm.default(grad, [weight, scale], "fp8", True)
    else:
        values, scales = torch.ops.fxrl.rows_in_e4m3.default(grad, scale, 0)
        made = torch.ops.fxrl.scaled_mm.default(values, scales, weight, None, True, grad.dtype)
    return made


# ---------------------------------------------------------------------------- what a device can do
_FIRST = (8, 9)  # compute capability of the first GPUs with products in FP8
_ENOUGH = 2**13  # rows from where a product's time grows as they do
_REPEATS = 10  # runs that are measured together


def why_no_fp8(device: torch.device) -> str:
    """Why a device multiplies nothing in FP8; empty where it does, or a CPU stands in for it."""
    if device.type in ("cpu", "meta"):
        return ""
    if device.type != "cuda":
        return f"PyTorch has no such products on {device.type}"
    have = torch.cuda.get_device_capability(device)
    told = f"this GPU has compute capability {have[0]}.{have[1]}, and FP8 begins at 8.9"
    return "" if have >= _FIRST else told


def adds_adapters(device: torch.device) -> bool:
    """Whether ``scaled_mm`` adds a product of low rank for less than it takes by itself: where it
    has a kernel for it, on Hopper. A CPU stands in."""
    if device.type != "cuda":
        return device.type in ("cpu", "meta")
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def measured_seconds(
    device: torch.device, recipe: Recipe, gradient: str, rows: int, features: int, out: int
) -> tuple[float, float]:
    """Forward and backward of one frozen Linear on a GPU: in bf16, and in FP8 with quantisers.

    Each shape is measured once in a process, at a power of two of rows.
    """
    rows = min(_ENOUGH, 1 << max(0, rows - 1).bit_length())
    x = torch.randn(rows, features, dtype=torch.bfloat16, device=device)
    grad = torch.randn(rows, out, dtype=torch.bfloat16, device=device)
    weight = torch.randn(out, features, dtype=torch.bfloat16, device=device)
    kept = quantized_weight(weight, recipe)
    block = BLOCK if recipe == "block" else 0

    def in_bf16() -> None:
        torch.mm(x, weight.t())
        torch.mm(grad, weight)

    def in_fp8() -> None:
        values = torch.ops.fxrl.rows_in_e4m3.default(x, None, block)
        torch.ops.fxrl.scaled_mm.default(*values, *kept, False, x.dtype)
        _gradient_of_rows(grad, *kept, gradient)

    with torch.cuda.device(device), torch.no_grad():
        return _device_seconds(in_bf16), _device_seconds(in_fp8)


def _device_seconds(run: Callable[[], None]) -> float:
    """A run's seconds on the GPU alone: as a graph, launched at once; a step's launches hide behind
    the kernels before them, and here there are none."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels are compiled, workspaces allocated
            run()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_REPEATS):
            run()
    with torch.cuda.stream(stream):
        graph.replay()
        start.record()
        graph.replay()
        end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _REPEATS
