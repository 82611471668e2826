"""Microbatches cover a request exactly once within the budget."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrl.engines.engine import PromptError
from fxrl.engines.torch.engine import plan_microbatches


def plan(lengths, n, max_tokens, budget, pad=True):
    every = range(len(lengths))
    return plan_microbatches(lengths, n, [max_tokens] * len(lengths), budget, only=every, pad=pad)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 40), max_size=12),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(70, 600),
    st.booleans(),
)
def test_each_completion_once_and_within_the_budget(lengths, n, max_tokens, budget, pad):
    batches = plan(lengths, n, max_tokens, budget, pad)
    made = []
    for groups in batches:
        rows = sum(group.count for group in groups)
        assert rows * (max(lengths[g.prompt] for g in groups) + max_tokens) <= budget
        assert rows > 0
        assert pad or len({lengths[g.prompt] for g in groups}) == 1
        for group in groups:
            made += [(group.prompt, group.first + i) for i in range(group.count)]
    assert sorted(made) == [(p, s) for p in range(len(lengths)) for s in range(n)]


def test_a_group_stays_together_where_it_fits():
    batches = plan([10, 10, 10], n=4, max_tokens=10, budget=20 * 6)
    assert [[(g.prompt, g.count) for g in b] for b in batches] == [[(0, 4)], [(1, 4)], [(2, 4)]]


def test_a_large_group_fills_batches():
    batches = plan([10], n=10, max_tokens=10, budget=20 * 4)
    assert [[(g.first, g.count) for g in b] for b in batches] == [[(0, 4)], [(4, 4)], [(8, 2)]]


def test_prompts_of_like_length_share_a_batch_longest_first():
    batches = plan([5, 50, 6, 49], n=1, max_tokens=10, budget=120)
    assert [[g.prompt for g in b] for b in batches] == [[1, 3], [2, 0]]


def test_without_padding_only_equal_lengths_share_a_batch():
    batches = plan([5, 6, 5], n=2, max_tokens=10, budget=120, pad=False)
    assert [[g.prompt for g in b] for b in batches] == [[1], [0, 2]]


def test_a_row_over_the_budget_is_refused():
    with pytest.raises(PromptError, match=r"prompt 1 has 90 tokens.*max_batch_tokens=99; raise"):
        plan([3, 90], n=1, max_tokens=10, budget=99)
