"""The kernels' arithmetic without a GPU: Triton's interpreter against the float64 reference."""

from pathlib import Path

import pytest

import fxrl.kernels
from tests.kernels.interpreted import check_interpreted

HERE = Path(__file__).parent


def test_the_interpreted_kernels_equal_the_reference():
    pytest.importorskip("triton")
    check_interpreted(HERE / "kernel_cases.py", "60")


def test_the_interpreted_kernels_keep_their_promises():
    pytest.importorskip("triton")
    check_interpreted(HERE / "head_checks.py")


def test_without_triton_register_says_so(monkeypatch):
    monkeypatch.setattr(fxrl.kernels, "find_spec", lambda name: None)
    assert fxrl.kernels.register() is False
