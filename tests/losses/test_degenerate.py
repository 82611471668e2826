"""One token, nothing to learn from, ratios out of range, rubbish in the padding."""

import pytest
import torch
from loss_models import LANGUAGE, FreeLogits, ToyLM, loss_of, random_batch

from fxrl import losses

POLICY = [name for name in LANGUAGE if name not in ("sft", "distill", "dpo", "kto")]
ALL = LANGUAGE
SETTINGS = [{}, {"beta": 0.1}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def run(name, batch, logits, **kw):
    """Loss, gradient and metrics, all of which must be finite."""
    model = FreeLogits(logits.clone())
    loss, metrics = loss_of(name, **kw)(model, batch)
    loss.backward()
    assert loss.isfinite()
    assert model.logits.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values()), metrics
    return loss.detach(), model.logits.grad, metrics


def policy_batch(**kw):
    """A batch whose ``returns`` do not ask for a value head."""
    batch, logits = random_batch(**kw)
    del batch["returns"], batch["values"]
    return batch, logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_all_masked_is_a_differentiable_zero(name, dtype):
    batch, logits = policy_batch(batch=4)
    batch["completion_mask"] = torch.zeros(4, 4)
    settings = SETTINGS if name in POLICY else [{}]
    for kw in settings:
        loss, grad, _ = run(name, batch, logits.to(dtype), **kw)
        if name not in ("dpo", "kto"):  # -log sigmoid(0), sigmoid(-beta kl)
            assert loss == 0
        assert (grad == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_one_token(name, dtype):
    batch, logits = policy_batch(batch=2, prompt=1, completion=1)
    batch["completion_mask"] = torch.ones(2, 1)
    for kw in SETTINGS if name in POLICY else [{}]:
        _, grad, _ = run(name, batch, logits.to(dtype), **kw)
        assert grad[:, 0].abs().sum() > 0
        assert (grad[:, 1] == 0).all()


@pytest.mark.parametrize("name", POLICY)
def test_one_sequence_of_one_token_with_no_spread(name):
    batch, logits = policy_batch(batch=1, prompt=1, completion=1)
    batch["completion_mask"] = torch.ones(1, 1)
    run(name, batch, logits, beta=0.1)


@pytest.mark.parametrize("name", POLICY)
def test_advantage_zero_is_a_zero_gradient(name):
    batch, logits = policy_batch(spread=100.0)
    batch["advantages"] = torch.zeros(3)
    loss, grad, _ = run(name, batch, logits)
    assert loss == 0
    assert (grad == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [-1e4, -200, 200, 1e4])
@pytest.mark.parametrize("name", POLICY)
def test_ratio_overflow(name, size, dtype):
    """Ratios of e^200 and more, up and down, in the policy, the KL and the correction."""
    batch, logits = policy_batch()
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    batch["old_logps"] = batch["old_logps"] + size
    batch["ref_logps"] = batch["ref_logps"] - size
    for sign in (2, -2):
        batch["advantages"] = sign * batch["advantages"].abs()
        for mode, high in (("token_truncate", None), ("sequence_truncate", 3.0)):
            kw = {
                "vllm_importance_sampling_mode": mode,
                "vllm_importance_sampling_clip_max": high,
                "beta": 0.1,
            }
            run(name, batch, logits.to(dtype), **kw)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "rloo", "ppo"])
def test_overflow_takes_the_clipped_branch_exactly(name):
    """A > 0 and a huge ratio: the loss is -(1 + epsilon) A, with no gradient."""
    batch, logits = policy_batch()
    del batch["rollout_logps"]
    batch["completion_mask"] = torch.ones(3, 4)
    batch["advantages"] = torch.full((3,), 2.0, dtype=torch.float64)
    batch["old_logps"] = batch["old_logps"] - 1e4
    loss, grad, metrics = run(name, batch, logits, epsilon=0.2, epsilon_high=0.2)
    assert loss.item() == pytest.approx(-2.4)
    assert (grad == 0).all()
    assert metrics["clip_ratio/high_mean"] == 1


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ALL)
def test_padding_may_hold_anything(name, rubbish):
    batch, logits = policy_batch(batch=4)
    masked = batch["completion_mask"] == 0
    assert masked.any()
    batch["advantages"] = batch["advantages"][:, None].repeat(1, 4)
    kw = {"beta": 0.1, "off_policy_mask_threshold": 0.1} if name in POLICY else {}
    expected = run(name, batch, logits, **kw)
    for key in ("advantages", "old_logps", "rollout_logps", "ref_logps"):
        batch[key] = batch[key].masked_fill(masked, rubbish)
    got = run(name, batch, logits, **kw)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_reaches_every_parameter_of_a_model(name):
    torch.manual_seed(0)
    batch, _ = policy_batch(batch=4)
    model = ToyLM().double()
    loss_of(name)(model, batch)[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ALL)
def test_logits_to_keep_may_be_ignored(name):
    batch, logits = policy_batch(batch=4)
    models = [FreeLogits(logits, honours=honours) for honours in (True, False)]
    values = [loss_of(name)(model, batch)[0] for model in models]
    assert models[0].kept == 5
    assert torch.equal(*values)


def test_a_completion_without_prompt_is_refused():
    batch, logits = random_batch(prompt=1)
    batch["input_ids"] = batch["input_ids"][:, 1:]
    with pytest.raises(losses.BatchError, match="4 columns for 4 input_ids"):
        losses.grpo()(FreeLogits(logits), batch)


@pytest.mark.parametrize(
    ("key", "kw"),
    [("completion_mask", {}), ("advantages", {}), ("input_ids", {}), ("ref_logps", {"beta": 0.1})],
)
def test_a_missing_key_is_named(key, kw):
    batch, logits = random_batch()
    del batch[key]
    with pytest.raises(losses.BatchError, match=f"no {key!r}"):
        losses.grpo(**kw)(FreeLogits(logits), batch)
