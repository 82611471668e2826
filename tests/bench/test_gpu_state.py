"""What ``nvidia-smi`` is asked and how its answer is read, with a stand-in on the PATH."""

import pytest
import torch

from bench.lib import gpu_state


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A program that notes its arguments and answers after a while."""

    def answer(text):
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nsleep 0.2\necho "{text}"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        return lambda: (tmp_path / "asked").read_text()

    return answer


def test_read_while_it_works(smi):
    asked = smi("1980, 655.31, 48")
    calls = []
    found = gpu_state.under(lambda: calls.append(1))
    assert found == {"sm_mhz": 1980.0, "power_w": 655.31, "temperature_c": 48.0}
    assert len(calls) > 10
    assert "-i 3 --query-gpu=clocks.sm,power.draw.instant,temperature.gpu" in asked()


def test_what_cannot_be_read_is_left_out(smi):
    smi("[N/A], 655.31, 48")
    assert gpu_state.under(lambda: None) == {"power_w": 655.31, "temperature_c": 48.0}
    smi("")
    assert gpu_state.under(lambda: None) == {}


def test_settings(smi):
    asked = smi("700.00, 1980, 580.1, Enabled")
    assert gpu_state.settings().startswith("power.limit 700.00, clocks.max.sm 1980")
    assert "query-gpu" in asked()  # it reads: nothing that sets anything


def test_available(monkeypatch):
    assert not gpu_state.available("cpu")
    monkeypatch.setattr(gpu_state.shutil, "which", lambda name: None)
    assert not gpu_state.available("cuda")
