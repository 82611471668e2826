"""A step's seconds: every one counted once."""

import time

import pytest
import torch

from fxrl.rl.report.timing import PHASES, Clock


def test_phases_add_up_to_the_step():
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        with clock.phase("generate"):
            time.sleep(0.02)
    with clock.phase("train"):
        time.sleep(0.03)
    time.sleep(0.02)
    found = clock.metrics()
    total = found.pop("step_time")
    assert found.keys() == {f"time/{name}" for name in PHASES}
    assert sum(found.values()) == pytest.approx(total)
    assert found["time/generate"] >= 0.04
    assert found["time/train"] >= 0.03
    assert found["time/other"] >= 0.02
    assert found["time/wake"] == 0.0


def test_moving_never_makes_seconds():
    clock = Clock(torch.device("cpu"))
    clock.seconds["generate"] = 2.0
    clock.move("generate", "sync", 0.5)
    clock.move("generate", "sync", 9.0)
    assert (clock.seconds["generate"], clock.seconds["sync"]) == (0.0, 2.0)


def test_a_phase_that_raises_is_not_counted():
    clock = Clock(torch.device("cpu"))
    with pytest.raises(ValueError, match="x"), clock.phase("train"):
        raise ValueError("x")
    assert clock.seconds["train"] == 0.0


def test_a_gpu_is_waited_for_once_a_phase(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    clock = Clock(torch.device("cuda:0"))
    with clock.phase("score"):
        pass
    with clock.phase("train"):
        assert len(waits) == 1
    clock.metrics()
    assert waits == [torch.device("cuda:0")] * 2


def test_memory_that_an_engine_gave_back_is_not_counted(monkeypatch):
    """PyTorch counts a cache in standby as allocated; a phase that began before it went still had
    it, and so has one that ends after it came back."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    asleep = 0
    clock = Clock(torch.device("cuda:0"), lambda: asleep)
    with clock.phase("release"):
        asleep = 30
    with clock.phase("train"):
        pass
    with clock.phase("wake"):
        asleep = 0
    assert clock.bytes == {"release": 100, "train": 70, "wake": 100}
