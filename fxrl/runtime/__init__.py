"""Rollout engines: the protocol, one embedded engine that needs nothing but PyTorch, and vLLM."""

from fxrl.runtime.engine import Completion, Engine, EngineError, PromptError, SamplingParams
from fxrl.runtime.torch_engine import TorchEngine
from fxrl.runtime.vllm_engine import VllmEngine
from fxrl.runtime.vllm_options import VllmOptions

__all__ = [
    "Completion",
    "Engine",
    "EngineError",
    "PromptError",
    "SamplingParams",
    "TorchEngine",
    "VllmEngine",
    "VllmOptions",
]
