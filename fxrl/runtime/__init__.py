"""Rollout engines: the protocol, and one embedded engine that needs nothing but PyTorch."""

from fxrl.runtime.engine import Completion, Engine, EngineError, PromptError, SamplingParams
from fxrl.runtime.torch_engine import TorchEngine

__all__ = ["Completion", "Engine", "EngineError", "PromptError", "SamplingParams", "TorchEngine"]
