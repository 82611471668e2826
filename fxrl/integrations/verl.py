"""An engine for verl whose log-probabilities and entropies come from a ``TrainStep``.

verl finds it where fxrl is installed (entry point ``verl.plugins``); it takes the place of
verl's FSDP engine, for the actor, the reference and supervised training:

    actor_rollout_ref.actor.strategy=fxrl
    actor_rollout_ref.actor.fsdp_config._target_=fxrl.integrations.verl.FxrlEngineConfig
    +actor_rollout_ref.actor.fsdp_config.fxrl.gpu_memory=60GiB

verl packs the sequences of a micro-batch into one row and reads three values of each token: its
log-probability, the entropy, and the sum of squared probabilities. The step computes them from the
model's own logits; losses, metrics, data and rollouts stay verl's. Weights are whole on every rank,
as fxrl's regions need them, and gradients are averaged before the optimizer's step.

Of verl 0.9.0's own tests of its engines 97 are for a CPU: 96 pass with this engine in the place of
verl's, as they do without it; the last one needs CUDA. No run with ray was made.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxrl import TrainStep, optimize
from fxrl.config import Config
from fxrl.dtypes import at_least_float32
from fxrl.errors import ConfigError, FxrlError, optional
from fxrl.losses.logprobs import EntropyUse, token_stats

_PURPOSE, _EXTRA = "fxrl.integrations.verl", "[verl]"
_base = optional("verl.workers.engine.base", _PURPOSE, _EXTRA)
_fsdp = optional("verl.workers.engine.fsdp.transformer_impl", _PURPOSE, _EXTRA)
_configs = optional("verl.workers.config", _PURPOSE, _EXTRA)
_tensordicts = optional("verl.utils.tensordict_utils", _PURPOSE, _EXTRA)
_devices = optional("verl.utils.device", _PURPOSE, _EXTRA)

log = logging.getLogger(__name__)
dist: Any = torch.distributed


@dataclass
class FxrlEngineConfig(_configs.FSDPEngineConfig):  # type: ignore[misc, name-defined]
    """verl's ``FSDPEngineConfig`` for the strategy ``fxrl``."""

    strategy: str = "fxrl"
    fxrl: dict[str, Any] = field(default_factory=dict)  # keywords of ``fxrl.Config``

    def __post_init__(self) -> None:
        _configs.EngineConfig.__post_init__(self)  # FSDP's own knows FSDP's strategies alone
        Config(**self.fxrl)


@dataclass(frozen=True)
class PackedScores:
    """The loss function of the steps: what verl reads of each token, on the model's logits.

    The batch is ``{"inputs": the model's own keywords, "tokens": [N] int64, "temperature": [N]}``
    of N tokens. ``inputs`` hold all sequences in one row, with positions that begin anew, or (with
    an ``attention_mask``) one sequence a row, padded on the right.
    """

    entropy: EntropyUse = "none"  # ``"loss"`` with gradient, ``"log"`` without
    sum_pi_squared: bool = False  # the sum of squared probabilities is read too

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        """``log_probs``, and what else is asked for: [N], in verl's names."""
        logits = model(**batch["inputs"], use_cache=False).logits
        mask = batch["inputs"].get("attention_mask")
        rows = logits.flatten(0, 1) if mask is None else logits[mask.bool()]
        scaled = at_least_float32(rows) / batch["temperature"][:, None]
        logps, entropy = token_stats(scaled, batch["tokens"], entropy=self.entropy)
        found = {"log_probs": logps}
        if entropy is not None:
            found["entropy"] = entropy
        if self.sum_pi_squared:
            found["sum_pi_squared"] = scaled.softmax(-1).square().sum(-1)
        return found


# ---------------------------------------------------------------------------- what is refused
def _refuse(model: Any, engine: Any) -> None:
    """Refuses what of verl's model and engine configuration cannot work together with fxrl."""
    dtype = (engine.mixed_precision or {}).get("param_dtype", "bf16")
    options = {
        "use_fused_kernels": (
            model.use_fused_kernels,
            "replaces the model's forward; leave it out: fxrl fuses the loss head",
        ),
        "use_liger": (
            model.use_liger,
            "puts kernels into the layers that cannot be looked into; leave it out: fxrl compiles "
            "the layers",
        ),
        "enable_activation_offload": (
            model.enable_activation_offload,
            "takes what autograd keeps away from fxrl, which plans where that waits; leave it out "
            "and say fxrl={gpu_memory: ..., host_memory: ...}",
        ),
        "ulysses_sequence_parallel_size": (
            engine.ulysses_sequence_parallel_size > 1,
            "takes sequences apart in hooks that cannot be captured; 1 is what works",
        ),
        "fsdp_size": (
            engine.fsdp_size > 1,
            "shards weights, and fxrl's are whole on every rank; leave it out",
        ),
        "offload_policy": (
            engine.offload_policy,
            "is FSDP's; param_offload and optimizer_offload do without it",
        ),
        "qat": (engine.qat.enable, "rewrites the linear layers; leave it out"),
        "mixed_precision.param_dtype": (
            dtype not in ("bf16", "bfloat16", "fp32", "float32"),
            f"is {dtype!r}; it takes bf16 or fp32",
        ),
    }
    for name, (asked, why) in options.items():
        if asked:
            raise ConfigError(f"strategy=fxrl and {name}: this {why}")


# ---------------------------------------------------------------------------- the engine
@_base.EngineRegistry.register(model_type="language_model", backend="fxrl", device=["cuda", "cpu"])
class FxrlEngineWithLMHead(_fsdp.FSDPEngineWithLMHead):  # type: ignore[misc, name-defined]
    """verl's FSDP engine with whole weights, whose forward is a step's.

    Attributes:
        steps: one for each set of values that was asked for, with its ``report`` and ``plan``.
    """

    def __init__(self, model_config: Any, engine_config: Any, *others: Any, **named: Any) -> None:
        _refuse(model_config, engine_config)
        self.steps: dict[PackedScores, TrainStep] = {}
        super().__init__(model_config, engine_config, *others, **named)

    def _build_module(self) -> nn.Module:
        module: nn.Module = super()._build_module()
        if self.model_config.enable_gradient_checkpointing:
            log.warning(
                "enable_gradient_checkpointing is set aside: fxrl plans for each layer what is "
                "kept, sent to the host or run again, by the memory there is"
            )
            module.gradient_checkpointing_disable()  # type: ignore[operator]
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Whole, where verl shards: on the device, and equal on every rank."""
        precision = self.engine_config.mixed_precision or {}
        short = precision.get("param_dtype", "bf16") in ("bf16", "bfloat16")
        self._autocast_dtype = torch.bfloat16 if short else torch.float32
        device = _devices.get_device_id()
        here = not any(parameter.is_meta for parameter in module.parameters())
        module = module.to(device) if here else module.to_empty(device=device)  # rank 0 has loaded
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        return module

    def forward_step(
        self, micro_batch: Any, loss_function: Any, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a micro-batch; its tokens' values go to ``loss_function`` as verl's do."""

        def asked(name: str) -> Any:
            return _tensordicts.get_non_tensor_data(data=micro_batch, key=name, default=False)

        if asked("distillation_use_topk"):
            raise FxrlError(
                "distillation_use_topk reads the model's logits, which are never whole with "
                "strategy=fxrl; use strategy=fsdp for distillation"
            )
        micro_batch = micro_batch.to(_devices.get_device_id())
        use: EntropyUse = "log" if forward_only else "loss"
        scores = PackedScores(
            use if asked("calculate_entropy") else "none", asked("calculate_sum_pi_squared")
        )
        device = torch.device(_devices.get_device_name())
        short = self._autocast_dtype != torch.float32
        with torch.autocast(device.type, self._autocast_dtype, enabled=short):
            output = self._scores(scores, micro_batch)
            loss, metrics = torch.ones((), device=device), {}
            if loss_function is not None:
                loss, metrics = loss_function(
                    model_output=output, data=micro_batch, dp_group=self.get_data_parallel_group()
                )
        told = {name: values.detach() for name, values in output.items()}
        return loss, {"model_output": told, "loss": loss.item(), "metrics": metrics}

    def _scores(self, scores: PackedScores, micro_batch: Any) -> dict[str, Tensor]:
        """Jagged [B, T of each], the last value of each sequence being of no use."""
        inputs, packed = self.prepare_model_inputs(micro_batch=micro_batch)
        offsets = micro_batch["input_ids"].offsets()
        tokens = packed["input_ids_rmpad_rolled"]
        temperature = packed.get("temperature_rmpad")
        if temperature is None:  # padded: one for each sequence
            temperature = packed["temperature"].repeat_interleave(offsets.diff())
        given = {name: value for name, value in inputs.items() if value is not None}
        if scores not in self.steps:
            config = Config(**self.engine_config.fxrl)
            self.steps[scores] = optimize(self.module, scores, config)
        found = self.steps[scores]({"inputs": given, "tokens": tokens, "temperature": temperature})
        padding = packed.get("pad_size", 0)
        return {
            name: torch.nested.nested_tensor_from_jagged(F.pad(values, (0, -padding)), offsets)
            for name, values in found.items()
        }

    def optimizer_step(self) -> float:
        """With the ranks' mean gradients, which FSDP would have made in backward."""
        size = self.get_data_parallel_size()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if size > 1 and gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.get_data_parallel_group())
            parts = (flat / size).split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        norm: float = super().optimizer_step()
        return norm
