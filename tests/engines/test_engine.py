"""Sampling parameters: what is refused, and how it is said."""

import math

import pytest

from fxrl.engines.engine import SamplingParams, SamplingParamsError
from fxrl.errors import ConfigError


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"n": 0}, r"n=0 is below 1; ask for"),
        ({"n": 1.5}, r"n=1.5 is not a whole number"),
        ({"n": True}, r"n=True is not a whole number"),
        ({"temperature": -0.1}, r"temperature=-0.1 is below 0; use 0 for greedy"),
        ({"temperature": math.nan}, r"temperature=nan is not a finite number"),
        ({"temperature": "hot"}, r"temperature='hot' is not a number"),
        ({"top_p": 0.0}, r"top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, r"top_p=1.1 is outside \[0, 1\]; use 1"),
        ({"min_p": -1e-9}, r"min_p=-1e-09 is outside \[0, 1\]; use 0"),
        ({"top_k": -1}, r"top_k=-1 is below 0; use 0"),
        ({"max_tokens": 0}, r"max_tokens=0 is below 1"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens=9 is above max_tokens=8"),
        ({"seed": -1}, r"seed=-1 is below 0; use None"),
        ({"stop_token_ids": [3, -2]}, r"stop_token_ids has -2; token ids start at 0"),
    ],
)
def test_bad_values_are_named_with_reason_and_cure(bad, message):
    with pytest.raises(SamplingParamsError, match=message) as caught:
        SamplingParams(**bad)
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ValueError)


def test_edges_are_allowed_and_lists_become_tuples():
    params = SamplingParams(
        temperature=0, top_p=1, min_p=1.0, top_k=0, max_tokens=1, min_tokens=1, seed=0,
        stop_token_ids=[5],
    )  # fmt: skip
    assert params.stop_token_ids == (5,)
    assert hash(params) is not None
