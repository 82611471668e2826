"""What a model's files may name: sizes, and other files of their folder; no code and no kernels.

Whoever loads a checkpoint takes its numbers, not its author's programs. transformers would fetch
and run a kernel that ``attn_implementation`` names, and open files wherever an index points to.
Code that ``auto_map`` names is left to ``trust_remote_code=False``, with which all models load.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fxrl.models.hf import ModelError

MOST_PARTS = 4096
"""Layers, heads or experts; layers are Python objects, so of a wrong number there is no end."""
_PARTS = re.compile(r"(layer|expert|head|block|group)s?$")
# Endings of what transformers reads, there and in the one folder below.
_READ = {".json", ".safetensors", ".bin", ".txt", ".model", ".jinja", ".tiktoken"}
_IMPLEMENTATION = re.compile(r"(attn|experts)_implementation(_internal)?$")


def read_json(file: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{str(file)!r}: {error.strerror}; give a config.json's path") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{str(file)!r} is not JSON ({error}); mend it, or give another"
        ) from error


def check_config(values: Any, name: str) -> None:
    """Raise if a ``config.json`` with these values, called ``name`` in the message, names a kernel,
    or more parts than any model has."""
    for key, value in _entries(values):
        if _IMPLEMENTATION.search(key):
            for one in value.values() if isinstance(value, Mapping) else [value]:
                if one is not None and not re.fullmatch(r"[\w|]+", str(one)):
                    raise ModelError(
                        f"{name}: {key}={one!r} names a kernel, which would be fetched and run; "
                        "a model's files are data: remove the entry, or write 'sdpa'"
                    )
        is_count = isinstance(value, int | float) and _PARTS.search(key)
        if is_count and not -1 <= value <= MOST_PARTS:
            raise ModelError(
                f"{name}: {key}={value} is outside 0..{MOST_PARTS}; the file is damaged, or of no "
                "model that can be built"
            )


def check_folder(folder: Path) -> None:
    """Raises where a model's folder reaches out of itself.

    Links of the Hugging Face cache, from a snapshot to its repository's blobs, are inside.
    """
    templates = folder / "additional_chat_templates"
    for entry in sorted([*folder.iterdir(), *templates.glob("*")]):
        if entry.suffix in _READ:
            _inside(folder, entry.relative_to(folder), str(entry))
        if entry.name == "config.json":
            check_config(read_json(entry), str(entry))
        elif entry.name.endswith(".index.json"):
            table = _table(read_json(entry), "weight_map", dict, entry)
            for name in set(map(str, table.values())):
                _inside(folder, name, f"{entry}: weight_map")
        elif entry.name == "tokenizer_config.json":
            for name in _table(read_json(entry), "fast_tokenizer_files", list, entry):
                _inside(folder, name, f"{entry}: fast_tokenizer_files")


def _entries(values: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON tree, at any depth."""
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _table(values: Any, key: str, kind: type, file: Path) -> Any:
    found = values.get(key) if isinstance(values, dict) else values
    if found is None:
        return kind()
    if not isinstance(found, kind):
        raise ModelError(f"{file}: {key} is {type(found).__name__}; the file is damaged")
    return found


def _inside(folder: Path, name: Any, where: str) -> None:
    home = Path(os.path.realpath(folder))
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    path = Path(str(name))
    real = Path(os.path.realpath(home / path))
    if path.is_absolute() or ".." in path.parts or not any(map(real.is_relative_to, homes)):
        raise ModelError(
            f"{where}: {str(name)!r} leads to {real}, outside of the model's folder; put the file "
            "itself there"
        )
