"""Rollout engines: the protocol, one embedded engine that needs nothing but PyTorch, and vLLM."""

from fxrl.engines.engine import (
    Completion,
    Engine,
    EngineError,
    GenerateTimeoutError,
    PromptError,
    SamplingParams,
)
from fxrl.engines.torch.engine import TorchEngine
from fxrl.engines.vllm.engine import VllmEngine
from fxrl.engines.vllm.options import VllmOptions

__all__ = [
    "Completion",
    "Engine",
    "EngineError",
    "GenerateTimeoutError",
    "PromptError",
    "SamplingParams",
    "TorchEngine",
    "VllmEngine",
    "VllmOptions",
]
