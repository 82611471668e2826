"""Micro-batches: every row once, within the budget, and the step's loss is one big batch's."""

import itertools
import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxrl.engines import Completion
from fxrl.losses import FACTORIES, loss_info
from fxrl.rl.config.named import build_loss
from fxrl.rl.config.tables import LossConfig
from fxrl.rl.loop.batching import (
    make_batches,
    padding_fraction,
    plan_micro_batches,
    plan_ranks,
)
from fxrl.rl.loop.updater import Updater
from fxrl.rl.types import of_completion

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20)


CPU = torch.device("cpu")


@given(lengths, st.integers(1, 60))
def test_the_plan_has_every_row_once_and_keeps_the_budget(rows, budget):
    plan = plan_micro_batches(rows, budget)
    assert sorted(row for group in plan for row in group) == list(range(len(rows)))
    widths = [max(sum(rows[r]) for r in group) for group in plan]
    assert widths == sorted(widths, reverse=True)
    for group, width in zip(plan, widths, strict=True):
        assert len(group) == 1 or len(group) * width <= budget


def cost(groups, totals, budget):
    return sum(len(g) * max(totals[r] for r in g) + budget // 16 for g in groups)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 150))
def test_no_cut_of_the_sorted_rows_costs_less(totals, budget):
    """Against all cuts there are, by brute force."""
    rows = [(1, total) for total in totals]
    totals = [total + 1 for total in totals]
    order = sorted(range(len(totals)), key=lambda r: -totals[r])
    best = math.inf
    for cuts in itertools.product((False, True), repeat=len(order) - 1):
        edges = [0, *(i + 1 for i, c in enumerate(cuts) if c), len(order)]
        groups = [order[a:b] for a, b in itertools.pairwise(edges)]
        if all(len(g) == 1 or len(g) * totals[g[0]] <= budget for g in groups):
            best = min(best, cost(groups, totals, budget))
    assert cost(plan_micro_batches(rows, budget), totals, budget) == best


def test_one_long_row_does_not_pad_all_others():
    rows = [(2, 98)] + [(2, 8)] * 9
    plan = plan_micro_batches(rows, 1000)
    assert plan == [(0,), tuple(range(1, 10))]
    assert padding_fraction(rows, plan) == 0.0
    assert padding_fraction(rows, [tuple(range(10))]) == pytest.approx(1 - 190 / 1000)


def completion(prompt, tokens, stop="stop"):
    logprobs = tuple(-0.1 * (i + 1) for i in range(len(tokens)))
    return Completion(tuple(prompt), tuple(tokens), logprobs, stop, 0)


def token_rows(completions, advantages):
    return [of_completion(c, a) for c, a in zip(completions, advantages, strict=True)]


def test_layout():
    rows = [completion([5], [6, 7, 2]), completion([3, 4], [8]), completion([9, 9], [1])]
    plan = [(0, 1), (2,)]
    made = token_rows(rows, [1.0, -1.0, 0.5])
    batch, part = make_batches(made, plan, pad_token_id=0, device=CPU)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 2], [3, 4, 8, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [0, 1, 0]]
    assert batch["right_padded"] is True
    expected = torch.tensor([[-0.1, -0.2, -0.3], [0, -0.1, 0]])
    torch.testing.assert_close(batch["rollout_logps"], expected)
    assert batch["advantages"].tolist() == [1.0, -1.0]
    assert part["input_ids"].tolist() == [[9, 9, 1]]
    assert part["advantages"].tolist() == [0.5]
    assert batch["num_items_in_batch"].item() == part["num_items_in_batch"].item() == 5


@given(st.data())
def test_every_token_keeps_its_number(data):
    """Read back by the masks, each row is its completion again."""
    rows = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1))
    made = [
        Completion(
            tuple(100 * i + j for j in range(p)),
            tuple(100 * i + 50 + j for j in range(c)),
            tuple(-(i + j / 8) for j in range(c)),
            "stop",
            0,
        )
        for i, (p, c) in enumerate(rows)
    ]
    plan = plan_micro_batches(rows, data.draw(st.integers(1, 80)))
    kw = {"pad_token_id": 7, "device": CPU, "dtype": torch.float64}
    batches = make_batches(token_rows(made, range(len(made))), plan, **kw)
    for group, batch in zip(plan, batches, strict=True):
        columns = batch["completion_mask"].shape[1]
        for place, row in enumerate(group):
            real = batch["attention_mask"][place] != 0
            ids = batch["input_ids"][place]
            assert ids[real].tolist() == [*made[row].prompt_token_ids, *made[row].token_ids]
            assert set(ids[~real].tolist()) <= {7}
            mask = batch["completion_mask"][place] != 0
            assert ids[-columns:][mask].tolist() == list(made[row].token_ids)
            assert batch["rollout_logps"][place][mask].tolist() == list(made[row].logprobs)
            assert batch["rollout_logps"][place][~mask].abs().sum() == 0
            assert batch["advantages"][place].item() == row


def test_a_large_step_costs_the_host_little():
    """260 thousand tokens in 128 rows."""
    tokens = tuple(range(2000))
    made = [Completion((1,) * 48, tokens, tuple(-i / 7 for i in tokens), "length", 0)] * 128
    start = time.process_time()
    plan = plan_micro_batches([(48, 2000)] * 128, 65536)
    make_batches(token_rows(made, [0.5] * 128), plan, pad_token_id=0, device=CPU)
    assert len(plan) == 4
    assert time.process_time() - start < 0.3  # 20 ms on an idle core


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_every_row_goes_to_one_rank_and_tokens_are_even(num_ranks):
    rows = [(10, 7 * i % 90) for i in range(40)]
    plans = plan_ranks(rows, 256, num_ranks)
    dealt = [[row for group in plan for row in group] for plan in plans]
    assert sorted(row for each in dealt for row in each) == list(range(40))
    tokens = [sum(sum(rows[row]) for row in each) for each in dealt]
    assert max(tokens) - min(tokens) <= 100  # the longest row
    if num_ranks == 1:
        assert plans == [plan_micro_batches(rows, 256)]
    assert [len(plan) for plan in plan_ranks(rows[:1], 256, 3)] == [1, 0, 0]


class TokenModel(nn.Module):
    """Logits from the token alone, so that padding cannot matter; float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(12, 12, dtype=torch.float64))

    def forward(self, input_ids, logits_to_keep=0, **_):
        logits = self.table[input_ids]
        return type("Output", (), {"logits": logits[:, -logits_to_keep:]})


def updater(model, name, tmp_path):
    options = {"entropy_coef": 0.3, "beta": 0.1}
    loss_fn = build_loss(name, options, temperature=0.9, max_tokens=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Updater(
        step=lambda batch: loss_fn(model, batch),
        parameters=list(model.parameters()),
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        loss=LossConfig(name),
        max_grad_norm=None,
        max_nonfinite=2,
        run_dir=tmp_path,
        info=loss_info(loss_fn),
    )


OTHERS = {"ppo", "dpo", "kto", "sft", "distill", "reward_model"}  # other batches


@pytest.mark.parametrize("name", sorted(FACTORIES.keys() - OTHERS))
def test_micro_batches_add_up_to_one_batch(name, tmp_path):
    generator = torch.Generator().manual_seed(1)
    rows = [
        completion([3, 4][: 1 + n % 2], torch.randint(12, (n,), generator=generator).tolist())
        for n in (1, 6, 2, 5, 3, 3)
    ]
    advantages = torch.randn(6, generator=generator).tolist()
    found = []
    for plan in [[(0, 1, 2, 3, 4, 5)], [(1, 3), (4,), (0, 2, 5)]]:
        model = TokenModel()
        made = token_rows(rows, advantages)
        batches = make_batches(made, plan, pad_token_id=0, device=CPU, dtype=torch.float64)
        for batch in batches:  # off-policy, so that ratios, clips and corrections take part
            batch["old_logps"] = batch["rollout_logps"] * 1.5 - 2.5
            batch["ref_logps"] = batch["rollout_logps"] - 2.0
        loss, _, metrics = updater(model, name, tmp_path).backward(batches)
        found.append((loss, metrics, model.table.grad))
    (loss, metrics, grad), (parts_loss, parts_metrics, parts_grad) = found
    assert abs(loss - parts_loss) < 1e-12
    torch.testing.assert_close(grad, parts_grad, rtol=1e-10, atol=1e-12)
    assert grad.abs().max() > 1e-6
    assert metrics == pytest.approx(parts_metrics, abs=1e-12)
    assert metrics["sampling/importance_sampling_ratio/max"] > 0
