"""Rollout engines: the protocol, and one embedded engine that needs nothing but PyTorch."""

from fxrl.runtime.engine import Completion, Engine, EngineError, PromptError, SamplingParams

__all__ = ["Completion", "Engine", "EngineError", "PromptError", "SamplingParams"]
