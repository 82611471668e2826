"""What scores a micro-batch without a gradient: the loss, and policies by their log-probabilities.

NOTE [One step per state of the adapter]
The reference and the policy each have a step of their own, captured in the state it is always
called in. One step for both would have to be captured anew whenever the adapter is switched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxrl import optimize
from fxrl.losses import completion_logits, loss_info, token_stats
from fxrl.losses.actor_critic import asking_for_values, predicted_values
from fxrl.models.hf import eval_mode
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.types import Batch

MakeStep = Callable[[nn.Module, Callable[..., Any]], Callable[[Batch], Any]]
"""``step(batch)`` of a model and a loss over it."""


@dataclass(slots=True)
class Scorers:
    """Log-probabilities [B, C] of a micro-batch's completions; None where nothing reads them."""

    judge: Callable[[Batch], Any]  # the loss itself, in eval mode
    old_policy: Callable[[Batch], Tensor] | None  # before the first of several updates
    # The same for a loss with a value head, which also reads the values.
    critic: Callable[[Batch], tuple[Tensor, dict[str, Tensor]]] | None
    # Under the reference policy; None too if all rows were scored before the first step.
    reference: Callable[[Batch], Tensor] | None
    mismatched: Callable[[Batch], Tensor] | None  # of prompts with each other's answers
    probe: Callable[[Batch], Tensor] | None  # of a sample, to measure the drift


def step_maker(config: TrainConfig, device: torch.device) -> MakeStep:
    """``fxrl.optimize`` as the run is configured, or its plain twin; under the model's autocast."""
    dtype = config.model.autocast_dtype

    def make(model: nn.Module, loss_fn: Callable[..., Any]) -> Callable[[Batch], Any]:
        def loss_under_autocast(model: nn.Module, batch: Batch) -> Any:
            with torch.autocast(device.type, dtype=dtype):
                return loss_fn(model, batch)

        made = loss_fn if dtype is None else loss_under_autocast
        return optimize(model, made, config.fxrl) if config.optimize else partial(made, model)

    return make


def make_scorers(
    config: TrainConfig,
    model: nn.Module,
    loss_fn: Callable[..., Any],
    make_step: MakeStep,
    *,
    draws: bool,
) -> Scorers:
    """What a run scores by; ``draws`` where it draws completions."""
    info = loss_info(loss_fn)
    score_by = partial(scorer, temperature=config.sampling.temperature, make_step=make_step)
    critic = score_by(model, values=True) if info.critic is not None else None
    old_policy = score_by(model) if config.num_iterations > 1 and critic is None else None
    of_reference = None
    if config.needs_reference:
        lasts = info.mismatched_kl or not config.precompute_ref_log_probs
        frozen, context = reference(model, config.model.lora is not None, lasts)
        of_reference = score_by(frozen, context=context)
    return Scorers(
        judge=partial(scoring, model, make_step(model, loss_fn)),
        old_policy=old_policy,
        critic=critic,
        reference=of_reference,
        mismatched=score_by(model) if info.mismatched_kl else None,
        probe=(old_policy or score_by(model)) if draws and info.options is None else None,
    )


def scorer(
    model: nn.Module,
    temperature: float,
    make_step: MakeStep,
    *,
    values: bool = False,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[Batch], Any]:
    """``score(batch) -> [B, C]`` log-probabilities without gradient, in eval mode: dropout is no
    part of a policy. ``values`` gives ``{"values": [B, C]}`` of the same forward behind them."""

    def logps(model: nn.Module, batch: Batch) -> Any:
        num = batch["completion_mask"].shape[1]
        options = asking_for_values(model) if values else {}
        logits, output = completion_logits(model, batch, num, **options)
        tokens = batch["input_ids"][:, -num:]
        found = token_stats(logits, tokens, temperature=temperature).logps
        if not values:
            return found
        return found, {"values": predicted_values(model, output, batch, num)}

    step = make_step(model, logps)

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
