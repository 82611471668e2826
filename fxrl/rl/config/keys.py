"""The keys of a configuration as the sources of its tables name them.

NOTE [Why sources are read]
Importing the tables takes PyTorch, seconds in which a mistyped key would be known and not told. All
else that may be wrong with a configuration waits for them, so what is found here is shown, and ends
nothing: the error names all mistakes at once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fxrl.rl.config import trl
from fxrl.rl.config.binding import Suggester

_ROOT = "TrainConfig"
_PACKAGE = Path(__file__).parents[2]
_SOURCES = ("rl/config/tables.py", "config.py", "engines/vllm/options.py", "models/quantized.py")
"""Where the classes of tables stand."""


class _Class(NamedTuple):
    """Annotation by field; whether further keys are taken."""

    fields: dict[str, ast.expr]
    is_open: bool


def unknown_keys(table: Mapping[str, Any]) -> list[str]:
    """What is said of keys that no table has, in the words of ``bind``; a line each."""
    classes = _classes()
    suggest = Suggester(_dotted(classes, _ROOT), trl.KEYS, trl.INSTEAD)
    return [suggest.no_such_key(name) for name in _unknown(classes, _ROOT, table)]


def known_keys() -> set[str]:
    """All of them, such as ``optim.lr``."""
    return {*_dotted(_classes(), _ROOT)}


def _classes() -> dict[str, _Class]:
    found = {}
    for source in _SOURCES:
        for node in ast.parse((_PACKAGE / source).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = _fields_of(node)
    return found


def _fields_of(node: ast.ClassDef) -> _Class:
    fields, is_open = {}, False
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            if "ClassVar" in _names(line.annotation):
                continue
            if line.value is not None and "REST" in _names(line.value):
                is_open = True
            else:
                fields[line.target.id] = line.annotation
    return _Class(fields, is_open)


def _names(tree: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _table_in(classes: Mapping[str, _Class], annotation: ast.expr) -> str | None:
    return next((name for name in _names(annotation) if name in classes), None)


def _dotted(classes: Mapping[str, _Class], cls: str, path: str = "") -> Iterator[str]:
    for key, annotation in classes[cls].fields.items():
        yield f"{path}{key}"
        if (inner := _table_in(classes, annotation)) is not None:
            yield from _dotted(classes, inner, f"{path}{key}.")


def _unknown(
    classes: Mapping[str, _Class], cls: str, table: Mapping[str, Any], path: str = ""
) -> Iterator[str]:
    fields, is_open = classes[cls]
    for key, value in table.items():
        if key in fields:
            inner = _table_in(classes, fields[key])
            if inner is not None and isinstance(value, Mapping):
                yield from _unknown(classes, inner, value, f"{path}{key}.")
        elif not is_open:
            yield f"{path}{key}"
