"""What of a configuration does not go together; what each table says of itself is its own."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fxrl.errors import ConfigError
from fxrl.losses import FACTORIES
from fxrl.rl.config.binding import default_of, keys_of
from fxrl.rl.config.named import takes_keyword
from fxrl.step import check_config

if TYPE_CHECKING:
    from fxrl.rl.config.tables import TrainConfig

OF_PROMPTS = (
    *("data.pattern", "data.template", "data.few_shot", "data.max_prompt_tokens", "data.answer"),
    *("reward", "sampling", "rollout", "eval.greedy", "eval.reward", "eval.batch"),
    *("engine", "vllm", "engine_retries", "num_iterations", "advantages", "scale_rewards"),
    *("dynamic_sampling", "max_refills", "mask_truncated_completions"),
)
"""Keys that say something where rows are prompts alone."""
OF_ANSWERS = ("data.columns", "data.train_on", "data.max_length", "precompute_ref_log_probs")
"""Where they are not."""
OF_SEQUENCES = ("data.train_on",)
OF_GROUPS = ("advantages", "scale_rewards", "dynamic_sampling")
"""Where completions of one prompt are compared."""
MOST_COMPLETIONS = 2**20
"""Of a step; each is an object in memory."""


def conflicts(config: TrainConfig) -> Iterator[str]:
    """A line each, which starts with the key."""
    if config.epochs is not None and config.dynamic_sampling == "refill":
        yield (
            f"epochs={config.epochs:g}: with dynamic_sampling='refill' a step takes as many "
            "prompts as it needs; give steps"
        )
    repo = config.push_to_hub
    if repo is not None and not re.fullmatch(r"([\w.-]+/)?[\w.-]+", repo):
        yield f"push_to_hub={repo!r} is no repository; write user/name"
    completions = config.prompts_per_step * config.sampling.num_generations
    if completions > MOST_COMPLETIONS:
        yield (
            f"prompts_per_step={config.prompts_per_step} times sampling.num_generations="
            f"{config.sampling.num_generations} is above {MOST_COMPLETIONS} completions a step"
        )
    if config.rollout.has_tools and not config.data.chat:
        yield "rollout: tools are called by chat messages; set data.chat=true"
    if config.rollout.has_tools and config.sampling.ignore_eos:
        yield "rollout: with sampling.ignore_eos no turn ends to call a tool; leave it out"
    if config.mask_truncated_completions and config.sampling.ignore_eos:
        yield (
            "mask_truncated_completions leaves nothing to train on where sampling.ignore_eos "
            "draws every completion up to max_tokens; leave one of them out"
        )
    if config.eval.is_other_split and config.data.dataset is None:
        yield "eval: split and subset are a dataset's; give eval.dataset or data.dataset"
    elif config.data.reasoning_gym is not None and config.eval.source(config.data) is not None:
        yield (
            f"eval: data.reasoning_gym={config.data.reasoning_gym!r} makes the held-out "
            "questions itself; give eval.size alone"
        )
    if torch.float16 in config.model.trained_dtypes:
        yield (
            "model.dtype='float16': gradients and optimizer state leave its range, and nothing "
            "scales them; train float32 weights (model.autocast='bfloat16' makes their "
            "products fast), or an adapter (model.lora)"
        )
    if config.fxrl.context_parallel > 1 and not config.optimize:
        yield (
            f"fxrl.context_parallel={config.fxrl.context_parallel}: optimize=false runs the loss "
            "as it is written, which shares no sequence; leave one of them out"
        )
    yield from _pass_conflicts(config)
    yield from _adapter_conflicts(config)
    yield from _teacher_conflicts(config)
    yield from _form_conflicts(config)
    yield from _critic_conflicts(config)
    yield from _engine_conflicts(config)


def _pass_conflicts(config: TrainConfig) -> Iterator[str]:
    """Names of passes and of options, which ``Config`` itself does not know."""
    try:
        check_config(config.fxrl)
    except ConfigError as error:
        yield from (f"fxrl.{line}" for line in str(error).splitlines())


def _adapter_conflicts(config: TrainConfig) -> Iterator[str]:
    adapter, judges = config.model.adapter, config.loss_info().scalar_head
    if adapter is not None and adapter.is_classifier != judges:
        kinds = {True: "a reward model", False: "a language model"}
        yield (
            f"model.id={config.model.name!r} is an adapter of {kinds[not judges]}, and loss.name="
            f"{config.loss.name!r} trains {kinds[judges]}; merge it into its base model, and name "
            "the result"
        )


def _teacher_conflicts(config: TrainConfig) -> Iterator[str]:
    name, takes = config.loss.name, takes_keyword(config.loss.name, "teacher")
    if config.teacher is not None and not takes:
        yield f"teacher: loss.name={name!r} compares with none; leave it out"
    if config.teacher is None and takes and name in FACTORIES:
        yield f"teacher: loss.name={name!r} needs one; add [teacher] with its id"


def _judge_conflicts(config: TrainConfig) -> Iterator[str]:
    """What plays and judges completions is one thing, and there is one."""
    rollout, verifiers = config.rollout, config.data.verifiers
    if not config.reward.functions and not (rollout.environment_factory or verifiers):
        yield (
            "reward.functions is empty; name at least one reward, or rollout.environment_factory "
            "whose environments have get_reward"
        )
    turns = rollout.has_tools or rollout.rollout_func is not None
    if verifiers and (turns or config.eval.source(config.data) is not None):
        yield (
            "data.verifiers plays its rollouts itself, and eval's are tasks of it; leave tools, "
            "environments, rollout_func, and sources of [eval] out"
        )


def _form_conflicts(config: TrainConfig) -> Iterator[str]:
    named = f"loss.name={config.loss.name!r}"
    learns = f"but {named} learns from {config.form}; leave it out"
    if config.form == "prompts":
        yield from _judge_conflicts(config)
        yield from (f"{said} is of given answers, {learns}" for said in _said(config, OF_ANSWERS))
        return
    form, info, model = config.form, config.loss_info(), config.model
    if config.loss.name in FACTORIES and info.reads != form:
        yield f"data.form={form!r}: {named} reads {info.reads}; leave it out"
    if info.scalar_head and model.quantization is not None:
        yield (
            f"model.quantization={model.quantization!r}: a reward model is not made of quantised "
            "weights; leave it out"
        )
    if info.scalar_head and model.sharded:
        yield "model.sharded=true: a reward model's weights are not shared out; leave it out"
    if config.precompute_ref_log_probs and not config.needs_reference:
        yield (
            f"precompute_ref_log_probs=true: {named} compares with no reference as it is set up; "
            "leave it out"
        )
    for said in _said(config, OF_PROMPTS):
        yield f"{said} is of prompts and their completions, {learns}"
    if form != "sequences":
        yield from (f"{said} is of sequences, {learns}" for said in _said(config, OF_SEQUENCES))


def _critic_conflicts(config: TrainConfig) -> Iterator[str]:
    """What compares completions where a critic judges each by itself, or the reverse."""
    named = f"loss.name={config.loss.name!r}"
    if config.loss_info().critic is None:
        if config.form == "prompts" and config.sampling.num_generations == 1:
            yield (
                f"sampling.num_generations=1: {named} compares a completion with others of its "
                "prompt; give at least 2, or loss.name='ppo'"
            )
        return
    if config.form != "prompts":
        yield f"data.form={config.form!r}: {named} judges completions of prompts; leave it out"
    for said in _said(config, OF_GROUPS):
        yield (
            f"{said} compares completions of a prompt, and {named} judges each by a value head; "
            "leave it out"
        )


def _said(config: TrainConfig, paths: Sequence[str]) -> Iterator[str]:
    """``key=value`` of those that are not left at their defaults."""
    for path in paths:
        *outer, key = path.split(".")
        table: Any = functools.reduce(getattr, outer, config)
        if (value := getattr(table, key)) != default_of(keys_of(type(table))[key]):
            yield f"{path}={value!r}"


def _engine_conflicts(config: TrainConfig) -> Iterator[str]:
    if config.engine != "vllm":
        if config.sampling.extra:
            yield (
                f"sampling.extra={dict(config.sampling.extra)!r} are vLLM's own parameters; leave "
                'them out, or set engine="vllm"'
            )
        return
    model = config.model
    if not isinstance(model.id, str):
        yield (
            f'engine="vllm" loads the weights itself, but the model is a {type(model.id).__name__};'
            " give its name or its folder (save_pretrained)"
        )
    if model.quantization is not None:
        yield (
            f"model.quantization={model.quantization!r} is the trainer's own, and vLLM shares "
            'weights as it holds them; set engine="torch", or leave it out'
        )
    if model.offload_embeddings:
        yield (
            "model.offload_embeddings=true: the embeddings are vLLM's, and lie on the GPU; set "
            'engine="torch", or leave it out'
        )
    if model.sharded:
        yield (
            'model.sharded=true: vLLM needs the weights whole on each GPU; set engine="torch", '
            "or leave it out"
        )
    if model.dtype == "float64":
        yield 'engine="vllm": vLLM has no float64; set model.dtype to bfloat16 or float32'
