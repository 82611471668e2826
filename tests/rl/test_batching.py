"""Micro-batches: every row once, within the budget, and the step's loss is one big batch's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxrl.losses import FACTORIES
from fxrl.rl.batching import make_batch, plan_micro_batches
from fxrl.rl.named import build_loss
from fxrl.rl.sections import LossConfig
from fxrl.rl.updater import Updater
from fxrl.runtime import Completion

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20)


@given(lengths, st.integers(1, 60))
def test_the_plan_has_every_row_once_and_keeps_the_budget(rows, budget):
    plan = plan_micro_batches(rows, budget)
    assert sorted(row for group in plan for row in group) == list(range(len(rows)))
    for group in plan:
        width = max(rows[r][0] for r in group) + max(rows[r][1] for r in group)
        assert len(group) == 1 or len(group) * width <= budget


def completion(prompt, tokens, stop="stop"):
    logprobs = tuple(-0.1 * (i + 1) for i in range(len(tokens)))
    return Completion(tuple(prompt), tuple(tokens), logprobs, stop, 0)


def test_layout():
    rows = [completion([5], [6, 7, 2]), completion([3, 4], [8])]
    batch = make_batch(rows, [1.0, -1.0], [0, 1], pad_token_id=0, device=torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[0, 5, 6, 7, 2], [3, 4, 8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    expected = torch.tensor([[-0.1, -0.2, -0.3], [-0.1, 0, 0]])
    torch.testing.assert_close(batch["rollout_logps"], expected)
    assert batch["num_items_in_batch"].item() == 4
    part = make_batch(rows, [1.0, -1.0], [1], pad_token_id=0, device=torch.device("cpu"))
    assert part["input_ids"].tolist() == [[3, 4, 8]]
    assert part["advantages"].tolist() == [-1.0]
    assert part["num_items_in_batch"].item() == 4


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
    options = {"epsilon": 0.1} if name == "grpo" else {}
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
    )


@pytest.mark.parametrize("name", sorted(FACTORIES.keys() - {"ppo", "dpo", "sft"}))
def test_micro_batches_add_up_to_one_batch(name, tmp_path):
    generator = torch.Generator().manual_seed(1)
    rows = [
        completion([3, 4], torch.randint(12, (n,), generator=generator).tolist())
        for n in (1, 6, 2, 5, 3, 3)
    ]
    advantages = torch.randn(6, generator=generator).tolist()
    found = []
    for plan in [[(0, 1, 2, 3, 4, 5)], [(1, 3), (4,), (0, 2, 5)]]:
        model = TokenModel()
        batches = [
            make_batch(
                rows,
                advantages,
                group,
                pad_token_id=0,
                device=torch.device("cpu"),
                dtype=torch.float64,
            )
            for group in plan
        ]
        for batch in batches:  # off-policy, so that ratios, clips and corrections take part
            batch["old_logps"] = batch["rollout_logps"] - 2.5
        loss, metrics = updater(model, name, tmp_path).backward(batches)
        found.append((loss, metrics, model.table.grad))
    (loss, metrics, grad), (parts_loss, parts_metrics, parts_grad) = found
    assert abs(loss - parts_loss) < 1e-12
    torch.testing.assert_close(grad, parts_grad, rtol=1e-10, atol=1e-12)
    assert grad.abs().max() > 1e-6
    for key in ("entropy", "policy_loss"):
        assert abs(metrics[key] - parts_metrics[key]) < 1e-12
    sampling = {k: v for k, v in metrics.items() if k.startswith("sampling/") and "max" in k}
    assert sampling == pytest.approx({k: parts_metrics[k] for k in sampling}, abs=1e-12)
