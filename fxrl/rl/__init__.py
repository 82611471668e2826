"""The trainer and what goes with it, imported on first use: ``import fxrl.rl`` loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxrl.rl.callbacks import Callback, Control
    from fxrl.rl.config.tables import TrainConfig
    from fxrl.rl.loop.run import Outcome
    from fxrl.rl.trainer import Trainer

__all__ = ["Callback", "Control", "Outcome", "TrainConfig", "Trainer"]

_HOMES = {
    "Callback": "fxrl.rl.callbacks",
    "Control": "fxrl.rl.callbacks",
    "Outcome": "fxrl.rl.loop.run",
    "TrainConfig": "fxrl.rl.config.tables",
    "Trainer": "fxrl.rl.trainer",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fxrl.rl' has no attribute {name!r}")
