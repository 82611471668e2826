"""The model that is trained and the engine that draws from it, as the configuration wants them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxrl.engines import Built, EngineSpec, build_engine
from fxrl.errors import ConfigError
from fxrl.models import load_model, lora
from fxrl.models.folder import model_folder
from fxrl.rl.config import TrainConfig

Tell = Callable[[str], None]
LongestPrompt = Callable[[Any], int]
"""From the tokenizer to the tokens of the longest prompt of the run."""


def build_policy(
    config: TrainConfig,
    device: torch.device,
    run_dir: Path,
    longest_prompt: LongestPrompt,
    tell: Tell,
) -> Built:
    """Model, tokenizer and engine of a run.

    Raises:
        ModelError, FetchError: no such model.
        ConfigError: the model has no tokenizer.
        EngineError: vLLM is not installed, or cannot be built; the message has the cure.
    """
    wanted = config.model
    tell(f"loading {wanted.id} ({wanted.dtype}, {device})")

    def load() -> tuple[nn.Module, Any]:
        model, tokenizer = load_model(
            wanted.id, wanted.dtype, device, seed=config.seed, on_progress=tell
        )
        if tokenizer is None:
            raise ConfigError(
                f"model.id={wanted.id!r} has no tokenizer; give a folder that has one"
            )
        return model, tokenizer

    def folder() -> tuple[Path, Any]:
        return model_folder(
            wanted.id, run_dir / "model", dtype=wanted.dtype, seed=config.seed, on_progress=tell
        )

    spec = EngineSpec(
        load=load,
        folder=folder,
        trainable=functools.partial(_trainable, config=config),
        longest_prompt=longest_prompt,
        max_tokens=config.sampling.max_tokens,
        device=device,
        dtype=getattr(torch, wanted.dtype),
        autocast=wanted.autocast_dtype,
        seed=config.seed,
        tell=tell,
        options=getattr(config, config.engine, None),  # the table of the engine's name
    )
    return build_engine(config.engine, spec)


def _trainable(model: nn.Module, config: TrainConfig) -> nn.Module:
    """With its adapter and checkpointing, in train mode."""
    wanted = config.model
    if wanted.lora is not None:
        model = lora(
            model,
            wanted.lora.r,
            wanted.lora.alpha,
            wanted.lora.targets,
            dropout=wanted.lora.dropout,
            seed=config.seed,
        )
    if wanted.gradient_checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        if wanted.lora is not None:
            model.enable_input_require_grads()  # type: ignore[operator]
    return model.train()
