"""Backups give every byte back, also where the copy is cut into blocks."""

import pytest
import torch

from fxrl.engines.weights.lora.fold import DeviceBackup, HostBackup
from fxrl.ops import host_memory
from fxrl.ops.out_of_memory import free_bytes


@pytest.mark.parametrize("kind", [DeviceBackup, HostBackup])
@pytest.mark.parametrize("block", [40, 64, 2**20])
def test_every_byte_comes_back(kind, block, monkeypatch):
    monkeypatch.setattr(host_memory, "PAGE", block)
    monkeypatch.setattr(host_memory, "_POOLS", {})
    storage = torch.randn(400).to(torch.bfloat16)
    tensors = [storage[:60].view(6, 10), storage[60:160].view(10, 10), torch.randn(7, 3)]
    before = [tensor.clone() for tensor in tensors]
    backup = kind(tensors)
    backup.save()
    for tensor in tensors:
        tensor.fill_(float("nan"))
    outside = storage[160:].clone()
    backup.load()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)
    assert torch.equal(storage[160:], outside)


def test_the_cpu_has_no_device_limit():
    assert free_bytes(torch.device("cpu")) is None
