"""Every policy loss against ``loss_reference``: value, gradient, metrics."""

import math

import pytest
import torch
from loss_models import FreeLogits, random_batch
from loss_reference import gradients, loss

from fxrl import losses

NAMES = (
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "luspo",
    "cispo",
    "sapo",
    "reinforce",
    "rloo",
    "ppo",
)
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo")
# Clip ranges narrow enough that the random ratios lie on both sides of every bound.
OWN = {
    "dr_grpo": {"max_completion_length": 9},
    "gspo": {"epsilon": 0.04, "epsilon_high": 0.06},
    "luspo": {"epsilon": 0.04, "epsilon_high": 0.06},
    "cispo": {"epsilon_high": 1.1},
    "sapo": {"sapo_temperature_pos": 1.3, "sapo_temperature_neg": 2.1},
    "ppo": {"vf_coef": 0.0},
}
COMMON = {
    "plain": {},
    "k1": {"beta": 0.3, "kl_estimator": "k1"},
    "k2": {"beta": 0.3, "kl_estimator": "k2"},
    "k3": {"beta": 0.3},
    "k3_biased": {"beta": 0.3, "use_bias_correction_kl": False},
    "entropy": {"entropy_coef": 0.2},
    "temperature": {"temperature": 0.7, "entropy_coef": 0.1},
    "token_truncate": {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.2,
        "vllm_importance_sampling_clip_min": 0.9,
    },
    "token_mask": {
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_max": 1.2,
    },
    "sequence_truncate": {
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 1.1,
    },
    "sequence_mask": {
        "vllm_importance_sampling_clip_max": 1.5,
        "vllm_importance_sampling_clip_min": 0.7,
    },
    "uncorrected": {"vllm_importance_sampling_correction": False},
    "off_policy_mask": {"off_policy_mask_threshold": 0.05},
    "top_entropy": {"top_entropy_quantile": 0.5},
    "top_entropy_bonus": {"top_entropy_quantile": 0.5, "entropy_coef": 0.2},
}


def reference_kw(name, kw):
    """Factory keywords as the reference names them."""
    out = {"epsilon": 0.2, "epsilon_high": kw.get("epsilon", 0.2)} | kw
    if name == "cispo":
        out["cispo_high"] = kw["epsilon_high"]
    if name == "sapo":
        out |= {"tau_pos": kw["sapo_temperature_pos"], "tau_neg": kw["sapo_temperature_neg"]}
    if name in ("gspo", "luspo"):
        out.setdefault("importance_sampling_level", "sequence")
    return out


def reference_data(batch):
    def on_policy(frozen, b, t):
        return frozen[b][t]

    def off_policy(frozen, b, t):
        return float(batch["old_logps"][b, t])

    mask, adv = batch["completion_mask"], batch["advantages"]
    columns = range(mask.shape[1])
    data = {
        "tokens": [[t for t in columns if mask[b, t]] for b in range(len(mask))],
        "adv": [
            [float(adv[b] if adv.dim() == 1 else adv[b, t]) for t in columns] for b in range(3)
        ],
        "old": off_policy if "old_logps" in batch else on_policy,
        "ref": batch["ref_logps"].tolist(),
        "rollout": batch["rollout_logps"].tolist() if "rollout_logps" in batch else None,
    }
    if "num_items_in_batch" in batch:
        data["num_items"] = int(batch["num_items_in_batch"])
    return data


def check(name, kw, batch, logits):
    """Loss and d loss / d logits of the factory's loss against the reference's."""
    model = FreeLogits(logits.clone())
    value, metrics = getattr(losses, name)(**kw)(model, batch)
    value.backward()
    c = batch["completion_mask"].shape[1]
    p = (logits[:, -c - 1 : -1] / kw.get("temperature", 1.0)).softmax(-1)
    onehot = torch.nn.functional.one_hot(batch["input_ids"][:, -c:], p.shape[-1]).double()
    logps, entropy = (p * onehot).sum(-1).log(), -(p * p.log()).sum(-1)
    data, numbers = reference_data(batch), (logps.tolist(), entropy.tolist())
    expected = loss(name, data, *numbers, *numbers, reference_kw(name, kw))
    by_logp, by_entropy = gradients(name, data, *numbers, reference_kw(name, kw))
    grad = torch.zeros_like(logits)
    for (b, t), g in by_logp.items():  # d logp / dz = onehot - p,  dH / dz = -p (log p + H)
        d_entropy = -p[b, t] * (p[b, t].log() + entropy[b, t])
        rows = g * (onehot[b, t] - p[b, t]) + by_entropy[b, t] * d_entropy
        grad[b, -c - 1 + t] = rows / kw.get("temperature", 1.0)
    torch.testing.assert_close(value.item(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.logits.grad, grad, rtol=1e-6, atol=1e-8)
    assert all(not v.requires_grad and v.isfinite() for v in metrics.values())
    return metrics


@pytest.mark.parametrize("common", COMMON)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(name, common):
    batch, logits = random_batch(seed=3)
    check(name, OWN.get(name, {}) | COMMON[common], batch, logits)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_on_policy_the_ratio_is_one_and_has_a_gradient(name, seed):
    batch, logits = random_batch(seed)
    del batch["old_logps"], batch["rollout_logps"]
    check(name, OWN.get(name, {}) | {"beta": 0.1}, batch, logits)


@pytest.mark.parametrize("name", NAMES)
def test_advantages_per_token(name):
    batch, logits = random_batch(seed=5)
    batch["advantages"] = torch.randn(3, 4, dtype=torch.float64)
    check(name, OWN.get(name, {}), batch, logits)


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("seed", [0, 1])
def test_levels_of_the_ratio(name, level, seed):
    batch, logits = random_batch(seed, spread=0.6)
    batch["advantages"] = torch.randn(3, 4, dtype=torch.float64)
    own = OWN.get(name, {}) | {"importance_sampling_level": level}
    check(name, own, batch, logits)


@pytest.mark.parametrize("name", [*CLIPPED, "ppo"])
def test_dual_clip_and_asymmetric_clip(name):
    batch, logits = random_batch(seed=2, spread=1.5)
    batch["advantages"] = -batch["advantages"].abs()
    kw = OWN.get(name, {}) | {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.4}
    check(name, kw, batch, logits)
    ratio = (random_logps(batch, logits) - batch["old_logps"]).exp()
    assert (ratio[batch["completion_mask"].bool()] > 1.4).any(), "delta was never reached"


def random_logps(batch, logits):
    return losses.token_stats(logits[:, -5:-1], batch["input_ids"][:, -4:]).logps


@pytest.mark.parametrize("count", [17, torch.tensor(17)])
@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_tokens_of_the_whole_update_normalise(name, count):
    batch, logits = random_batch(seed=4)
    batch["num_items_in_batch"] = count
    check(name, OWN.get(name, {}), batch, logits)


def test_accumulated_batches_add_up_to_one():
    batch, logits = random_batch(seed=6)
    whole = losses.dapo()(FreeLogits(logits), batch)[0]
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    parts = []
    for rows in (slice(0, 1), slice(1, 3)):
        part = {k: v[rows] if v.dim() else v for k, v in batch.items()}
        parts.append(losses.dapo()(FreeLogits(logits[rows]), part)[0])
    torch.testing.assert_close(sum(parts), whole)


def test_metrics_of_grpo():
    batch, logits = random_batch(seed=3, spread=0.6)
    metrics = check("grpo", {"beta": 0.3}, batch, logits)
    logps, keep = random_logps(batch, logits), batch["completion_mask"].bool()
    ratio, adv = (logps - batch["old_logps"]).exp()[keep], batch["advantages"][:, None]
    adv = adv.expand(3, 4)[keep]
    low, high = (ratio < 0.8) & (adv < 0), (ratio > 1.2) & (adv > 0)
    assert low.any() or high.any()
    expected = {
        "clip_ratio/low_mean": low.double().mean(),
        "clip_ratio/high_mean": high.double().mean(),
        "clip_ratio/region_mean": (low | high).double().mean(),
    }
    for key, value in expected.items():
        torch.testing.assert_close(metrics[key], value)
    gap = (batch["old_logps"] - batch["rollout_logps"])[keep].abs()
    torch.testing.assert_close(metrics["sampling/sampling_logp_difference/mean"], gap.mean())
    torch.testing.assert_close(metrics["sampling/sampling_logp_difference/max"], gap.max())
    assert {"kl", "entropy", "policy_loss"} <= metrics.keys()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extremes_of_the_clip_are_those_of_single_sequences(level):
    """Row 0 is clipped in part, row 1 not at all, row 2 has no tokens."""
    batch, logits = random_batch(seed=3)
    batch["advantages"] = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    batch["completion_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    raised = torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 0], [9, 9, 9, 9]], dtype=torch.float64)
    batch["old_logps"] = random_logps(batch, logits) - raised
    loss_fn = losses.grpo(importance_sampling_level=level)
    metrics = loss_fn(FreeLogits(logits), batch)[1]
    share = {"token": 0.25, "sequence": 1.0}[level]
    mean = {"token": 1 / 6, "sequence": 0.5}[level]
    assert metrics["clip_ratio/high_max"].item() == share
    assert metrics["clip_ratio/high_mean"].item() == pytest.approx(mean)
    batch["advantages"] = -batch["advantages"]
    batch["old_logps"] = random_logps(batch, logits) + raised[[0, 0, 2]]
    metrics = loss_fn(FreeLogits(logits), batch)[1]
    assert metrics["clip_ratio/low_min"].item() == {"token": 0.25, "sequence": 1.0}[level]
    batch["old_logps"] = random_logps(batch, logits) + raised
    assert loss_fn(FreeLogits(logits), batch)[1]["clip_ratio/low_min"].item() == 0.0


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_mask"])
def test_a_token_without_a_sampled_log_prob_has_ratio_one(mode):
    batch, logits = random_batch(seed=3)
    batch["advantages"] = -batch["advantages"].abs()
    kw = {"vllm_importance_sampling_mode": mode, "off_policy_mask_threshold": 0.05}
    known = {k: v.clone() for k, v in batch.items()}
    known["rollout_logps"][0, 1] = known["old_logps"][0, 1]  # ratio 1
    batch["rollout_logps"][0, 1] = math.nan
    if "old_logps" in batch:  # the off-policy drift of that token must be 0 as well
        known["old_logps"] = known["rollout_logps"].clone()
        known["old_logps"][0, 1] = known["rollout_logps"][0, 1] = random_logps(batch, logits)[0, 1]
        batch["old_logps"] = known["old_logps"]
    model = FreeLogits(logits.clone())
    value, metrics = losses.grpo(**kw)(model, batch)
    expected, expected_metrics = losses.grpo(**kw)(FreeLogits(logits.clone()), known)
    torch.testing.assert_close(value, expected)
    value.backward()
    assert model.logits.grad.isfinite().all()
    for name in metrics:
        if "logp_difference/mean" not in name:
            torch.testing.assert_close(metrics[name], expected_metrics[name])
    batch["old_logps"] = batch["old_logps"] + 0.5
    gap = losses.grpo(**kw)(model, batch)[1]["sampling/sampling_logp_difference/mean"]
    assert gap.item() == pytest.approx(0.5), "the unknown token is left out, not counted as 0"


def test_log_entropy_can_be_left_out():
    batch, logits = random_batch()
    assert "entropy" not in losses.grpo(log_entropy=False)(FreeLogits(logits), batch)[1]
    assert "entropy" in losses.grpo()(FreeLogits(logits), batch)[1]
