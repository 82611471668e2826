"""Finds and runs the scripts of ``bench/``, which a checkout has and an installed wheel has not."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import fxrl
from fxrl.errors import ConfigError, FxrlError

_NO_BENCHMARK = {"__init__", "common", "readme"}


class NoCheckoutError(FxrlError):
    """``fxrl bench`` was called on an installed package."""


def find_scripts(root: Path | None = None) -> dict[str, Path]:
    """Name -> file of every benchmark: a module of ``bench/`` with a ``__main__`` part.

    Raises:
        NoCheckoutError: fxrl does not run from a checkout.
    """
    root = root or Path(fxrl.__file__).resolve().parents[1]
    folder = root / "bench"
    if not folder.is_dir() or not (root / "pyproject.toml").is_file():
        raise NoCheckoutError(
            f"no bench/ beside {root / 'fxrl'}: benchmarks are part of the source, not of the "
            "package; clone the repository and install it with pip install -e '.[demo]'"
        )
    files = {f.stem: f for f in sorted(folder.glob("*.py")) if f.stem not in _NO_BENCHMARK}
    return {name: f for name, f in files.items() if "__main__" in f.read_text(encoding="utf-8")}


def first_line(script: Path) -> str:
    """The first line of the script's docstring."""
    doc = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]


def run_script(name: str, arguments: Sequence[str], root: Path | None = None) -> int:
    """Runs one in its own process, from the checkout's folder.

    Returns:
        Its exit code.

    Raises:
        NoCheckoutError: see ``find_scripts``.
        ConfigError: no script of that name.
    """
    scripts = find_scripts(root)
    if name not in scripts:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(scripts) or 'none'}")
    command = [sys.executable, "-m", f"bench.{name}", *arguments]
    return subprocess.run(command, cwd=scripts[name].parents[1], check=False).returncode
