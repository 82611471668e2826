"""Rollout engines: the protocol, one embedded engine that needs nothing but PyTorch, and vLLM."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fxrl.engines.engine import (
    Built,
    Completion,
    Engine,
    EngineError,
    EngineSpec,
    GenerateTimeoutError,
    PromptError,
    SamplingParams,
)
from fxrl.engines.torch import engine as _torch
from fxrl.engines.torch.engine import TorchEngine
from fxrl.engines.vllm import door as _door
from fxrl.engines.vllm import engine as _vllm
from fxrl.engines.vllm.engine import VllmEngine
from fxrl.engines.vllm.options import VllmOptions

__all__ = [
    "ENGINES",
    "Built",
    "Completion",
    "Engine",
    "EngineError",
    "EngineSpec",
    "GenerateTimeoutError",
    "PromptError",
    "SamplingParams",
    "TorchEngine",
    "VllmEngine",
    "VllmOptions",
    "build_engine",
    "check_engine",
]

ENGINES: Mapping[str, Callable[[EngineSpec], Built]] = MappingProxyType(
    {"torch": _torch.build, "vllm": _vllm.build}
)


def check_engine(name: str) -> None:
    """Refuse an engine that cannot run on this machine before anything is loaded for it: raises
    ``EngineError`` with reason and cure."""
    if name == "vllm":
        _door.check_machine()


def build_engine(name: str, spec: EngineSpec) -> Built:
    """Model, tokenizer and engine of a run. Raises ``EngineError`` if the engine is unknown or
    cannot be built, ``ConfigError`` if it cannot serve a model on ``spec.device``."""
    if name not in ENGINES:
        raise EngineError(f"engine={name!r} is unknown; use one of {', '.join(ENGINES)}")
    return ENGINES[name](spec)
