"""Rollout engines: the protocol, one embedded engine that needs nothing but PyTorch, and vLLM."""

from fxrl.engines.engine import (
    Completion,
    Engine,
    EngineError,
    GenerateTimeoutError,
    PromptError,
    SamplingParams,
)
from fxrl.engines.registry import ENGINES, Built, EngineSpec, build_engine
from fxrl.engines.torch.engine import TorchEngine
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
]
