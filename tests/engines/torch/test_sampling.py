"""Sampling against the analytic distribution, and the filters against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrl.engines.engine import SamplingParams
from fxrl.engines.torch.sampling import (
    SamplingError,
    filter_tokens,
    inverse_cdf,
    log_probs,
    sample,
)

VOCAB = 12
NUM_DRAWS = 40_000
# Upper 1e-6 quantiles of chi-square; with a fixed seed the test is deterministic anyway.
CHI2_LIMIT = {1: 23.9, 2: 27.6, 3: 30.7, 4: 33.4, 5: 35.9, 6: 38.3, 7: 40.5, 8: 42.7, 11: 48.8}


def reference_filter(probs, top_k, top_p, min_p):
    """The kept ids by the definitions, in plain Python floats."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(probs[i] for i in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p:
            break
        kept.append(token)
        mass += probs[token] / total
    return {token for token in kept if probs[token] >= min_p * max(probs)}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.5, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.3),
        (0.8, 7, 0.9, 0.1),
    ],
)
def test_draws_follow_the_filtered_softmax(temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    uniforms = torch.rand(NUM_DRAWS, generator=generator, dtype=torch.float64)
    tokens, logprobs = sample(logits.expand(NUM_DRAWS, -1), uniforms, params)

    probs = (logits / temperature).softmax(-1).tolist()
    kept = sorted(reference_filter(probs, top_k, top_p, min_p))
    counts = torch.bincount(tokens, minlength=VOCAB).tolist()
    assert sum(counts[i] for i in kept) == NUM_DRAWS, "a cut token was drawn"
    mass = sum(probs[i] for i in kept)
    expected = [NUM_DRAWS * probs[i] / mass for i in kept]
    chi2 = sum((counts[i] - e) ** 2 / e for i, e in zip(kept, expected, strict=True))
    assert chi2 < CHI2_LIMIT[len(kept) - 1]
    torch.testing.assert_close(logprobs, torch.tensor(probs, dtype=torch.float64).log()[tokens])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=2, max_size=20),  # few values: many ties
    st.integers(0, 22),
    st.sampled_from([0.1037, 0.3313, 0.4877, 0.7719, 0.9013, 0.9991, 1.0]),
    st.sampled_from([0.0, 0.06, 0.3, 0.9, 1.0]),
)
def test_filters_keep_what_their_definitions_say(values, top_k, top_p, min_p):
    logprobs = torch.tensor([values], dtype=torch.float64).log_softmax(-1)
    kept = filter_tokens(logprobs, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = reference_filter(logprobs[0].exp().tolist(), top_k, top_p, min_p)
    assert set(kept[0].isfinite().nonzero()[:, 0].tolist()) == expected
    assert kept[0, sorted(expected)].equal(logprobs[0, sorted(expected)])


def test_top_p_is_the_smallest_set_even_where_it_is_wide():
    """Flat over 20000 tokens: the nucleus goes past the first look at 1024 of them."""
    logits = torch.zeros(2, 20_000, dtype=torch.float64)
    logits[1, 777] = 20.0
    kept = filter_tokens(logits.log_softmax(-1), top_p=0.30003)
    assert kept.isfinite().sum(-1).tolist() == [6001, 1]
    assert kept[0, :6001].isfinite().all(), "of equal tokens the lower ids are kept"
    assert kept[1, 777].isfinite()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 1000))
def test_inverse_cdf_equals_a_linear_search(seed, num_tokens):
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(4, num_tokens, generator=generator, dtype=torch.float64) * 3
    cut = torch.rand(4, num_tokens, generator=generator) < 0.5
    logprobs = logprobs.masked_fill(cut & (torch.arange(num_tokens) > 0), -torch.inf)
    uniforms = torch.rand(4, generator=generator, dtype=torch.float64)
    tokens = inverse_cdf(logprobs, uniforms)
    probs = logprobs.softmax(-1)
    for row in range(4):
        mass, level = 0.0, float(uniforms[row])
        for token in range(num_tokens):
            mass += float(probs[row, token])
            if mass > level:
                break
        # Where the level is within rounding of a border, either side is right.
        near = abs(mass - level) < 1e-12 or abs(mass - float(probs[row, token]) - level) < 1e-12
        assert near or tokens[row] == token


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
@pytest.mark.parametrize("num_tokens", [1, 5, 256, 257, 1000])
def test_extreme_uniforms_never_draw_an_impossible_token(uniform, num_tokens):
    logprobs = torch.full((1, num_tokens), -torch.inf)
    possible = num_tokens // 2
    logprobs[0, possible] = -3.0
    assert inverse_cdf(logprobs, torch.tensor([uniform], dtype=torch.float64)) == possible


def test_rare_tokens_are_as_likely_as_they_should_be():
    """Half the mass in 200000 tokens of 2.5e-6 each: float32 running sums would distort them."""
    num_tokens = 200_001
    logprobs = torch.full((1, num_tokens), math.log(0.5 / (num_tokens - 1)))
    logprobs[0, 0] = math.log(0.5)
    levels = torch.linspace(0.5 + 1e-9, 1 - 1e-9, 101, dtype=torch.float64)
    tokens = inverse_cdf(logprobs.expand(101, -1), levels).double()
    exact = 1 + (levels - 0.5) / 0.5 * (num_tokens - 1)
    assert (tokens - exact).abs().max() < 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_math_runs_in_float32_or_wider(dtype):
    logits = torch.randn(3, 7, dtype=dtype)
    found = log_probs(logits, 0.5)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found, (logits.to(found.dtype) / 0.5).log_softmax(-1))


def test_greedy_takes_the_first_of_the_largest_and_needs_no_random_numbers():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    tokens, logprobs = sample(logits, None, SamplingParams(temperature=0, top_p=0.1, top_k=2))
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 1])


def test_banned_tokens_are_not_drawn_and_log_probabilities_do_not_know():
    logits = torch.tensor([[200.0, 0.0, 1.0]])  # what is left underflows float32 next to token 0
    uniforms = torch.linspace(0, 0.999, 50, dtype=torch.float64)
    tokens, logprobs = sample(logits.expand(50, -1), uniforms, SamplingParams(top_k=2), banned=[0])
    assert set(tokens.tolist()) == {1, 2}
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[0, tokens])


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_rows_that_are_no_distribution_are_named(bad):
    logits = torch.tensor([[0.0, 0.0], bad, [-math.inf, 0.0]])
    with pytest.raises(SamplingError, match=r"rows \[1\].*checkpoint"):
        sample(logits, torch.zeros(3, dtype=torch.float64), SamplingParams())


def test_banning_everything_is_an_error():
    with pytest.raises(SamplingError, match="min_tokens"):
        sample(torch.zeros(1, 2), torch.zeros(1), SamplingParams(), banned=[0, 1])
