"""The kernels' arithmetic without a GPU: Triton's interpreter against the float64 reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fxrl.kernels

HERE = Path(__file__).parent


def test_the_interpreted_kernels_equal_the_reference():
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-W", "ignore", str(HERE / "kernel_cases.py"), "60"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all agree" in done.stdout


def test_without_triton_register_says_so(monkeypatch):
    monkeypatch.setattr(fxrl.kernels, "find_spec", lambda name: None)
    assert fxrl.kernels.register() is False
