"""Sources of the head benchmark: distributions are what they say, models read what they say."""

import argparse
import math

import pytest
import torch

from bench.lib import head_inputs

SHAPE = head_inputs.Shape(600, 64, 3000)


def log_probs(inputs):
    return (inputs.hidden.double() @ inputs.weight.double().t()).log_softmax(-1)


@pytest.mark.parametrize("shuffled", [False, True])
def test_zipf(shuffled):
    inputs = head_inputs.zipf(SHAPE, torch.bfloat16, "cpu", 1, exponent=1.5, shuffled=shuffled)
    logps = log_probs(inputs)
    order = -inputs.weight[:, 0].float()
    rank = order.argsort(stable=True)
    assert torch.equal(rank, torch.arange(SHAPE.vocab)) != shuffled
    # Averaged over the noise, logits fall by s for each e-fold of the rank.
    slope = (logps[:, rank[99:109]].mean() - logps[:, rank[-10:]].mean()) / math.log(29.0)
    assert slope.item() == pytest.approx(1.5, abs=0.2)
    # Targets are drawn from the distribution: their surprise is the entropy, on average.
    entropy = -(logps.exp() * logps).sum(-1)
    surprise = -logps.gather(-1, inputs.target[:, None])[:, 0]
    assert surprise.mean().item() == pytest.approx(entropy.mean().item(), abs=0.25)


def test_skippable_share():
    """All but the target's block of a head that is sure; nothing of one that knows nothing."""
    shape = head_inputs.Shape(200, 8, 1000)
    inputs = head_inputs.zipf(shape, torch.float32, "cpu", 2, shuffled=False)
    assert head_inputs.skippable_share(inputs, 0.0) == 0
    small, large = (head_inputs.skippable_share(inputs, t) for t in (2**-9, 2**-3))
    assert 0 <= small < large < 1
    inputs.hidden[:, 0] = 20  # p falls by rank^-20: all but the first of four blocks is empty
    assert head_inputs.skippable_share(inputs, 2**-9) == 0.75
    inputs.hidden.zero_()
    assert head_inputs.skippable_share(inputs, 2**-9) == 0


def test_model_reads_text():
    source = head_inputs.parse_source("model:tiny:qwen3")
    width, vocab = source.shape()
    shape = head_inputs.Shape(1200, width, vocab)
    first, second = (source.make(shape, torch.float32, "cpu", seed) for seed in (0, 1))
    assert first.hidden.shape == (1200, width)
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.target, second.target)
    model, tokens = head_inputs._reader("tiny:qwen3", torch.float32, "cpu")
    logits = model(input_ids=tokens[None, :512]).logits[0, :-1]
    made = first.hidden[:511] @ first.weight.t()
    torch.testing.assert_close(made, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(first.target[:511], tokens[1:512])
    assert len({tuple(row) for row in first.target[:1022].view(2, 511).tolist()}) == 2


@pytest.mark.parametrize("text", ["gauss", "model:", "model", ""])
def test_unknown_sources(text):
    with pytest.raises(argparse.ArgumentTypeError, match="none of peaked, zipf"):
        head_inputs.parse_source(text)


@pytest.mark.parametrize("text", ["zipf:steep", "zipf-shuffled:0", "zipf:nan"])
def test_bad_exponents(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not in \(0, 100\)"):
        head_inputs.parse_source(text)
    assert head_inputs.parse_source("zipf:1.5").name == "zipf:1.5"
