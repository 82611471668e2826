"""``widened``: interpreted on the CPU, compiled on a GPU."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.interpreted import check_interpreted

sys.path.insert(0, str(Path(__file__).parent))
import dequantized_cases as cases


def test_interpreted():
    check_interpreted(cases.__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cases.FLOATS, ids=str)
@pytest.mark.parametrize(("format", "recipe"), cases.FORMATS)
def test_on_a_gpu(format, recipe, dtype):
    cases.check_bits(format, recipe, dtype, "cuda")
