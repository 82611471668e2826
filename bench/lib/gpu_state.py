"""Clock, power and temperature of the GPU while it works, as ``nvidia-smi`` reads them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch

_FIELDS = {
    "clocks.sm": "sm_mhz",
    "power.draw.instant": "power_w",
    "temperature.gpu": "temperature_c",
}
_SETTINGS = ("power.limit", "clocks.max.sm", "driver_version", "persistence_mode")
_TIMEOUT_S = 20


def available(device: str) -> bool:
    """Whether there is anything to read."""
    return device == "cuda" and shutil.which("nvidia-smi") is not None


def under(work: Callable[[], Any]) -> dict[str, float]:
    """What ``nvidia-smi`` reads while ``work`` runs again and again: ``sm_mhz``, ``power_w``, ...

    Only reads; it changes no setting. What cannot be read is left out.
    """
    reading = subprocess.Popen(_command(_FIELDS), stdout=subprocess.PIPE, text=True)
    try:
        while reading.poll() is None:
            work()
            torch.cuda.synchronize()
        told, _ = reading.communicate(timeout=_TIMEOUT_S)
    finally:
        reading.kill()
    found = {}
    for name, text in zip(_FIELDS.values(), told.strip().split(","), strict=False):
        try:
            found[name] = float(text)
        except ValueError:  # "[N/A]": this driver or this virtual machine does not tell
            continue
    return found


def settings() -> str:
    """The limits that stand, in one line."""
    told = subprocess.run(
        _command(_SETTINGS), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    ).stdout.strip()
    pairs = zip(_SETTINGS, told.split(","), strict=False)
    return ", ".join(f"{name} {value.strip()}" for name, value in pairs)


def _command(fields: Any) -> list[str]:
    index, query = str(torch.cuda.current_device()), f"--query-gpu={','.join(fields)}"
    return ["nvidia-smi", "-i", index, query, "--format=csv,noheader,nounits"]
