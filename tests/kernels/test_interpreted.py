"""The kernels' arithmetic without a GPU: Triton's interpreter against references."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fxrl.kernels

HERE = Path(__file__).parent
CASES = (
    "decode_cases.py",
    "dequantized_cases.py",
    "head_checks.py",
    "hopper_cases.py,12",
    "kernel_cases.py,20",
    "sample_cases.py",
)


@pytest.fixture(scope="module")
def said():
    """Of each file its exit code and its words. In a process of their own: whether Triton
    interprets is decided when it is imported, which takes seconds and is done once."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-W", "ignore", str(HERE / "interpreted.py"), *CASES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("cases", CASES)
def test_all_agree(said, cases):
    code, words = said[cases]
    assert code == 0, words[-3000:]
    assert "all agree" in words


def test_without_triton_register_says_so(monkeypatch):
    monkeypatch.setattr(fxrl.kernels, "find_spec", lambda name: None)
    assert fxrl.kernels.register() is False
