"""Drift against its definition in float64, and against distributions it must tell apart."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxrl.rl.drift import Drift, DriftMeter


def measure(*batches):
    meter = DriftMeter()
    for batch in batches:
        meter.add(*batch)
    return meter.result()


def batch(rows, length, scale, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, length, generator=generator, dtype=torch.float64) * 5
    logps = rollout + torch.randn(rows, length, generator=generator, dtype=torch.float64) * scale
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[0, 0] = True
    return logps.to(dtype), rollout.to(dtype), mask


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=4),
    scale=st.floats(0, 3),
    seed=st.integers(0, 999),
)
def test_micro_batches_add_up_to_the_definition(sizes, scale, seed):
    batches = [batch(*size, scale, seed + i) for i, size in enumerate(sizes)]
    d = torch.cat([(a - b)[m] for a, b, m in batches])
    ratio = d.exp()
    drift = measure(*batches)
    want = {
        "mean": d.abs().mean(),
        "max": d.abs().max(),
        "ratio_min": ratio.min(),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_error": ratio.var(correction=0).sqrt() / math.sqrt(len(d)),
        "kl": (ratio - 1 - d).mean(),
    }
    for name, value in want.items():
        assert getattr(drift, name) == pytest.approx(float(value), rel=1e-6, abs=1e-9), name
    assert drift.num_tokens == len(d)
    assert drift.num_broken == 0


def test_what_is_masked_may_hold_anything():
    logps, rollout, mask = batch(3, 8, 0.1, 0)
    clean = measure((logps, rollout, mask))
    for rubbish in (math.nan, math.inf, -math.inf, 1e300):
        dirty = torch.where(mask, logps, rubbish)
        assert measure((dirty, rollout, mask)) == clean
        assert measure((logps, torch.where(mask, rollout, rubbish), mask.float())) == clean


def test_low_precision_is_widened_first():
    logps, rollout, mask = batch(2, 50, 0.01, 1, torch.bfloat16)
    d = (logps.double() - rollout.double())[mask]
    assert measure((logps, rollout, mask)).kl == pytest.approx(float((d.exp() - 1 - d).mean()))


def test_names_are_trls():
    metrics = measure(batch(2, 8, 0.1, 0)).metrics()
    assert set(metrics) == {
        "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max",
        "sampling/importance_sampling_ratio/min",
        "sampling/importance_sampling_ratio/mean",
        "sampling/importance_sampling_ratio/max",
        "sampling/kl",
    }
    assert all(isinstance(value, float) for value in metrics.values())


def test_nothing_to_compare():
    assert measure() is None
    logps, rollout, mask = batch(2, 3, 0.1, 0)
    assert measure((logps, rollout, torch.zeros_like(mask))) is None


def test_broken_tokens_are_counted_left_out_and_severe():
    logps, rollout, mask = batch(2, 8, 1e-4, 0)
    broken = rollout.clone()
    broken[0, 0] = -math.inf
    drift = measure((logps, broken, mask))
    assert drift.num_broken == 1
    assert drift.num_tokens == int(mask.sum()) - 1
    assert drift.mean < 1e-3
    assert drift.level() == "severe"
    assert "1 sampled tokens" in drift.warning()
    only = measure((logps[:1, :1], broken[:1, :1], mask[:1, :1]))
    assert only.num_tokens == 0
    assert math.isnan(only.mean)
    assert only.level() == "severe"


def sampled(sampler, trainer, temperature_of_record=1.0, num_tokens=20000):
    """Tokens drawn from one set of logits, recorded at some temperature, scored by another."""
    torch.manual_seed(0)
    logits = torch.randn(num_tokens, 50, dtype=torch.float64) * 2
    drawn_from = (logits + sampler(logits)).log_softmax(-1)
    tokens = torch.multinomial(drawn_from.exp(), 1)
    recorded = (drawn_from * temperature_of_record).log_softmax(-1).gather(-1, tokens)
    scored = (logits + trainer(logits)).log_softmax(-1).gather(-1, tokens)
    return measure((scored, recorded, torch.ones_like(scored, dtype=torch.bool)))


def noise(scale):
    return lambda logits: torch.randn_like(logits) * scale


def test_rounding_is_told_from_wrong_records_and_from_other_weights():
    small = sampled(noise(1e-3), noise(1e-3))
    assert small.level() == "ok"
    assert small.warning() is None
    rounding = sampled(noise(0.05), noise(0.05))
    assert rounding.level() == "high"
    assert "it is rounding" in rounding.warning()
    assert rounding.ratio_mean == pytest.approx(1, abs=5 * rounding.ratio_error)
    assert rounding.kl == pytest.approx(0.5 * 2 * 0.05**2 * 0.8, rel=0.5)  # half its variance
    raw = sampled(noise(0.0), noise(0.0), temperature_of_record=0.8)
    assert "not those the tokens were drawn with" in raw.warning()
    other = sampled(noise(0.0), noise(1.0))
    assert other.level() == "severe"
    assert "prefix cache" in other.warning()


def test_levels_by_threshold():
    drift = Drift(100, 0, 0.05, 0.1, 0.9, 1.0, 1.1, 0.01, 0.001)
    assert drift.level() == "high"
    assert drift.level(high=0.06) == "ok"
    assert drift.level(severe=0.04) == "severe"
    assert drift.warning(high=0.06) is None
    assert "0.05 nat" in drift.warning()
