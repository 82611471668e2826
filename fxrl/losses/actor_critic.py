"""PPO: the clipped policy term per token, and a clipped value term.

The value term is there when the batch has ``returns``:

============= ======= ==============================================================
key           shape   meaning
============= ======= ==============================================================
``returns``   [B, C]  what the value predicts (``advantages.gae``)
``values``    [B, C]  the value at rollout time; absent: no clip of the value
============= ======= ==============================================================

The prediction comes from one of two attributes of the model, looked for in this order:

``model.value_model``  a network of its own: ``value_model(**inputs).logits`` is [B, T, 1]
    (Hugging Face's token classifiers with one label);
``model.value_head``   a module on the policy's last hidden state: [B, C, H] -> [B, C, 1] or [B, C].
    The policy is then run with ``output_hidden_states=True``. (transformers 5 installs hooks at
    the first such call of a model, which torch.compile cannot trace: make that call in eager.)

Column c is the value of the state before completion token c, as with the log-probs.
Shapes: B sequences, T tokens of prompt and completion, C tokens of completion, H hidden size.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fxrl.losses.batch import (
    Batch,
    BatchError,
    LossFn,
    Metrics,
    check_positive,
    model_inputs,
    per_token,
)
from fxrl.losses.logprobs import at_least_float32
from fxrl.losses.options import PolicyKeywords, PolicyOptions, loss_factory
from fxrl.losses.policy_losses import clipped_surrogate
from fxrl.losses.reduce import masked_mean, token_mean
from fxrl.losses.surrogate import Extra, policy_loss


@loss_factory
def ppo(
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    vf_coef: float = 0.1,
    cliprange_value: float = 0.2,
    **common: Unpack[PolicyKeywords],
) -> LossFn:
    """Proximal policy optimization with clip, dual clip and value head.

        L = mean_t( -min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon_high) A_t) ) + vf_coef L_V
        L_V = 1/2 mean_t max( (V_t - R_t)^2, (V_old,t + clip(V_t - V_old,t, +-c) - R_t)^2 )

    c = ``cliprange_value``; means are over all tokens of the batch. ``delta`` > 1 + epsilon_high
    is the dual clip (arXiv:1912.09729). Source: arXiv:1707.06347.

    Raises:
        LossConfigError: a value is out of range.
        BatchError: (on call) ``returns`` are there, but the model predicts no value.
    """
    check_positive("vf_coef", vf_coef, or_zero=True)
    check_positive("cliprange_value", cliprange_value)

    def model_options(model: nn.Module, batch: Batch) -> dict[str, Any]:
        predicted = getattr(model, "value_model", None) is not None
        if predicted or vf_coef == 0.0 or "returns" not in batch:
            return {}
        if getattr(model, "value_head", None) is None:
            raise BatchError(
                f"the batch has 'returns', but {type(model).__name__} has no value_head and no "
                "value_model; add one, or use ppo(vf_coef=0.0)"
            )
        return {"output_hidden_states": True}

    def value_term(
        model: nn.Module, output: Any, batch: Batch, mask: Tensor
    ) -> tuple[Tensor, Metrics]:
        if vf_coef == 0.0 or "returns" not in batch:
            return output.logits.new_zeros(()), {}
        values = per_token(predicted_values(model, output, batch, mask.shape[1]), mask)
        returns = per_token(batch["returns"], mask).detach()
        old_values = batch.get("values")
        old = None if old_values is None else per_token(old_values, mask).detach()
        loss, metrics = clipped_value_loss(values, returns, old, mask, cliprange_value)
        return vf_coef * loss, metrics

    surrogate = clipped_surrogate(epsilon, epsilon_high, delta, "token")
    extra = Extra(model_options, value_term)
    return policy_loss(surrogate, token_mean, PolicyOptions(**common), extra)


def predicted_values(model: nn.Module, output: Any, batch: Batch, num_tokens: int) -> Tensor:
    """V of the states before each of the last ``num_tokens`` = C tokens, [B, C], with gradient."""
    before = slice(-(num_tokens + 1), -1)
    network = getattr(model, "value_model", None)
    if network is not None:
        values: Tensor = network(**model_inputs(batch)).logits[:, before]
    else:
        head: Any = getattr(model, "value_head", None)
        values = head(output.hidden_states[-1][:, before])
    return at_least_float32(values.squeeze(-1) if values.dim() == 3 else values)


def clipped_value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None, mask: Tensor, cliprange: float
) -> tuple[Tensor, Metrics]:
    """``L_V`` of ``ppo`` and its metrics; without ``old_values`` it is not clipped."""
    errors = (values - returns).square()
    clipped = torch.zeros_like(errors)
    if old_values is not None:
        near = old_values + (values - old_values).clamp(-cliprange, cliprange)
        near_errors = (near - returns).square()
        clipped = (near_errors > errors).to(errors.dtype)
        errors = torch.maximum(errors, near_errors)
    loss = 0.5 * masked_mean(errors, mask)
    return loss, {
        "value_loss": loss.detach(),
        "value_mean": masked_mean(values, mask).detach(),
        "return_mean": masked_mean(returns, mask),
        "value_clip_ratio": masked_mean(clipped, mask).detach(),
    }
