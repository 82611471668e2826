"""TOML file and overrides -> ``TrainConfig``, or one error with every mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxrl.losses.own_code import importable_from
from fxrl.options import dataclass_in, hints_of
from fxrl.rl.config.binding import bind, counted, default_of, read_tables
from fxrl.rl.config.places import settle_places
from fxrl.rl.config.tables import ModelConfig, TrainConfig
from fxrl.rl.errors import BadConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file and check everything that can be checked before a model or dataset is
    loaded.

    ``overrides`` such as ``"optim.lr=1e-5"`` have values as in TOML; bare words are texts, ``none``
    is None. Raises ``BadConfigError`` with every unknown key (and the nearest right name), every
    value of a wrong type or out of range, and every missing key.
    """
    path = Path(path)
    problems: list[str] = []
    table = read_tables(path, overrides, problems)
    problems += settle_places(table, path.parent)
    with importable_from(path.parent, Path.cwd()):
        return config_of(table, str(path), str(Path("runs") / path.stem), problems)


def config_of(
    table: Mapping[str, Any], source: str, run_dir: str, problems: Sequence[str] = ()
) -> TrainConfig:
    """The configuration that nested tables describe. ``source`` names their origin in messages;
    ``run_dir`` is used if they give none."""
    problems = list(problems)
    config = bind(TrainConfig, table, problems)
    if {"steps", "epochs"} <= table.keys():
        problems.append("steps, epochs: give one of them")
    if problems or config is None:
        lines = [f"{source}: {counted(problems)}", *(f"  {line}" for line in problems)]
        raise BadConfigError("\n".join(lines))
    return config if config.run_dir else dataclasses.replace(config, run_dir=run_dir)


def as_table(config: Any) -> dict[str, Any]:
    """A table of the configuration as plain JSON values, defaults included."""
    table = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        counted = value is not None and field.metadata.get("counted")
        table[field.name] = f"{len(value)} rows" if counted else _as_json(value)
    if isinstance(config, ModelConfig):
        table["id"] = config.name
    return table


def with_defaults(
    saved: Mapping[str, Any], present: Mapping[str, Any], cls: type[Any] = TrainConfig
) -> dict[str, Any]:
    """A table of ``as_table`` that an earlier fxrl wrote, with the keys of a present one that are
    newer than it, by their defaults."""
    hints, filled = hints_of(cls), dict(saved)
    for field in dataclasses.fields(cls):
        name, inner = field.name, dataclass_in(hints[field.name])
        old, new = saved.get(name), present.get(name)
        if name in present and name not in saved:
            default = default_of(field)
            filled[name] = None if default is dataclasses.MISSING else _as_json(default)
        elif inner is not None and isinstance(old, Mapping) and isinstance(new, Mapping):
            filled[name] = with_defaults(old, new, inner)
    return filled


def differences(saved: Mapping[str, Any], present: Mapping[str, Any], path: str = "") -> list[str]:
    """Dotted keys in which two trees differ, with both values."""
    lines: list[str] = []
    for key in sorted(saved.keys() | present.keys()):
        name, old, new = f"{path}{key}", saved.get(key), present.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{name}.")
        elif old != new:
            lines.append(f"{name}: was {old!r}, is {new!r}")
    return lines


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return as_table(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner) for inner in value]
    if callable(value):
        return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value if isinstance(value, str | int | float | None) else str(value)
