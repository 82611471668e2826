"""The package as it is installed, looked at from elsewhere."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from fxrl import errors


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


@pytest.mark.parametrize(
    ("here", "what", "command"),
    [
        ("fxrl", "[demo]", "pip install -e '.[demo]'"),
        ("elsewhere", "[demo]", "pip install -e '{root}/fxrl[demo]'"),
        ("elsewhere", "wandb", "pip install wandb"),
        (None, "[demo]", "pip install 'fxrl[demo]'"),
    ],
)
def test_what_is_missing_is_installed_as_fxrl_is(here, what, command, tmp_path, monkeypatch):
    """An index may have another package of that name; ``None``: fxrl is no checkout."""
    root = tmp_path / "fxrl"
    (root / "fxrl").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    if here is not None:
        (root / "pyproject.toml").touch()
        monkeypatch.chdir(tmp_path / here)
    monkeypatch.setattr(errors, "__file__", str(root / "fxrl" / "errors.py"))
    with pytest.raises(errors.MissingPackageError, match=r"needs nowhere_at_all") as caught:
        errors.optional("nowhere_at_all", "a test", what)
    assert f"; {command.format(root=Path(tmp_path).resolve())} brings it" in str(caught.value)
