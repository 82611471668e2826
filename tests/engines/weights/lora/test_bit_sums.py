"""Sums over bits: what must change them and what must not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxrl.engines.weights.lora.fold import BitSums


def random_tensors(dtype=torch.bfloat16):
    shapes = [(6, 16), (5, 3), (7,), (2, 3, 4), (1, 1)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
def test_equal_bytes_equal_sums(dtype):
    tensors = random_tensors(dtype)
    first = BitSums(tensors).measure()
    assert first.dtype == torch.int64
    assert torch.equal(first, BitSums([t.clone() for t in tensors]).measure())


@settings(deadline=None)
@given(
    which=st.integers(0, 4),
    at=st.integers(0, 10**6),
    bit=st.integers(0, 15),
)
def test_every_single_bit_shows_in_its_tensor_and_no_other(which, at, bit):
    torch.manual_seed(0)
    tensors = random_tensors()
    sums = BitSums(tensors)
    before = sums.measure().tolist()
    words = tensors[which].view(torch.int16).view(-1)
    words[at % words.numel()] ^= torch.tensor(1 << bit if bit < 15 else -(2**15), dtype=torch.int16)
    after = sums.measure().tolist()
    assert [a != b for a, b in zip(before, after, strict=True)] == [i == which for i in range(5)]


def test_signs_of_zero_and_kinds_of_nan_are_bits_too():
    tensor = torch.zeros(2, 4)
    sums = BitSums([tensor])
    zero = sums.measure()
    tensor[1, 2] = -0.0
    assert not torch.equal(zero, sums.measure())


def test_swapped_rows_show():
    tensor = torch.randn(8, 16)
    sums = BitSums([tensor])
    before = sums.measure()
    tensor.copy_(tensor.roll(1, 0).clone())
    assert not torch.equal(before, sums.measure())


def test_slices_at_odd_offsets():
    storage = torch.randn(101).to(torch.bfloat16)
    odd = storage[3:99].view(8, 12)
    sums = BitSums([odd])
    before = sums.measure()
    storage[2] += 1  # outside
    assert torch.equal(before, sums.measure())
    storage[98] += 1
    assert not torch.equal(before, sums.measure())
