"""Release and wake on a made-up vLLM: order of calls, room-making, failures that lose nothing."""

from dataclasses import dataclass

import pytest

from fxrl.engines.ledger import MemoryLedger, Reading, TagBytes
from fxrl.engines.vllm.engine import VllmEngine
from fxrl.engines.vllm.standby import Standby, WakeError, map_tag, tag_bytes, unmap_tag

GiB = 2**30


@dataclass
class Allocation:
    handle: tuple
    tag: str
    is_asleep: bool = False


class Memory:
    """What vLLM's C library does: mapping needs room, mapping twice is an error."""

    def __init__(self, room=1000):
        self.room, self.mapped = room, set()

    def create(self, handle):
        if handle in self.mapped:
            raise AssertionError("mapped twice")
        if handle[1] > self.room:
            raise RuntimeError("CUDA Error: out of memory")
        self.mapped.add(handle)
        self.room -= handle[1]

    def unmap(self, handle):
        self.mapped.remove(handle)
        self.room += handle[1]


@pytest.fixture
def pool():
    memory = Memory(room=100)
    made = [Allocation((0, size, i, i), tag) for i, (tag, size) in enumerate(POOL)]
    for allocation in made:
        memory.create(allocation.handle)
    return made, memory


POOL = [("weights", 10), ("kv_cache", 20), ("weights", 5), ("kv_cache", 30), ("kv_cache", 1)]


def test_only_the_tag_goes_and_comes_back_once(pool):
    made, memory = pool
    for _ in range(2):
        unmap_tag(made, "kv_cache", memory.unmap)
        assert memory.room == 100 - 15
    assert [one.is_asleep for one in made] == [False, True, False, True, True]
    assert tag_bytes(dict(enumerate(made))) == {"weights": (15, 15), "kv_cache": (0, 51)}
    for _ in range(2):
        map_tag(made, "kv_cache", memory.create, memory.unmap)
        assert memory.room == 100 - 66
    assert tag_bytes(dict(enumerate(made))) == {"weights": (15, 15), "kv_cache": (51, 51)}


def test_mapping_is_all_or_nothing_and_can_be_repeated(pool):
    made, memory = pool
    unmap_tag(made, "kv_cache", memory.unmap)
    taken, memory.room = memory.room - 25, 25  # the second of three does not fit
    with pytest.raises(RuntimeError, match="out of memory"):
        map_tag(made, "kv_cache", memory.create, memory.unmap)
    assert memory.room == 25
    assert [one.is_asleep for one in made] == [False, True, False, True, True]
    memory.room += taken
    map_tag(made, "kv_cache", memory.create, memory.unmap)
    assert tag_bytes(dict(enumerate(made)))["kv_cache"] == (51, 51)


class Llm:
    """Records calls; ``kv`` GiB of a 100 GiB device are mapped or not."""

    def __init__(self, kv=60, calls=None):
        self.kv, self.mapped, self.calls = kv, True, [] if calls is None else calls
        self.error = None

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        if level:
            self.mapped = False

    def release_kv_cache_memory(self):
        self.calls.append("release_kv_cache_memory")
        self.mapped = False

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")

    def wake_up(self, tags=None):
        self.calls.append(f"wake_up {tags}")
        if self.error is not None:
            raise self.error
        self.mapped = True


class Probe:
    name = "made-up GPU"

    def __init__(self, llm):
        self.llm, self.trainer, self.unused = llm, 0, 0

    def read(self):
        kv = self.llm.kv * GiB
        tags = {"kv_cache": TagBytes(kv if self.llm.mapped else 0, kv)}
        held = (self.trainer + self.unused) * GiB
        used = tags["kv_cache"].mapped + held
        return Reading(100 * GiB, 100 * GiB - used, tags, self.trainer * GiB + kv, held + kv)

    def synchronize(self):
        self.llm.calls.append("synchronize")

    def empty_cache(self):
        self.llm.calls.append("empty_cache")
        self.unused = 0


def make(way):
    llm = Llm()
    probe = Probe(llm)
    ledger = MemoryLedger(probe)
    return Standby(llm, way, ledger, lambda: llm.calls.append("drain"), {}), probe


@pytest.mark.parametrize(
    ("way", "calls"),
    [
        (
            "native",
            ["drain", "sleep 0", "release_kv_cache_memory", "synchronize", "wake_up ['kv_cache']"],
        ),
        ("backend", ["drain", "sleep 1", "synchronize", "wake_up None"]),
        ("calls only", ["drain", "sleep 0", "reset_prefix_cache", "wake_up ['scheduling']"]),
    ],
)
def test_calls_in_order(way, calls):
    standby, probe = make(way)
    standby.release()
    standby.wake()
    assert probe.llm.calls == calls
    assert probe.llm.mapped
    assert standby.timings.keys() == {"release", "wake"}
    assert [entry.event for entry in standby.ledger.entries()] == [
        "before release",
        "release",
        "wake",
    ]
    assert not standby.ledger.problems


def test_memory_that_pytorch_only_holds_is_taken_back():
    standby, probe = make("native")
    standby.release()
    probe.trainer, probe.unused = 10, 50
    probe.llm.calls.clear()
    standby.wake()
    assert probe.llm.calls == ["synchronize", "empty_cache", "wake_up ['kv_cache']"]


def test_room_that_is_there_costs_nothing():
    standby, probe = make("native")
    standby.release()
    probe.unused = 30
    standby.wake()
    assert "empty_cache" not in probe.llm.calls
    assert probe.unused == 30


@pytest.mark.parametrize("way", ["native", "backend"])
def test_no_room_names_the_holders_and_can_be_repeated(way):
    standby, probe = make(way)
    standby.release()
    probe.trainer, probe.unused = 45, 10
    with pytest.raises(WakeError, match=r"needs 60\.00 GiB.*the trainer's tensors 45\.00 GiB"):
        standby.wake()
    assert not any(call.startswith("wake_up") for call in probe.llm.calls)
    probe.trainer = 5
    standby.wake()
    assert probe.llm.mapped


def test_an_error_while_mapping_is_told_likewise():
    """Another process may be quicker."""
    standby, probe = make("backend")
    standby.release()
    probe.llm.error = RuntimeError("CUDA Error: out of memory")
    with pytest.raises(WakeError, match=r"could not map it \(CUDA Error: out of memory\)"):
        standby.wake()
    probe.llm.error = None
    standby.wake()


def test_a_release_that_frees_nothing_is_a_problem():
    standby, probe = make("native")
    probe.llm.release_kv_cache_memory = lambda: None
    standby.release()
    assert "freed 0 B of 60.00 GiB" in standby.ledger.problems[0]


class Blocked:
    """A standby whose memory is not free again."""

    def release(self): ...

    def wake(self):
        raise WakeError("wake: the KV cache needs 30 GiB")


@pytest.fixture
def held_engine():
    engine = VllmEngine.__new__(VllmEngine)
    engine._state, engine._standby = "awake", Blocked()
    return engine


def test_why_a_step_failed_is_told_and_the_wake_that_failed_after_it_is_a_note(held_engine):
    with (
        pytest.raises(MemoryError, match="lower micro_batch_tokens") as caught,
        held_engine.standby(),
    ):
        raise MemoryError("lower micro_batch_tokens")
    assert caught.value.__notes__ == ["wake: the KV cache needs 30 GiB"]


def test_a_wake_that_fails_by_itself_is_the_error(held_engine):
    with pytest.raises(WakeError), held_engine.standby():
        pass
    assert held_engine._state == "standby"
