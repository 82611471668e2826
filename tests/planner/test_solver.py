"""The solver against every plan of its kind there is, and what more memory may do."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrl.errors import PlanError
from fxrl.ir.plan import CutLayer, describe
from fxrl.planner.chain import Option, host_bytes, peak_bytes
from fxrl.planner.pace import paced, step_seconds
from fxrl.planner.solver import fastest, least_peak, mixture
from tests.planner.chains import plain_chain

SIZES = st.integers(0, 12)
TIMES = st.integers(1, 20).map(float)
IDLE, OFF = (st.just(0.0), st.just(0.0)), st.just(False)
CHOICES = (CutLayer("products"), CutLayer("attention"), CutLayer("inputs"), CutLayer(tile_tokens=8))


#: Of layers in segments of so many.
SEGMENTS = ((CutLayer("inputs", "host"), 2), (CutLayer("attention"), 3))
WAYS = (*CHOICES, *SEGMENTS)


def option(way, number=0):
    choice, count = way if isinstance(way, tuple) else (way, 1)
    found = st.builds(Option, st.just(choice), SIZES, SIZES, TIMES, TIMES, SIZES, SIZES)
    if count == 1:
        return found
    return found.map(lambda one: replace(one, reach=number % count, segments=way))


def layer(ways, number=0):
    return st.tuples(*(option(way, number) for way in ways))


CHOSEN = st.lists(st.sampled_from(WAYS), min_size=1, max_size=4, unique=True)
LAYERS = CHOSEN.filter(lambda ways: {*ways} & {*CHOICES}).flatmap(
    lambda ways: st.integers(1, 6).flatmap(
        lambda count: st.tuples(*(layer(ways, number) for number in range(count))).map(list)
    )
)


@st.composite
def chains(draw):
    """Layers that are all alike, or all differ; some lack a choice that others have, or run in two
    forwards."""
    layers = draw(LAYERS)
    if draw(st.booleans()):
        reaches = [[option.reach for option in options] for options in layers]
        layers = [
            tuple(replace(o, reach=r) for o, r in zip(layers[0], reach, strict=True))
            for reach in reaches
        ]
    elif len(layers[0]) > 2 and draw(st.booleans()):
        layers[0] = layers[0][1:]
    numbers = ()
    if draw(st.booleans()):
        layers = layers[:3]
        between = draw(st.builds(Option, st.none(), SIZES, st.just(0), *IDLE, SIZES, SIZES, OFF))
        again = [draw(layer([o.way for o in options], n)) for n, options in enumerate(layers)]
        if draw(st.booleans()):  # the first forward is not differentiated
            layers = [tuple(replace(o, reach=0) for o in options) for options in layers]
        numbers = (*range(len(layers)), len(layers) - 1, *range(len(layers)))
        layers = [*layers, (between,), *again]
    gradients = draw(
        st.just(()) | st.lists(SIZES, min_size=len(layers) + 2, max_size=len(layers) + 2)
    )
    ends = draw(st.tuples(SIZES, SIZES, TIMES, st.sampled_from([0.5, 2.0, 100.0])))
    return plain_chain(layers, *ends, gradients=gradients, numbers=numbers)


def of_choices(chain, choices):
    """The options of layers with these choices, one a layer; None where one lacks its choice."""
    pairs = zip(chain.numbers, chain.layers, strict=True)
    found = tuple(
        options[0] if len(options) == 1 else next((o for o in options if o.way == choices[n]), 0)
        for n, options in pairs
    )
    return None if 0 in found or not whole(choices) else found


def whole(choices):
    """Whether all segments are, and in one run."""
    place = runs = 0
    for way, same in itertools.groupby(choices):
        count, start = way[1] if isinstance(way, tuple) else 1, place
        place += len([*same])
        runs += isinstance(way, tuple)
        if start % count or (place % count and place < len(choices)):
            return False
    return runs < 2


def choices_of(chain):
    """What each layer has a choice of."""
    first = {}
    for number, options in zip(chain.numbers, chain.layers, strict=True):
        first.setdefault(number, [option.way for option in options])
    return [*first.values()]


def in_runs(chain, runs=3):
    """All assignments in which the choice changes at most twice."""
    for choices in itertools.product(*choices_of(chain)):
        if len([*itertools.groupby(choices)]) <= runs and (found := of_choices(chain, choices)):
            yield found


def mixed(chain):
    """All assignments of which a part in front has two choices, evenly, and the rest a third."""
    choices, count = list(dict.fromkeys(itertools.chain(*choices_of(chain)))), chain.count
    for ahead, ways in itertools.product(range(count + 1), itertools.product(choices, repeat=3)):
        for share in range(1, ahead) if not {*ways[:2]} & {*SEGMENTS} else ():
            places = [*mixture(share, ahead), *[2] * (count - ahead)]
            if (named := of_choices(chain, [ways[place] for place in places])) is not None:
                yield named


def of_its_kind(chain):
    return {*in_runs(chain), *mixed(chain)}


@settings(max_examples=50, deadline=None)
@given(chains(), st.integers(0, 90), st.integers(0, 60))
def test_no_plan_is_faster(chain, gpu, host):
    found = fastest(chain, gpu, host)
    plans = [paced(chain, o, gpu) for o in of_its_kind(chain) if host_bytes(o) <= host]
    times = [step_seconds(chain, plan) for plan in plans if plan is not None]
    assert (found is None) == (not times)
    if found is not None:
        assert peak_bytes(chain, found) <= gpu
        assert host_bytes(found) <= host
        seconds, least = step_seconds(chain, found), min(times)
        assert seconds >= least * (1 - 1e-12)
        # several forwards share how much may be on its way, which is found for each by itself
        assert chain.numbers or seconds == pytest.approx(least, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(chains())
def test_nothing_needs_less(chain):
    least, needed = least_peak(chain, 10**9)
    assert peak_bytes(chain, least) <= needed
    assert not any(paced(chain, o, needed - 1) for o in in_runs(chain))


@given(st.integers(2, 40).flatmap(lambda n: st.tuples(st.integers(1, n - 1), st.just(n))))
def test_a_mixture_is_even(case):
    share, count = case
    ways = mixture(share, count)
    assert (ways.count(0), len(ways), ways[0]) == (share, count, 0)
    for start, end in itertools.combinations(range(count + 1), 2):
        assert abs(ways[start:end].count(0) - share * (end - start) / count) < 1


def test_given_choices_stay_wherever_they_are():
    given = (0, 2, 5)
    layers = [LAYER[i : i + 1] if i in given else LAYER for i in range(8)]
    chain = plain_chain(layers, 0, 0, 0.0, 54e9)
    for gpu in (7_000, 9_000, 20_000):
        found = fastest(chain, gpu * MiB, 8_000 * MiB)
        assert all(found[i].choice == LAYER[i].choice for i in given)
        assert peak_bytes(chain, found) <= gpu * MiB
    with pytest.raises(PlanError, match=r"choices that are given keep .* in host memory"):
        least_peak(plain_chain((LAYER[-1:],) * 3, 0, 0, 0.0, 54e9), 64 * MiB)


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
    ends = 15_800 * MiB, 700 * MiB, 0.03, 54e9
    return plain_chain((LAYER,) * layers, *ends, gradients=made)


MODEL = model(36)
SHORT = model(10)  # a tenth of the plans: for the tests that ask many times


def seconds_at(gpu, host):
    options = fastest(SHORT, gpu * MiB, host * MiB)
    return float("inf") if options is None else round(step_seconds(SHORT, options), 9)


def test_more_memory_is_never_slower():
    for host in (0, 600, 128 * 1024):
        times = [seconds_at(gpu, host) for gpu in range(18_000, 30_000, 1_500)]
        assert times == sorted(times, reverse=True)
        assert times[0] > times[-1]
    for gpu in (17_900, 18_600, 21_000):
        times = [seconds_at(gpu, host) for host in range(0, 6_000, 900)]
        assert times == sorted(times, reverse=True)
        assert times[0] > times[-1]


def test_everything_stays_where_there_is_room_and_what_is_cheap_goes_first():
    everything = fastest(MODEL, 80_000 * MiB, 0)
    assert {one.choice for one in everything} == {CutLayer("products")}
    little = fastest(MODEL, 18_500 * MiB, 128 * 1024 * MiB)
    assert "host" in {one.choice.kept_on for one in little}
    assert fastest(MODEL, 15_000 * MiB, 128 * 1024 * MiB) is None


def test_a_chain_without_layers():
    chain = plain_chain((), 10, 5, 1.0, 1.0)
    assert fastest(chain, 15, 0) == ()
    assert fastest(chain, 14, 0) is None


def test_what_goes_to_the_host_is_spread_where_the_link_binds():
    options = fastest(MODEL, 23_500 * MiB, 128 * 1024 * MiB)
    assert len({o.choice for o in options}) > 1
    sizes = [option.host_bytes for option in options]
    half = len(sizes) // 2
    assert sum(sizes[:half]) < 2 * sum(sizes[half:])
    runs = [next(same) for _, same in itertools.groupby(o.choice for o in options)]
    assert len(runs) > 3
    in_three = sorted(options, key=lambda o: (-o.host_bytes, describe(o.choice)))
    together = paced(MODEL, in_three, 23_500 * MiB)
    assert together is None or step_seconds(MODEL, together) > step_seconds(MODEL, options)
