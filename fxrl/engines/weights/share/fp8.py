"""FP8 weights that vLLM owns: where their scales lie, and whether they are the checkpoint's.

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

import torch
from torch import Tensor, nn

from fxrl.engines.weights.share.layout import BLOCK_BYTES, Placement, row_blocks
from fxrl.ops.fp8 import dequantized, read_scale, scale_of_rows

FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_SCALES = ("weight_scale", "weight_scale_inv")
_BLOCK = [128, 128]
_SLACK = 1 + 2**-10
# Half a step relative to a normal number, and half a step between subnormal ones.
_HALF_STEPS = {torch.float8_e4m3fn: (2**-4, 2**-10), torch.float8_e5m2: (2**-3, 2**-17)}


def logical(parameter: Tensor) -> Tensor:
    """A vLLM weight as [out, in]: FP8 ones are kept as [in, out] views of such a storage."""
    value = parameter.detach()
    column_major = value.dim() == 2 and value.stride() == (1, value.shape[0])
    return value.t() if value.element_size() == 1 and column_major else value


def find_scale(vllm_model: nn.Module, weight: Tensor, place: Placement) -> tuple[str, Tensor] | str:
    """vLLM's name of the scales beside ``weight``, a whole vLLM weight [N, K], and the scales of
    the rows at ``place``; or why there are none."""
    path, _, leaf = place.name.rpartition(".")
    module = vllm_model.get_submodule(path)
    names = [name for name in _SCALES if isinstance(getattr(module, name, None), Tensor)]
    if leaf != "weight" or len(names) != 1 or place.transposed:
        return f"vLLM's {place.name} is FP8 with {len(names)} known scale tensors beside it"
    block = list(getattr(module, "weight_block_size", None) or _BLOCK)
    if block != _BLOCK:
        return f"vLLM's {place.name} is FP8 in blocks of {block}; they are shared in {_BLOCK}"
    values = getattr(module, names[0]).detach()
    try:
        whole = read_scale(values, weight.shape)
    except ValueError as error:
        # DeepGEMM lays block scales out anew for some GPUs: nothing a trainer could read.
        cure = "; VLLM_USE_DEEP_GEMM=0 keeps the scales as they were made" * (values.dim() > 1)
        return f"vLLM's {place.name} is FP8 and {error}{cure}"
    return f"{path}.{names[0]}", scale_of_rows(whole, len(weight), place.start, place.length)


@torch.no_grad()
def why_not_quantized(view: Tensor, scale: Tensor, reference: Tensor) -> str:
    """Why ``view * scale`` is not the reference rounded to FP8; "" if it is (see the NOTE).

    Args:
        view: [N, K] FP8 on any device.
        scale: of its rows.
        reference: [N, K] of a wider dtype, on the CPU.
    """
    if view.dtype not in _HALF_STEPS:
        return f"no error bound is known for {view.dtype}"
    relative, absolute = _HALF_STEPS[view.dtype]
    powers = bool((scale.frexp().mantissa == 0.5).all())
    roundings = 2 + relative if powers else 1.0
    error, norm = 0.0, 0.0
    for start, length in row_blocks(reference, BLOCK_BYTES // 16):  # a few float32 copies of it
        exact = reference.narrow(0, start, length).to(view.device, torch.float32)
        part = scale_of_rows(scale, len(view), start, length)
        found = dequantized(view.narrow(0, start, length), part, torch.float32)
        unit = dequantized(torch.ones_like(exact), part, torch.float32)
        wrong = (exact - found).abs()
        allowed = torch.maximum(exact.abs() * relative, unit * absolute) * (_SLACK * roundings)
        if not bool((wrong <= allowed).all()):  # NaN is not <= either
            return "its FP8 values are not the checkpoint's rounded"
        error += float(wrong.double().square().sum())
        norm += float(exact.double().square().sum())
    if error > relative**2 * norm * _SLACK:
        return "its FP8 scales are too coarse for this tensor"
    return ""
