"""The JSON schema of a configuration file, made of the dataclasses' types and docstrings.

Editors complete and check a TOML file with it: ``fxrl train --schema > config.schema.json``, and
``#:schema config.schema.json`` as the file's first line.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any, Literal

from fxrl.options import Check, in_files
from fxrl.rl.config.binding import default_of, keys_of
from fxrl.rl.config.tables import TrainConfig

Schema = dict[str, Any]


def json_schema() -> Schema:
    """The schema of ``TrainConfig``, JSON Schema draft 2020-12; a definition for each table."""
    definitions: dict[str, Schema] = {}
    root = _table(TrainConfig, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fxrl train",
        **root,
        "$defs": definitions,
    }


def _table(cls: type[Any], definitions: dict[str, Schema]) -> Schema:
    """A dataclass; its fields' tables go into ``definitions``."""
    about, described = documented(cls)
    hints = typing.get_type_hints(cls, include_extras=True)
    defaults = {name: default_of(field) for name, field in keys_of(cls).items()}
    properties = {}
    for name, default in defaults.items():
        found = _typed(hints[name], definitions)
        if default is not MISSING and default is not None and not dataclasses.is_dataclass(default):
            found["default"] = list(default) if isinstance(default, tuple) else default
        properties[name] = {"description": described[name], **found}
    return {
        "type": "object",
        "description": about,
        "properties": properties,
        "required": [name for name, default in defaults.items() if default is MISSING],
        "additionalProperties": len(defaults) < len(dataclasses.fields(cls)),
    }


_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean"}


def _typed(hint: Any, definitions: dict[str, Schema]) -> Schema:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        found = _typed(args[0], definitions)
        for check in args[1:]:
            if isinstance(check, Check):
                found |= check.schema
        return found
    if origin in (typing.Union, types.UnionType):
        kinds = [_typed(a, definitions) for a in args if a is not type(None) and in_files(a)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": _typed(args[0], definitions)}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        name = hint.__name__
        if name not in definitions:
            definitions[name] = _table(hint, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object"}
    return {} if hint is Any else {"type": _PLAIN[hint]}


def documented(cls: type[Any]) -> tuple[str, dict[str, str]]:
    """The docstring's text before ``Attributes:``, and its entry for each attribute."""
    text = inspect.getdoc(cls) or ""
    about, _, rest = text.partition("Attributes:\n")
    entries = re.split(r"\n\S", rest)[0]
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", entries, flags=re.MULTILINE)
    return _flat(about), {name: _flat(words) for name, words in found}


def _flat(text: str) -> str:
    return " ".join(text.replace("``", "`").split())
