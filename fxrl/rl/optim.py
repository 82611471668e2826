"""Optimizer and schedule out of ``torch.optim``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fxrl.rl.errors import BadConfigError
from fxrl.rl.named import optimizer_class
from fxrl.rl.sections import OptimConfig


def build_optimizer(
    config: OptimConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer over the trainable ones of ``parameters``.

    Raises:
        BadConfigError: the optimizer refuses its keywords.
    """
    trained = [p for p in parameters if p.requires_grad]
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config.options.items()}
    make: Callable[..., torch.optim.Optimizer] = optimizer_class(config.name)
    try:
        return make(trained, lr=config.lr, **options)
    except (TypeError, ValueError) as error:
        raise BadConfigError(f"optim: {config.name} refuses {options}: {error}") from error


def build_schedule(
    config: OptimConfig, optimizer: torch.optim.Optimizer, num_updates: int
) -> LambdaLR:
    """Linear warmup, then constant, linear or cosine; see ``lr_factor``."""
    return LambdaLR(optimizer, lambda update: lr_factor(config, update, num_updates))


def lr_factor(config: OptimConfig, update: int, num_updates: int) -> float:
    """What the learning rate of update number ``update`` (from 0) is multiplied by.

    Warmup ends at 1 at update ``warmup_steps``; decay would reach 0 at update ``num_updates``, one
    past the last, so no update is lost.
    """
    if update < config.warmup_steps:
        return (update + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    span = max(1, num_updates - config.warmup_steps)
    done = min(1.0, (update - config.warmup_steps) / span)
    return 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
