"""PPO: the clipped policy term per token, and a clipped value term.

The value term is there when the batch has ``returns``:

============= ======= ==============================================================
key           shape   meaning
============= ======= ==============================================================
``returns``   [B, C]  what the value predicts (``advantages.gae``)
``values``    [B, C]  the value at rollout time; absent: no clip of the value
============= ======= ==============================================================

The prediction comes from one of these attributes of the model, looked for in this order:

``model.value_model``  a network of its own: ``value_model(**inputs).logits`` is [B, T, 1]
    (Hugging Face's token classifiers with one label);
``model.value_head``   a ``ValueHead``, which reads what the policy's output layer reads; or any
    module on the policy's last hidden state, [B, C, H] -> [B, C, 1] or [B, C]. For the latter the
    policy is run with ``output_hidden_states=True``, under which layers are captured one by one.

Column c is the value of the state before completion token c, as with the log-probs.
Shapes: B sequences, T tokens of prompt and completion, C tokens of completion, H hidden size.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxrl.dtypes import at_least_float32, wide_dtype
from fxrl.losses.batch import (
    Batch,
    BatchError,
    LossConfigError,
    LossFn,
    Metrics,
    check_positive,
    model_inputs,
    per_token,
)
from fxrl.losses.options import Critic, PolicyKeywords, PolicyOptions, loss_factory
from fxrl.losses.policy_losses import clipped_surrogate
from fxrl.losses.reduce import masked_mean, token_mean
from fxrl.losses.surrogate import Extra, policy_loss


class ValueHead(nn.Linear):
    """The value of each state: a Linear on the hidden state that the policy's output layer reads.

    ``model.value_head = ValueHead(model)`` is all: a hook on the output layer hands its input over
    in the policy's own forward, when a loss asks. It starts as zero, so the first advantages are
    rewards, and the policy's layers get no gradient of a head that knows nothing.

    Args:
        model: a causal LM of Hugging Face, with its adapter if it gets one.
        dtype: of the weight; by default float32, or float64 for such a model. It is multiplied in
            the hidden state's dtype.

    Raises:
        LossConfigError: the model has no output layer.

    NOTE [Why a hook]
    ``output_hidden_states=True`` makes transformers collect every layer's, through a hook in each.
    A layer whose output is read elsewhere than in the next one is no repetition of it
    (``fxrl.capture.repeated``), so the capture of 8 layers took 23 s in place of 6. The output
    layer's input is the same tensor, cut to the tokens that ``logits_to_keep`` keeps.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        layer = getattr(model, "get_output_embeddings", lambda: None)()
        if not isinstance(layer, nn.Module):
            raise LossConfigError(
                f"ValueHead: {type(model).__name__} has no output layer (get_output_embeddings); "
                "give a causal LM, or set model.value_head to a module of your own"
            )
        like: Any = layer.weight
        dtype = dtype or wide_dtype(like.dtype)
        width = int(getattr(layer, "in_features", like.shape[-1]))  # packed weights are narrower
        super().__init__(width, 1, device=like.device, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self._asked = False
        self._heard: Tensor | None = None
        layer.register_forward_pre_hook(self._hear)

    def _hear(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._asked:
            self._asked, self._heard = False, inputs[0]

    def ask(self) -> None:
        """The next forward of the policy is to hand its hidden state over."""
        self._asked, self._heard = True, None

    def heard(self) -> Tensor:
        """The hidden states that were recorded, [B, T or the kept part of it, H]; they are
        released. Raises ``BatchError`` if the policy has not run."""
        hidden, self._asked, self._heard = self._heard, False, None
        if hidden is None:
            raise BatchError(
                "value_head is of another model: set model.value_head = ValueHead(model), once "
                "its adapter is there"
            )
        return hidden

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, H] -> [B, C, 1], in its dtype."""
        return F.linear(hidden, self.weight.to(hidden.dtype), self.bias.to(hidden.dtype))


@loss_factory
def ppo(
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    vf_coef: float = 0.1,
    cliprange_value: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_coef: float = 0.0,
    **common: Unpack[PolicyKeywords],
) -> LossFn:
    """Proximal policy optimization with clip, dual clip and value head.

        L = mean_t( -min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon_high) A_t) ) + vf_coef L_V
        L_V = 1/2 mean_t max( (V_t - R_t)^2, (V_old,t + clip(V_t - V_old,t, +-c) - R_t)^2 )

    c = ``cliprange_value``; means are over all tokens of the batch. ``delta`` > 1 + epsilon_high
    is the dual clip (arXiv:1912.09729). The batch has ``advantages`` A and ``returns`` R, [B, C]
    each, and ``values``, V_old: ``gae`` makes the first two of the third and ``token_rewards``, and
    ``whiten`` scales A. ``fxrl train`` does all this; your own loop does it itself.

    Sources: arXiv:1707.06347 eq. 7 and 9; the KL in the reward: InstructGPT, arXiv:2203.02155.

    Args:
        vf_coef: weight of the value term; 0.0 leaves it out.
        cliprange_value: c.
        gamma, lam, kl_coef: of ``gae`` and ``token_rewards``, for the trainer (``loss_info``): the
            loss itself reads what they came to. ``beta`` is a KL in the loss, beside.

    Raises:
        LossConfigError: a value is out of range.
        BatchError: (on call) ``returns`` are there, but the model predicts no value.
    """
    check_positive("vf_coef", vf_coef, or_zero=True)
    check_positive("cliprange_value", cliprange_value)

    def model_options(model: nn.Module, batch: Batch) -> dict[str, Any]:
        if vf_coef == 0.0 or "returns" not in batch:
            return {}
        return asking_for_values(model)

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
    extra, critic = Extra(model_options, value_term), Critic(gamma, lam, kl_coef)
    return policy_loss(surrogate, token_mean, PolicyOptions(**common), extra, critic=critic)


def asking_for_values(model: nn.Module) -> dict[str, Any]:
    """Keywords for the policy's forward, so that ``predicted_values`` works behind it."""
    if getattr(model, "value_model", None) is not None:
        return {}
    head = getattr(model, "value_head", None)
    if head is None:
        raise BatchError(
            f"the batch has 'returns', but {type(model).__name__} has no value_head and no "
            "value_model; set model.value_head = fxrl.losses.ValueHead(model), or use "
            "ppo(vf_coef=0.0)"
        )
    if isinstance(head, ValueHead):
        head.ask()
        return {}
    return {"output_hidden_states": True}


def predicted_values(model: nn.Module, output: Any, batch: Batch, num_tokens: int) -> Tensor:
    """V of the states before each of the last ``num_tokens`` = C tokens, [B, C], with gradient."""
    before = slice(-(num_tokens + 1), -1)
    network = getattr(model, "value_model", None)
    if network is not None:
        values: Tensor = network(**model_inputs(batch)).logits[:, before]
    else:
        head: Any = getattr(model, "value_head", None)
        own = isinstance(head, ValueHead)
        hidden = head.heard() if own else output.hidden_states[-1]
        values = head(hidden[:, before])
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
