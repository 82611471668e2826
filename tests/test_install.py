"""The package as it is installed, looked at from elsewhere."""

import importlib.metadata
import subprocess
import sys

import pytest


def test_a_folder_of_the_packages_name_does_not_hide_it(tmp_path, monkeypatch):
    """Such as the folder that a clone lies in: Python takes any folder for a namespace package."""
    try:
        importlib.metadata.distribution("fxrl")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fxrl is not installed here")
    (tmp_path / "fxrl").mkdir()
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", "import fxrl; print(fxrl.__version__)"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr}\ncure: pip install -e . again"
