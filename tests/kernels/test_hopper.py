"""The Hopper route of ``fxrl::linear_logprob`` without a GPU: which heads it serves, and plans."""

import pytest
import torch

pytest.importorskip("triton")

from fxrl.kernels.hopper import head, module, plan
from fxrl.kernels.hopper.module import aligned
from fxrl.ops.linear_logprob import LossHead

SIZES = [
    (1, 64, 1000),
    (1000, 64, 1000),
    (16384, 4096, 151936),
    (65536, 576, 49152),
    (8192, 5120, 262144),
    (262144, 8192, 262144),
    (65536, 8192, 1000),
]


def test_no_head_on_the_cpu_is_served():
    weight = torch.zeros(2000, 64, dtype=torch.bfloat16)
    target = torch.zeros(128, dtype=torch.int64)
    assert not head.serves(LossHead(weight[:128], weight, target))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("make", [plan.for_scoring, plan.for_product])
def test_a_plan_fits_its_scratch_and_is_whole_tiles(make, sizes):
    rows, width, vocab = sizes
    steps = make(*sizes, 132)
    assert steps.rows % 256 == 0
    assert steps.vocab % 256 == 0
    assert steps.rows < rows + 256
    assert steps.vocab < vocab + 256
    scratch = 2 * steps.rows * steps.vocab + 4 * steps.rows * width
    statistics = 20 * steps.rows * -(-vocab // 256)
    if make is plan.for_scoring:
        assert steps.vocab >= vocab
        assert statistics <= 180 * 2**20
    else:
        assert scratch + statistics <= 192 * 2**20


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_gradient_of_a_trainable_head_fits_its_memory(sizes):
    rows, width, vocab = sizes
    steps = plan.for_gradient(*sizes, 132)
    assert steps.rows % 256 == steps.vocab % 256 == 0
    assert steps.rows < rows + 256
    assert steps.vocab < vocab + 256
    assert 2 * steps.rows * steps.vocab <= 256 * 2**20
    assert plan.launch_rows(width) % 256 == 0
    assert 4096 <= plan.launch_rows(width) <= 16384


def test_a_trainable_heads_pieces():
    """One piece of 16384 rows writes dW at once; 65536 in one piece would add dH 24 times.

    Measured at the second (H200, 24 plans in one process): 25.5 ms with this plan, 27.2 with 13312
    x 9984, 27.3 with 32768 x 4096, 27.6 with 65536 x 2048.
    """
    assert plan.for_gradient(16384, 4096, 151936, 132) == plan.TilePlan(16384, 8192)
    assert plan.for_gradient(65536, 576, 49152, 132) == plan.TilePlan(8192, 16384)


def test_full_waves_are_preferred():
    """132 tiles of 128 x 256 at a time: 2048 x 25344 is 12 x 66 clusters of two."""
    steps = plan.for_product(16384, 4096, 151936, 132)
    clusters = -(-steps.rows // 256) * (steps.vocab // 256)
    assert clusters % 66 == 0


def test_what_tma_can_read():
    whole = torch.zeros(10, 64, dtype=torch.bfloat16)
    assert aligned(whole)
    assert aligned(whole[::2, 8:40])
    assert not aligned(whole[:, 1:])
    assert not aligned(whole[:1].expand(10, 64))
    assert not aligned(torch.zeros(10, 63, dtype=torch.bfloat16))
    assert not aligned(torch.zeros(64, 16, dtype=torch.bfloat16).t())


@pytest.mark.parametrize(
    ("cuda", "packages"),
    [
        ("13.0", "'cuda-bindings==13.*' 'nvidia-cuda-nvrtc==13.*'"),
        ("12.8", "'cuda-bindings==12.*' 'nvidia-cuda-nvrtc-cu12==12.*'"),
    ],
)
def test_missing_bindings_are_said_with_the_cure(cuda, packages, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="slower route") as caught:
        assert module.available.__wrapped__() is False
    assert packages in str(caught[0].message)
