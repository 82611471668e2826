"""fxrl: any model, any PyTorch RL loss, rewritten into a train step that fits and flies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fxrl.config import Config
    from fxrl.ir.plan import Plan
    from fxrl.ir.remark import Remark, Report
    from fxrl.step import TrainStep, optimize

__all__ = ["Config", "Plan", "Remark", "Report", "TrainStep", "optimize"]

#: Public name -> module. Imported on first use, so that ``fxrl --help`` does not wait for torch.
_HOMES = {
    "Config": "fxrl.config",
    "Plan": "fxrl.ir.plan",
    "Remark": "fxrl.ir.remark",
    "Report": "fxrl.ir.remark",
    "TrainStep": "fxrl.step",
    "optimize": "fxrl.step",
}
_MODULES = ("losses", "passes")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"fxrl.{name}")
    raise AttributeError(f"module 'fxrl' has no attribute {name!r}")
