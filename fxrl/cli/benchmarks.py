"""Finds and runs the scripts of ``bench/``, which a checkout has and an installed wheel has not.

The checkout is the one that fxrl is imported from, or else the one around the current folder.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import fxrl
from fxrl.cli import show
from fxrl.errors import ConfigError, FxrlError

SUITES = ("head", "step", "rollout")  # the public names, listed first
_NO_BENCHMARK = {"__init__", "readme"}


class NoCheckoutError(FxrlError):
    """``fxrl bench`` was called on an installed package."""


def find_scripts(root: Path | None = None) -> dict[str, Path]:
    """Name -> file of every benchmark: a module of ``bench/`` with a ``__main__`` part."""
    package = Path(fxrl.__file__).resolve().parents[1]
    here = Path.cwd().resolve()
    places = [root] if root else [package, here, *here.parents]
    found = next((place for place in places if _is_checkout(place)), None)
    if found is None:
        raise NoCheckoutError(
            f"no bench/ beside {(root or package) / 'fxrl'} nor around {here}: benchmarks are part "
            "of the source, not of the package; clone the repository and call this inside it, or "
            "install it with pip install -e '.[demo]'"
        )
    files = {f.stem: f for f in sorted((found / "bench").glob("*.py"))}
    scripts = {
        name: file
        for name, file in files.items()
        if name not in _NO_BENCHMARK and "__main__" in file.read_text(encoding="utf-8")
    }
    return {n: scripts[n] for n in (*(s for s in SUITES if s in scripts), *scripts)}


def _is_checkout(place: Path) -> bool:
    return (place / "bench" / "__init__.py").is_file() and (place / "pyproject.toml").is_file()


def summary_of(script: Path) -> str:
    doc = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]


def run_script(name: str, arguments: Sequence[str], root: Path | None = None) -> int:
    """Runs one in its own process, in the current folder."""
    scripts = find_scripts(root)
    if name not in scripts:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(scripts) or 'none'}")
    command = [sys.executable, "-m", f"bench.{name}", *arguments]
    # The checkout is on the path and not the working folder: --out FILE is where the caller is.
    # PYTHONSAFEPATH, here and in processes that a script starts: another bench/ there is not run.
    path = [str(scripts[name].parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",  # a row is seen when it is measured, through a pipe too
    }
    show.status(f"running {' '.join(command[1:])}")
    return subprocess.run(command, env=environment, check=False).returncode
