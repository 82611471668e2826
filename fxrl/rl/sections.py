"""The tables of a training configuration, one frozen class each.

Defaults live here and nowhere else. Names follow TRL's
``GRPOConfig`` where the meaning is the same. It reads no environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from fxrl.models.errors import ModelError
from fxrl.models.load import Source, resolve
from fxrl.models.tiny import parse_tiny
from fxrl.rl.binding import REST
from fxrl.rl.checks import above, at_least, none_of, regular_expression, when, within
from fxrl.rl.named import loss_problems, optimizer_problems

Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """``[model.lora]``: a PEFT adapter; leave the table out for full fine-tuning."""

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"

    def __post_init__(self) -> None:
        none_of(at_least("r", self.r, 1), within("dropout", self.dropout, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``[model]``.

    Attributes:
        id: local folder, hub id, or ``tiny:<kind>`` (random weights, made on the fly).
        dtype: of the weights; the optimizer works in it. ``auto`` is bfloat16 on a GPU, on a CPU
            what that is fast at (``fxrl.rl.precision``); weights that are trained stay float32.
        autocast: dtype of matrix products in the train step, ``none`` for the weights' own.
            ``auto`` is bfloat16 for an adapter on bfloat16 weights: PEFT keeps adapters in float32,
            whose products would run without tensor cores (1.77 s instead of 1.22 s for a step's
            updates, Qwen3-1.7B on an H200).
        device: ``auto`` takes the GPU if there is one.
        gradient_checkpointing: Hugging Face's own, taken over by ``fxrl.optimize``.
        lora: adapter; ``none`` trains all weights.
    """

    id: str
    dtype: Dtype = "float32"
    autocast: Literal["auto", "bfloat16"] | None = "auto"
    device: str = "auto"
    gradient_checkpointing: bool = False
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        none_of(_model_problems(self.id), _device_problems(self.device))

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What ``autocast`` comes to; ``None`` is no autocast."""
        auto = self.autocast == "auto" and self.dtype == "bfloat16" and self.lora is not None
        return torch.bfloat16 if auto or self.autocast == "bfloat16" else None


@dataclass(frozen=True, slots=True)
class Turn:
    """One chat turn of ``[[data.turns]]``, put between the system prompt and the question."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class DataConfig:
    """``[data]``: where prompts come from. Exactly one of the three sources is given.

    Attributes:
        path: a JSONL file.
        dataset: a Hugging Face dataset's name or folder (``subset``, ``split`` choose in it).
        reasoning_gym: a reasoning-gym task; ``params`` are its keywords.
        size: questions to generate (reasoning-gym) or to keep (others); ``none`` keeps all.
        seed: of the generated questions and of the held-out split, whatever the run's seed is, so
            that runs with several seeds are judged on the same questions.
        prompt: column with the prompt, a text or a list of chat messages.
        answer: column with the right answer, for ``exact`` and the majority baseline.
        pattern: regular expression with named groups, searched in the prompt text; its groups fill
            ``template``.
        template: new prompt text; ``{name}`` is a column or a group of ``pattern``.
        chat: apply the tokenizer's chat template.
        system: system prompt.
        few_shot: solved questions as chat turns before each prompt; they are not trained on.
        turns: explicit chat turns before each prompt.
        max_prompt_tokens: a longer prompt is an error.
    """

    path: str | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    reasoning_gym: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    size: int | None = None
    seed: int = 0
    prompt: str = "prompt"
    answer: str = "answer"
    pattern: str | None = None
    template: str | None = None
    chat: bool = True
    system: str | None = None
    few_shot: int = 0
    turns: tuple[Turn, ...] = ()
    max_prompt_tokens: int = 4096
    shuffle: bool = True

    def __post_init__(self) -> None:
        given = [n for n in ("path", "dataset", "reasoning_gym") if getattr(self, n) is not None]
        sources = " and ".join(given) or "none of them"
        missing = self.path is not None and not Path(self.path).is_file()
        chat_only = self.system or self.few_shot or self.turns
        none_of(
            when(len(given) != 1, f"path, dataset, reasoning_gym: give exactly one, not {sources}"),
            when(missing, f"path={self.path!r} is not a file, seen from {Path.cwd()}"),
            at_least("size", self.size, 1),
            at_least("few_shot", self.few_shot, 0),
            at_least("max_prompt_tokens", self.max_prompt_tokens, 1),
            regular_expression("pattern", self.pattern),
            when(
                self.pattern is not None and self.template is None,
                "pattern is given but template, which it fills, is not",
            ),
            when(
                not self.chat and chat_only,
                "chat=false leaves no place for system, few_shot and turns",
            ),
        )


@dataclass(frozen=True, slots=True)
class LossConfig:
    """``[loss]``: a name of ``fxrl.losses`` or ``module:function``; further keys are its keywords.

    Attributes:
        name: as for ``fxrl.losses.by_name``.
        normalize: what a micro-batch's loss is a mean over, see ``fxrl.rl.batching``; ``auto``
            knows fxrl's own losses and takes ``sequences`` for others.
    """

    name: str = "grpo"
    normalize: Literal["auto", "update", "sequences", "tokens"] = "auto"
    options: Mapping[str, Any] = field(default_factory=dict, metadata=REST)

    def __post_init__(self) -> None:
        none_of(loss_problems(self.name, self.options))


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """``[optim]``: any optimizer of ``torch.optim`` by name; further keys are its keywords.

    The schedule is ``LambdaLR``'s: linear warmup over ``warmup_steps`` updates, then constant, or
    down to 0 at the last update (linear, or half a cosine).
    """

    name: str = "adamw"
    lr: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    max_grad_norm: float | None = 1.0
    options: Mapping[str, Any] = field(default_factory=dict, metadata=REST)

    def __post_init__(self) -> None:
        none_of(
            at_least("lr", self.lr, 0.0),
            at_least("warmup_steps", self.warmup_steps, 0),
            above("max_grad_norm", self.max_grad_norm, 0.0),
            optimizer_problems(self.name, self.options),
        )


def _model_problems(model_id: str) -> list[str]:
    """Decided by the text and the file system; nothing is loaded."""
    try:
        if resolve(model_id) is Source.TINY:
            parse_tiny(model_id)
    except ModelError as error:
        return [f"id: {error}"]
    return []


def _device_problems(device: str) -> list[str]:
    try:
        torch.device("cpu" if device == "auto" else device)
    except RuntimeError:
        return [f"device={device!r} is no device; use auto, cpu or cuda:0"]
    return []
