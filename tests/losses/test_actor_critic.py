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


class WithHead(ToyLM):
    """With the door to its output layer that transformers' models have."""

    def get_output_embeddings(self):
        return self.lm_head


def test_a_value_head_reads_what_the_output_layer_reads():
    """As a Linear on the last hidden state, without being run with hidden states."""
    torch.manual_seed(0)
    batch, _ = random_batch(seed=1)
    model = WithHead().double()
    model.value_head = losses.ValueHead(model)
    assert model.value_head.weight.dtype == torch.float64
    assert not any(p.any() for p in model.value_head.parameters()), "it knows nothing yet"
    torch.nn.init.normal_(model.value_head.weight)
    plain = WithHead().double()
    plain.value_head = torch.nn.Linear(6, 1).double()
    plain.load_state_dict(model.state_dict())
    found = []
    for one in (model, plain):
        loss, metrics = losses.ppo(vf_coef=0.7)(one, batch)
        loss.backward()
        found.append((loss, metrics, [p.grad for p in one.parameters()]))
    torch.testing.assert_close(*found)


def test_a_value_head_of_another_model_says_so():
    batch, _ = random_batch()
    model = WithHead().double()
    model.value_head = losses.ValueHead(WithHead().double())
    with pytest.raises(losses.BatchError, match="value_head is of another model"):
        losses.ppo()(model, batch)
    with pytest.raises(losses.LossConfigError, match="ToyLM has no output layer"):
        losses.ValueHead(ToyLM())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_head_computes_in_the_dtype_of_the_hidden_state(dtype):
    model = WithHead().to(dtype)
    head = losses.ValueHead(model)
    assert head.weight.dtype == torch.float32
    assert head(torch.randn(2, 3, 6, dtype=dtype)).dtype == dtype


def test_a_reward_stands_at_the_last_token_that_counts():
    rewards = torch.tensor([1.0, -2.0, 3.0])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    logps, refs = torch.randn(2, 3, 4)
    logps[1, 0] = torch.nan
    found = losses.token_rewards(rewards, mask, logps, refs, 0.5)
    gaps = torch.where(mask != 0, 0.5 * (logps - refs), 0.0)
    last = torch.tensor([[0, 0, 0, 1.0], [0, 0, -2.0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(found, last - gaps)
    assert torch.equal(losses.token_rewards(rewards, mask), last)


def test_what_a_trainer_reads_of_it():
    info = losses.loss_info(losses.ppo(gamma=0.9, lam=0.5, kl_coef=0.1))
    assert info.critic == losses.Critic(0.9, 0.5, 0.1)
    assert info.reference is True
    assert losses.loss_info(losses.ppo()).reference is False
    assert losses.loss_info(losses.grpo()).critic is None
