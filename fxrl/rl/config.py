"""``TrainConfig``: everything ``fxrl train`` may be told, as one frozen tree.

Each class is a TOML table of the same name; defaults live here and nowhere else. Names follow TRL's
``GRPOConfig`` where the meaning is the same. It reads no environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fxrl.config import Config
from fxrl.errors import ConfigError
from fxrl.rl.binding import REST

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """``[model.lora]``: a PEFT adapter; leave the table out for full fine-tuning."""

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"

    def __post_init__(self) -> None:
        _at_least("r", self.r, 1)
        _within("dropout", self.dropout, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``[model]``.

    Attributes:
        id: local folder, hub id, or ``tiny:<kind>`` (random weights, made on the fly).
        dtype: of the weights; the optimizer works in it.
        autocast: dtype of matrix products in the train step, ``none`` for the weights' own.
        device: ``auto`` takes the GPU if there is one.
        gradient_checkpointing: Hugging Face's own, taken over by ``fxrl.optimize``.
        lora: adapter; ``none`` trains all weights.
    """

    id: str
    dtype: Dtype = "float32"
    autocast: Literal["bfloat16", "float16"] | None = None
    device: str = "auto"
    gradient_checkpointing: bool = False
    lora: LoraConfig | None = None


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
        if len(given) != 1:
            names = " and ".join(given) or "none of them"
            raise ConfigError(f"path, dataset, reasoning_gym: give exactly one, not {names}")
        if self.size is not None:
            _at_least("size", self.size, 1)
        _at_least("few_shot", self.few_shot, 0)
        _at_least("max_prompt_tokens", self.max_prompt_tokens, 1)
        if (self.pattern is not None) and self.template is None:
            raise ConfigError("pattern is given but template, which it fills, is not")
        if not self.chat and (self.system or self.few_shot or self.turns):
            raise ConfigError("chat=false leaves no place for system, few_shot and turns")


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """``[reward]``.

    Attributes:
        functions: built-in names (``exact``, ``reasoning_gym``, ``length``, ``regex``) or
            ``module:function`` with TRL's signature.
        weights: one per function; all 1 by default.
        params: keywords by function name, ``[reward.params.length] target = 8``.
        extract: regular expression; built-ins judge its last match in the completion (the whole
            text where nothing matches).
    """

    functions: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    extract: str | None = None

    def __post_init__(self) -> None:
        if not self.functions:
            raise ConfigError("functions is empty; name at least one reward")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ConfigError(
                f"weights has {len(self.weights)} entries for {len(self.functions)} functions"
            )


@dataclass(frozen=True, slots=True)
class LossConfig:
    """``[loss]``: a name of ``fxrl.losses`` or ``module:factory``, and the factory's keywords."""

    name: str = "grpo"
    options: Mapping[str, Any] = field(default_factory=dict, metadata=REST)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """``[sampling]``: how completions are drawn; ``num_generations`` per prompt."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    num_generations: int = 8

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature} must be above 0 to explore")
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _at_least("top_k", self.top_k, 0)
        _at_least("max_tokens", self.max_tokens, 1)
        _at_least("num_generations", self.num_generations, 2)


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
        _at_least("lr", self.lr, 0.0)
        _at_least("warmup_steps", self.warmup_steps, 0)
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ConfigError(f"max_grad_norm={self.max_grad_norm} must be above 0; none is no cut")


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """``[eval]``: held-out questions, never trained on; 0 is off.

    Attributes:
        size: questions held out (distinct prompts).
        every: steps between evaluations besides before the first and after the last step; 0: none.
        greedy: temperature 0; else one sample each at ``[sampling]``.
        reward: the function whose value >= 0.99 counts as right; the first one by default.
        batch: prompts per generation call.
    """

    size: int = 0
    every: int = 0
    greedy: bool = True
    reward: str | None = None
    batch: int = 64

    def __post_init__(self) -> None:
        _at_least("size", self.size, 0)
        _at_least("every", self.every, 0)
        _at_least("batch", self.batch, 1)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The top level of the file.

    A step is one batch of rollouts and ``num_iterations`` optimizer updates on it.

    Attributes:
        run_dir: everything the run writes; by default ``runs/<name of the file>``.
        steps: how many.
        seed: of sampling, data order, adapter initialisation and dropout.
        save_every: steps between checkpoints; 0 saves only at the end (and when stopped).
        keep_checkpoints: older ones are deleted.
        prompts_per_step: prompts in one step, each with ``sampling.num_generations`` completions.
        micro_batch_tokens: padded tokens that one forward pass may hold; the loss of the step does
            not depend on it.
        num_iterations: optimizer updates on the same completions.
        scale_rewards: advantages are divided by the standard deviation of the reward in the
            ``group``, in the ``batch``, or not (``none``).
        max_nonfinite: updates with a non-finite loss or gradient that are skipped in a row before
            the run stops.
        log_completions: sample completions shown and written per step; 0 is none.
        optimize: ``false`` runs the loss without ``fxrl.optimize``, for comparison.
    """

    KEY_ALIASES: ClassVar[Mapping[str, str]] = {
        "learning_rate": "optim.lr",
        "max_completion_length": "sampling.max_tokens",
        "max_new_tokens": "sampling.max_tokens",
        "max_steps": "steps",
        "output_dir": "run_dir",
        "save_steps": "save_every",
        "eval_steps": "eval.every",
        "lr_scheduler_type": "optim.schedule",
        "reward_funcs": "reward.functions",
        "reward_weights": "reward.weights",
        "loss_type": "loss.name",
        "beta": "loss.beta",
        "epsilon": "loss.epsilon",
        "model_name_or_path": "model.id",
        "per_device_train_batch_size": "prompts_per_step",
    }

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    run_dir: str = ""
    loss: LossConfig = LossConfig()
    sampling: SamplingConfig = SamplingConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    fxrl: Config = Config()
    engine: Literal["torch"] = "torch"
    steps: int = 100
    seed: int = 0
    save_every: int = 50
    keep_checkpoints: int = 2
    prompts_per_step: int = 8
    micro_batch_tokens: int = 16384
    num_iterations: int = 1
    scale_rewards: Literal["group", "batch", "none"] = "group"
    max_nonfinite: int = 3
    log_completions: int = 4
    optimize: bool = True
    tensorboard: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "keep_checkpoints", "prompts_per_step", "micro_batch_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name in ("num_iterations", "max_nonfinite"):
            _at_least(name, getattr(self, name), 1)
        for name in ("save_every", "log_completions", "seed"):
            _at_least(name, getattr(self, name), 0)


def _at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(f"{name}={value} is below {low:g}")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is outside [{low:g}, {high:g}]")
