"""A frozen linear layer whose weight is FP8 in a storage that another program owns.

The value of an element is ``weight * scale``, one scale for a rectangle of elements: a row
(per-channel), a block of 128 x 128, or the whole matrix. The layer dequantizes into the
activations' dtype, multiplies, and forgets; backward dequantizes again, so nothing of the weight's
size is kept between the two.

NOTE [How FP8 bytes are judged]
vLLM made them from the checkpoint's values, so they differ from it by the rounding to FP8 and
nothing else. e4m3 has three bits after the leading one: between 2^e and 2^(e+1) its numbers are
2^(e-3) apart, so rounding to the nearest errs by at most 2^(e-4) <= 2^-4 |x|; below 2^-6 they are
2^-9 apart and the error is at most 2^-10. With x = w / s that is
``|w - s q| <= max(2^-4 |w|, 2^-10 s)`` for every element (e5m2: 2^-3 and 2^-17). A scale that is
far too large would make the second bound say nothing, so the error of the whole part, as a norm,
must also be within 2^-4 of the weight's norm. vLLM divides in float32: ``_SLACK`` on top.

For DeepGEMM vLLM rounds a second time: it multiplies out what it quantized and quantizes that anew,
with scales that are powers of two and no smaller. Where all scales are powers of two each element
may therefore be off by both roundings, the second of a number larger by 2^-4; the norm's bound
holds for both together (two roundings err by 0.04 of the norm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fxrl.engines.weights.share.layout import BLOCK_BYTES, Placement, row_blocks

FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_SCALES = ("weight_scale", "weight_scale_inv")
_BLOCK = (128, 128)
_SLACK = 1 + 2**-10
# Half a step relative to a normal number, and half a step between subnormal ones.
_HALF_STEPS = {torch.float8_e4m3fn: (2**-4, 2**-10), torch.float8_e5m2: (2**-3, 2**-17)}


@dataclass(frozen=True, slots=True)
class Fp8Scale:
    """The scales of an [N, K] weight.

    Attributes:
        values: [P, Q] float32, P and Q rectangles down and across.
        rows: elements that one scale covers, down.
        columns: and across.
        shift: how far into its first rectangle the weight's first row lies (a part of a fused
            matrix need not begin where a block does).
    """

    values: Tensor
    rows: int
    columns: int
    shift: int = 0

    def part(self, start: int, length: int) -> Fp8Scale:
        """The scales of ``length`` rows from row ``start``: a view."""
        first, last = (self.shift + start) // self.rows, (self.shift + start + length - 1)
        count = last // self.rows - first + 1
        shift = (self.shift + start) % self.rows
        return Fp8Scale(self.values.narrow(0, first, count), self.rows, self.columns, shift)

    def by_row(self, length: int) -> Tensor:
        """[length, Q], or [1, Q] where all rows have the same scales."""
        if self.rows == 1 or self.values.shape[0] == 1:
            return self.values
        return self.values.repeat_interleave(self.rows, 0)[self.shift : self.shift + length]


def read_scale(values: Tensor, shape: torch.Size, block: tuple[int, int]) -> Fp8Scale | str:
    """What a scale tensor beside an [N, K] weight means, judged by its shape, or why nothing.

    Args:
        values: one number, [N] or [N, 1], or [ceil(N / block rows), ceil(K / block columns)].
        shape: N, K.
        block: rows and columns of a block.
    """
    num_rows, num_columns = shape
    if values.dtype != torch.float32:
        return f"its scales are {values.dtype}, not float32"
    if values.numel() == 1:
        return Fp8Scale(values.reshape(1, 1), num_rows, num_columns)
    if values.numel() == num_rows and values.shape[0] == num_rows:
        return Fp8Scale(values.reshape(num_rows, 1), 1, num_columns)
    blocks = (-(-num_rows // block[0]), -(-num_columns // block[1]))
    if tuple(values.shape) == blocks:
        return Fp8Scale(values, *block)
    return (
        f"its scales have shape {list(values.shape)}, which is neither one, nor one a row, nor "
        f"{list(blocks)} blocks of {list(block)}"
    )


def logical(parameter: Tensor) -> Tensor:
    """A vLLM weight as [out, in]: FP8 ones are kept as [in, out] views of such a storage."""
    value = parameter.detach()
    column_major = value.dim() == 2 and value.stride() == (1, value.shape[0])
    return value.t() if value.element_size() == 1 and column_major else value


@torch.no_grad()
def dequantize(weight: Tensor, scale: Fp8Scale, dtype: torch.dtype) -> Tensor:
    """[N, K] in ``dtype``: the product in float32 (or wider), rounded once.

    FP8 values are exact in every wider dtype, so only the product rounds.
    """
    out = weight.to(dtype)
    rows, width = scale.by_row(weight.shape[0]), scale.columns
    whole = out.shape[1] // width * width
    if whole:
        blocks = out.narrow(1, 0, whole).view(-1, whole // width, width)
        blocks.mul_(rows[:, : whole // width, None])
    if whole < out.shape[1]:
        out.narrow(1, whole, out.shape[1] - whole).mul_(rows[:, -1:])
    return out


class _Fp8Product(torch.autograd.Function):
    """x W^T with the gradient of x alone; saves the FP8 weight, not the dequantized one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, values: Tensor, rows: int, columns: int, shift: int
    ) -> Tensor:
        ctx.save_for_backward(weight, values)
        ctx.where = (rows, columns, shift)
        return F.linear(x, dequantize(weight, Fp8Scale(values, rows, columns, shift), x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        weight, values = ctx.saved_tensors
        scale = Fp8Scale(values, *ctx.where)
        return grad @ dequantize(weight, scale, grad.dtype), None, None, None, None, None


class Fp8Linear(nn.Linear):
    """``nn.Linear`` over a frozen FP8 weight.

    NOTE [Why a subclass of nn.Linear]
    PEFT puts a LoRA beside what is an ``nn.Linear``, and finds ``compute_dtype`` where the weight's
    own dtype is no dtype for an adapter. ``merge_and_unload`` would write into the FP8 weight and
    is not for this layer: a sum of FP8 and a small update rounds the update away.

    Args:
        weight: [N, K] FP8, any strides; kept as a view.
        scale: of this weight; its values are kept as a view.
        bias: [N], or ``None``.
        compute_dtype: what adapters take as the base's dtype.
    """

    weight_scale: Tensor

    def __init__(
        self,
        weight: Tensor,
        scale: Fp8Scale,
        bias: nn.Parameter | None,
        compute_dtype: torch.dtype,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and draw a weight
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", bias)
        self.register_buffer("weight_scale", scale.values)
        self.compute_dtype = compute_dtype
        self._where = (scale.rows, scale.columns, scale.shift)

    @property
    def scale(self) -> Fp8Scale:
        """The scales of ``weight``."""
        return Fp8Scale(self.weight_scale, *self._where)

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the input's dtype."""
        out = _Fp8Product.apply(input, self.weight, self.weight_scale, *self._where)  # type: ignore[no-untyped-call]
        assert isinstance(out, Tensor)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        rows, columns, _ = self._where
        return f"{super().extra_repr()}, {self.weight.dtype}, one scale for {rows} x {columns}"


def find_scale(
    vllm_model: nn.Module, weight: Tensor, place: Placement
) -> tuple[str, Fp8Scale] | str:
    """vLLM's name of the scales beside a weight and those of the rows at ``place``, or why not.

    Args:
        weight: the whole vLLM weight as [N, K].
    """
    path, _, leaf = place.name.rpartition(".")
    module = vllm_model.get_submodule(path)
    names = [name for name in _SCALES if isinstance(getattr(module, name, None), Tensor)]
    if leaf != "weight" or len(names) != 1 or place.transposed:
        return f"vLLM's {place.name} is FP8 with {len(names)} known scale tensors beside it"
    block = getattr(module, "weight_block_size", None) or _BLOCK
    values = getattr(module, names[0]).detach()
    whole = read_scale(values, weight.shape, (int(block[0]), int(block[1])))
    if isinstance(whole, str):
        # DeepGEMM lays block scales out anew for some GPUs: nothing a trainer could read.
        cure = "; VLLM_USE_DEEP_GEMM=0 keeps the scales as they were made" * (values.dim() > 1)
        return f"vLLM's {place.name} is FP8 and {whole}{cure}"
    return f"{path}.{names[0]}", whole.part(place.start, place.length)


@torch.no_grad()
def why_not_quantized(view: Tensor, scale: Fp8Scale, reference: Tensor) -> str:
    """Why ``view * scale`` is not the reference rounded to FP8; "" if it is (see the NOTE).

    Args:
        view: [N, K] FP8 on any device.
        scale: of its rows.
        reference: [N, K] of a wider dtype, on the CPU.
    """
    if view.dtype not in _HALF_STEPS:
        return f"no error bound is known for {view.dtype}"
    relative, absolute = _HALF_STEPS[view.dtype]
    powers = bool((scale.values.frexp().mantissa == 0.5).all())
    roundings = 2 + relative if powers else 1.0
    error, norm = 0.0, 0.0
    for start, length in row_blocks(reference, BLOCK_BYTES // 16):  # a few float32 copies of it
        exact = reference.narrow(0, start, length).to(view.device, torch.float32)
        part = scale.part(start, length)
        found = dequantize(view.narrow(0, start, length), part, torch.float32)
        unit = dequantize(torch.ones_like(exact), part, torch.float32)
        wrong = (exact - found).abs()
        allowed = torch.maximum(exact.abs() * relative, unit * absolute) * (_SLACK * roundings)
        if not bool((wrong <= allowed).all()):  # NaN is not <= either
            return "its FP8 values are not the checkpoint's rounded"
        error += float(wrong.double().square().sum())
        norm += float(exact.double().square().sum())
    if error > relative**2 * norm * _SLACK:
        return "its FP8 scales are too coarse for this tensor"
    return ""
