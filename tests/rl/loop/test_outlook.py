"""What a run takes, said ahead: of several ranks the first plans for all, and a refusal is said."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from fxrl import Config, TrainStep
from fxrl.distributed import Ranks
from fxrl.engines.kv_cache import held_bytes
from fxrl.errors import PlanError
from fxrl.ir.remark import format_bytes
from fxrl.models.sharded import shard_skeleton
from fxrl.planner.budget import Budget, Limits
from fxrl.planner.target import TARGETS
from fxrl.rl.loop import outlook
from fxrl.rl.types import TokenRow

REFUSED = "no plan fits gpu_memory: this batch needs 2.0 GiB at least"


def rank(number, said, monkeypatch):
    """A rank of two, that of the least memory: what is said to all goes into ``said``."""
    ranks = Ranks(number, 2)

    def broadcast(_, value):
        if not number:
            said.append(value)
        return said[-1]

    other = Limits(TARGETS["h200"], Budget(2**20, 2**10, given=True))
    monkeypatch.setattr(Ranks, "broadcast", broadcast)
    monkeypatch.setattr(Ranks, "gather", lambda _, value: [value, other])
    step = Mock(spec=TrainStep)
    step.limits.return_value = Limits(TARGETS["h200"], Budget(2**30, 2**30, given=True))
    step.plan_for.side_effect = PlanError(REFUSED)
    return SimpleNamespace(
        config=SimpleNamespace(
            fxrl=Config(gpu_memory="1GiB"), prompts_per_step=2, micro_batch_tokens=64
        ),
        ranks=ranks,
        model=torch.nn.Linear(2, 2),
        engine=SimpleNamespace(standby=nullcontext),
        updater=SimpleNamespace(step=step, state_shards=2),
        scorers=SimpleNamespace(old_policy=None, critic=None, reference=None),
        source=SimpleNamespace(rows_each=2),
    )


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_rank_plans_for_all_and_a_refusal_ends_nothing(monkeypatch, number):
    said = [(None, f"PlanError: {REFUSED}")]
    parts = rank(number, said, monkeypatch)
    unit = [TokenRow([5] * 8, [6] * 8, {}, {"advantages": 1.0})]
    [line] = outlook._update(parts, unit, 16)
    assert line.endswith(f"not planned: PlanError: {REFUSED}")
    step = parts.updater.step
    assert step.plan_for.called == (number == 0)
    [(limits,)] = (call.args for call in step.plan_within.call_args_list)
    assert {one.budget.gpu_bytes for one in limits} == {2**20, 2**30}
    assert limits[0].budget.state_shards == 2


def test_of_weights_that_ranks_share_out_each_has_its_part():
    """They are no parameters; neither are those of a teacher."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, device="meta") for _ in range(2)))
    model[0].requires_grad_(False)
    shard_skeleton(model, 2)
    assert held_bytes(model) > sum(p.nbytes for p in model.parameters())
    parts = SimpleNamespace(
        config=SimpleNamespace(prompts_per_step=1, micro_batch_tokens=64),
        ranks=Ranks(0, 1),
        model=model,
        teacher=model,
        updater=SimpleNamespace(step=None, state_shards=1, sharded=False),
        source=SimpleNamespace(
            largest=lambda: [TokenRow([5] * 8, [6] * 8, {}, {})], draws=False, rows_each=1
        ),
    )
    stays, teacher, _ = outlook.outlook(parts)
    held = format_bytes(held_bytes(model))
    assert f"plan: {held} of weights" in stays
    assert teacher == f"  and {held} of the teacher"
