"""``TrainConfig``: everything ``fxrl train`` may be told, as one frozen tree, a class a table.

Defaults live here and nowhere else. Names follow TRL's ``GRPOConfig`` where the meaning is the
same. It reads no environment.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from fxrl.config import Config
from fxrl.dtypes import wide_dtype
from fxrl.engines.vllm.options import VllmOptions
from fxrl.losses import LossFn, LossInfo, loss_info
from fxrl.losses.own_code import looked_in
from fxrl.models.hf import ModelError
from fxrl.models.load import Source, resolve
from fxrl.models.lora import StoredAdapter, stored_adapter
from fxrl.models.quantized import Quantization
from fxrl.models.tiny import PREFIX, parse_tiny
from fxrl.options import Options, Positive, above, at_least, within
from fxrl.rl.config import trl
from fxrl.rl.config.binding import COUNTED, REST, keys_of, regular_expression
from fxrl.rl.config.conflicts import conflicts
from fxrl.rl.config.named import (
    build_loss,
    code_problem,
    keyword,
    loss_problems,
    optimizer_problems,
    reward_problems,
)

Count = Annotated[int, at_least(0)]
Fraction = Annotated[float, within(0.0, 1.0)]
Seconds = Annotated[float, above(0.0), within(0.0, 1e8)]
Regex = Annotated[str, regular_expression]
Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class LoraConfig(Options):
    """``[model.lora]``: a PEFT adapter; leave the table out for full fine-tuning.

    Attributes:
        r: rank: columns of the adapter's factors.
        alpha: scale: the adapter's output is multiplied by ``alpha / r``.
        dropout: share of the adapter's inputs that are dropped in training.
        targets: names of the Linear modules that get one, ``["q_proj", "v_proj"]``; ``all-linear``
            is all but the head.
    """

    r: Annotated[int, within(1, 65536)] = 16
    alpha: float = 32.0
    dropout: Fraction = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"


@dataclass(frozen=True, slots=True)
class ModelConfig(Options):
    """``[model]``.

    Attributes:
        id: local folder, hub id, or ``tiny:<kind>`` (random weights, made on the fly). The folder
            of a PEFT adapter, such as another run's ``final``, has that adapter trained further, as
            large as it is, on its base model; what it was is the reference. ``ppo`` goes on with
            the ``value_head.safetensors`` of a folder, too. In Python also a model itself.
        dtype: type of the weights' numbers, in which the optimizer works too. ``auto`` is bfloat16
            on a GPU, on a CPU what that is fast at; weights that are trained stay float32. Training
            all weights in bfloat16 loses small updates, and float16 is refused for it.
        autocast: dtype of matrix products in the train step, ``none`` for the weights' own.
            ``auto`` is bfloat16 for an adapter on bfloat16 weights: PEFT keeps adapters in float32,
            whose products would run without tensor cores (1.77 s instead of 1.22 s for a step's
            updates, Qwen3-1.7B on an H200).
        device: device of the model: ``cuda``, ``cpu``; ``auto`` takes the GPU if there is one.
        gradient_checkpointing: recomputation of each layer's activations in the backward pass,
            which saves memory and costs a forward pass: Hugging Face's own, which
            ``fxrl.optimize`` takes over.
        lora: adapter; ``none`` trains all weights.
        quantization: bits of the frozen weights under the adapter, for ``engine = "torch"``: e4m3
            (``fp8``, whose products run in FP8 where ``fxrl.precision`` is ``fp8``), ``int4`` or
            ``nf4``. Each is quantised when it is read, held once, and widened a part at a time
            where it is multiplied. As a table it says more: ``format`` is the word, ``recipe`` how
            FP8's scales lie, ``skip`` which modules stay; ``embeddings`` and ``head`` hold these
            so, too, of which rows that are looked up, and a piece of the vocabulary at a time, are
            widened (where both are one weight, set both). A checkpoint in FP8, int4
            (compressed-tensors) or NF4 (bitsandbytes) is loaded as it is without this.
        offload_embeddings: the tables of frozen embeddings in pinned host memory, for ``engine =
            "torch"``: a step reads a few thousand of their rows, and their memory on the GPU is
            free for what layers keep.
        sharded: the frozen weights under the adapter shared out over the ranks of a host, for
            ``engine = "torch"``: each rank reads and holds a part, and what a product needs of the
            others' comes while the one before runs. For what does not fit one GPU: it takes a copy
            of each weight over the link between them, forward and backward.
    """

    id: str | nn.Module
    dtype: Dtype = "float32"
    autocast: Literal["auto", "bfloat16"] | None = "auto"
    device: str = "auto"
    gradient_checkpointing: bool = False
    lora: LoraConfig | None = None
    quantization: Quantization | Literal["fp8", "int4", "nf4"] | None = None
    offload_embeddings: bool = False
    sharded: bool = False

    def problems(self) -> Iterator[str]:
        """Decided by the text and the file system; nothing is loaded."""
        broken = [*_id_problems(self.id)]
        yield from broken
        if broken:
            return
        if self.adapter is not None and self.lora is not None:
            yield (
                f"lora: id={self.name!r} is an adapter, which is trained further as it is; leave "
                "[model.lora] out, or merge it into its base model first"
            )
        of_frozen = {
            "offload_embeddings=true": self.offload_embeddings,
            "sharded=true": self.sharded,
            f"quantization={self.quantization!r}": self.quantization is not None,
        }
        for said in (said for said, given in of_frozen.items() if given and not self.adapted):
            yield (
                f"{said} is of frozen weights, and without an adapter all are trained; add "
                "[model.lora]"
            )
        if self.offload_embeddings and self.sharded:
            yield (
                "offload_embeddings=true: sharded=true shares the embeddings out over the ranks; "
                "leave one of them out"
            )
        try:
            torch.device("cpu" if self.device == "auto" else self.device)
        except RuntimeError:
            yield f"device={self.device!r} is no device; use auto, cpu or cuda:0"

    @property
    def name(self) -> str:
        """``id``, of a model itself where it came from."""
        if isinstance(self.id, str):
            return self.id
        config = getattr(self.id, "config", None)
        return getattr(config, "_name_or_path", "") or type(self.id).__name__

    @property
    def adapter(self) -> StoredAdapter | None:
        """The adapter whose folder ``id`` names."""
        return stored_adapter(self.id) if isinstance(self.id, str) else None

    @property
    def adapted(self) -> bool:
        """Whether an adapter is trained, a new one or that of ``id``."""
        return self.lora is not None or self.adapter is not None

    @property
    def trained_dtypes(self) -> set[torch.dtype]:
        """Dtypes of the trained weights; PEFT keeps adapters on weights of half precision in
        float32."""
        if self.lora is None and isinstance(self.id, nn.Module):
            return {p.dtype for p in self.id.parameters() if p.requires_grad}
        dtype: torch.dtype = getattr(torch, self.dtype, torch.float32)  # settle's, for "auto"
        return {wide_dtype(dtype) if self.adapted else dtype}

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What ``autocast`` comes to; ``None`` is no autocast."""
        wider = self.dtype == "bfloat16" and torch.float32 in self.trained_dtypes
        auto = self.autocast == "auto" and wider
        return torch.bfloat16 if auto or self.autocast == "bfloat16" else None


def _id_problems(model_id: str | nn.Module) -> Iterator[str]:
    if not isinstance(model_id, str):
        return
    try:
        if resolve(model_id) is Source.TINY:
            parse_tiny(model_id)
        else:
            stored_adapter(model_id)
    except ModelError as error:
        is_path = not model_id.startswith(PREFIX) and not Path(model_id).exists()
        yield f"id: {error}{_sought(model_id) if is_path else ''}"


def _sought(path: str) -> str:
    """Where a relative path was looked for, as the end of a message."""
    return "" if Path(path).is_absolute() else f" (looked for in {looked_in()})"


@dataclass(frozen=True, slots=True)
class TeacherConfig(Options):
    """``[teacher]``: the model that a loss with the keyword ``teacher`` compares with: ``distill``,
    or a factory of your own. It has the model's vocabulary, is never trained, and runs in the step.

    Attributes:
        id: as ``model.id``.
        dtype: type of its weights' numbers; ``auto`` is the checkpoint's own.
        quantization: bits of its weights, as ``model.quantization``.
    """

    id: str | nn.Module
    dtype: Dtype = "auto"
    quantization: Literal["fp8", "int4", "nf4"] | None = None

    def problems(self) -> Iterator[str]:
        """Decided by the text and the file system; nothing is loaded."""
        yield from _id_problems(self.id)


@dataclass(frozen=True, slots=True)
class Turn:
    """One chat turn of ``[[data.turns]]``, put between the system prompt and the question.

    Attributes:
        role: who says it.
        content: what is said.
    """

    role: Literal["system", "user", "assistant"]
    content: str


def _pads_widely(template: str) -> bool:
    try:
        fields = [*string.Formatter().parse(template)]
    except ValueError:  # told where the first row is put in
        return False
    return any(re.search(r"\d{5}|\{", spec or "") for _, _, spec, _ in fields)


MOST_GENERATED = 10_000_000
"""Questions of reasoning-gym, all made before the first step."""


@dataclass(frozen=True, slots=True)
class DataConfig(Options):
    """``[data]``: what is trained on. Exactly one of the five sources is given.

    Attributes:
        form: what rows are: ``prompts``, which the model answers; or what it learns as it stands:
            ``sequences``, ``pairs`` of a chosen and a rejected answer, or ``labelled`` sequences.
            ``auto`` is what the loss reads, of your own loss ``prompts``.
        path: JSONL file, a question a line; or a ``.csv`` file, whose first line names the columns
            and whose values are all texts. Looked for beside the configuration and in the working
            folder, as every path of the file but ``run_dir``.
        dataset: Hugging Face dataset, a name or a folder.
        subset: part of ``dataset``, what ``datasets.load_dataset`` calls ``name``.
        split: split of ``dataset``.
        reasoning_gym: task of reasoning-gym, which generates its questions.
        params: keywords of the reasoning-gym task.
        verifiers: environment of the ``verifiers`` package, which plays its own tasks and judges
            them: the name of an installed taskset, played on this machine (by its own harness, else
            by verifiers' ``null``); or verifiers' own table ``env``.
        rows: questions themselves, each a table of columns.
        size: number of questions to generate (reasoning-gym; ``none`` is 1000) or to keep (others;
            ``none`` keeps all, of tasks without end 1000).
        seed: seed of the generated questions and of the held-out split, whatever the run's seed is,
            so that runs with several seeds are judged on the same questions.
        prompt: column with the prompt, a text or a list of chat messages whose last is the user's.
        answer: column with the right answer, for ``exact`` and the majority baseline.
        columns: the data's own names of the columns that a form other than ``prompts`` reads, such
            as ``{ completion = "output" }``.
        train_on: tokens that ``sequences`` are learned from: the ``completions``, which are the
            assistant's messages of a conversation, or ``all``.
        max_length: most tokens of a row of a form other than ``prompts``, its prompt among them; a
            longer one is unusable.
        pattern: regular expression with named groups, searched in the prompt text; its groups fill
            ``template``.
        template: new prompt text; ``{name}`` is a column or a group of ``pattern``.
        chat: use of the tokenizer's chat template; ``false`` gives the model the bare text.
        chat_template_kwargs: keywords that the chat template reads besides the messages, such as
            Qwen3's ``{ enable_thinking = false }``.
        system: system prompt.
        few_shot: number of solved questions that go as chat turns before each prompt; they are not
            trained on.
        turns: chat turns before each prompt.
        max_prompt_tokens: most tokens of a prompt; a longer one is unusable.
        unusable_rows: fate of rows whose prompt is empty, no text, too long, or does not
            fit ``pattern`` and ``template``, and of those not of their ``form``: an ``error`` that
            names them, or ``skip`` leaves them out and says how many. Either way before a model is
            loaded.
        shuffle: order of the questions, another in each epoch; ``false`` keeps the source's.
    """

    form: Literal["auto", "prompts", "sequences", "pairs", "labelled"] = "auto"
    path: str | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    reasoning_gym: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    verifiers: Mapping[str, Any] | str | None = None
    rows: tuple[Mapping[str, Any], ...] | None = field(default=None, repr=False, metadata=COUNTED)
    size: Positive | None = None
    seed: int = 0
    prompt: str = "prompt"
    answer: str = "answer"
    columns: Mapping[str, str] = field(default_factory=dict)
    train_on: Literal["completions", "all"] = "completions"
    max_length: Positive = 4096
    pattern: Regex | None = None
    template: str | None = None
    chat: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    few_shot: Count = 0
    turns: tuple[Turn, ...] = ()
    max_prompt_tokens: Positive = 4096
    unusable_rows: Literal["error", "skip"] = "error"
    shuffle: bool = True

    def problems(self) -> Iterator[str]:
        sources = ("path", "dataset", "reasoning_gym", "verifiers", "rows")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            yield f"{', '.join(sources[:-1])}: give exactly one (or rows), not {found}"
        of_text = ("pattern", "template", "system", "few_shot", "turns")
        if self.verifiers and (ours := [name for name in of_text if getattr(self, name)]):
            yield f"verifiers makes its prompts itself; leave out {', '.join(ours)}"
        if self.verifiers and not self.chat:
            yield "chat=false: environments of verifiers are conversations; leave it out"
        if self.reasoning_gym is not None and (self.size or 0) > MOST_GENERATED:
            yield f"size={self.size} questions are generated in advance; {MOST_GENERATED} at most"
        if self.path is not None and not Path(self.path).is_file():
            yield f"path={self.path!r} is not a file{_sought(self.path)}"
        if self.pattern is not None and self.template is None:
            yield "pattern is given but template, which it fills, is not"
        if self.template is not None and _pads_widely(self.template):
            yield f"template={self.template!r} pads by more than 9999, or by what a row says"
        of_chat = ("system", "few_shot", "turns", "chat_template_kwargs")
        if not self.chat and any(getattr(self, name) for name in of_chat):
            yield f"chat=false leaves no place for {', '.join(of_chat)}"
        for name in {"tokenize", "add_generation_prompt"} & self.chat_template_kwargs.keys():
            yield f"chat_template_kwargs.{name} is fxrl's own; leave it out"


@dataclass(frozen=True, slots=True)
class RewardConfig(Options):
    """``[reward]``.

    Attributes:
        functions: built-in names (``exact``, ``reasoning_gym``, ``length``, ``regex``) or
            ``file.py:function`` or ``module:function`` with TRL's signature, looked for beside the
            configuration, then in the working folder. In Python also functions themselves.
        weights: factors of the functions' values in their sum, one each; all 1 by default.
        params: keywords by function name, ``[reward.params.length] target = 8``.
        extract: regular expression; built-ins judge its last match in the completion (the whole
            text where nothing matches).
        timeout_s: seconds that one call of one function may take; ``none`` waits for ever.
        retries: number of further calls of a function that raised or took too long.
        on_error: consequence of a failure after these: ``stop`` ends the run (its state is saved),
            ``skip`` gives these completions no value of this function, as if it had returned
            ``None``.
        per_group: calls of your own functions for each prompt's completions as soon as these are
            there, while the engine draws others, on the rank that drew them; ``false`` is one call
            a step, with all of them, on rank 0.
    """

    functions: tuple[str | Callable[..., Any], ...] = ()
    weights: tuple[float, ...] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    extract: Regex | None = None
    timeout_s: Seconds | None = None
    retries: Count = 0
    on_error: Literal["stop", "skip"] = "stop"
    per_group: bool = False

    def problems(self) -> Iterator[str]:
        for name in dict.fromkeys(self.functions):
            if self.functions.count(name) > 1:
                yield f"functions: {name!r} is named twice; give it a weight instead"
        if self.weights is not None and len(self.weights) != len(self.functions):
            yield f"weights has {len(self.weights)} entries for {len(self.functions)} functions"
        yield from reward_problems(self.functions, self.params)


@dataclass(frozen=True, slots=True)
class LossConfig(Options):
    """``[loss]``: a name of ``fxrl.losses`` or ``module:function``; further keys are its keywords.

    Attributes:
        name: as for ``fxrl.losses.by_name``.
        normalize: what a micro-batch's loss is a mean over, see ``fxrl.rl.loop.batching``; with
            ``auto`` losses of ``fxrl.losses`` say it themselves, also where your own factory
            returns one; others are taken for means over ``sequences``.
        options: further keys, the loss's own keywords: ``beta``, ``epsilon``, ...
    """

    name: str = "grpo"
    normalize: Literal["auto", "update", "sequences", "tokens"] = "auto"
    options: Mapping[str, Any] = field(default_factory=dict, metadata=REST)

    def problems(self) -> Iterator[str]:
        yield from loss_problems(self.name, self.options, [*keys_of(type(self))])


@dataclass(frozen=True, slots=True)
class RolloutConfig(Options):
    """``[rollout]``: rollouts of several turns, with tools or in environments. All of a rollout's
    turns and answers together have ``sampling.max_tokens``; what the policy did not draw is context
    for the loss.

    Attributes:
        tools: functions that the policy may call, ``file.py:function`` or ``module:function``, with
            type hints and a Google docstring, plain or async. In Python also functions themselves.
        environment_factory: ``file.py:Class`` or ``module:Class``; called without arguments it
            makes an environment: its ``reset(**columns)`` begins a rollout and may return text for
            the prompt, its other public methods are tools, its ``get_reward()``, if any, is a
            reward of weight 1. A table of several has names, of which the data's column
            ``environment`` picks one a row.
        rollout_func: ``file.py:function`` that plays the rollouts itself,
            ``rollout_func(prompts, trainer)``; it returns a dict with ``prompt_ids``,
            ``completion_ids``, ``logprobs``, and may add ``env_mask`` (0 on what the policy did not
            draw) and columns for the rewards.
        max_tool_calling_iterations: most turns of a rollout that call tools; ``none`` leaves it to
            ``sampling.max_tokens``.
        timeout_s: seconds that one call of a tool, ``reset`` or ``get_reward`` may take, or that
            environments of ``data.verifiers`` may keep silent; ``none`` waits for ever.
        on_error: consequence of a tool that raises or takes too long: ``tell`` makes the error its
            output, ``stop`` ends the run (its state is saved). Calls of tools that there are not,
            or with wrong arguments, are told in any case.
        response_template: how the model's tool calls are read, as transformers documents it; by
            default the tokenizer's own, else as the chat template writes them.
    """

    tools: tuple[str | Callable[..., Any], ...] = ()
    environment_factory: Mapping[str, Any] | str | Callable[..., Any] | None = None
    rollout_func: str | Callable[..., Any] | None = None
    max_tool_calling_iterations: Positive | None = None
    timeout_s: Seconds | None = None
    on_error: Literal["tell", "stop"] = "tell"
    response_template: Mapping[str, Any] | None = None

    def problems(self) -> Iterator[str]:
        if self.rollout_func is not None and self.has_tools:
            yield "rollout_func plays the rollouts itself; leave it or tools and environments out"
        given = [("tools", one) for one in self.tools] + [("rollout_func", self.rollout_func)]
        named = self.factories.items()
        given += [(f"environment_factory.{name}".rstrip("."), one) for name, one in named]
        for key, one in given:
            if one is not None and (problem := code_problem(one)):
                yield f"{key}: {problem}"

    @property
    def has_tools(self) -> bool:
        return bool(self.tools or self.environment_factory)

    @property
    def factories(self) -> Mapping[str, Any]:
        """Factories of environments by name; one alone has none, ``""``."""
        given = self.environment_factory
        return given if isinstance(given, Mapping) else {} if given is None else {"": given}


@dataclass(frozen=True, slots=True)
class SamplingConfig(Options):
    """``[sampling]``: how completions are drawn.

    Attributes:
        temperature: divisor of the logits, in the loss as well (your own gets it as its keyword
            ``temperature``, and ``max_tokens`` as ``max_completion_length``, if it has these); a
            lower one favours likely tokens.
        top_p: probability of the likeliest tokens that are drawn from, together; 1 is all.
        top_k: number of the likeliest tokens that are drawn from; 0 is all.
        min_p: least probability of a token that is drawn, as a share of the likeliest's; 0 is all.
        max_tokens: most tokens of a completion; what is longer is cut off.
        num_generations: completions of each prompt, the group whose rewards are compared; ``ppo``
            compares none, and takes 1 as well.
        ignore_eos: drawing past the end token, up to ``max_tokens``.
        min_tokens: least tokens of a completion; no end token is drawn before.
        stop_token_ids: tokens that end a completion besides the tokenizer's end token.
        extra: further sampling parameters of vLLM by its own names, for ``engine = "vllm"``:
            ``extra = { repetition_penalty = 1.1 }``. What they do to the distribution the trainer
            does not repeat; the losses' importance-sampling correction makes up for it token by
            token (``vllm_importance_sampling_mode = "token_truncate"``), but over a whole
            completion (``"sequence_*"``, the default) the ratios multiply, and little is left.
    """

    temperature: Annotated[float, above(0.0), within(0.0, 1e6)] = 1.0
    top_p: Annotated[float, within(0.0, 1.0), above(0.0)] = 1.0
    top_k: Count = 0
    min_p: Fraction = 0.0
    max_tokens: Positive = 256
    num_generations: Positive = 8
    ignore_eos: bool = False
    min_tokens: Count = 0
    stop_token_ids: tuple[int, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        if self.min_tokens > self.max_tokens:
            yield f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}"

    def filters(self) -> list[str]:
        """What changes the distribution besides the temperature."""
        plain = SamplingConfig()
        names = ("top_p", "top_k", "min_p", "min_tokens", "extra")
        given = {name: getattr(self, name) for name in names}
        return [f"sampling.{k}={v!r}" for k, v in given.items() if v != getattr(plain, k)]


@dataclass(frozen=True, slots=True)
class OptimConfig(Options):
    """``[optim]``: any optimizer of ``torch.optim`` by name; further keys are its keywords.

    Attributes:
        name: class of ``torch.optim``, in any case. Keywords that are not given have its defaults:
            ``adamw`` has ``weight_decay = 0.01``, where Hugging Face and TRL have 0.
        lr: learning rate after the warmup.
        schedule: learning rate after that: ``constant``, or down to 0 at the last update
            (``linear``, or half a ``cosine``).
        warmup_steps: updates over which ``lr`` rises linearly from 0.
        max_grad_norm: largest norm of the gradient, to which a larger one is scaled down; ``none``
            is no bound.
        options: further keys, the optimizer's own keywords: ``weight_decay``, ``betas``, ...
    """

    name: str = "adamw"
    lr: Annotated[float, at_least(0)] = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    max_grad_norm: Annotated[float, above(0.0)] | None = 1.0
    options: Mapping[str, Any] = field(default_factory=dict, metadata=REST)

    def problems(self) -> Iterator[str]:
        yield from optimizer_problems(self.name, self.options, [*keys_of(type(self))])


@dataclass(frozen=True, slots=True)
class EvalConfig(Options):
    """``[eval]``: held-out questions, never trained on: some of ``[data]``, another split of its
    dataset, or a source of their own. Their columns become prompts as ``[data]`` says.

    Attributes:
        size: questions (distinct prompts) held out of ``[data]``; 0 holds out none. Of a source of
            their own, or of another split, the first so many; 0 is all.
        path: JSONL or ``.csv`` file of their own.
        dataset: Hugging Face dataset of their own, a name or a folder.
        subset: part of ``dataset``, what ``datasets.load_dataset`` calls ``name``.
        split: split of ``dataset``, ``test`` by default; alone, ``split = "test"``, it is one of
            ``data.dataset``.
        rows: questions themselves, each a table of columns.
        every: steps between evaluations, besides those before the first and after the last step; 0
            is none.
        greedy: answers at temperature 0; ``false`` draws one as ``[sampling]`` says.
        reward: function whose value >= 0.99 counts as right; the first one by default.
        batch: prompts per generation call.
    """

    size: Count = 0
    path: str | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str | None = None
    rows: tuple[Mapping[str, Any], ...] | None = field(default=None, repr=False, metadata=COUNTED)
    every: Count = 0
    greedy: bool = True
    reward: str | None = None
    batch: Positive = 64

    def problems(self) -> Iterator[str]:
        if len(given := self._sources()) > 1:
            yield f"path, dataset: give one of them (or rows), not {' and '.join(given)}"
        if self.path is not None and not Path(self.path).is_file():
            yield f"path={self.path!r} is not a file{_sought(self.path)}"

    def _sources(self) -> list[str]:
        return [n for n in ("path", "dataset", "rows") if getattr(self, n) is not None]

    @property
    def is_other_split(self) -> bool:
        """Whether the questions are another part of ``data.dataset``."""
        return not self._sources() and (self.split or self.subset) is not None

    def source(self, data: DataConfig) -> DataConfig | None:
        """``data`` with the questions that are given here; ``None`` where none are."""
        if not self._sources() and not self.is_other_split:
            return None
        return replace(
            data,
            path=self.path,
            dataset=data.dataset if self.is_other_split else self.dataset,
            subset=self.subset or (data.subset if self.is_other_split else None),
            split=self.split or "test",
            rows=self.rows,
            reasoning_gym=None,
            params={},
            size=self.size or None,
        )


@dataclass(frozen=True, slots=True)
class TrainConfig(Options):
    """The top level of the file.

    A step is one batch of rollouts and ``num_iterations`` optimizer updates on it.

    Attributes:
        run_dir: folder of everything that the run writes; by default ``runs/<name of the file>``.
        model: what is trained.
        teacher: what it is compared with; needed by the loss ``distill``.
        data: what is trained on.
        reward: what judges completions; needed where ``data`` are prompts.
        loss: what is minimized.
        sampling: how completions are drawn.
        rollout: what they may do between their turns.
        optim: the optimizer.
        eval: held-out questions.
        fxrl: how ``fxrl.optimize`` works.
        vllm: the engine's setup, for ``engine = "vllm"``.
        steps: number of training steps: a batch of completions and the updates on it.
        epochs: passes over the training questions, instead of ``steps``.
        seed: seed of sampling, data order, adapter initialisation and dropout.
        save_every: steps between checkpoints; 0 saves only at the end (and when stopped).
        keep_checkpoints: number of checkpoints that stay; older ones of the same branch are
            deleted. Going back to an older one begins a branch.
        prompts_per_step: prompts in one step, each with ``sampling.num_generations`` completions;
            of data in another ``form``, rows.
        micro_batch_tokens: most tokens of one forward pass, padding included; less takes less
            memory and more passes. The loss of the step does not depend on it, unless
            ``loss.top_entropy_quantile`` is below 1.
        num_iterations: optimizer updates on the same completions.
        precompute_ref_log_probs: scoring of all rows by the reference of ``dpo`` or ``kto`` before
            the first step, into run_dir, in place of each step: less work from the second epoch on,
            and, without an adapter, no copy of the weights for the reference. The KL of ``kto`` is
            of other answers in each step, and still asks the reference.
        advantages: what a completion is worth: its reward minus its group's mean (``group``, GRPO),
            or minus the mean of the others (``leave_one_out``, RLOO). By default the loss's own:
            ``leave_one_out`` for ``rloo``, ``group`` for all others but ``ppo``, whose value head
            takes their place.
        scale_rewards: divisor of ``group`` advantages: the standard deviation of the reward in the
            ``group``, in the ``batch``, or ``"none"``. By default the loss's own: ``"none"`` for
            ``dr_grpo``, ``group`` for all others.
        max_nonfinite: updates in a row that may be skipped, as loss or gradient is not finite; so
            many stop the run.
        log_completions: sample completions shown and written per step; 0 is none.
        engine: what draws completions. ``torch`` is embedded and samples with the trained model
            itself: exact, simple, slow. ``vllm`` is vLLM in this process, over the same weights,
            set up by the table ``[vllm]``.
        engine_retries: further tries where drawing a step's completions takes longer than
            ``vllm.generate_timeout_s``. An engine that fails otherwise stops the run, with its
            state saved.
        dynamic_sampling: fate of groups whose rewards are all the same, which teach
            nothing: they are trained on as any other (``off``), left out (``drop``), or replaced by
            groups of further prompts (``refill``, DAPO's way). The loss is a mean over what is
            trained on.
        max_refills: most rounds of further prompts in one step.
        mask_truncated_completions: exclusion of completions that ``sampling.max_tokens`` cut off
            (DAPO's overlong filter): the loss is a mean over the others. Their rewards count in
            their group's mean and spread.
        disk_retries: tries to write a checkpoint at the end of the run while the disk is full.
        disk_wait_s: seconds between these tries.
        optimize: use of ``fxrl.optimize``; ``false`` runs the loss as it is, for comparison.
        log_to: trackers that get each step's metrics besides ``metrics.jsonl``: ``tensorboard`` (in
            run_dir), ``wandb``, ``trackio``, ``mlflow``, by the packages of these names, which take
            accounts and addresses from their own environment variables.
        project: name of the run's project there (MLflow: experiment); the run has run_dir's name.
        tensorboard: use of TensorBoard; ``false`` takes it out of ``log_to``.
        push_to_hub: repository of the Hugging Face hub, ``user/name``, that gets the trained model.
            It is made where there is none (public, unless your account says otherwise).
        hub_strategy: time of the push: at the ``end`` only, or at ``every_save`` of a checkpoint as
            well.
    """

    KEY_ALIASES: ClassVar[Mapping[str, str]] = trl.KEYS
    KEY_ANSWERS: ClassVar[Mapping[str, str]] = trl.INSTEAD

    model: ModelConfig
    data: DataConfig
    teacher: TeacherConfig | None = None
    reward: RewardConfig = field(default_factory=RewardConfig)
    run_dir: str = ""
    loss: LossConfig = field(default_factory=LossConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    fxrl: Config = field(default_factory=Config)
    vllm: VllmOptions = field(default_factory=VllmOptions)
    engine: Literal["torch", "vllm"] = "torch"
    steps: Positive = 100
    epochs: Annotated[float, above(0.0)] | None = None
    seed: Count = 0
    save_every: Count = 50
    keep_checkpoints: Positive = 2
    prompts_per_step: Positive = 8
    micro_batch_tokens: Positive = 16384
    num_iterations: Annotated[int, within(1, 1000)] = 1
    precompute_ref_log_probs: bool = False
    advantages: Literal["group", "leave_one_out"] | None = None
    scale_rewards: Literal["group", "batch", "none"] | None = None
    max_nonfinite: Positive = 3
    engine_retries: Count = 0
    dynamic_sampling: Literal["off", "drop", "refill"] = "off"
    max_refills: Count = 3
    mask_truncated_completions: bool = False
    disk_retries: Count = 20
    disk_wait_s: Annotated[float, within(0.0, 1e8)] = 30.0
    log_completions: Count = 4
    optimize: bool = True
    log_to: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ("tensorboard",)
    project: str = "fxrl"
    tensorboard: bool = True
    push_to_hub: str | None = None
    hub_strategy: Literal["end", "every_save"] = "end"

    def problems(self) -> Iterator[str]:
        return conflicts(self)

    def warnings(self) -> Iterator[str]:
        """What may be meant, but hardly teaches; told before the run."""
        options = self.loss_info().options
        if self.engine != "vllm" or options is None:
            return
        mode = options.vllm_importance_sampling_mode
        sequences = options.vllm_importance_sampling_correction and mode.startswith("sequence")
        if sequences and (filters := self.sampling.filters()):
            yield (
                f"{', '.join(filters)}: vLLM's log-probs count what is left of the distribution, "
                f"the trainer's all of it, and vllm_importance_sampling_mode={mode!r} multiplies "
                "that over a completion: with 0.98 of it left, 512 tokens weigh 3e-5; set "
                'loss.vllm_importance_sampling_mode="token_truncate"'
            )

    def make_loss(self, teacher: nn.Module | None = None) -> LossFn:
        """The loss of ``[loss]``, as ``[sampling]`` draws what it reads."""
        loss, sampling = self.loss, self.sampling
        return build_loss(
            loss.name,
            loss.options,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            teacher=teacher,
        )

    def loss_info(self) -> LossInfo:
        """What the loss says of itself."""
        return loss_info(self.make_loss())

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads log-probabilities of the reference."""
        said = self.loss_info().reference
        beta = keyword(self.loss.name, self.loss.options, "beta", 0.0)
        return bool(beta if said is None else said)

    @property
    def form(self) -> str:
        """``data.form``, where that is ``auto`` the loss's."""
        return self.loss_info().reads if self.data.form == "auto" else self.data.form

    def settled(self) -> TrainConfig:
        """This configuration with the loss's own advantages if it names none."""
        known = self.advantages is not None and self.scale_rewards is not None
        info = self.loss_info()
        if known or self.form != "prompts" or info.critic is not None:
            return self
        return dataclasses.replace(
            self,
            advantages=self.advantages or info.advantages,
            scale_rewards=self.scale_rewards or info.scale_rewards,
        )
