"""Optimizers by name, and the schedules' closed forms."""

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fxrl.errors import ConfigError
from fxrl.rl.config.tables import OptimConfig
from fxrl.rl.loop.sharded import build_optimizer
from fxrl.rl.loop.updater import lr_factor


def rates(num_updates, **options):
    config = OptimConfig(lr=1.0, **options)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = build_optimizer(config, [weight])
    schedule = LambdaLR(optimizer, lambda update: lr_factor(config, update, num_updates))
    found = []
    for _ in range(num_updates):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_schedules():
    assert rates(4) == [1.0] * 4
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    cosine = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert rates(4, schedule="cosine") == pytest.approx(cosine)
    assert rates(5, schedule="linear", warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 0.5]


def test_no_update_is_lost_to_a_rate_of_zero():
    for schedule in ("constant", "linear", "cosine"):
        config = OptimConfig(schedule=schedule, warmup_steps=2)
        assert min(lr_factor(config, i, 9) for i in range(9)) > 0


def test_by_name_in_any_case_with_the_optimizers_own_keywords():
    frozen, weight = nn.Parameter(torch.zeros(1), requires_grad=False), nn.Parameter(torch.zeros(1))
    options = {"betas": [0.8, 0.9], "weight_decay": 0.1}
    optimizer = build_optimizer(OptimConfig("AdamW", 0.3, options=options), [frozen, weight])
    assert isinstance(optimizer, torch.optim.AdamW)
    [group] = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.3, (0.8, 0.9), 0.1)
    assert len(group["params"]) == 1
    assert group["params"][0] is weight


def test_a_value_that_the_optimizer_refuses():
    with pytest.raises(ConfigError, match="'adamw' refuses"):
        build_optimizer(OptimConfig(options={"betas": [2.0, 0.9]}), [nn.Parameter(torch.zeros(1))])
