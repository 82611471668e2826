"""Leaving out blocks of the vocabulary: the bound that was proven holds, and values do not change.

``|delta u_i| <= t |slope| (1 - p_y) max_v |W_vi|`` for every token and coordinate, in float64.
"""

import math
import sys
from pathlib import Path

import pytest
import torch

from fxrl.ops.linear_logprob import linear_logprob
from fxrl.ops.linear_logprob_skip import BLOCK_ROWS, BLOCK_VOCAB, block_masses, skippable

sys.path.insert(0, str(Path(__file__).parent))
from linear_logprob_reference import random_head

WIDTH = 16


def zipf_head(num_rows, vocab, *, seed=0):
    """A head whose tokens have Zipf-like probabilities: one shared direction, and some noise."""
    hidden, weight, target = random_head(num_rows, vocab, WIDTH, seed=seed)
    rank = torch.arange(1, vocab + 1, dtype=torch.float64)
    hidden, weight = hidden / 4, weight / 4
    hidden[:, 0], weight[:, 0] = 4, -rank.log() * 0.5  # logits of -2 log(rank): p ~ 1 / rank^2
    return hidden, weight, target


HEADS = {"random": lambda n, v: random_head(n, v, WIDTH), "zipf": zipf_head}


def gradients(hidden, weight, target, tolerance, name, **options):
    leaf = hidden.clone().requires_grad_()
    out = linear_logprob(
        leaf, weight, target, outputs=[name, "entropy"], grad_outputs=[name],
        skip_tolerance=tolerance, **options
    )  # fmt: skip
    value = getattr(out, name)
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), out.entropy, grad


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["logprob", "lse"])
@pytest.mark.parametrize("tolerance", [2**-9, 2**-4, 0.5])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0, "scale": -1.5}, {"temperature": 0.7}], ids=str
)
def test_the_error_is_within_the_proven_bound(kind, name, tolerance, options):
    hidden, weight, target = HEADS[kind](300, 2100)
    if "temperature" in options:
        options = {"temperature": torch.tensor(options["temperature"], dtype=torch.float64)}
    exact, entropy, truth = gradients(hidden, weight, target, 0.0, name, **options)
    value, same_entropy, made = gradients(hidden, weight, target, tolerance, name, **options)
    assert torch.equal(value, exact)
    assert torch.equal(same_entropy, entropy)

    logprob = linear_logprob(hidden, weight, target, **options).logprob
    slope = abs(options.get("scale", 1.0)) / options.get("temperature", torch.tensor(1.0)).item()
    bound = tolerance * slope * -torch.expm1(logprob)[:, None] * weight.abs().amax(0)
    assert (made - truth).abs().le(bound + 1e-14).all()
    if kind == "zipf" and not options.get("softcap"):
        assert not torch.equal(made, truth)  # something was left out


def test_nothing_is_left_out_unless_asked_for():
    hidden, weight, target = zipf_head(40, 1000)
    leaf = hidden.clone().requires_grad_()
    (plain,) = torch.autograd.grad(linear_logprob(leaf, weight, target).logprob.sum(), leaf)
    assert torch.equal(gradients(hidden, weight, target, 0.0, "logprob")[2], plain)


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 5000])
def test_every_row_keeps_its_budget_and_the_choice_is_greedy(vocab):
    gen = torch.Generator().manual_seed(vocab)
    prob = torch.rand(BLOCK_ROWS, vocab, generator=gen, dtype=torch.float64)
    prob *= torch.exp(-8 * torch.rand(1, vocab, generator=gen, dtype=torch.float64))
    masses = block_masses(prob)
    assert masses.shape[1] == math.ceil(vocab / BLOCK_VOCAB)
    torch.testing.assert_close(masses.sum(1), prob.sum(1))
    budget = 0.3 * prob.sum(1, keepdim=True) * torch.rand(BLOCK_ROWS, 1, generator=gen)
    skipped = skippable(masses, budget)
    assert (masses[:, skipped].sum(1, keepdim=True) <= budget).all()
    share = (masses / budget).amax(0)
    if not skipped.all():  # one more, the cheapest of the rest, is too much for some row
        cheapest = torch.where(skipped, torch.inf, share).argmin()
        more = masses[:, skipped].sum(1) + masses[:, cheapest]
        assert (more > budget.squeeze(1)).any()
        assert not skipped.any() or share[skipped].max() <= share[~skipped].min()


def test_a_confident_row_and_a_nan_keep_everything_they_need():
    masses = torch.tensor([[0.0, 1e-9, 1e-3], [0.0, 0.0, 0.0]])
    assert skippable(masses, torch.zeros(2, 1)).tolist() == [True, False, False]
    masses[1, 1] = torch.nan
    assert skippable(masses, torch.ones(2, 1)).tolist() == [True, False, True]


def test_a_nan_in_one_block_is_not_left_out():
    hidden, weight, target = zipf_head(4, 1000)
    weight[900, 3] = torch.nan
    grad = gradients(hidden, weight, target.clamp(max=800), 0.5, "logprob")[2]
    assert grad.isnan().all()
