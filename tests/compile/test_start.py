"""What is asked of Triton when a step is made, so that its first call does not wait for it."""

import threading

import pytest

from fxrl.compile._torch import start_inductor_workers


def test_the_checksum_of_triton_is_made_meanwhile(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TORCH_WARM_POOL", "0")  # no processes
    from torch._inductor.runtime.triton_compat import triton_key

    triton_key.cache_clear()
    start_inductor_workers()
    for thread in threading.enumerate():
        if thread.name == "fxrl-triton":
            thread.join(60)
    assert triton_key.cache_info().currsize == 1
