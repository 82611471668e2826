"""Builds a run's parts around its data: model, engine and train step, the cheap parts first.

NOTE [Why one part is built after the other]
Parts gain by overlapping where one waits while another computes. On two cores none waits: capture
and lowering are Python and hold the interpreter, so of the 22 s to the end of SmolLM2's first step
3 s could run beside others. vLLM waits for tens of seconds while it is built, but the model that is
captured is made of its weights, so that there is none to capture before; what is left to begin
early is the import of the compiler's modules and its workers' start (not measured beside vLLM).
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from fxrl import TrainStep, optimize
from fxrl.distributed import COLLECTIVE_S, Ranks
from fxrl.engines import Built, Engine, EngineSpec, build_engine
from fxrl.errors import ConfigError
from fxrl.losses import ValueHead, completion_logits, loss_info, token_stats
from fxrl.losses.actor_critic import asking_for_values, predicted_values
from fxrl.models import ModelError, Peers, QuantizedLinear, load_model, lora, quantize, shard
from fxrl.models.hf import VALUE_HEAD, eval_mode, load_value_head, train_without_cache
from fxrl.models.load import is_random, model_folder, write_model
from fxrl.models.lora import StoredAdapter
from fxrl.models.quantized import as_quantization, in_bits
from fxrl.rl.callbacks import Events
from fxrl.rl.config.named import build_loss
from fxrl.rl.config.tables import ModelConfig, TrainConfig
from fxrl.rl.data.examples import Examples
from fxrl.rl.data.questions import PromptStream
from fxrl.rl.errors import defined_at
from fxrl.rl.loop import fingerprint
from fxrl.rl.loop.data import Questions
from fxrl.rl.loop.updater import Updater, build_optimizer, lr_factor
from fxrl.rl.report.files import try_to_write
from fxrl.rl.report.progress import Reporter, Stage
from fxrl.rl.types import Batch, Source


@dataclass(slots=True)
class RunParts:
    """A run's parts, ready for the loop."""

    model: nn.Module
    teacher: nn.Module | None
    tokenizer: Any
    engine: Engine
    data: Questions | Examples
    source: Source
    stream: PromptStream
    updater: Updater  # ``updater.step`` is the train step
    judge: Callable[[Batch], Any]  # the loss in eval mode, without gradient
    # Scorers: log-probabilities [B, C] of a micro-batch's completions; None if nothing reads them.
    old_policy: Callable[[Batch], torch.Tensor] | None  # before the first of several updates
    # The same for a loss with a value head, which also reads the values.
    critic: Callable[[Batch], tuple[Tensor, dict[str, Tensor]]] | None
    # Under the reference policy; None too if all rows were scored before the first step.
    reference: Callable[[Batch], torch.Tensor] | None
    mismatched: Callable[[Batch], torch.Tensor] | None  # of prompts with each other's answers
    probe: Callable[[Batch], torch.Tensor] | None  # of a sample, to measure the drift
    stage: Stage
    events: Events
    fingerprints: Mapping[str, str]  # of the data, and of model and tokenizer before training
    ranks: Ranks


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def build_parts(
    config: TrainConfig,
    data: Questions | Examples,
    run_dir: Path,
    reporter: Reporter,
    callbacks: Sequence[object] = (),
    ranks: Ranks | None = None,
) -> RunParts:
    """Load the model and wire the run together. Raises ``ModelError`` or ``FetchError`` if there is
    no such model, ``ConfigError`` if something does not fit it, ``EngineError`` if vLLM is missing
    or cannot be built."""
    ranks = ranks or Ranks()
    spec = _engine_spec(config, data, run_dir, reporter, ranks)
    teacher = _teacher(config, data.tokenizer, spec.device, reporter.stage)
    built = build_engine(config.engine, spec)
    try:
        about = {"model": built.model, "tokenizer": built.tokenizer}
        events = Events(config, tuple(callbacks), about)
        return _around(built, teacher, data, run_dir, reporter.stage, events, ranks)
    except BaseException:
        built.engine.close()
        raise


def prompts_each(config: TrainConfig, ranks: Ranks) -> int:
    """Prompts of a step that one rank draws completions for, where all cost about the same."""
    return -(-config.prompts_per_step // ranks.size)


def _engine_spec(
    config: TrainConfig,
    data: Questions | Examples,
    run_dir: Path,
    reporter: Reporter,
    ranks: Ranks,
) -> EngineSpec:
    """How the run's model is come by, and what the run wants of its engine."""
    device = pick_device(config.model.device)
    wanted = config.model
    what = f"{wanted.name} ({wanted.dtype}, {device})"
    made = run_dir.absolute() / "model"
    peers = Peers.of(ranks.gather) if wanted.sharded else None
    adapter = wanted.adapter
    rank = None if wanted.lora is None else wanted.lora.r

    def load() -> tuple[nn.Module, Any]:
        if isinstance(wanted.id, nn.Module):
            found = wanted.id.to(device), data.tokenizer
        else:
            with reporter.stage(f"loading {what}") as say:
                found = _load(config, adapter, device, peers, say)
                if adapter is not None:
                    found = found[0], data.tokenizer  # which the adapter's folder may have
        return _given_away(*found, wanted, made, peers)

    def folder() -> tuple[Path, Any]:
        with reporter.stage(f"finding {what}") as say:
            name = wanted.name if adapter is None else adapter.base
            find = functools.partial(model_folder, name, made, dtype=wanted.dtype, seed=config.seed)
            return try_to_write(functools.partial(find, on_progress=say), str(made))

    return EngineSpec(
        load=load,
        folder=folder,
        trainable=functools.partial(_trainable, config=config, adapter=adapter, made=made),
        longest_prompt=data.longest,
        max_tokens=config.sampling.max_tokens,
        num_sequences=prompts_each(config, ranks) * config.sampling.num_generations,
        device=device,
        dtype=getattr(torch, wanted.dtype),
        autocast=wanted.autocast_dtype,
        seed=config.seed,
        tell=reporter.message,
        stage=reporter.stage,
        options=getattr(config, config.engine, None),  # the table of the engine's name
        lora_rank=rank if adapter is None else adapter.rank,
        prompts_grow=isinstance(data, Questions) and data.grow,
    )


def _load(
    config: TrainConfig,
    adapter: StoredAdapter | None,
    device: torch.device,
    peers: Peers | None,
    say: Callable[[str], None],
) -> tuple[nn.Module, Any]:
    """The model of ``[model]``, of an adapter its base model, and its tokenizer."""
    wanted = config.model
    whole = _is_only_here(wanted)  # random weights are written down in full first
    return load_model(
        wanted.id if adapter is None else adapter.base,  # type: ignore[arg-type]
        wanted.dtype,
        device,
        seed=config.seed,
        quantization=None if whole else wanted.quantization,
        scalar_head=config.loss_info().scalar_head,
        peers=None if whole else peers,
        on_progress=say,
    )


def _given_away(
    model: nn.Module, tokenizer: Any, wanted: ModelConfig, made: Path, peers: Peers | None
) -> tuple[nn.Module, Any]:
    """A model whose weights no folder has is written, for whoever loads the adapter; then this rank
    keeps its part of one that was not read so, in few bits where that is asked for."""
    only_here = _is_only_here(wanted)
    if wanted.lora is not None and only_here:
        try_to_write(lambda: write_model(model, tokenizer, made), str(made))
    if peers is not None and (only_here or isinstance(wanted.id, nn.Module)):
        if wanted.quantization is not None:  # what is shared out stays as it is
            model = in_bits(model, as_quantization(wanted.quantization))
        model = shard(model, peers, trained=True)
    return model, tokenizer


def _around(
    built: Built,
    teacher: nn.Module | None,
    data: Questions | Examples,
    run_dir: Path,
    stage: Stage,
    events: Events,
    ranks: Ranks,
) -> RunParts:
    """All parts, where model and engine are there: the steps that train and score are made, which
    captures nothing yet."""
    model, tokenizer, engine = built
    config, device = events.config, next(model.parameters()).device
    _check_positions(model, data, config.sampling.max_tokens)
    optimized = functools.partial(optimize, config=config.fxrl)
    make_step: Callable[..., Any] = optimized if config.optimize else _plain
    wrap = functools.partial(
        with_autocast, device_type=device.type, dtype=config.model.autocast_dtype
    )
    temperature = config.sampling.temperature
    loss_fn = build_loss(
        config.loss.name,
        config.loss.options,
        temperature=temperature,
        max_tokens=config.sampling.max_tokens,
        teacher=teacher,
    )
    info = loss_info(loss_fn)
    step = make_step(model, wrap(loss_fn))
    if isinstance(step, TrainStep):  # here, where no rank is missing
        step.join(timedelta(seconds=COLLECTIVE_S))
    updater = _updater(config, model, step, loss_fn, run_dir, ranks)
    new = config.model.lora is not None
    made_of = fingerprint.of_models(model, tokenizer, teacher, new=new)
    source = data.source(engine, config, tokenizer, stage, ranks)
    score_by = functools.partial(scorer, temperature=temperature, optimize=make_step, wrap=wrap)
    critic = score_by(model, values=True) if info.critic is not None else None
    old_policy = score_by(model) if config.num_iterations > 1 and critic is None else None
    ref_model, context = model, None
    if config.needs_reference:
        lasts = info.mismatched_kl or not config.precompute_ref_log_probs
        ref_model, context = reference(model, new, lasts)
    return RunParts(
        model=model,
        teacher=teacher,
        tokenizer=tokenizer,
        engine=engine,
        data=data,
        source=source,
        stream=PromptStream(len(data.split.train), config.seed, shuffle=config.data.shuffle),
        updater=updater,
        judge=functools.partial(scoring, model, make_step(model, wrap(loss_fn))),
        old_policy=old_policy,
        critic=critic,
        reference=score_by(ref_model, context=context) if context is not None else None,
        mismatched=score_by(model) if info.mismatched_kl else None,
        probe=(old_policy or score_by(model)) if source.draws and info.options is None else None,
        stage=stage,
        events=events,
        fingerprints={**data.fingerprints, **made_of},
        ranks=ranks,
    )


def _check_positions(model: nn.Module, data: Questions | Examples, max_tokens: int) -> None:
    """Raises ``ConfigError`` if a completion may not fit behind the longest prompt, which engines
    refuse when they get it."""
    about: Any = getattr(model, "config", None)
    limit = about and getattr(about.get_text_config(), "max_position_embeddings", None)
    if limit is None or not isinstance(data, Questions) or data.grow:
        return
    if data.longest + max_tokens > limit:
        raise ConfigError(
            f"sampling.max_tokens={max_tokens} behind the longest prompt, of {data.longest} "
            f"tokens, is more than the model's {limit} positions; lower it, or "
            "data.max_prompt_tokens"
        )


def _updater(
    config: TrainConfig,
    model: nn.Module,
    step: Callable[[Batch], Any],
    loss_fn: Callable[..., Any],
    run_dir: Path,
    ranks: Ranks,
) -> Updater:
    """What updates the model's trained parameters by ``step``, ``loss_fn`` of it."""
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
        run_dir=run_dir,
        place=defined_at(loss_fn) if ":" in config.loss.name else "",
        info=loss_info(loss_fn),
        ranks=ranks,
        names=list(named),
        context_parallel=config.fxrl.context_parallel,
    )


def _teacher(
    config: TrainConfig, tokenizer: Any, device: torch.device, stage: Stage
) -> nn.Module | None:
    """The frozen model of ``[teacher]``. Raises ``ModelError`` or ``FetchError`` if there is no
    such model, or it has another vocabulary."""
    wanted = config.teacher
    if wanted is None:
        return None
    if isinstance(wanted.id, nn.Module):
        teacher = wanted.id.to(device)
    else:
        with stage(f"loading the teacher: {wanted.id}") as say:
            bits = wanted.quantization
            teacher, theirs = load_model(
                wanted.id, wanted.dtype, device, quantization=bits, on_progress=say
            )
        if theirs is not None:
            _check_vocabulary(wanted.id, theirs.get_vocab(), tokenizer.get_vocab())
    train_without_cache(teacher)
    return teacher.requires_grad_(False).eval()


def _check_vocabulary(name: str, theirs: Mapping[str, int], own: Mapping[str, int]) -> None:
    """Raises where an id means one token to the teacher and another to the model; either may have
    tokens that the other has not."""
    by_id = {number: token for token, number in theirs.items()}
    other = [
        token
        for token, number in own.items()
        if theirs.get(token, number) != number or by_id.get(number, token) != token
    ]
    if other:
        raise ModelError(
            f"teacher.id={name!r}: {len(other)} of the model's {len(own)} tokens, such as "
            f"{other[0]!r}, have other ids there, and distributions are compared id by id; take a "
            "teacher with the model's tokenizer"
        )


def _is_only_here(wanted: ModelConfig) -> bool:
    """Whether no folder or hub has the weights."""
    if isinstance(wanted.id, str):
        return is_random(wanted.id)
    return not getattr(wanted.id, "name_or_path", "")


def _trainable(
    model: nn.Module, config: TrainConfig, adapter: StoredAdapter | None, made: Path
) -> nn.Module:
    """The model with its adapter, value head and checkpointing, in train mode."""
    wanted = config.model
    head = model._modules.pop(VALUE_HEAD, None)  # which an adapter would freeze, or adapt
    adapted = wanted.lora is not None or adapter is not None
    if not adapted and any(isinstance(m, QuantizedLinear) for m in model.modules()):
        raise ModelError(
            f"model.id={wanted.name!r} holds its Linears in 8 or 4 bits, which cannot be trained; "
            "add [model.lora], or give the checkpoint in bf16"
        )
    if adapted:
        base: Any = model  # its name goes into the adapter's configuration
        place = made if _is_only_here(wanted) else Path(base.name_or_path or wanted.name)
        base.name_or_path = str(place.resolve() if place.is_dir() else place)
        if adapter is not None:
            model = adapter.put_on(model)
        elif wanted.lora is not None:
            model = lora(
                model,
                wanted.lora.r,
                wanted.lora.alpha,
                wanted.lora.targets,
                dropout=wanted.lora.dropout,
                seed=config.seed,
            )
        if wanted.autocast_dtype is not None:  # a classifier's head too, as PEFT keeps adapters
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                wide = torch.promote_types(parameter.dtype, torch.float32)
                parameter.data = parameter.data.to(wide)
    loaded_so = wanted.sharded or (isinstance(wanted.id, str) and not _is_only_here(wanted))
    if wanted.quantization is not None and not loaded_so:
        model = quantize(model, wanted.quantization)
    if wanted.gradient_checkpointing:
        _checkpoint(model)
        if adapted:
            model.enable_input_require_grads()  # type: ignore[operator]
    judged = config.loss_info().critic is not None
    if judged or head is not None:
        trained = next(p.dtype for p in model.parameters() if p.requires_grad)
        if head is None:
            head = ValueHead(model, trained)
            load_value_head(head, Path(wanted.name).expanduser())
        model.value_head = head.requires_grad_(judged)
    return model.train()


def _checkpoint(model: Any) -> None:
    """Activation checkpointing, by its name in whichever transformers is installed; without the
    KV cache, which transformers would switch off with a warning at the first batch."""
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)()
    train_without_cache(model)


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU if there is one."""
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


def scorer(
    model: nn.Module,
    temperature: float,
    *,
    optimize: Callable[..., Callable[[Batch], Any]],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    values: bool = False,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[Batch], Any]:
    """``score(batch) -> [B, C]`` log-probabilities without gradient, in eval mode: dropout is no
    part of a policy.

    Args:
        optimize: ``fxrl.optimize`` with its configuration bound, or its plain twin.
        values: gives ``{"values": [B, C]}`` of the same forward behind them.

    NOTE [One step per state of the adapter]
    The reference and the policy each have a step of their own, captured in the state it is always
    called in. One step for both would have to be captured anew whenever the adapter is switched.
    """

    def logps(model: nn.Module, batch: Batch) -> Any:
        num = batch["completion_mask"].shape[1]
        options = asking_for_values(model) if values else {}
        logits, output = completion_logits(model, batch, num, **options)
        tokens = batch["input_ids"][:, -num:]
        found = token_stats(logits, tokens, temperature=temperature).logps
        if not values:
            return found
        return found, {"values": predicted_values(model, output, batch, num)}

    step = optimize(model, wrap(logps))

    def score(batch: Batch) -> Any:
        keep = ("input_ids", "right_padded", "completion_mask")
        with context():
            return scoring(model, step, {name: batch[name] for name in keep})

    return score


def scoring(model: nn.Module, step: Callable[[Batch], Any], batch: Batch) -> Any:
    """``step(batch)`` with ``model`` in eval mode, without gradient."""
    with eval_mode(model), torch.no_grad():
        return step(batch)


def reference(
    model: nn.Module, new_adapter: bool, lasts: bool
) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]:
    """The reference policy, which is ``model`` as it is before training: with its adapter switched
    off where that is new, for it starts as zero; else, where it lasts, a frozen copy of what is
    trained, which has all other weights in common with ``model``."""
    if new_adapter:
        switch: Any = model.disable_adapter
        return model, switch
    if not lasts:
        return model, nullcontext
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    frozen = copy.deepcopy(model, shared)
    frozen.requires_grad_(False)
    return frozen, nullcontext
