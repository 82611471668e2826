"""The user's own code: what ``file.py:function`` and ``module:function`` name.

NOTE [Whose imports are answered]
Code beside a configuration is found without being installed, and without standing on ``sys.path``:
there a mere ``kernels.py`` would be run by every library that looks whether a package of that name
is installed. So a finder behind all others answers for the modules that are named, and for what
these import in turn; a library's imports it does not answer. What is installed comes first.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from fxrl.errors import did_you_mean
from fxrl.losses.batch import LossConfigError


class _Finder:
    """Finds the user's top-level modules for the user's own code; an entry of ``sys.meta_path``."""

    def __init__(self) -> None:
        # Where to look, the first one first; none outside of ``importable_from``.
        self.folders: list[str] = []
        self.folder_of: dict[str, str] = {}  # the modules that were found, by name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As of ``importlib.abc.MetaPathFinder``."""
        asks = _importer()
        if path is not None or not (asks == __name__ or asks.partition(".")[0] in self.folder_of):
            return None
        beside = self.folder_of.get(asks)
        for folder in [beside, *self.folders] if beside else self.folders:
            if (spec := PathFinder.find_spec(name, [folder])) is not None:
                self.folder_of[name] = folder
                return spec
        return None

    def forget(self) -> None:
        """Elsewhere the same names mean other files."""
        for name in self.folder_of:
            for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[loaded]
        self.folder_of.clear()
        importlib.invalidate_caches()


_FINDER = _Finder()


def _importer() -> str:
    """The name of the module that the import in progress stands in."""
    frame = sys._getframe(2)
    while True:
        name = str(frame.f_globals.get("__name__", ""))
        if frame.f_back is None or not name.startswith(("importlib", "_frozen_importlib")):
            return name
        frame = frame.f_back


@contextmanager
def importable_from(*folders: Path) -> Iterator[None]:
    """Inside, ``load_function`` finds files and modules in ``folders``, the first one first."""
    former, _FINDER.folders = _FINDER.folders, [str(folder.resolve()) for folder in folders]
    if _FINDER.folders != former:
        _FINDER.forget()
    if not former:
        sys.meta_path.append(_FINDER)
    try:
        yield
    finally:
        _FINDER.folders = former
        if not former:
            sys.meta_path.remove(_FINDER)


def load_function(path: str | Callable[..., Any]) -> Callable[..., Any]:
    """What ``module:function`` or ``file.py:function`` names; a function itself is given back."""
    if not isinstance(path, str):
        return path
    home, _, attribute = path.rpartition(":")
    file = _file(home) if home.endswith(".py") else None
    try:
        found: Any = _load_file(file) if file else importlib.import_module(home)
    # User code may raise anything while it is imported; the user must hear which line named it.
    except (Exception, SystemExit) as error:
        why = f"SyntaxError: {error}" if isinstance(error, SyntaxError) else repr(error)
        cure = "; write 'package.module:function' or 'path/to/file.py:function'"
        raise LossConfigError(
            f"{path!r}: importing {home!r} failed: {why}{_place(error)}{'' if file else cure}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            named = vars(found).items()
            public = [name for name, value in named if name[:1] != "_" and callable(value)]
            near = did_you_mean(part, public)
            raise LossConfigError(f"{home} has no function {part!r}{near}{_hidden(path)}")
        found = getattr(found, part)
    if not callable(found):
        raise LossConfigError(f"{path!r} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _folders() -> list[str]:
    return _FINDER.folders or [str(Path.cwd())]


def looked_in() -> str:
    """The folders that the names in a run's file are looked for in, in words."""
    return " or ".join(dict.fromkeys(_folders()))


def _file(name: str) -> str:
    places = [os.path.join(folder, os.path.expanduser(name)) for folder in _folders()]
    if (found := next(filter(os.path.isfile, places), None)) is None:
        raise LossConfigError(f"{name!r} is not a file; give its path from {looked_in()}")
    return os.path.realpath(found)


def _load_file(path: str) -> ModuleType:
    """The module of a file; the same one again as long as the file is the same."""
    digest = hashlib.sha256(path.encode() + Path(path).read_bytes()).hexdigest()
    name = f"{Path(path).stem}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _FINDER.folder_of[name] = os.path.dirname(path)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name], _FINDER.folder_of[name]
        raise
    return module


def _place(error: BaseException) -> str:
    """File and line where it was raised, if there is such a file."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({frame.filename}:{frame.lineno})" if os.path.isfile(frame.filename) else ""


def _hidden(path: str) -> str:
    """The cure where an installed module hides the user's file."""
    home, _, attribute = path.rpartition(":")
    found = getattr(sys.modules.get(home), "__file__", None)
    for folder in _folders():
        file = os.path.join(folder, f"{home}.py")
        if os.path.isfile(file) and file != found:
            return f" ({found or 'built in'} comes before {file}: write '{home}.py:{attribute}')"
    return ""
