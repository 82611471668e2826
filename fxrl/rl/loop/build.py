"""Builds everything a run needs from its configuration, the cheap parts first.

NOTE [Model and engine, in the order that each needs]
The embedded engine samples with the trainer's own model, so the model comes first. vLLM owns the
weights: it loads them, the trainer's model is made over its storages, the adapter goes on top, and
then the engine is told which model's policy it serves. Only then may an optimizer be made, since it
refers to the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fxrl import optimize
from fxrl.errors import ConfigError
from fxrl.models import load_model, lora
from fxrl.models.load import model_folder
from fxrl.rl.config.named import build_loss
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.data.prompts import PromptBuilder, question_text
from fxrl.rl.data.questions import PromptStream, Source, Split, read_source, split_rows
from fxrl.rl.data.rewards import Reward, build_rewards
from fxrl.rl.drift import loss_measures
from fxrl.rl.errors import BadConfigError
from fxrl.rl.loop.scoring import Scorer, reference
from fxrl.rl.loop.updater import Updater, build_optimizer, build_schedule
from fxrl.rl.report.progress import Reporter, Stage
from fxrl.rl.rollout.rollouter import Rollouter
from fxrl.rl.types import Batch
from fxrl.runtime import Engine, TorchEngine


@dataclass(frozen=True, slots=True)
class Questions:
    """What needs no model: rows, their split and the rewards.

    Attributes:
        source: all rows.
        split: train, held out, few-shot.
        rewards: the reward functions.
    """

    source: Source
    split: Split
    rewards: list[Reward]


@dataclass(slots=True)
class RunParts:
    """A run's parts, ready for the loop.

    Attributes:
        model: with its adapter, in train mode.
        tokenizer: the model's.
        engine: rollouts.
        rollouter: generates and judges.
        stream: order of the training rows.
        updater: makes the updates; ``updater.step`` is the train step.
        old_policy: scores completions before the first of several updates; else ``None``.
        reference: scores them under the reference policy; ``None`` without a KL.
        probe: scores some of them for the drift, where the loss does not measure it.
        stage: says what is being done.
    """

    model: nn.Module
    tokenizer: Any
    engine: Engine
    questions: Questions
    rollouter: Rollouter
    stream: PromptStream
    updater: Updater
    old_policy: Callable[[Batch], torch.Tensor] | None
    reference: Callable[[Batch], torch.Tensor] | None
    probe: Callable[[Batch], torch.Tensor] | None
    stage: Stage


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def read_questions(config: TrainConfig) -> Questions:
    """Reads the data and makes the rewards; loads no model.

    Raises:
        DataError: the data does not fit the configuration.
        BadConfigError: ``eval.reward`` names no reward.
    """
    data = config.data
    source = read_source(data)
    split = split_rows(
        source.rows,
        lambda row: question_text(data, source.prompt, row),
        num_held_out=config.eval.size,
        num_shots=data.few_shot,
        seed=data.seed,
    )
    rewards = build_rewards(config.reward, data.answer, source.score)
    names = [reward.name for reward in rewards]
    if config.eval.reward is not None and config.eval.reward not in names:
        raise BadConfigError(f"eval.reward={config.eval.reward!r} is not one of {', '.join(names)}")
    return Questions(source, split, rewards)


def build_parts(
    config: TrainConfig, questions: Questions, run_dir: Path, reporter: Reporter
) -> RunParts:
    """Loads the model and wires the run together.

    Raises:
        ModelError, FetchError: no such model.
        ConfigError: something does not go together with this model.
        EngineError: vLLM is not installed, or cannot be built; the message has the cure.
    """
    device = pick_device(config.model.device)
    prompts = functools.partial(
        PromptBuilder, config.data, questions.source.prompt, questions.split.shots
    )
    if config.engine == "vllm":
        model, tokenizer, engine = _with_vllm(
            config,
            device,
            run_dir / "model",
            lambda tokenizer: _longest_prompt(prompts(tokenizer), questions.split, config),
            reporter,
        )
    else:
        model, tokenizer, engine = _embedded(config, device, reporter)
    try:
        builder = prompts(tokenizer)
        rollouter = Rollouter(engine, builder, questions.rewards, config, tokenizer, reporter.stage)
        return _around(model, rollouter, questions, run_dir, device)
    except BaseException:
        engine.close()
        raise


def _around(
    model: nn.Module,
    rollouter: Rollouter,
    questions: Questions,
    run_dir: Path,
    device: torch.device,
) -> RunParts:
    """What goes around model and engine."""
    config = rollouter.config
    make_step: Callable[..., Any] = functools.partial(optimize, config=config.fxrl)
    if not config.optimize:
        make_step = _plain
    wrap = functools.partial(
        with_autocast, device_type=device.type, dtype=config.model.autocast_dtype
    )
    sampling = config.sampling
    loss_fn = build_loss(
        config.loss.name,
        config.loss.options,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(config.optim, parameters)
    scorer = functools.partial(
        Scorer, optimize=make_step, temperature=sampling.temperature, wrap=wrap
    )
    old_policy = scorer(model) if config.num_iterations > 1 else None
    needs_reference = bool(config.loss.options.get("beta", 0.0))
    ref_model, context = reference(model) if needs_reference else (model, None)
    return RunParts(
        model=model,
        tokenizer=rollouter.tokenizer,
        engine=rollouter.engine,
        questions=questions,
        rollouter=rollouter,
        stream=PromptStream(len(questions.split.train), config.seed, shuffle=config.data.shuffle),
        updater=Updater(
            step=make_step(model, wrap(loss_fn)),
            parameters=parameters,
            optimizer=optimizer,
            schedule=build_schedule(config.optim, optimizer, config.steps * config.num_iterations),
            loss=config.loss,
            max_grad_norm=config.optim.max_grad_norm,
            max_nonfinite=config.max_nonfinite,
            run_dir=run_dir,
        ),
        old_policy=old_policy,
        reference=scorer(ref_model, context=context) if context is not None else None,
        probe=None if loss_measures(config.loss.name) else old_policy or scorer(model),
        stage=rollouter.stage,
    )


def _embedded(
    config: TrainConfig, device: torch.device, reporter: Reporter
) -> tuple[nn.Module, Any, Engine]:
    """Model, tokenizer, and the engine that samples with the model itself."""
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
    return model, tokenizer, engine


def _with_vllm(
    config: TrainConfig,
    device: torch.device,
    made: Path,
    longest_prompt: Callable[[Any], int],
    reporter: Reporter,
) -> tuple[nn.Module, Any, Engine]:
    """Tokenizer and engine, and the model made of the engine's weights.

    Args:
        made: where a model of random weights is written.
        longest_prompt: from the tokenizer to the tokens of the longest prompt of the run.
    """
    from fxrl.runtime.vllm_engine import VllmEngine

    wanted = config.model
    with reporter.stage(f"finding {wanted.id} ({wanted.dtype}, {device})") as say:
        folder, tokenizer = model_folder(
            wanted.id, made, dtype=wanted.dtype, seed=config.seed, on_progress=say
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
    return model, tokenizer, engine


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


MANY_ROWS = 20_000
"""Beyond it not every prompt is tokenised in advance; data.max_prompt_tokens bounds them all."""


def _longest_prompt(builder: PromptBuilder, split: Split, config: TrainConfig) -> int:
    """Tokens of the longest prompt of the run, or a bound."""
    rows = [*split.train, *split.held_out]
    if len(rows) > MANY_ROWS:
        return config.data.max_prompt_tokens
    return max(len(builder.encode(builder.prompt(row))) for row in rows)


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU if there is one.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device={name!r}: PyTorch sees no GPU; use auto or cpu")
    return device


def with_autocast(
    loss_fn: Callable[..., Any], *, device_type: str, dtype: torch.dtype | None
) -> Callable[..., Any]:
    """``loss_fn`` under autocast; unchanged where ``dtype`` is ``None``."""
    if dtype is None:
        return loss_fn

    def loss_under_autocast(model: nn.Module, batch: Batch) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return loss_fn(model, batch)

    return loss_under_autocast


def _plain(model: nn.Module, loss_fn: Callable[..., Any]) -> Callable[[Batch], Any]:
    return functools.partial(loss_fn, model)
