"""Advantages from rewards, by loops over groups."""

import math
import statistics

import pytest
import torch

from fxrl import losses

NAN = math.nan


def random_rewards(groups=5, size=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(groups * size, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(scale):
    rewards = random_rewards()
    expected = []
    for start in range(0, 20, 4):
        group = rewards[start : start + 4].tolist()
        spread = {
            "group": statistics.stdev(group) + 1e-4,
            "batch": statistics.stdev(rewards.tolist()) + 1e-4,
            "none": 1.0,
        }[scale]
        expected += [(r - statistics.mean(group)) / spread for r in group]
    got = losses.group_advantages(rewards, 4, scale)
    torch.testing.assert_close(got.tolist(), expected)


def test_rloo_advantages():
    rewards = random_rewards()
    expected = []
    for i in range(20):
        first = i - i % 4
        others = [float(rewards[j]) for j in range(first, first + 4) if j != i]
        expected.append(float(rewards[i]) - statistics.mean(others))
    torch.testing.assert_close(losses.rloo_advantages(rewards, 4).tolist(), expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_and_groups_of_one_give_zero(scale):
    assert (losses.group_advantages(torch.full((8,), 0.7), 4, scale).abs() < 1e-3).all()
    assert (losses.group_advantages(random_rewards(), 1, scale) == 0).all()
    assert (losses.rloo_advantages(random_rewards(), 1) == 0).all()


def test_a_missing_reward_takes_no_part():
    rewards = torch.tensor([1.0, NAN, 2.0, 6.0, NAN, NAN, NAN, 5.0], dtype=torch.float64)
    for scale in ("group", "none"):
        got = losses.group_advantages(rewards, 4, scale)
        without = losses.group_advantages(rewards[[0, 2, 3]], 3, scale)
        torch.testing.assert_close(got[[0, 2, 3]], without)
        assert (got[[1, 4, 5, 6, 7]] == 0).all()
    got = losses.rloo_advantages(rewards, 4)
    torch.testing.assert_close(got[[0, 2, 3]], losses.rloo_advantages(rewards[[0, 2, 3]], 3))
    assert (got[[1, 4, 5, 6, 7]] == 0).all()


def test_reward_metrics():
    rewards = torch.tensor([1.0, 3.0, 2.0, 2.0], dtype=torch.float64)
    metrics = {key: value.item() for key, value in losses.reward_metrics(rewards, 2).items()}
    spread = statistics.stdev([1.0, 3.0]) / 2
    assert metrics == pytest.approx(
        {"reward": 2.0, "reward_std": spread, "frac_reward_zero_std": 0.5}
    )


def test_rewards_must_fill_their_groups():
    with pytest.raises(losses.BatchError, match="7 rewards are not groups of num_generations=4"):
        losses.group_advantages(torch.zeros(7), 4)
    with pytest.raises(losses.LossConfigError, match="scale_rewards='std'"):
        losses.group_advantages(torch.zeros(8), 4, "std")


def test_gae_is_the_discounted_sum_of_its_deltas():
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 6, generator=g, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=g) > 0.4
    mask[3] = False
    advantages, returns = losses.gae(rewards, values, mask, gamma=0.9, lam=0.8)
    for b in range(4):
        kept = mask[b].nonzero()[:, 0].tolist()
        v = [float(values[b, t]) for t in kept] + [0.0]
        deltas = [float(rewards[b, t]) + 0.9 * v[i + 1] - v[i] for i, t in enumerate(kept)]
        for i, t in enumerate(kept):
            total = sum(0.72 ** (j - i) * deltas[j] for j in range(i, len(kept)))
            assert advantages[b, t].item() == pytest.approx(total)
            assert returns[b, t].item() == pytest.approx(total + v[i])
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


def test_whiten():
    values, mask = random_rewards().reshape(4, 5), torch.rand(4, 5) > 0.3
    kept = losses.whiten(values, mask)[mask]
    assert kept.mean().item() == pytest.approx(0, abs=1e-9)
    assert kept.std().item() == pytest.approx(1, abs=1e-3)
    assert (losses.whiten(values, mask)[~mask] == 0).all()
    moments = float(values[mask].mean()), float(values[mask].std())
    halves = [losses.whiten(v, m, moments) for v, m in zip(values, mask, strict=True)]
    torch.testing.assert_close(torch.stack(halves), losses.whiten(values, mask))
