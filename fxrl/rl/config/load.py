"""TOML file and overrides -> ``TrainConfig``, or one error with every mistake."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxrl.losses.own_code import importable_from
from fxrl.rl.config.binding import Text, bind, merge_override, parse_override
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.errors import BadConfigError

MOST_SEQUENCES = 1024
"""At once: beyond it a decode step's time and the sampler's memory grow with the sequences."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads and checks everything that can be checked before a model or dataset is loaded.

    Args:
        overrides: ``"optim.lr=1e-5"``; values as in TOML, bare words are texts, ``none`` is None.

    Raises:
        BadConfigError: lists every unknown key with the nearest right name, every value of the
            wrong type or out of range, and every missing key.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadConfigError(f"{path}: not TOML: {error}") from error
    problems: list[str] = []
    for text in overrides:
        if (override := parse_override(text, problems)) is not None:
            merge_override(table, *override)
    with importable_from(path.parent, Path.cwd()):
        config = bind(TrainConfig, table, problems)
    if problems or config is None:
        count = f"{len(problems)} mistakes" if len(problems) > 1 else "1 mistake"
        raise BadConfigError("\n".join([f"{path}: {count}", *(f"  {line}" for line in problems)]))
    given = table.get("vllm", {})
    if "max_num_seqs" not in (given.value if isinstance(given, Text) else given):
        completions = config.prompts_per_step * config.sampling.num_generations
        vllm = dataclasses.replace(config.vllm, max_num_seqs=min(completions, MOST_SEQUENCES))
        config = dataclasses.replace(config, vllm=vllm)  # all of a step at the same time
    if not config.run_dir:
        config = dataclasses.replace(config, run_dir=str(Path("runs") / path.stem))
    return config


def as_table(config: TrainConfig) -> dict[str, Any]:
    """The whole tree as plain JSON values, defaults included."""
    table: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=_plain))
    return table


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


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)
