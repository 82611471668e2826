"""Runs a file of cases under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path


def check_interpreted(cases: Path | str, *arguments: str) -> None:
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-W", "ignore", str(cases), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all agree" in done.stdout
