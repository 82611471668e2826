"""Builds a run's parts around its data: model, engine and train step, the cheap parts first.

NOTE [Why one part is built after the other]
Parts gain by overlapping where one waits while another computes. On two cores none waits: capture
and lowering are Python and hold the interpreter, so of the 22 s to the end of SmolLM2's first step
3 s could run beside others. vLLM waits for tens of seconds while it is built, but the model that is
captured is made of its weights, so that there is none to capture before; what is left to begin
early is the import of the compiler's modules and its workers' start (not measured beside vLLM).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fxrl import TrainStep
from fxrl.distributed import COLLECTIVE_S, Ranks
from fxrl.engines import Engine, EngineSpec, build_engine
from fxrl.errors import ConfigError
from fxrl.losses import loss_info
from fxrl.models import ModelError, Peers
from fxrl.rl.callbacks import Events
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.data.examples import Examples
from fxrl.rl.data.questions import PromptStream
from fxrl.rl.errors import defined_at
from fxrl.rl.loop import fingerprint
from fxrl.rl.loop.data import Questions
from fxrl.rl.loop.models import Models, pick_device
from fxrl.rl.loop.prepare import Task
from fxrl.rl.loop.scoring import Scorers, make_scorers, step_maker
from fxrl.rl.loop.sharded import build_optimizer
from fxrl.rl.loop.updater import Updater, lr_factor
from fxrl.rl.report.progress import Reporter
from fxrl.rl.rollout.rollouter import Rollouter
from fxrl.rl.types import Batch


@dataclass(slots=True)
class RunParts:
    """A run's parts, ready for the loop."""

    config: TrainConfig  # settled
    model: nn.Module
    teacher: nn.Module | None
    tokenizer: Any
    engine: Engine
    data: Questions | Examples
    source: Rollouter | Examples
    stream: PromptStream
    updater: Updater  # ``updater.step`` is the train step
    scorers: Scorers
    reporter: Reporter
    events: Events
    fingerprints: Mapping[str, str]  # of the data, and of model and tokenizer before training
    ranks: Ranks


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def build_parts(task: Task, reporter: Reporter) -> RunParts:
    """Load the model and wire the run together. Raises ``ModelError`` or ``FetchError`` if there is
    no such model, ``ConfigError`` if something does not fit it, ``EngineError`` if vLLM is missing
    or cannot be built."""
    config, data, ranks = task.config, task.data, task.ranks
    device, made = pick_device(config.model.device), Path(config.run_dir).absolute() / "model"
    peers = Peers.of(ranks.gather) if config.model.sharded else None
    models = Models(config, data.tokenizer, device, made, peers, reporter.stage)
    teacher = models.teacher()
    model, tokenizer, engine = build_engine(config.engine, _engine_spec(task, models, reporter))
    with ExitStack() as where_it_fails:
        where_it_fails.callback(engine.close)
        _check_positions(model, data, config.sampling.max_tokens)
        loss_fn = config.make_loss(teacher)
        make_step = step_maker(config, next(model.parameters()).device)
        step = make_step(model, loss_fn)  # which captures nothing yet
        if isinstance(step, TrainStep):  # here, where no rank is missing
            step.join(timedelta(seconds=COLLECTIVE_S))
        new = config.model.lora is not None
        made_of = fingerprint.of_models(model, tokenizer, teacher, new=new)
        source = data.source(engine, config, tokenizer, reporter.stage, ranks)
        parts = RunParts(
            config=config,
            model=model,
            teacher=teacher,
            tokenizer=tokenizer,
            engine=engine,
            data=data,
            source=source,
            stream=PromptStream(len(data.split.train), config.seed, shuffle=config.data.shuffle),
            updater=_updater(task, model, step, loss_fn),
            scorers=make_scorers(config, model, loss_fn, make_step, draws=source.draws),
            reporter=reporter,
            events=Events(config, task.callbacks, {"model": model, "tokenizer": tokenizer}),
            fingerprints={**data.fingerprints, **made_of},
            ranks=ranks,
        )
        where_it_fails.pop_all()
    return parts


def prompts_each(config: TrainConfig, ranks: Ranks) -> int:
    """Prompts of a step that one rank draws completions for, where all cost about the same."""
    return -(-config.prompts_per_step // ranks.size)


def _engine_spec(task: Task, models: Models, reporter: Reporter) -> EngineSpec:
    """How the run's model is come by, and what the run wants of its engine."""
    config, data, wanted = task.config, task.data, task.config.model
    adapter = wanted.adapter
    rank = None if wanted.lora is None else wanted.lora.r
    return EngineSpec(
        load=models.load,
        folder=models.folder,
        trainable=models.trainable,
        longest_prompt=data.longest,
        max_tokens=config.sampling.max_tokens,
        num_sequences=prompts_each(config, task.ranks) * config.sampling.num_generations,
        device=models.device,
        dtype=getattr(torch, wanted.dtype),
        autocast=wanted.autocast_dtype,
        seed=config.seed,
        tell=reporter.message,
        stage=reporter.stage,
        options=getattr(config, config.engine, None),  # the table of the engine's name
        lora_rank=rank if adapter is None else adapter.rank,
        prompts_grow=isinstance(data, Questions) and data.grow,
    )


def _check_positions(model: nn.Module, data: Questions | Examples, max_tokens: int) -> None:
    """Raises ``ConfigError`` if a completion may not fit behind the longest prompt, which engines
    refuse when they get it."""
    about: Any = getattr(model, "config", None)
    limit = about and getattr(about.get_text_config(), "max_position_embeddings", None)
    if limit is None or not isinstance(data, Questions) or data.grow:
        return
    if data.longest + max_tokens > limit:
        room = limit - data.longest
        lower = f"lower it to {room}, or data.max_prompt_tokens"
        raise ConfigError(
            f"sampling.max_tokens={max_tokens} behind the longest prompt, of {data.longest} "
            f"tokens, is more than the model's {limit} positions; "
            f"{lower if room > 0 else 'lower data.max_prompt_tokens'}"
        )


def _updater(
    task: Task, model: nn.Module, step: Callable[[Batch], Any], loss_fn: Callable[..., Any]
) -> Updater:
    """What updates the model's trained parameters by ``step``, ``loss_fn`` of it."""
    config, ranks = task.config, task.ranks
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ModelError(
            f"model.id={config.model.name!r}: nothing of it is trained, as all its weights are "
            "frozen; of an adapter on the hub give the folder that it is downloaded to"
        )
    full = not config.model.adapted
    optimizer = build_optimizer(config.optim, list(named.values()), ranks if full else None)
    num_updates = config.steps * config.num_iterations
    return Updater(
        step=step,
        parameters=list(named.values()),
        optimizer=optimizer,
        schedule=LambdaLR(optimizer, lambda n: lr_factor(config.optim, n, num_updates)),
        loss=config.loss,
        max_grad_norm=config.optim.max_grad_norm,
        max_nonfinite=config.max_nonfinite,
        run_dir=Path(config.run_dir),
        place=defined_at(loss_fn) if ":" in config.loss.name else "",
        info=loss_info(loss_fn),
        ranks=ranks,
        names=list(named),
        context_parallel=config.fxrl.context_parallel,
    )
