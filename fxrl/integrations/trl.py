"""TRL's trainers with their model's forward and backward run by a ``TrainStep``.

    from fxrl.integrations.trl import FxrlGRPOTrainer as GRPOTrainer

Since 1.15 TRL reaches the policy and the reference in one way, whatever the loss:

    model(input_ids=..., labels=..., fused_lm_head=True)    ->  FusedCausalLMOutput, [B, T - 1] each

An ``Fxrl*Trainer`` hands TRL's own code a ``ThroughStep`` for the model, which answers that one
call from a step over ``TokenScores`` and leaves all else to the model. TRL's losses, metrics and
options stay TRL's; nothing of TRL or of the model is patched.

What follows from it: log-probabilities of the old policy, of the reference and of the policy take
one route, so the first ratio is exactly 1. The first KL is 0 but for rounding: in bf16 a product
without its adapter may be rounded otherwise (on a GPU DPO's first loss was 0.690, not 0.693).
Adapters that are switched off or over are captured by themselves; under DistributedDataParallel the
step runs inside the wrapper, so gradients are reduced, accumulated and clipped as ever.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxrl import TrainStep, optimize
from fxrl.config import Config
from fxrl.dtypes import at_least_float32
from fxrl.engines import Engine, SamplingParams
from fxrl.engines.ledger import ledger_of
from fxrl.errors import TESTED, ConfigError, FxrlError, optional
from fxrl.ir.on_miss import Judge
from fxrl.ir.remark import Remark, RemarkKind, Report
from fxrl.losses.logprobs import token_stats

_PURPOSE, _EXTRA = "fxrl.integrations.trl", "[trl]"
trl = optional("trl", _PURPOSE, _EXTRA)
transformers = optional("transformers", _PURPOSE, _EXTRA)
_utils = optional("trl.trainer.utils", _PURPOSE, _EXTRA)
_accelerate = optional("accelerate.utils", _PURPOSE, _EXTRA)

log = logging.getLogger(__name__)

_IGNORED = -100
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class TRLVersionError(FxrlError, ImportError):
    """What this module relies on is not what it is in the versions of TRL that were tested."""


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise TRLVersionError(
            f"trl {trl.__version__}: {what}, which fxrl.integrations.trl relies on; "
            f"pip install 'trl=={TESTED['trl'][-1]}' (tested: {', '.join(TESTED['trl'])})"
        )


def _check_method(trainer: str, name: str, *leading: str) -> None:
    """The method is there and begins with these parameters."""
    method = getattr(getattr(trl, trainer, None), name, None)
    found = list(inspect.signature(method).parameters) if method else []
    call = f"{trainer}.{name}({', '.join(leading)}, ...)"
    _check(found[: len(leading)] == list(leading), f"there is no {call}")


for _name in ("GRPOTrainer", "RLOOTrainer"):
    _check_method(_name, "_get_per_token_logps_and_entropies", "self", "model", "input_ids")
for _name in ("SFTTrainer", "DPOTrainer", "KTOTrainer"):
    _check_method(_name, "compute_loss", "self", "model", "inputs")
for _name in ("DPOTrainer", "KTOTrainer"):
    _check_method(_name, "compute_ref_log_probs", "self", "model", "inputs")
_check(hasattr(_utils, "FusedCausalLMOutput"), "models have no fused LM head")
_check(
    {part.name for part in fields(_utils.FusedCausalLMOutput)}
    == {*_PER_TOKEN, "loss", "label_mask", "aux_loss"},
    "FusedCausalLMOutput has other fields",
)


# ---------------------------------------------------------------------------- what is captured
@dataclass(frozen=True)
class TokenScores:
    """The loss function of the steps: TRL's ``FusedCausalLMOutput``, written on the model's logits.

    The batch is ``{"inputs": the model's own keywords, "labels": [B, T] int64}``. Only the rows
    whose next token has a label are read, so that no other is projected.
    """

    entries: tuple[str, ...] = ()  # those of ``_PER_TOKEN`` that are computed besides ``log_probs``
    temperature: float = 1.0  # that logits are divided by
    entropy_gradient: bool = False  # the entropy is differentiated: there is an entropy bonus

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Values [B, T - 1] that are 0 where the label is -100, and ``label_mask``.

        Prompt learning of PEFT puts V virtual tokens before the others: then [B, V + T - 1].
        """
        output: Any = model(**batch["inputs"], use_cache=False)
        labels = batch["labels"]
        virtual = output.logits.shape[1] - labels.shape[1]
        labels = F.pad(labels, (virtual, 0), value=_IGNORED)[:, 1:]
        mask = labels != _IGNORED
        found = self._scores(output.logits[:, :-1][mask], labels[mask])
        scores = {
            name: values.new_zeros(mask.shape).masked_scatter(mask, values)
            for name, values in found.items()
        }
        if getattr(output, "aux_loss", None) is not None:
            scores["aux_loss"] = output.aux_loss
        return {**scores, "label_mask": mask}

    def _scores(self, logits: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Of N rows: logits [N, V], tokens [N]."""
        use: Any = "loss" if self.entropy_gradient else "log"
        logps, entropy = token_stats(
            logits,
            tokens,
            temperature=self.temperature,
            entropy=use if "entropy" in self.entries else "none",
        )
        found = {"log_probs": logps}
        if entropy is not None:
            found["entropy"] = entropy
        with torch.no_grad():
            scaled = at_least_float32(logits) / self.temperature
            if "log_sum_sq_probs" in self.entries:
                found["log_sum_sq_probs"] = scaled.softmax(-1).square().sum(-1).log()
            if "mean_logits" in self.entries:
                found["mean_logits"] = scaled.mean(-1)
            if "is_top1" in self.entries:
                found["is_top1"] = scaled.argmax(-1) == tokens
        return found


class ThroughStep:
    """A model for TRL's code: the fused call is answered from a step, all else by the model."""

    def __init__(self, model: nn.Module, scores: TokenScores, config: Config) -> None:
        self._model, self._asked_for_logits = model, False
        self.train_step: TrainStep = optimize(model, scores, config)  # the step over the model

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance goes by it, such as is_peft_model
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self,
        *args: Any,
        labels: Tensor | None = None,
        fused_lm_head: bool = False,
        num_items_in_batch: Any = None,
        **inputs: Any,
    ) -> Any:
        """``FusedCausalLMOutput``; what the model itself returns without ``fused_lm_head``."""
        if not fused_lm_head:
            self._tell_of_logits()
            return self._model(*args, **({} if labels is None else {"labels": labels}), **inputs)
        if args or labels is None or "shift_labels" in inputs:
            raise FxrlError(
                "fxrl.integrations.trl answers model(**inputs, labels=..., fused_lm_head=True), "
                "without positional arguments and without shift_labels"
            )
        inputs.pop("use_cache", None)
        given = {name: value for name, value in inputs.items() if value is not None}
        found = self.train_step({"inputs": given, "labels": labels})
        count = found["label_mask"].sum().clamp(min=1)
        total = -found["log_probs"].sum()
        loss = total / (count if num_items_in_batch is None else num_items_in_batch)
        if "aux_loss" in found:
            bare: Any = getattr(self._model, "module", self._model)  # of what DDP wraps
            weight = getattr(bare.config.get_text_config(), "router_aux_loss_coef", 0.0)
            loss = loss + weight * found["aux_loss"]
        return _utils.FusedCausalLMOutput(loss=loss, **found)

    def _tell_of_logits(self) -> None:
        if self._asked_for_logits:
            return
        self._asked_for_logits = True
        remark = Remark(
            RemarkKind.MISSED,
            "capture",
            "model",
            _line_of_trl(),
            "TRL reads the model's logits outside of the fused call (label_smoothing_factor, "
            "compute_loss_func, compute_metrics), so they are made",
            "leave that option out, or write the loss and give it to fxrl.optimize",
        )
        Judge(self.train_step.config.on_miss)(Report((remark,)))


def _line_of_trl() -> str:
    """Where in TRL the innermost call under way stands."""
    home = str(Path(trl.__file__).parent)
    calls = [call for call in traceback.extract_stack() if call.filename.startswith(home)]
    return f"{calls[-1].filename}:{calls[-1].lineno}" if calls else ""


# ---------------------------------------------------------------------------- what is refused
_REFUSED = {
    "use_liger_kernel": (
        "puts kernels into the layers that cannot be looked into",
        "leave it out: fxrl compiles the layers",
    ),
    "activation_offloading": (
        "takes what autograd keeps away from fxrl, which plans where that waits",
        "leave it out and say fxrl.Config(gpu_memory=..., host_memory=...)",
    ),
    "torch_compile": (
        "compiles the model, and fxrl compiles model and loss together",
        "leave it out",
    ),
}


_SET_ASIDE = Remark(
    RemarkKind.ANALYSIS,
    "trl",
    "gradient_checkpointing",
    reason="set aside: the plan says of each layer what is kept, sent to the host or run again, by "
    "the memory there is (fxrl.Config(gpu_memory=...))",
)

_HOW_TRL_DRAWS = {
    "cache_implementation", "transformers_continuous_batching_config", "use_transformers_paged",
    "use_transformers_continuous_batching", "vllm_mode", "vllm_model_impl", "vllm_server_port",
    "vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host", "vllm_group_port",
    "vllm_server_timeout", "vllm_gpu_memory_utilization", "vllm_max_model_length",
    "vllm_tensor_parallel_size",
}  # fmt: skip
"""Options that an engine does not read. ``vllm_enable_sleep_mode`` is what engines do anyway."""


def _judged(args: Any) -> Any:
    """A copy of TRL's configuration, less what fxrl does itself. Checkpointing is TRL's default, so
    that it is set aside is for the report, not for a warning to everyone."""
    for name, (reason, cure) in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name}={getattr(args, name)!r} {reason}; {cure}")
    args = copy.copy(args)
    if args.gradient_checkpointing:
        for name in {"gradient_checkpointing", "activation_checkpointing"} & vars(args).keys():
            setattr(args, name, False)  # of transformers, old and new name
            setattr(args, f"{name}_kwargs", None)
    return args


def _refuse_sharding(trainer: Any) -> None:
    """Asked of accelerate, since its own launcher and file may say so too."""
    parallel = trainer.accelerator.parallelism_config
    kinds = ("dp_shard", "tp", "cp", "sp")
    sharded = [kind for kind in kinds if getattr(parallel, f"{kind}_enabled", False)]
    sharded += ["FSDP"] * trainer.is_fsdp_enabled + ["DeepSpeed"] * trainer.is_deepspeed_enabled
    if sharded:
        raise ConfigError(
            f"{', '.join(sharded)}: parameters or sequences are taken apart between the processes, "
            "which these trainers do not follow; use DistributedDataParallel "
            "(accelerate launch --multi_gpu, or torchrun)"
        )


def _refuse_rounded_head(trainer: Any) -> None:
    """Asked of accelerate, which may be told so by its own launcher."""
    precision = trainer.accelerator.mixed_precision
    if getattr(trainer.args, "cast_lm_head_to_fp32", False) and precision != "no":
        raise ConfigError(
            f"cast_lm_head_to_fp32=True under {precision} autocast, which rounds what goes into "
            "the model's own head; leave it out (fxrl sums and keeps logits in float32), or say "
            f"bf16=False and load the model in {precision}"
        )


# ---------------------------------------------------------------------------- completions
class FxrlGeneration:
    """TRL's ``VLLMGeneration`` over an engine that shares the trainer's weights.

    There is no second copy of the weights to be filled, and between rollouts the engine stands by:
    its KV cache's memory is the trainer's.

    Args:
        engine: awake; it is woken for a rollout and stands by afterwards.
        params: how completions are drawn.
        adapter: only LoRA factors are trained.
        max_model_len: most tokens of a prompt and its completion, for TRL's tool calls.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams, *, adapter: bool, max_model_len: int
    ) -> None:
        self.engine, self.params = engine, params
        self._update = engine.update_lora if adapter else engine.update_weights
        self._standby = contextlib.ExitStack()
        model_config = SimpleNamespace(max_model_len=max_model_len)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=model_config))

    def sync_weights(self) -> None:
        """The engine draws from the present weights from here on."""
        self._standby.close()
        self._update(policy_version=self.engine.policy_version + 1)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None,
        num_generations: int,
        profiler: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, list[list[int]], list[list[list[float]]], None]:
        """One completion for each prompt; equal neighbours share a prefill.

        Returns:
            (prompts, completion ids, log-probabilities [[one], ...] of each token, None).
        """
        if images is not None and any(image is not None for image in images):
            raise ConfigError("engine= draws from token ids; leave it out for prompts with images")
        firsts = prompts[::num_generations]
        groups = [prompt for prompt in firsts for _ in range(num_generations)] == list(prompts)
        params = replace(self.params, n=num_generations if groups else 1)
        self._standby.close()
        with profiler or contextlib.nullcontext():
            drawn = self.engine.generate(firsts if groups else prompts, params)
        self._standby.enter_context(self.engine.standby())
        flat = [completion for group in drawn for completion in group]
        return (
            prompts,
            [list(completion.token_ids) for completion in flat],
            [[[logprob] for logprob in completion.logprobs] for completion in flat],
            None,
        )


# ---------------------------------------------------------------------------- the trainers
class _Fxrl:
    """What the trainers share; it stands before TRL's trainer, whose arguments it takes.

    Args:
        config: how fxrl works; ``None`` takes the defaults.

    Raises:
        ConfigError: an option of TRL cannot work together with fxrl; says why and what to do.
    """

    _args: ClassVar[Any]
    _entries: tuple[str, ...] = ("entropy",)

    def __init__(self, *positional: Any, config: Config | None = None, **named: Any) -> None:
        given = inspect.signature(super().__init__).bind(*positional, **named).arguments
        if not isinstance(config, Config | None):
            raise ConfigError(
                f"config is a {type(config).__name__}; it takes a fxrl.Config, TRL's goes into args"
            )
        self._fxrl_config = config or Config()
        self._through: dict[nn.Module, ThroughStep] = {}
        asked = given.get("args") or self._default_args(given["model"])
        self._remarks = Report((_SET_ASIDE,) if asked.gradient_checkpointing else ())
        given["args"] = self._prepared(asked)
        super().__init__(**given)
        _refuse_sharding(self)
        _refuse_rounded_head(self)
        trainer: Any = self
        trainer.add_callback(_Reporter(trainer))

    def _prepared(self, args: Any) -> Any:
        return _judged(args)

    def _default_args(self, model: Any) -> Any:
        """The arguments that TRL takes for ``args=None``."""
        trainer: Any = self
        name = model if isinstance(model, str) else _utils.get_config_model_id(model.config)
        return self._args(f"{name.split('/')[-1]}-{trainer._name}")

    @property
    def train_step(self) -> TrainStep:
        """The step over the policy: its ``report``, ``plan``, ``dump`` and ``explain``."""
        trainer: Any = self
        through: ThroughStep = self._of(trainer.model_wrapped)
        return through.train_step

    def _of(self, model: Any) -> Any:
        """The model for TRL's code; made at first use, which may be while TRL is being made."""
        if model is None or type(model) is ThroughStep:
            return model
        if model not in self._through:
            bonus = getattr(self, "_entropy_bonus_enabled", False)
            scores = TokenScores(self._entries, getattr(self, "temperature", 1.0), bonus)
            self._through[model] = ThroughStep(model, scores, self._fxrl_config)
        return self._through[model]


class _OnPolicy(_Fxrl):
    """GRPO and RLOO, whose log-probabilities all pass through one method.

    Args:
        engine: draws the completions with the trainer's own weights, in the place of vLLM's second
            copy (``use_vllm``): a ``VllmEngine`` whose ``shared_model()`` is ``model``, or a
            ``TorchEngine`` over it. ``None`` lets TRL draw.
    """

    def __init__(self, *positional: Any, engine: Engine | None = None, **named: Any) -> None:
        self._engine = engine
        super().__init__(*positional, **named)
        if engine is not None:
            self._draw_with(engine)

    def _prepared(self, args: Any) -> Any:
        args = super()._prepared(args)
        if self._engine is None:
            return args
        for option in filter(lambda option: option.name in _HOW_TRL_DRAWS, fields(args)):
            if (value := getattr(args, option.name)) != option.default:
                raise ConfigError(
                    f"{option.name}={value!r} says how TRL draws, and engine= draws here; leave "
                    "out one of the two (the engine's own options say it)"
                )
        modes = ("token_truncate", "token_mask")
        corrected = getattr(args, "loss_type", "") == "vespo" and (
            args.vllm_importance_sampling_correction
        )
        if corrected and args.vllm_importance_sampling_mode not in modes:
            raise ConfigError(  # TRL asks this where it makes vLLM
                f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r}: the vespo "
                f"loss takes {' or '.join(map(repr, modes))}"
            )
        args.use_vllm = False  # else TRL makes one of its own
        return args

    def _draw_with(self, engine: Engine) -> None:
        """TRL draws as with vLLM: its importance-sampling correction, which asks so, is on."""
        trainer: Any = self
        adapter = _accelerate.is_peft_model(trainer.model)
        if hasattr(engine, "attach"):
            engine.attach(trainer.model)
        extra = dict(trainer.args.generation_kwargs or {})
        if trainer.repetition_penalty != 1.0:
            extra["repetition_penalty"] = trainer.repetition_penalty
        params = SamplingParams(
            temperature=trainer.temperature,
            top_p=trainer.top_p,
            top_k=trainer.top_k or 0,
            min_p=trainer.min_p or 0.0,
            max_tokens=trainer.max_completion_length,
            stop_token_ids=tuple(trainer.eos_token_ids),
            extra=extra,
        )
        longest = trainer.model.config.get_text_config().max_position_embeddings
        longest = getattr(getattr(engine, "options", None), "max_model_len", None) or longest
        trainer.vllm_generation = FxrlGeneration(
            engine, params, adapter=adapter, max_model_len=longest
        )
        trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "colocate", -1

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **named: Any) -> Any:
        trls: Any = super()
        return trls._get_per_token_logps_and_entropies(self._of(model), *args, **named)


class _Supervised(_Fxrl):
    """SFT, and what is like it: the model is an argument of the loss."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        trls: Any = super()
        return trls.compute_loss(self._of(model), inputs, *args, **named)


class _Preference(_Supervised):
    """DPO and KTO, which call the reference too inside of the loss: as ``self.ref_model``, or as
    ``self.model`` with its adapter switched off."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        trainer: Any = self
        own = trainer.model, trainer.ref_model
        trainer.model, trainer.ref_model = map(self._of, own)
        try:
            return super().compute_loss(model, inputs, *args, **named)
        finally:
            trainer.model, trainer.ref_model = own

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        """For ``precompute_ref_log_probs``."""
        trls: Any = super()
        return trls.compute_ref_log_probs(self._of(model), inputs)


class FxrlGRPOTrainer(_OnPolicy, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
    """``trl.GRPOTrainer`` through a ``TrainStep``; also takes ``config`` and ``engine``."""

    _args = trl.GRPOConfig


class FxrlRLOOTrainer(_OnPolicy, trl.RLOOTrainer):  # type: ignore[misc, name-defined]
    """``trl.RLOOTrainer`` through a ``TrainStep``; also takes ``config`` and ``engine``."""

    _args = trl.RLOOConfig


class FxrlSFTTrainer(_Supervised, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """``trl.SFTTrainer`` through a ``TrainStep``; also takes ``config``."""

    _args = trl.SFTConfig
    _entries = ("entropy", "is_top1")


class FxrlDPOTrainer(_Preference, trl.DPOTrainer):  # type: ignore[misc, name-defined]
    """``trl.DPOTrainer`` through a ``TrainStep``; also takes ``config``."""

    _args = trl.DPOConfig

    @property
    def _entries(self) -> tuple[str, ...]:  # type: ignore[override]
        found = ("entropy", "mean_logits", "is_top1")
        return (*found, "log_sum_sq_probs") if self.use_weighting else found


class FxrlKTOTrainer(_Preference, trl.KTOTrainer):  # type: ignore[misc, name-defined]
    """``trl.KTOTrainer`` through a ``TrainStep``; also takes ``config``."""

    _args = trl.KTOConfig
    _entries = ("entropy", "mean_logits")


class _Reporter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Writes what was done to the step into ``output_dir/fxrl``: after the first step, at the end.

    The files are ``report.txt``, ``plan.json`` and, of an engine that keeps one, ``ledger.txt``.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.on_train_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / "fxrl"
        folder.mkdir(parents=True, exist_ok=True)
        step = self._trainer.train_step
        report = self._trainer._remarks + step.report
        texts = {"report.txt": str(report), "plan.json": step.plan.to_json()}
        ledger = ledger_of(getattr(self._trainer, "_engine", None))
        if ledger is not None:
            texts["ledger.txt"] = str(ledger)
        for name, text in texts.items():
            (folder / name).write_text(text + "\n", encoding="utf-8")
        log.info("what fxrl did to the step is in %s", folder)
