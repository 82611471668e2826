"""The solver against every assignment there is, and what more memory may do."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrl.ir.plan import CutLayer
from fxrl.planner.chain import Chain, Option, host_bytes, peak_bytes, step_seconds
from fxrl.planner.solver import fastest, fits

SIZES = st.integers(0, 12)
TIMES = st.integers(1, 20).map(float)
OPTIONS = st.builds(Option, st.just(CutLayer()), SIZES, SIZES, TIMES, TIMES, SIZES, SIZES)
CHAINS = st.builds(
    Chain,
    st.lists(st.lists(OPTIONS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=6).map(
        tuple
    ),
    SIZES,
    SIZES,
    TIMES,
    st.sampled_from([0.5, 2.0, 100.0]),
)


def by_trying(chain, gpu, host):
    """The least time over all assignments that fit."""
    times = [
        step_seconds(chain, options)
        for options in itertools.product(*chain.layers)
        if fits(chain, options, gpu, host)
    ]
    return min(times, default=None)


@settings(max_examples=300, deadline=None)
@given(CHAINS, st.integers(0, 90), st.integers(0, 60))
def test_no_assignment_is_faster(chain, gpu, host):
    found, best = fastest(chain, gpu, host), by_trying(chain, gpu, host)
    if best is None:
        assert found is None
        return
    assert peak_bytes(chain, found) <= gpu
    assert host_bytes(found) <= host
    assert step_seconds(chain, found) == pytest.approx(best, rel=1e-12)


MiB = 2**20
#: A layer of Qwen3-8B's shape at 8192 tokens on an H200, about.
LAYER = tuple(
    Option(CutLayer(kept, inputs_on, kept_on, tile), *kinds)
    for kept, inputs_on, kept_on, tile, *kinds in [
        ("products", "gpu", "gpu", 0, 1090 * MiB, 0, 0.0056, 0.0090, 610 * MiB, 1000 * MiB),
        ("products", "host", "host", 0, 0, 1090 * MiB, 0.0056, 0.0090, 610 * MiB, 1000 * MiB),
        ("attention", "gpu", "gpu", 0, 129 * MiB, 0, 0.0056, 0.0131, 610 * MiB, 1540 * MiB),
        ("attention", "host", "host", 0, 0, 129 * MiB, 0.0056, 0.0131, 610 * MiB, 1540 * MiB),
        ("attention", "gpu", "host", 0, 64 * MiB, 65 * MiB, 0.0056, 0.0131, 610 * MiB, 1540 * MiB),
        ("attention", "host", "host", 4096, 0, 129 * MiB, 0.006, 0.0145, 400 * MiB, 900 * MiB),
        ("inputs", "gpu", "gpu", 0, 64 * MiB, 0, 0.0056, 0.0142, 610 * MiB, 1700 * MiB),
        ("inputs", "host", "gpu", 0, 0, 64 * MiB, 0.0056, 0.0142, 610 * MiB, 1700 * MiB),
        ("inputs", "host", "gpu", 4096, 0, 64 * MiB, 0.006, 0.0157, 400 * MiB, 1000 * MiB),
    ]
)
MODEL = Chain((LAYER,) * 36, 15800 * MiB, 700 * MiB, 0.03, 55e9)


def told(gpu, host):
    options = fastest(MODEL, gpu * MiB, host * MiB)
    if options is None:
        return None
    return step_seconds(MODEL, options), peak_bytes(MODEL, options)


def test_more_memory_is_never_slower_and_less_never_peaks_higher():
    for host in (0, 2000, 128 * 1024):
        ends = [told(gpu, host) for gpu in range(16_000, 56_000, 2_000)]
        fits = [end for end in ends if end is not None]
        assert fits, "the largest budget fits"
        assert ends == [None] * (len(ends) - len(fits)) + fits
        times = [time for time, _ in fits]
        assert times == sorted(times, reverse=True)
    for gpu in (17_500, 20_000, 30_000):
        ends = [told(gpu, host) for host in range(0, 60_000, 3_000)]
        times = [end[0] for end in ends if end is not None]
        assert times == sorted(times, reverse=True)


def test_the_cheapest_bytes_go_first():
    """With room for all, products are kept; with none, what is kept goes to the host."""
    everything = fastest(MODEL, 80_000 * MiB, 0)
    assert {option.choice for option in everything} == {CutLayer("products")}
    little = fastest(MODEL, 18_000 * MiB, 128 * 1024 * MiB)
    assert "host" in {option.choice.kept_on for option in little}
