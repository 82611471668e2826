"""Token log-probs, entropy, KL estimators: numbers, dtypes, and what they estimate."""

import math

import pytest
import torch
from loss_models import VOCAB

from fxrl import losses
from fxrl.losses.logprobs import bounded_exp, exponent_bound


def random_logits(seed=0, shape=(2, 5, VOCAB)):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_stats(temperature):
    logits = random_logits()
    tokens = torch.randint(0, VOCAB, (2, 5))
    stats = losses.token_stats(logits, tokens, temperature=temperature, entropy="log")
    for b in range(2):
        for t in range(5):
            weights = [math.exp(float(z) / temperature) for z in logits[b, t]]
            p = [w / sum(weights) for w in weights]
            assert stats.logps[b, t].item() == pytest.approx(math.log(p[tokens[b, t]]))
            assert stats.entropy[b, t].item() == pytest.approx(-sum(q * math.log(q) for q in p))


def test_dtypes_and_gradients():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    wanted = {torch.bfloat16: torch.float32, torch.float32: torch.float32}
    for given, worked in (wanted | {torch.float64: torch.float64}).items():
        logits = random_logits().to(given).requires_grad_()
        logged = losses.token_stats(logits, tokens, entropy="log")
        assert logged.logps.dtype == worked
        assert not logged.entropy.requires_grad
        assert losses.token_stats(logits, tokens, entropy="loss").entropy.requires_grad
        assert losses.token_stats(logits, tokens).entropy is None


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator):
    """Summed over the vocabulary with weight p, the estimate is the KL."""
    logps, ref = random_logits(1).log_softmax(-1), random_logits(2).log_softmax(-1)
    exact = (logps.exp() * (logps - ref)).sum(-1)
    estimate = losses.kl_estimate(logps, ref, estimator)
    torch.testing.assert_close((logps.exp() * estimate).sum(-1), exact)
    if estimator == "k3":
        assert (estimate >= 0).all()


def test_the_gradient_of_k2_is_that_of_the_kl_on_policy():
    z, ref = random_logits(1).requires_grad_(), random_logits(2).log_softmax(-1)
    logps = z.log_softmax(-1)
    weights = logps.exp().detach()
    exact = torch.autograd.grad((logps.exp() * (logps - ref)).sum(), z, retain_graph=True)[0]
    k2 = losses.kl_estimate(logps, ref, "k2")
    torch.testing.assert_close(torch.autograd.grad((weights * k2).sum(), z)[0], exact)


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor([1e-3], dtype=torch.float32)
    got = losses.kl_estimate(-d, torch.zeros(1), "k3").item()
    assert got == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_of_three_bounded_exponentials_is_finite(dtype):
    huge = bounded_exp(torch.tensor([1e9], dtype=dtype))
    assert (huge * huge * huge).isfinite()
    exact = torch.tensor([exponent_bound(dtype) - 0.5, -3.0, 0.0], dtype=dtype)
    assert torch.equal(bounded_exp(exact), exact.exp())
