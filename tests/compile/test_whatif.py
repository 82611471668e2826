"""What-ifs of a planned step agree with plans that are made for them."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxrl
from fxrl.compile.whatif import WhatIf
from fxrl.inspect.explain import explained
from fxrl.ir.plan import Plan
from fxrl.models import offload_embeddings
from fxrl.planner.budget import Budget
from tests.passes.layered import GatedBlock, make_stack, square_loss

GiB = 2**30


@functools.cache
def asked(change=None):
    """Two rows of 3072 tokens; whatever is asked, this is traced once."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model = make_stack(4, block=GatedBlock, width=64, heads=4, wide=256)
        if change is not None:
            change(model)
    passes = ("recompute", "offload", "tile-tokens", "group-heads")
    config = fxrl.Config(passes=passes, compile_regions=False, host_memory="1GiB")
    batch = {"ids": torch.zeros(2, 3072, dtype=torch.long)}
    captures = explained(model, square_loss, batch, config, planned=True)[1]
    return WhatIf.of(captures, Plan())


def with_budget(share, host=GiB):
    """The same questions with a share of what keeping everything takes."""
    free = asked()
    budget = Budget(int(share * free.plan().peak_gpu_bytes), host, given=False)
    return within(budget, free), budget


def within(budget, asked):
    """The same questions with another budget."""
    step = asked.step
    return replace(asked, step=replace(step, planner=replace(step.planner, budget=budget)))


def test_where_all_is_kept_nothing_binds():
    advice = asked().advice()
    assert (advice.binds, advice.changes) == ((), ())


def test_too_little_of_the_gpu_binds():
    tight, budget = with_budget(0.8, host=0)
    now = tight.step.planned().step_seconds
    advice = tight.advice()
    assert advice.binds[0] == "GPU memory"
    assert "host memory" not in advice.binds, "a quarter of nothing is nothing"
    seconds = [change.seconds for change in advice.changes]
    assert seconds == sorted(seconds)
    best = next(change for change in advice.changes if "where all is kept" in change.what)
    assert best.seconds == pytest.approx(asked().plan().step_seconds, abs=1e-4)
    assert best.seconds < now
    assert budget.host_bytes == 0


def frozen_table(model):
    model.embed = nn.Embedding(200_000, 64).requires_grad_(False)


def frozen_table_on_the_host(model):
    frozen_table(model)
    offload_embeddings(model)


def test_a_table_on_the_host_brings_what_it_is_said_to():
    free, there = asked(frozen_table), asked(frozen_table_on_the_host)
    table = free.plan().peak_gpu_bytes - there.plan().peak_gpu_bytes
    assert table == 200_000 * 64 * 4
    assert (free.step.outside.table_bytes, there.step.outside.table_bytes) == (table, 0)
    budget = Budget(int(0.75 * there.plan().peak_gpu_bytes), 0, given=False)
    tight, after = within(budget, free), within(budget, there)
    (change,) = [one for one in tight.advice().changes if "offload_embeddings" in one.what]
    assert change.seconds == pytest.approx(after.step.planned().step_seconds, abs=6e-5)
    assert change.seconds < tight.step.planned().step_seconds
    assert "offload_embeddings" not in str(after.advice())


def test_nothing_fits():
    tight, _ = with_budget(0.05)
    assert tight.advice() is None
    assert list(tight.fits()) == []


def test_the_frontier_is_what_fits_and_no_more():
    tight, budget = with_budget(0.8)
    fits = list(tight.fits())
    assert {fit.tokens for fit in fits} >= {3072}
    assert any(fit.rows == 1 for fit in fits)
    for fit in fits:
        at = functools.partial(tight.step.at, tokens=fit.tokens)
        assert at(rows=fit.rows).smallest()[1] <= budget.gpu_bytes
        if fit.rows > 1:
            longer = tight.step.at(rows=fit.rows, tokens=int(1.05 * fit.tokens) + 1)
            wider = at(rows=int(1.02 * fit.rows) + 1)
            needed = max(one.smallest()[1] for one in (longer, wider))
            assert needed > budget.gpu_bytes
        assert fit.seconds > 0
    rows = [fit.rows for fit in fits]
    assert rows == sorted(rows, reverse=True)
