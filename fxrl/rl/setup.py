"""Builds everything a run needs from its configuration, the cheap parts first."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fxrl import optimize
from fxrl.errors import ConfigError
from fxrl.rl.config import TrainConfig
from fxrl.rl.data import PromptStream, Source, Split, read_source, split_rows
from fxrl.rl.drift import loss_measures
from fxrl.rl.errors import BadConfigError
from fxrl.rl.named import build_loss
from fxrl.rl.optim import build_optimizer, build_schedule
from fxrl.rl.policy import Policy, build_policy
from fxrl.rl.progress import Reporter, Stage
from fxrl.rl.prompts import PromptBuilder, question_text
from fxrl.rl.reward_call import CallRules, Reward
from fxrl.rl.rewards import build_rewards
from fxrl.rl.rollout import Roller
from fxrl.rl.scoring import Scorer, reference
from fxrl.rl.types import Batch
from fxrl.rl.updater import Updater
from fxrl.runtime import Engine


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
class Parts:
    """A run's parts, ready for the loop.

    Attributes:
        model: with its adapter, in train mode.
        tokenizer: the model's.
        engine: rollouts.
        roller: generates and judges.
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
    roller: Roller
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
    rewards = build_rewards(
        config.reward.functions,
        config.reward.weights,
        config.reward.params,
        extract=config.reward.extract,
        answer=data.answer,
        score=source.score,
        rules=CallRules(config.reward.timeout_s, config.reward.retries, config.reward.on_error),
        per_group=config.reward.per_group,
    )
    names = [reward.name for reward in rewards]
    if config.eval.reward is not None and config.eval.reward not in names:
        raise BadConfigError(f"eval.reward={config.eval.reward!r} is not one of {', '.join(names)}")
    return Questions(source, split, rewards)


def build_parts(
    config: TrainConfig, questions: Questions, run_dir: Path, reporter: Reporter
) -> Parts:
    """Loads the model and wires the run together.

    Raises:
        ModelError, FetchError: no such model.
        ConfigError: something does not go together with this model.
    """
    device = pick_device(config.model.device)
    prompts = functools.partial(
        PromptBuilder, config.data, questions.source.prompt, questions.split.shots
    )

    def longest_prompt(tokenizer: Any) -> int:
        return _longest_prompt(prompts(tokenizer), questions.split, config)

    policy = build_policy(config, device, run_dir, longest_prompt, reporter)
    try:
        builder = prompts(policy.tokenizer)
        return _around(policy, builder, config, questions, run_dir, device, reporter.stage)
    except BaseException:
        policy.engine.close()
        raise


def _around(
    policy: Policy,
    builder: PromptBuilder,
    config: TrainConfig,
    questions: Questions,
    run_dir: Path,
    device: torch.device,
    stage: Stage,
) -> Parts:
    """What goes around model and engine."""
    model, tokenizer, engine = policy
    autocast = config.model.autocast_dtype
    make_step: Callable[..., Any] = functools.partial(optimize, config=config.fxrl)
    if not config.optimize:
        make_step = _plain
    wrap = functools.partial(with_autocast, device_type=device.type, dtype=autocast)
    loss_fn = build_loss(
        config.loss.name,
        config.loss.options,
        temperature=config.sampling.temperature,
        max_tokens=config.sampling.max_tokens,
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(config.optim, parameters)
    schedule: LRScheduler = build_schedule(
        config.optim, optimizer, config.steps * config.num_iterations
    )
    scorer = functools.partial(
        Scorer, optimize=make_step, temperature=config.sampling.temperature, wrap=wrap
    )
    old_policy = scorer(model) if config.num_iterations > 1 else None
    needs_reference = bool(config.loss.options.get("beta", 0.0))
    ref_model, context = reference(model) if needs_reference else (model, None)
    return Parts(
        model=model,
        tokenizer=tokenizer,
        engine=engine,
        questions=questions,
        roller=Roller(
            engine,
            builder,
            questions.rewards,
            config.sampling,
            tokenizer,
            config.engine_retries,
            stage,
        ),
        stream=PromptStream(len(questions.split.train), config.seed, shuffle=config.data.shuffle),
        updater=Updater(
            step=make_step(model, wrap(loss_fn)),
            parameters=parameters,
            optimizer=optimizer,
            schedule=schedule,
            loss=config.loss,
            max_grad_norm=config.optim.max_grad_norm,
            max_nonfinite=config.max_nonfinite,
            run_dir=run_dir,
        ),
        old_policy=old_policy,
        reference=scorer(ref_model, context=context) if context is not None else None,
        probe=None if loss_measures(config.loss.name) else old_policy or scorer(model),
        stage=stage,
    )


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
