"""Bytes that ops take inside, beside those that running them allocates."""

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import fxrl.ops.context_parallel  # noqa: F401  # defines the ops
from fxrl.ops.context_parallel import join_group
from fxrl.planner.memory_profile import MemoryProfile
from fxrl.planner.schedule import kernels
from tests.compile.shared_sequences import silent_group


def most_allocated(work):
    """The most bytes that PyTorch has allocated at a time while ``work`` runs; its results live."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        results = work()
    events = sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert results
    return max(itertools.accumulate(changes))


def as_linear(*shape):
    """[B, heads, t, D], in memory [B, t, heads, D], as projections make it."""
    batch, heads, tokens, features = shape
    return torch.randn(batch, tokens, heads, features).transpose(1, 2)


CASES = {
    "q, k and v": ("seq_to_head", 2, 8, [as_linear(2, 8, 4, 16), *[as_linear(2, 4, 4, 16)] * 2]),
    "one sequence": ("seq_to_head", 4, 16, [torch.randn(1, 8, 4, 16)]),
    "tokens that 4 does not divide": ("seq_to_head", 4, 13, [as_linear(1, 8, 4, 16)]),
    "attention's result": ("head_to_seq", 2, 8, [torch.randn(2, 4, 8, 16)]),
    "gradients of q, k and v": ("head_to_seq", 4, 13, [as_linear(1, 2, 13, 16) for _ in range(3)]),
    "ranks without a token": ("head_to_seq", 4, 2, [torch.randn(1, 2, 2, 16)]),
}


@pytest.mark.parametrize("case", CASES)
def test_an_exchange_among_ranks(case):
    name, ranks, tokens, given = CASES[case]
    ids = torch.zeros(1, tokens)

    def call(ids, *x):
        return tuple(getattr(torch.ops.fxrl, name)(list(x), ids, ranks))

    with silent_group(ranks):
        join_group(ranks)
        gm = make_fx(call, tracing_mode="fake")(ids, *given)
        most = most_allocated(lambda: call(ids, *given))
    assert MemoryProfile(gm, kernels(gm)).peak(int) == most
