"""``is_plain`` on vLLM's own ``SamplingParams``, and results made of vLLM's own types."""

import pytest
import torch

pytest.importorskip("vllm")

import vllm

from fxrl.engines.vllm.sampler import is_plain

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("values", "plain"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.7, "seed": 4, "logprobs": 0, "flat_logprobs": True, "n": 3}, True),
        ({"stop": ["a"], "max_tokens": 9, "ignore_eos": True, "stop_token_ids": [3]}, True),
        ({"top_k": -1}, True),
        ({"top_k": 20}, False),
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"min_tokens": 3}, False),
        ({"logit_bias": {1: 2.0}}, False),
        ({"allowed_token_ids": [1]}, False),
        ({"bad_words": ["x"]}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"frequency_penalty": 0.2}, False),
        ({"logprobs": 3}, False),
    ],
    ids=str,
)
def test_plain_requests(values, plain):
    assert is_plain(vllm.SamplingParams(**values), vllm.SamplingParams(), 1000) is plain


def test_the_results_types_take_what_the_sampler_gives_them():
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    column = torch.zeros(2, 1)
    logprobs = LogprobsTensors(
        logprob_token_ids=column, logprobs=column, selected_token_ranks=column[:, 0]
    )
    SamplerOutput(
        sampled_token_ids=column, logprobs_tensors=logprobs, num_nans=None,
        num_sampled=column, num_rejected=column,
    )  # fmt: skip
