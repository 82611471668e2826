"""Tensors that wait on the host: they come back bit for bit, and their pages are used again."""

import ctypes
import gc
import mmap
import time
import weakref
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fxrl.errors import HostMemoryError
from fxrl.ops import host_memory
from fxrl.ops.host_memory import PAGE, HostPool, can_wait, pool_of

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


def drawn(shape, dtype, order=None, seed=0):
    """Random bits, NaNs among them, laid out in this order of dims."""
    order = order or range(len(shape))
    generator = torch.Generator().manual_seed(seed)
    sizes = [shape[d] for d in order]
    if dtype == torch.bool:
        x = torch.randint(0, 2, sizes, generator=generator).bool()
    else:
        count = torch.Size(sizes).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        x = raw.view(dtype).view(sizes)
    return x.permute([list(order).index(d) for d in range(len(shape))])


def same(found, wanted):
    bits = [x.reshape(-1).view(torch.uint8) for x in (found.contiguous(), wanted.contiguous())]
    return found.stride() == wanted.stride() and found.dtype == wanted.dtype and torch.equal(*bits)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 7), min_size=1, max_size=4),
            st.sampled_from(DTYPES),
            st.randoms(use_true_random=False),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_stored_comes_back(specs):
    tensors = []
    for seed, (shape, dtype, random) in enumerate(specs):
        order = list(range(len(shape)))
        random.shuffle(order)
        tensors.append(drawn(shape, dtype, order, seed))
    wanted = [x.clone(memory_format=torch.preserve_format) for x in tensors]
    stored = HostPool(CPU).store([x for x in tensors if can_wait(x)])
    wanted = [w for w, x in zip(wanted, tensors, strict=True) if can_wait(x)]
    for x in tensors:
        x.zero_()
    for _ in range(2):  # a second backward asks again
        assert all(map(same, stored.fetch(), wanted))


def test_a_store_may_lie_across_pages():
    pool = HostPool(CPU)
    tensors = [drawn((PAGE // 4 + 3,), torch.int64, seed=1), drawn((5, 7), torch.float32, seed=2)]
    stored = pool.store(tensors)
    assert pool.bytes == 3 * PAGE
    assert all(map(same, stored.fetch(), tensors))


def test_pages_are_used_again_whatever_the_lengths(monkeypatch):
    page = 2**12  # pages of a real size take a minute to fill
    monkeypatch.setattr(host_memory, "PAGE", page)
    pool, seen = HostPool(CPU), []
    for step in range(20):
        rows = [1 + (step * 7 + i) % 13 for i in range(4)]
        layers = [drawn((count, page // 8), torch.float32, seed=count) for count in rows]
        stored = [pool.store([x]) for x in layers]
        for one, x in zip(reversed(stored), reversed(layers), strict=True):
            assert same(one.fetch()[0], x)
        del one, stored
        seen.append(pool.bytes)
    assert seen[-1] == max(seen[:13]), "no page more once every length was seen"


@pytest.mark.parametrize(("fetching", "begun"), [(0, 0), (1, 1), (2, 2), (9, 3)])
def test_who_is_fetched_lets_those_before_set_out(fetching, begun):
    pool = HostPool(CPU)
    before = [pool.store([torch.full((3,), float(i))]) for i in range(3)]
    for last in (
        pool.store([torch.zeros(3)], fetching=fetching),
        pool.store([], fetching=fetching),
    ):
        last.fetch()
        assert sum(one._found is not None for one in before) == begun
        assert all(one._found is None for one in before[: 3 - begun])
        del last
    for i, one in enumerate(before):
        assert torch.equal(one.fetch()[0], torch.full((3,), float(i)))


def test_what_is_read_ahead_of_its_turn_lets_nobody_set_out_before_it():
    """As a segment's first layers are when its last one's backward begins."""
    pool = HostPool(CPU)
    before, first, middle = (pool.store([torch.full((3,), float(i))]) for i in range(3))
    last = pool.store([], fetching=2)
    last.fetch()
    held = [one.fetch(ahead=False)[0] for one in (middle, first)]
    assert [x[0] for x in held] == [2.0, 1.0]
    assert before._found is None
    middle.set_out()
    assert first._found is None, "it is held already"
    first.set_out()
    assert before._found is not None
    assert torch.equal(first.fetch()[0], held[1]), "of another backward"


def test_who_stores_nothing_has_a_turn():
    pool = HostPool(CPU)
    first = pool.store([torch.ones(3)])
    turn = pool.store([], sending=0, fetching=1)
    last = pool.store([torch.zeros(3)], fetching=1)
    assert turn.fetch() == []
    assert first._found is not None
    first.fetch()
    last.fetch()  # the one before it is the first, not the turn
    assert first._found is not None
    assert pool.bytes == 2 * PAGE


class Clock:
    """A GPU's stream and events, as far as a pool uses them: what waits for which copy."""

    def __init__(self):
        self.copies, self.waited = 0, []

    def begin(self, pairs):
        list(pairs)
        self.copies += 1
        return self.copies - 1

    def wait_event(self, copy):
        self.waited.append(copy)


def test_stores_are_waited_for_in_order_of_the_calls(monkeypatch):
    clock, pool = Clock(), HostPool(CPU)
    monkeypatch.setattr(pool, "_begin", clock.begin)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: clock)
    stores = [pool.store([torch.ones(3)], sending=sending) for sending in (1, 2, 2)]
    assert clock.waited == [0]
    stores.append(pool.store([], sending=1))
    assert clock.waited == [0, 1]
    assert [pool._sent[0][0]] == [2]
    stores.pop().fetch()  # a backward begins: all have arrived; one sets out
    assert clock.waited == [0, 1, 2]
    assert clock.copies == 4


def test_a_store_that_is_gone_is_not_started():
    pool = HostPool(CPU)
    first, second = pool.store([torch.ones(3)]), pool.store([torch.zeros(3)])
    del first
    gc.collect()
    assert torch.equal(second.fetch()[0], torch.zeros(3))


@pytest.mark.parametrize(
    ("x", "waits"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).t(), True),
        (torch.nn.Parameter(torch.ones(3)), True),
        (torch.ones(3, 4)[:, :2], False),
        (torch.ones(3, 1).expand(3, 4), False),
    ],
)
def test_what_can_wait(x, waits):
    assert can_wait(x) == waits


def test_a_stand_in_cannot_wait():
    with FakeTensorMode():
        assert not can_wait(torch.ones(3))


def test_a_device_has_one_pool():
    assert pool_of(CPU) is pool_of(CPU)


def test_what_came_ahead_is_let_go_and_copied_again():
    pool = HostPool(CPU)
    layers = [drawn((64, 5), torch.float32, seed=seed) for seed in range(3)]
    stored = [pool.store([x], fetching=2) for x in layers]
    assert same(stored[2].fetch()[0], layers[2])
    assert pool.let_go() == sum(x.nbytes for x in layers[:2])
    with pool.nothing_ahead():
        assert same(stored[2].fetch()[0], layers[2])
    assert pool.let_go() == 0
    for one, x in zip(stored, layers, strict=True):
        assert same(one.fetch()[0], x)


def test_pages_are_made_ahead(monkeypatch):
    monkeypatch.setattr(host_memory, "PAGE", 2**12)
    pool = HostPool(CPU)
    pool.reserve(40 * 2**12 + 1)
    stored = pool.store([torch.ones(39 * 2**12, dtype=torch.uint8)])
    deadline = time.monotonic() + 60
    while pool.bytes < 41 * 2**12 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert pool.bytes == 41 * 2**12
    assert stored.fetch()[0].all()


def test_a_refusal_reaches_who_stores_and_a_smaller_store_may_follow(monkeypatch):
    pool = HostPool(CPU)
    monkeypatch.setattr(host_memory, "PAGE", 2**62)
    with pytest.raises(HostMemoryError, match=r"0\.0 GiB are held.*cure: a smaller Config"):
        pool.store([torch.ones(3)])
    monkeypatch.setattr(host_memory, "PAGE", 2**12)
    assert torch.equal(pool.store([torch.ones(3)]).fetch()[0], torch.ones(3))


class Driver:
    """CUDA's, as far as pages are registered with it."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, status=0):
        self.status, self.registered = status, {}

    def cudaHostRegister(self, address, size, flags):
        self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address):
        ctypes.string_at(address, self.registered.pop(address))  # it is still there


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_pinned_memory_is_registered_until_the_last_page_is_gone(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    pages = [*host_memory.pinned_bytes(torch.device("cuda", 1), 3 * PAGE).view(3, PAGE).unbind()]
    assert driver.registered == {pages[0].data_ptr(): 3 * PAGE}
    for number, page in enumerate(pages):
        assert not page.any()
        page.fill_(number)
    assert [int(page[-1]) for page in pages] == [0, 1, 2]
    del page, pages[1:]
    gc.collect()
    assert driver.registered
    pages.clear()
    gc.collect()
    assert not driver.registered


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_memory_that_the_driver_refuses_is_given_back(monkeypatch):
    driver, launched = Driver(status=2), []

    def check(status):
        raise RuntimeError(f"out of memory ({status})")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: launched.append(device))
    with pytest.raises(RuntimeError, match=r"out of memory \(2\)"):
        host_memory.pinned_bytes(torch.device("cuda", 1), PAGE)
    assert launched == [torch.device("cuda", 1)], "what the error would be told to next"


def test_a_refusal_holds_nothing_of_who_stored(monkeypatch):
    """What the forward has made must be free when it is planned again."""
    monkeypatch.setattr(host_memory, "PAGE", 2**62)
    pool = HostPool(CPU)

    def forward():
        made = torch.ones(3)
        seen.append(weakref.ref(made))
        pool.store([made])

    seen = []
    with suppress(HostMemoryError):
        forward()
    assert seen[0]() is None
