"""From the command line's words to a model, a loss function and a ``Config``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxrl.config import Config
from fxrl.errors import ConfigError
from fxrl.losses import by_name
from fxrl.models import ModelError, build_from_config, fetch_smollm2, load_model, lora, tiny_config
from fxrl.models.build import read_config
from fxrl.models.hf import optional, why_no_hub
from fxrl.models.load import Source, resolve
from fxrl.models.tiny import parse_tiny
from fxrl.rl.config.binding import Text, bind, merge_override, parse_override
from fxrl.rl.config.named import importable_from


def optimize_config(pairs: Iterable[str]) -> Config:
    """``["gpu_memory=75GiB", "chunk_tokens=8"]`` as a ``Config``.

    Raises:
        ConfigError: names every wrong key, with the nearest right one, and every wrong value.
    """
    problems: list[str] = []
    found = bind(Config, _table(pairs, problems), problems)
    if found is None or problems:
        raise ConfigError("--config: " + "; ".join(problems))
    return found


def loss_function(name: str, pairs: Iterable[str]) -> Callable[..., Any]:
    """``fxrl.losses.by_name``, with modules of the working folder in reach.

    Raises:
        ConfigError: no such loss or keyword, or a value out of range.
    """
    problems: list[str] = []
    values = {k: v.value if isinstance(v, Text) else v for k, v in _table(pairs, problems).items()}
    if problems:
        raise ConfigError("--loss-args: " + "; ".join(problems))
    with importable_from(Path.cwd()):
        return by_name(name, **values)


def _table(pairs: Iterable[str], problems: list[str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for pair in pairs:
        if (parsed := parse_override(pair, problems)) is not None:
            merge_override(table, *parsed)
    return table


def empty_model(args: argparse.Namespace) -> nn.Module:
    """The model without weights (meta device), in training mode, with LoRA if asked for."""
    return _trainable(build_from_config(_hf_config(args.model), args.dtype, "meta"), args)


def real_model(args: argparse.Namespace, on_progress: Callable[[str], None]) -> nn.Module:
    """The model with its weights on ``--device``, likewise."""
    device = check_device(args.device)
    model, _ = load_model(args.model, args.dtype, device, seed=args.seed, on_progress=on_progress)
    return _trainable(model, args)


def _hf_config(model_id: str) -> Any:
    """The model's configuration alone; downloads no weights."""
    source = resolve(model_id)
    if source is Source.TINY:
        return tiny_config(*parse_tiny(model_id))
    if source is Source.CONFIG:
        return read_config(model_id)
    if source is Source.SMOLLM2:
        model_id = str(fetch_smollm2())
    if source is not Source.HUB:
        return read_config(Path(model_id).expanduser() / "config.json")
    no_hub = why_no_hub()
    hf = optional("transformers", f"reading the configuration of {model_id}")
    try:
        return hf.AutoConfig.from_pretrained(model_id, local_files_only=no_hub is not None)
    except (OSError, ValueError) as error:
        why = no_hub or str(error).partition("\n")[0]
        raise ModelError(
            f"model {model_id!r}: {why}; its config.json is enough here: save it and give its path"
        ) from error


def check_device(name: str) -> torch.device:
    """``"cpu"``, ``"cuda"``, ``"cuda:1"`` as a device that is there.

    Raises:
        ConfigError: no such device here.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is no device; use cpu or cuda") from error
    count = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if (device.index or 0) >= count:
        raise ConfigError(f"--device {name}: there are {count} of them here; see `fxrl doctor`")
    return device


def _trainable(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    return (lora(model, r=args.lora, seed=0) if args.lora else model).train()
