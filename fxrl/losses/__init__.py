"""RL losses in plain PyTorch: factories of ``loss_fn(model, batch) -> (loss, metrics)``.

``batch`` is described in ``fxrl.losses.batch``, the settings that all policy losses share in
``fxrl.losses.options``. Names, defaults and metric keys are those of TRL's GRPOConfig.
"""

from fxrl.losses.actor_critic import ValueHead, ppo
from fxrl.losses.advantages import (
    gae,
    group_advantages,
    reward_metrics,
    rloo_advantages,
    token_rewards,
    whiten,
)
from fxrl.losses.batch import Batch, BatchError, LossConfigError, LossFn, Metrics
from fxrl.losses.logprobs import TokenStats, completion_logits, token_stats
from fxrl.losses.options import Critic, LossInfo, PolicyOptions, loss_info
from fxrl.losses.policy_losses import (
    bnpo,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    luspo,
    reinforce,
    rloo,
    sapo,
)
from fxrl.losses.registry import FACTORIES, by_name
from fxrl.losses.supervised import distill, dpo, kto, reward_model, sft
from fxrl.losses.surrogate import importance_weights, kl_estimate, policy_loss

__all__ = [
    "FACTORIES",
    "Batch",
    "BatchError",
    "Critic",
    "LossConfigError",
    "LossFn",
    "LossInfo",
    "Metrics",
    "PolicyOptions",
    "TokenStats",
    "ValueHead",
    "bnpo",
    "by_name",
    "cispo",
    "completion_logits",
    "dapo",
    "distill",
    "dpo",
    "dr_grpo",
    "gae",
    "group_advantages",
    "grpo",
    "gspo",
    "importance_weights",
    "kl_estimate",
    "kto",
    "loss_info",
    "luspo",
    "policy_loss",
    "ppo",
    "reinforce",
    "reward_metrics",
    "reward_model",
    "rloo",
    "rloo_advantages",
    "sapo",
    "sft",
    "token_rewards",
    "token_stats",
    "whiten",
]
