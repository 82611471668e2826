"""``FastSampler`` over a double of vLLM's sampler: which steps it takes, and with what."""

import types
from collections import namedtuple

import numpy as np
import pytest
import torch

from fxrl.engines.vllm.sampler import FastSampler, is_plain

ROWS, VOCAB = 8, 50
Output = namedtuple(
    "Output", "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected"
)
Logprobs = namedtuple("Logprobs", "logprob_token_ids logprobs selected_token_ranks")
FIELDS = {
    "temperature": 1.0, "seed": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logprobs": None,
    "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None, "bad_words": None,
    "min_tokens": 0, "logprob_token_ids": None, "thinking_token_budget": None, "stop": None,
    "from_the_future": None, "_bad_words_token_ids": None,
}  # fmt: skip


class Params:
    __struct_fields__ = tuple(FIELDS)

    def __init__(self, **values):
        self.__dict__ |= FIELDS | values


class Backed:
    """A host array, and a device's copy of it that lags until it is written."""

    def __init__(self, dtype):
        self.gpu = torch.zeros(ROWS, dtype=dtype)
        self.np = torch.zeros(ROWS, dtype=dtype).numpy()

    def write(self):
        self.gpu = torch.from_numpy(self.np.copy())


class Sampler:
    logprobs_mode, compute_nans, penalties_state = "processed_logprobs", False, "theirs"

    def __init__(self):
        self.sampling_states = types.SimpleNamespace(
            temperature=Backed(torch.float32), seeds=Backed(torch.int64), vocab_size=VOCAB,
            num_logprobs=np.full(ROWS, -1),
        )  # fmt: skip
        self.sampling_states.max_num_logprobs = lambda rows: self.sampling_states.num_logprobs[
            rows
        ].max()
        prefill = types.SimpleNamespace(gpu=torch.zeros(ROWS))
        self.req_states = types.SimpleNamespace(prefill_len=prefill)

    def add_request(self, index, prompt_len, params):
        self.sampling_states.temperature.np[index] = params.temperature
        self.sampling_states.seeds.np[index] = params.seed or 0
        self.sampling_states.num_logprobs[index] = (
            -1 if params.logprobs is None else params.logprobs
        )

    def apply_staged_writes(self):
        self.sampling_states.temperature.write()
        self.sampling_states.seeds.write()

    def __call__(self, logits, batch):
        return "slow"


def sample(logits, temperature, seeds, positions, *, state_rows, position_rows):
    """Shows in its results what each row was given."""
    logprobs = temperature[state_rows] + positions[position_rows]
    return seeds[state_rows], logprobs.float()


def batch(*rows):
    mapping = torch.tensor(rows)
    return types.SimpleNamespace(
        idx_mapping_np=mapping.numpy(), idx_mapping=mapping, expanded_idx_mapping=mapping,
        num_reqs=len(rows), positions=torch.arange(100) * 10,
        logits_indices=torch.arange(len(rows)) + 3, seq_lens=torch.ones(len(rows)),
        cu_num_logits=None,
    )  # fmt: skip


def wrapped(inner=None, **requests):
    parts = (Output, Logprobs, lambda ones, *rest: (ones, ones * 0), Params())
    fast = FastSampler(inner or Sampler(), sample, *parts, torch.device("cpu"))
    for index, params in requests.items():
        fast.add_request(int(index[1:]), 5, params)
    fast.apply_staged_writes()
    return fast


def test_a_plain_step_gives_each_row_its_own_temperature_seed_and_position():
    fast = wrapped(r1=Params(temperature=0.5, seed=11, logprobs=0), r4=Params(seed=44))
    out = fast(torch.zeros(2, VOCAB), batch(4, 1))
    assert out.sampled_token_ids.tolist() == [[44], [11]]
    assert out.logprobs_tensors.logprobs.tolist() == [[31.0], [40.5]]
    assert out.logprobs_tensors.logprob_token_ids.tolist() == [[44], [11]]
    assert out.num_sampled.tolist() == [1, 1]
    assert out.num_rejected.tolist() == [0, 0]
    assert fast.penalties_state == "theirs"


def test_no_logprobs_unless_wanted_and_a_new_request_replaces_the_old():
    fast = wrapped(r1=Params(seed=11))
    assert fast(torch.zeros(1, VOCAB), batch(1)).logprobs_tensors is None
    fast.add_request(1, 5, Params(seed=12, top_p=0.9))
    fast.apply_staged_writes()
    assert fast(torch.zeros(1, VOCAB), batch(1)) == "slow"
    fast.add_request(1, 5, Params(seed=13))
    assert fast(torch.zeros(1, VOCAB), batch(1)) == "slow"  # not on the device yet
    fast.apply_staged_writes()
    assert fast(torch.zeros(1, VOCAB), batch(1)).sampled_token_ids.tolist() == [[13]]


def test_one_request_that_is_not_plain_makes_the_step_slow():
    fast = wrapped(r0=Params(), r1=Params(top_k=3))
    assert fast(torch.zeros(2, VOCAB), batch(0, 1)) == "slow"
    assert fast(torch.zeros(1, VOCAB), batch(0)) != "slow"
    assert fast(torch.zeros(2, VOCAB), batch(0)) == "slow"  # more logits than requests: drafts
    assert fast(torch.zeros(1, VOCAB), batch(2)) == "slow"  # a request that never came


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"temperature": 0.0, "seed": 3, "logprobs": 0, "stop": ["x"]}, True),
        ({"top_k": -1}, True),
        ({"top_k": VOCAB}, True),
        ({"logit_bias": {}}, True),
        ({"bad_words": []}, True),
        ({"_bad_words_token_ids": [[1]], "bad_words": ["a"]}, False),
        ({"top_k": VOCAB - 1}, False),
        ({"top_p": 0.99}, False),
        ({"min_p": 0.01}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": -0.5}, False),
        ({"min_tokens": 1}, False),
        ({"logprobs": 1}, False),
        ({"logprobs": -1}, False),
        ({"logprob_token_ids": [1]}, False),
        ({"from_the_future": 0.5}, False),
    ],
)
def test_plain_requests(changes, plain):
    assert is_plain(Params(**changes), Params(), VOCAB) is plain


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs_mode": "raw_logprobs"},
        {"compute_nans": True},
        {"use_fp64_gumbel": True},
        {"return_sampling_mask": True},
        {"trace_replay_state": "anything"},
        {"logits_processors": [types.SimpleNamespace()]},
    ],
    ids=str,
)
def test_a_sampler_with_settings_of_its_own_stays_vllms(changes):
    inner = Sampler()
    inner.__dict__ |= changes
    assert wrapped(inner, r0=Params())(torch.zeros(1, VOCAB), batch(0)) == "slow"


def test_a_subclass_of_vllms_sampler_stays():
    class Watermarking(Sampler):
        pass

    assert wrapped(Watermarking(), r0=Params())(torch.zeros(1, VOCAB), batch(0)) == "slow"
