"""PPO's value term: value, gradient and the two places a value may come from."""

import pytest
import torch
from loss_models import FreeLogits, TokenValues, ToyLM, random_batch

from fxrl import losses


def value_loss_by_hand(values, batch, clip):
    total, count = 0.0, 0
    for b in range(values.shape[0]):
        for t in range(values.shape[1]):
            if not batch["completion_mask"][b, t]:
                continue
            v, target, count = float(values[b, t]), float(batch["returns"][b, t]), count + 1
            old = float(batch["values"][b, t]) if "values" in batch else v
            near = min(max(v, old - clip), old + clip)
            total += max((v - target) ** 2, (near - target) ** 2)
    return total / count / 2


@pytest.mark.parametrize("old_values", [True, False])
@pytest.mark.parametrize("kind", ["value_head", "value_model"])
def test_value_term(kind, old_values):
    torch.manual_seed(0)
    batch, _ = random_batch(seed=1)
    if not old_values:
        del batch["values"]
    model = ToyLM(value_head=kind == "value_head").double()
    if kind == "value_model":
        model.value_model = TokenValues().double()
        values = model.value_model.embed(batch["input_ids"])[:, 2:-1, 0]
    else:
        hidden = model(batch["input_ids"], output_hidden_states=True).hidden_states[-1]
        values = model.value_head(hidden)[:, 2:-1, 0]
    values = values.detach()
    policy, _ = losses.ppo(vf_coef=0.0)(model, batch)
    loss, metrics = losses.ppo(vf_coef=0.7, cliprange_value=0.3)(model, batch)
    expected = value_loss_by_hand(values, batch, 0.3)
    torch.testing.assert_close((loss - policy).item(), 0.7 * expected)
    torch.testing.assert_close(metrics["value_loss"].item(), expected)
    assert (metrics["value_clip_ratio"] > 0) == old_values
    loss.backward()
    part = model.value_head if kind == "value_head" else model.value_model
    assert all(p.grad.abs().sum() > 0 for p in part.parameters())


def test_gradient_of_the_value():
    torch.manual_seed(0)
    shape = (3, 4)
    values = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    returns, old = torch.randn(2, *shape, dtype=torch.float64)
    mask = torch.rand(shape) > 0.3

    def loss(v):
        from fxrl.losses.actor_critic import clipped_value_loss

        return clipped_value_loss(v, returns, old, mask, 0.5)[0]

    assert torch.autograd.gradcheck(loss, values)


def test_without_returns_there_is_only_the_policy_term():
    batch, logits = random_batch()
    del batch["returns"]
    _, metrics = losses.ppo()(FreeLogits(logits), batch)
    assert "value_loss" not in metrics


def test_returns_without_a_value_name_the_cure():
    batch, logits = random_batch()
    with pytest.raises(losses.BatchError, match="no value_head and no value_model"):
        losses.ppo()(FreeLogits(logits), batch)
