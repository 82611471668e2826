"""Checks of ``widened`` on any device; run as a script, they run under Triton's interpreter."""

import sys
from pathlib import Path

import torch

from fxrl.kernels.dequantized import widened
from fxrl.ops import dequantized as op

FORMATS = [("int4", "row"), ("nf4", "row"), *(("fp8", r) for r in ("row", "block", "tensor"))]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_bits(format, recipe, dtype, device):
    """Bit for bit the reference's: parts of a weight by rows and by columns, and the whole."""
    draw = torch.Generator().manual_seed(len(format))
    weight = op.quantized(torch.randn(172, 192, generator=draw), format, recipe)
    seen = []

    def widen(parts, format, dtype):
        wanted = op.widened(parts, format, dtype)
        made = widened([part.to(device) for part in parts], format, dtype).cpu()
        assert made.dtype == dtype
        assert torch.equal(made, wanted)
        seen.append(made.shape)
        return wanted

    for transpose, entries in ((False, 128 * 192), (True, 128 * 172), (False, 172 * 192)):
        rows = torch.randn(2, 172 if transpose else 192, generator=draw).to(dtype)
        op.attach("cpu", widen, entries)
        try:
            op.dequantized_mm(rows, list(weight), format, transpose)
        finally:
            op._ATTACHED.pop("cpu")
    assert {(128, 192), (44, 192), (172, 128), (172, 64)} <= {tuple(shape) for shape in seen}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from interpreted import mend_interpreter

    mend_interpreter()
    for which in FORMATS:
        check_bits(*which, torch.float32, "cpu")
    print("all agree")
