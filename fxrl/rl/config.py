"""``TrainConfig``: everything ``fxrl train`` may be told, as one frozen tree.

Its tables are the classes of ``fxrl.rl.sections`` and ``fxrl.Config``. VllmSymbols follow TRL's
``GRPOConfig`` where the meaning is the same. It reads no environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from fxrl.config import Config
from fxrl.engines.vllm.options import VllmOptions
from fxrl.rl.checks import at_least, none_of, when
from fxrl.rl.rollout_sections import EvalConfig, RewardConfig, SamplingConfig
from fxrl.rl.sections import DataConfig, LossConfig, ModelConfig, OptimConfig


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
        advantages: reward minus its group's mean (GRPO), or minus the mean of the others (RLOO).
        scale_rewards: ``group`` advantages are divided by the standard deviation of the reward in
            the ``group``, in the ``batch``, or not (``none``).
        max_nonfinite: updates with a non-finite loss or gradient that are skipped in a row before
            the run stops.
        log_completions: sample completions shown and written per step; 0 is none.
        engine: what draws completions. ``torch`` is embedded and samples with the trained model
            itself: exact, simple, slow. ``vllm`` is vLLM in this process, over the same weights,
            set up by the table ``[vllm]``.
        engine_retries: further tries where drawing a step's completions takes longer than
            ``vllm.generate_timeout_s``. An engine that fails otherwise stops the run, with its
            state saved.
        dynamic_sampling: what becomes of groups whose rewards are all the same, which teach
            nothing: they are trained on as any other (``off``), left out (``drop``), or replaced by
            groups of further prompts (``refill``, DAPO's way). The loss is a mean over what is
            trained on.
        max_refills: rounds of further prompts in one step at most.
        disk_retries: tries to write a checkpoint at the end of the run while the disk is full.
        disk_wait_s: seconds between them.
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
    loss: LossConfig = field(default_factory=LossConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    fxrl: Config = field(default_factory=Config)
    vllm: VllmOptions = field(default_factory=VllmOptions)
    engine: Literal["torch", "vllm"] = "torch"
    steps: int = 100
    seed: int = 0
    save_every: int = 50
    keep_checkpoints: int = 2
    prompts_per_step: int = 8
    micro_batch_tokens: int = 16384
    num_iterations: int = 1
    advantages: Literal["group", "leave_one_out"] = "group"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    max_nonfinite: int = 3
    engine_retries: int = 0
    dynamic_sampling: Literal["off", "drop", "refill"] = "off"
    max_refills: int = 3
    disk_retries: int = 20
    disk_wait_s: float = 30.0
    log_completions: int = 4
    optimize: bool = True
    tensorboard: bool = True

    def __post_init__(self) -> None:
        positive = ["steps", "keep_checkpoints", "prompts_per_step", "micro_batch_tokens"]
        positive += ["num_iterations", "max_nonfinite"]
        not_negative = ["save_every", "log_completions", "seed", "max_refills"]
        not_negative += ["disk_retries", "disk_wait_s", "engine_retries"]
        none_of(
            *(at_least(name, getattr(self, name), 1) for name in positive),
            *(at_least(name, getattr(self, name), 0) for name in not_negative),
            when(
                self.engine != "vllm" and self.sampling.extra,
                f"sampling.extra={dict(self.sampling.extra)!r} are vLLM's own parameters; leave "
                'them out, or set engine="vllm"',
            ),
            when(
                self.engine == "vllm" and self.model.dtype == "float64",
                'engine="vllm": vLLM has no float64; set model.dtype to bfloat16 or float32',
            ),
        )
