"""What may be on its way, and the seconds of a step, beside one layer and one copy at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrl.ir.plan import CutLayer
from fxrl.planner.chain import Option, peak_bytes
from fxrl.planner.pace import paced, step_seconds
from tests.planner.chains import plain_chain

SIZES = st.integers(0, 12)
TIMES = st.integers(1, 20).map(float)


def option(kept="products", *, gpu=0, host=0, forward_s=1.0, backward_s=2.0, running=10):
    choice = CutLayer(kept, "gpu", "host" if host else "gpu")
    return Option(choice, gpu, host, forward_s, backward_s, running, running)


def chain_of(options, *, link=100.0, base=1000, head=50, head_s=0.5):
    return plain_chain([(o,) for o in options], base, head, head_s, link)


def played(chain, options):
    """Seconds of a step as the runtime plays it: a queue of stores, a list of what was fetched."""
    now, busy, queue, stores, arrived = 0.0, 0.0, [], [], {}

    def copy(size):
        nonlocal busy
        busy = max(busy, now) + size / chain.link
        return busy

    for i, one in enumerate(options):
        now += one.forward_s
        if one.host_bytes:
            queue.append(copy(one.host_bytes))
            stores.append(i)
        while len(queue) > (one.choice.sending or 0):
            now = max(now, queue.pop(0))
    now = max([now + chain.head_s, *queue])
    for i, one in reversed(list(enumerate(options))):
        before = [s for s in reversed(stores) if s < i]
        if one.host_bytes:
            arrived.setdefault(i, None)
            arrived[i] = arrived[i] or copy(one.host_bytes)
            now = max(now, arrived[i])
        for s in before[: one.choice.fetching or 0]:
            arrived[s] = arrived.get(s) or copy(options[s].host_bytes)
        now += one.backward_s
    return now


CHAINS = st.builds(
    lambda options, base, head, head_s, link: chain_of(
        options, base=base, head=head, head_s=head_s, link=link
    ),
    st.lists(
        st.builds(Option, st.just(CutLayer()), SIZES, SIZES, TIMES, TIMES, SIZES, SIZES),
        min_size=1,
        max_size=8,
    ),
    SIZES,
    SIZES,
    TIMES,
    st.sampled_from([0.5, 2.0, 100.0]),
)


@settings(max_examples=300, deadline=None)
@given(CHAINS, st.integers(0, 120))
def test_a_budget_is_kept_and_seconds_are_those_of_the_runtime(chain, gpu):
    options = [layer[0] for layer in chain.layers]
    least = peak_bytes(chain, options)  # with nothing on its way
    found = paced(chain, options, gpu)
    assert (found is None) == (least > gpu)
    if found is not None:
        assert peak_bytes(chain, found) <= gpu
        assert step_seconds(chain, found) == pytest.approx(played(chain, found))
        computed = sum(o.forward_s + o.backward_s for o in options) + chain.head_s
        assert step_seconds(chain, found) >= computed - 1e-9


@settings(max_examples=100, deadline=None)
@given(CHAINS)
def test_more_room_is_never_slower(chain):
    options = [layer[0] for layer in chain.layers]
    found = [paced(chain, options, gpu) for gpu in range(0, 240, 10)]
    seconds = [step_seconds(chain, one) for one in found if one is not None]
    assert seconds == sorted(seconds, reverse=True)


def test_copies_hide_where_layers_give_them_time():
    away, here = option(host=150), option("inputs")  # 1.5 s of the link, 1 s of a forward
    run, spread = [away, away, here, here, here], [away, here, away, here, here]
    chain = chain_of(run)
    computed = 0.5 + 5 * (1 + 2)
    tight = 1000 + 10 + 150  # one store on its way beside a layer
    apart, mixed = (step_seconds(chain, paced(chain, o, tight)) for o in (run, spread))
    assert mixed == pytest.approx(computed)
    assert apart == pytest.approx(computed + 0.5 + 1.5)  # of a store, of a whole way back
    roomy = [step_seconds(chain, paced(chain, o, 1e6)) for o in (run, spread)]
    assert roomy == pytest.approx([computed, computed])


def test_the_last_store_is_needed_at_once():
    options = [option(), option(host=150)]
    chain = chain_of(options)
    for gpu, waited in ((1160, 1.5 + 0.5), (10**6, max(1.5, 0.5))):  # ahead of the head, or beside
        found = step_seconds(chain, paced(chain, options, gpu))
        assert found == pytest.approx(2 * (1 + 2) + waited + 1.5)


def test_layers_that_keep_all_here_have_a_turn_only_where_something_moves():
    here = [option(gpu=10)] * 3
    assert paced(chain_of(here), here, 10**6) == tuple(here)
    mixed = [option(host=10), option(gpu=10), option(gpu=10)]
    counts = [(o.choice.sending, o.choice.fetching) for o in paced(chain_of(mixed), mixed, 10**6)]
    assert counts == [(1, 0), (1, 1), (1, 1)]
