"""The model that is trained and the engine that draws from it, built in the order each needs.

The embedded engine samples with the trainer's own model, so the model comes first. vLLM owns the
weights: it loads them, the trainer's model is made over its storages, the adapter goes on top, and
then the engine is told which model's policy it serves. Only then may an optimizer be made, since it
refers to the parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fxrl.errors import ConfigError
from fxrl.models import load_model, lora
from fxrl.models.folder import model_folder
from fxrl.rl.config import TrainConfig
from fxrl.rl.progress import Reporter
from fxrl.runtime import Engine, TorchEngine

LongestPrompt = Callable[[Any], int]
"""From the tokenizer to the tokens of the longest prompt of the run."""


class Policy(NamedTuple):
    """Attributes: model: with its adapter, in train mode. tokenizer: its own. engine: draws."""

    model: nn.Module
    tokenizer: Any
    engine: Engine


def build_policy(
    config: TrainConfig,
    device: torch.device,
    run_dir: Path,
    longest_prompt: LongestPrompt,
    reporter: Reporter,
) -> Policy:
    """Model, tokenizer and engine of a run.

    Raises:
        ModelError, FetchError: no such model.
        ConfigError: the model has no tokenizer.
        EngineError: vLLM is not installed, or cannot be built; the message has the cure.
    """
    if config.engine == "vllm":
        return _with_vllm(config, device, run_dir, longest_prompt, reporter)
    wanted = config.model
    with reporter.stage(f"loading {wanted.id} ({wanted.dtype}, {device})") as say:
        model, tokenizer = load_model(
            wanted.id, wanted.dtype, device, seed=config.seed, on_progress=say
        )
        if tokenizer is None:
            raise ConfigError(
                f"model.id={wanted.id!r} has no tokenizer; give a folder that has one"
            )
        model = _trainable(model, config)
    engine = TorchEngine.from_tokenizer(
        model, tokenizer, seed=config.seed, autocast=wanted.autocast_dtype
    )
    return Policy(model, tokenizer, engine)


def _with_vllm(
    config: TrainConfig,
    device: torch.device,
    run_dir: Path,
    longest_prompt: LongestPrompt,
    reporter: Reporter,
) -> Policy:
    from fxrl.runtime.vllm_engine import VllmEngine

    wanted = config.model
    with reporter.stage(f"finding {wanted.id} ({wanted.dtype}, {device})") as say:
        folder, tokenizer = model_folder(
            wanted.id, run_dir / "model", dtype=wanted.dtype, seed=config.seed, on_progress=say
        )
    options = config.vllm
    if options.max_model_len is None:
        longest = longest_prompt(tokenizer) + config.sampling.max_tokens
        options = dataclasses.replace(options, max_model_len=longest)
    if options.dtype == "auto":
        compute = wanted.autocast_dtype
        dtype = wanted.dtype if compute is None else str(compute).removeprefix("torch.")
        options = dataclasses.replace(options, dtype=dtype)
    sizes = f"max_model_len={options.max_model_len}, max_num_seqs={options.max_num_seqs}"
    with reporter.stage(f"starting vLLM: {sizes}, {options.dtype}"):
        eos = eos_ids(folder, tokenizer)
        engine = VllmEngine(folder, options, eos_token_ids=eos, seed=config.seed)
    try:
        with reporter.stage("making the trainer's model of vLLM's weights"):
            model, report = engine.shared_model(dtype=getattr(torch, wanted.dtype))
        reporter.message(str(report))
        if (place := next(model.parameters()).device).type != device.type:
            raise ConfigError(
                f"model.device={wanted.device!r}, but vLLM and the model made of its weights are "
                f"on {place.type}; use auto"
            )
        model = _trainable(model, config)
        completions = config.prompts_per_step * config.sampling.num_generations
        engine.attach(
            model,
            decode_steps=config.sampling.max_tokens,
            num_sequences=min(completions, options.max_num_seqs),
        )
        reporter.message(
            f"rollouts take the trained weights by {engine.policy.way!r}: {engine.policy.reason}"
        )
    except BaseException:
        engine.close()
        raise
    return Policy(model, tokenizer, engine)


def eos_ids(folder: Path, tokenizer: Any) -> Iterable[int]:
    """Ids that end a completion: the tokenizer's, and those of the checkpoint's generation."""
    from transformers import GenerationConfig

    found = {tokenizer.eos_token_id}
    if (folder / "generation_config.json").is_file():
        also = GenerationConfig.from_pretrained(str(folder)).eos_token_id
        found |= set(also) if isinstance(also, list | tuple) else {also}
    return sorted(found - {None})


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
