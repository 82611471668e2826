"""Sources of the head benchmark: a model reads what its source says."""

import argparse

import pytest
import torch

from bench.lib import head_inputs


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


@pytest.mark.parametrize("text", ["gauss", "model:", "model", "zipf:2", ""])
def test_unknown_sources(text):
    with pytest.raises(argparse.ArgumentTypeError, match="neither peaked nor model"):
        head_inputs.parse_source(text)
