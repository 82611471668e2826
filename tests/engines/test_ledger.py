"""The ledger's bookkeeping on a device that is made up: what is whose, and what does not add up."""

import json

import pytest

from fxrl.engines.ledger import COLUMNS, TOLERANCE, CpuProbe, MemoryLedger, Reading, TagBytes

GiB = 2**30


class Device:
    """A GPU with 100 GiB, of which the context takes 1; sizes in GiB."""

    name = "made-up GPU"

    def __init__(self):
        self.weights = self.kv = self.graphs = self.trainer = self.unused = self.others = 0.0
        self.kv_mapped = True
        self.emptied = self.readings = 0

    def tags(self):
        if not self.weights:
            return {}
        return {
            "weights": TagBytes(size(self.weights), size(self.weights)),
            "kv_cache": TagBytes(size(self.kv if self.kv_mapped else 0), size(self.kv)),
        }

    def read(self):
        self.readings += 1
        tags = self.tags()
        tagged = sum(tag.reserved for tag in tags.values())
        mapped = sum(tag.mapped for tag in tags.values())
        ordinary = size(self.graphs + self.trainer)
        reserved = ordinary + size(self.unused)
        used = mapped + reserved + size(1 + self.others)
        return Reading(100 * GiB, 100 * GiB - used, tags, ordinary + tagged, reserved + tagged)

    def synchronize(self):
        pass

    def empty_cache(self):
        self.emptied += 1
        self.unused = 0.0


def size(gib):
    return int(gib * GiB)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def ledger(device):
    """After loading: 3 GiB of weights, 60 of KV cache, 2 of graphs; the trainer had 0.5 before."""
    ledger = MemoryLedger(device)
    device.trainer, device.unused = 0.5, 0.25
    ledger.before_load()
    device.weights, device.kv, device.graphs = 3, 60, 2
    ledger.loaded()
    return ledger


def gibs(entry):
    return {name: getattr(entry, name) / GiB for name in COLUMNS}


def test_columns_add_up_to_the_device(ledger):
    for entry in ledger.entries():
        assert sum(getattr(entry, name) for name in COLUMNS) == entry.total


def test_what_loading_adds_is_the_engines(ledger):
    assert gibs(ledger.entries("load")[0]) == pytest.approx(
        {
            "weights": 3,
            "kv_cache": 60,
            "engine_other": 2,
            "trainer": 0.5,
            "unused": 0,
            "outside": 1,
            "free": 33.5,
        }
    )


def test_what_comes_later_is_the_trainers(ledger, device):
    device.trainer, device.unused, device.others = 8, 4, 2
    found = gibs(ledger.record("generate"))
    assert found["trainer"] == 8
    assert found["engine_other"] == 2
    assert found["unused"] == 4
    assert found["outside"] == 3


def test_released_memory_is_checked(ledger, device):
    before = ledger.record("before release")
    device.kv_mapped = False
    entry = ledger.released(before, before.kv_cache, frees=True)
    assert entry.kv_cache == 0
    assert entry.free - before.free == 60 * GiB
    assert ledger.cycle == 1
    assert not ledger.problems


@pytest.mark.parametrize("missing", [60, 1, 2 * TOLERANCE / GiB])
def test_memory_that_was_not_freed_is_a_problem(ledger, device, missing):
    before = ledger.record("before release")
    device.kv_mapped = False
    device.others = missing
    ledger.released(before, before.kv_cache, frees=True)
    assert "releasing the KV cache freed" in ledger.problems[0]
    assert ledger.problems[0] in str(ledger)
    assert "problems" in json.loads(ledger.to_json().splitlines()[-1])


def test_on_a_cpu_nothing_is_checked(ledger):
    before = ledger.record("before release")
    ledger.released(before, before.kv_cache, frees=False)
    assert not ledger.problems


def test_no_more_entries_are_kept_than_asked_for(device):
    ledger = MemoryLedger(device, keep=4)
    ledger.before_load()
    ledger.loaded()
    for _ in range(50):
        ledger.record("release")
    assert [entry.event for entry in ledger.entries()] == ["release"] * 4


def test_holders_are_named_largest_first(ledger, device):
    device.trainer = 20
    assert ledger.holders() == (
        "vLLM's KV cache 60.00 GiB, the trainer's tensors 20.00 GiB, free 14.00 GiB, vLLM's "
        "weights 3.00 GiB, vLLM's graphs and buffers 2.00 GiB, CUDA context and other processes "
        "1.00 GiB"
    )


def test_what_is_given_back_is_what_pytorch_still_counts(ledger, device):
    before = device.readings
    assert ledger.given_back() == 0
    device.kv_mapped = False
    assert ledger.given_back() == 60 * 2**30
    assert device.readings == before, "the driver and PyTorch's allocator are not asked"


def test_the_table_shows_every_column(ledger):
    table = str(ledger)
    for name in COLUMNS:
        assert name.replace("_", " ") in table
    assert "60.00" in table
    assert "made-up GPU" in table


def test_json_lines_have_every_entry(ledger):
    lines = [json.loads(line) for line in ledger.to_json().splitlines()]
    assert [line["event"] for line in lines] == ["before load", "load"]
    assert lines[1]["kv_cache"] == 60 * GiB


def test_the_host_adds_up_too():
    ledger = MemoryLedger(CpuProbe(lambda: {"weights": 5, "kv_cache": 7}))
    entry = ledger.before_load()
    assert (entry.weights, entry.kv_cache) == (5, 7)
    assert sum(getattr(entry, name) for name in COLUMNS) == entry.total
    assert entry.free > 0
