"""``widened``, compiled on a GPU; interpreted: ``test_interpreted.py``."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


sys.path.insert(0, str(Path(__file__).parent))
import dequantized_cases as cases


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.FLOATS, ids=str)
@pytest.mark.parametrize(("format", "recipe"), cases.FORMATS)
def test_on_a_gpu(format, recipe, dtype):
    cases.check_bits(format, recipe, dtype, "cuda")
