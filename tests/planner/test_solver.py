"""The solver against every plan of its kind there is, and what more memory may do."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrl.errors import PlanError
from fxrl.ir.plan import CutLayer
from fxrl.planner.chain import (
    ON_THEIR_WAY,
    Chain,
    Option,
    gradients_made,
    host_bytes,
    peak_bytes,
    step_seconds,
)
from fxrl.planner.solver import fastest, least_peak

SIZES = st.integers(0, 12)
TIMES = st.integers(1, 20).map(float)
CHOICES = (CutLayer("products"), CutLayer("attention"), CutLayer("inputs"), CutLayer(tile_tokens=8))


def option(choice):
    return st.builds(Option, st.just(choice), SIZES, SIZES, TIMES, TIMES, SIZES, SIZES)


def layer(names):
    return st.tuples(*map(option, names))


LAYERS = st.lists(st.sampled_from(CHOICES), min_size=1, max_size=4, unique=True).flatmap(
    lambda names: st.lists(layer(names), min_size=1, max_size=6)
)


@st.composite
def chains(draw):
    """Layers that are all alike, or all differ; some lack a choice that others have."""
    layers = draw(LAYERS)
    if draw(st.booleans()):
        layers = [layers[0]] * len(layers)
    elif len(layers[0]) > 2 and draw(st.booleans()):
        layers[0] = layers[0][1:]
    gradients = draw(
        st.just(()) | st.lists(SIZES, min_size=len(layers) + 2, max_size=len(layers) + 2)
    )
    ends = draw(st.tuples(SIZES, SIZES, TIMES, st.sampled_from([0.5, 2.0, 100.0])))
    return Chain(tuple(layers), *ends, tuple(gradients))


def in_runs(chain, runs=3):
    """All assignments in which the choice changes at most twice."""
    for options in itertools.product(*chain.layers):
        names = [key for key, _ in itertools.groupby(o.choice for o in options)]
        if len(names) <= runs:
            yield options


def fits(chain, options, gpu, host):
    """Whether a plan is within the budgets, transfers charged as ``fastest`` does."""
    sent, kept = max(option.host_bytes for option in options), 0
    always, made = chain.base_bytes + ON_THEIR_WAY * sent, gradients_made(chain)
    for option, ours in zip(options, made[1:], strict=False):
        running = max(option.forward_bytes, option.gpu_bytes + option.backward_bytes + ours)
        if always + kept + running > gpu:
            return False
        kept += option.gpu_bytes
    at_ends = always + max(kept + made[-1] + chain.head_bytes, made[0])
    return at_ends <= gpu and host_bytes(options) <= host


@settings(max_examples=200, deadline=None)
@given(chains(), st.integers(0, 90), st.integers(0, 60))
def test_no_plan_is_faster(chain, gpu, host):
    found = fastest(chain, gpu, host)
    times = [step_seconds(chain, o) for o in in_runs(chain) if fits(chain, o, gpu, host)]
    assert (found is None) == (not times)
    if found is not None:
        assert fits(chain, found, gpu, host)
        assert peak_bytes(chain, found) <= gpu
        assert host_bytes(found) <= host
        assert step_seconds(chain, found) == pytest.approx(min(times), rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(chains())
def test_nothing_needs_less(chain):
    least, needed = least_peak(chain, 10**9)
    assert fits(chain, least, needed, 10**9)
    assert not any(fits(chain, o, needed - 1, 10**9) for o in in_runs(chain))


def test_given_choices_stay_wherever_they_are():
    given = (0, 2, 5)
    layers = [LAYER[i : i + 1] if i in given else LAYER for i in range(8)]
    chain = Chain(tuple(layers), 0, 0, 0.0, 54e9)
    for gpu in (7_000, 9_000, 20_000):
        found = fastest(chain, gpu * MiB, 8_000 * MiB)
        assert all(found[i] == LAYER[i] for i in given)
        assert peak_bytes(chain, found) <= gpu * MiB
    with pytest.raises(PlanError, match=r"choices that are given keep .* in host memory"):
        least_peak(Chain((LAYER[-1:],) * 3, 0, 0, 0.0, 54e9), 64 * MiB)


MiB = 2**20
#: A layer of Qwen3-8B's shape at 8192 tokens on an H200, about.
LAYER = tuple(
    Option(
        CutLayer(kept, inputs_on, kept_on, tile),
        gpu * MiB,
        host * MiB,
        0.0064 + (0.0003 if tile else 0),
        backward_s + (0.0045 if tile else 0),
        (forward - (50 if tile else 0)) * MiB,
        (backward - (300 if tile else 0)) * MiB,
    )
    for tile in (0, 4096)
    for kept, inputs_on, kept_on, gpu, host, backward_s, forward, backward in [
        ("products", "gpu", "gpu", 1078, 0, 0.0087, 1142, 641),
        ("products", "host", "gpu", 1014, 64, 0.0087, 1142, 641),
        ("products", "host", "host", 0, 1088, 0.0087, 1142, 641),
        ("attention", "gpu", "gpu", 129, 0, 0.0127, 740, 1730),
        ("attention", "host", "gpu", 65, 64, 0.0127, 740, 1730),
        ("attention", "gpu", "host", 64, 80, 0.0127, 740, 1730),
        ("attention", "host", "host", 0, 144, 0.0127, 740, 1730),
        ("inputs", "gpu", "gpu", 64, 0, 0.0137, 674, 2054),
        ("inputs", "host", "gpu", 0, 64, 0.0137, 674, 2054),
    ]
)


def model(layers):
    made = (0, *(5 * MiB,) * layers, 0)
    return Chain((LAYER,) * layers, 15_800 * MiB, 700 * MiB, 0.03, 54e9, made)


MODEL = model(36)
SHORT = model(10)  # a tenth of the plans: for the tests that ask many times


def seconds_at(gpu, host):
    options = fastest(SHORT, gpu * MiB, host * MiB)
    return float("inf") if options is None else round(step_seconds(SHORT, options), 9)


def test_more_memory_is_never_slower():
    for host in (0, 600, 128 * 1024):
        times = [seconds_at(gpu, host) for gpu in range(18_000, 30_000, 600)]
        assert times == sorted(times, reverse=True)
        assert times[0] > times[-1]
    for gpu in (17_900, 18_600, 21_000):
        times = [seconds_at(gpu, host) for host in range(0, 6_000, 300)]
        assert times == sorted(times, reverse=True)
        assert times[0] > times[-1]


def test_everything_stays_where_there_is_room_and_what_is_cheap_goes_first():
    everything = fastest(MODEL, 80_000 * MiB, 0)
    assert {one.choice for one in everything} == {CutLayer("products")}
    little = fastest(MODEL, 18_500 * MiB, 128 * 1024 * MiB)
    assert "host" in {one.choice.kept_on for one in little}
    assert fastest(MODEL, 15_000 * MiB, 128 * 1024 * MiB) is None


def test_a_chain_without_layers():
    chain = Chain((), 10, 5, 1.0, 1.0)
    assert fastest(chain, 15, 0) == ()
    assert fastest(chain, 14, 0) is None
