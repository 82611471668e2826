"""The fold on a GPU: the GEMM's rounding, the host path, and what it costs."""

import copy

import pytest
import torch
from torch import nn

from fxrl.engines.weights.lora import fold as folding
from fxrl.engines.weights.lora.fold import BitSums, Fold, RestoreError, folded
from fxrl.engines.weights.lora.sites import (
    Factors,
    Merge,
    lora_sites,
    merge_all,
)
from fxrl.ops.fp8 import RECIPES, dequantized
from tests.engines.weights.lora.lora_models import (
    assert_same_bits,
    fill,
    llama,
    snapshot,
    with_lora,
)
from tests.engines.weights.lora.test_fold import in_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2048, 2048, 32), (1000, 300, 8), (2048, 6144, 64)])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_pass_rounds_the_sum_to_one_of_its_neighbours_without_a_bias(
    shape, factors, dtype, count, transposed
):
    out, inner, rank = shape
    weight = (torch.randn(out, inner, device="cuda") * 0.02).to(dtype)
    pairs = tuple(
        Factors(
            (torch.randn(rank, inner, device="cuda") * 0.02).to(factors),
            (torch.randn(out, rank, device="cuda") * 0.01).to(factors),
            1.7,
        )
        for _ in range(count)
    )
    exact = weight.double() + sum(1.7 * pair.b.double() @ pair.a.double() for pair in pairs)
    merged, again = (weight.t() if transposed else weight for _ in range(2))
    merged, again = merged.clone(), again.clone()
    merge_all([Merge(merged, pairs, transposed, seed=5), Merge(again, pairs, transposed, seed=5)])
    assert torch.equal(merged, again)
    off = (merged.t() if transposed else merged).double() - exact
    unit = torch.finfo(dtype).eps * exact.abs().clamp(min=2**-14).log2().floor().exp2()
    products = sum(1.7 * pair.b.double().abs() @ pair.a.double().abs() for pair in pairs)
    assert (off.abs() <= unit + 2**-18 * products).all()
    shares = off / unit
    assert abs(float(shares.mean())) < 5 * 0.41 / shares.numel() ** 0.5 + 1e-3
    assert 0.36 < float(shares.std()) < 0.46, "6 ** -0.5; the nearest's would be 12 ** -0.5"


def test_sums_agree_with_the_cpu():
    tensor = torch.randn(513, 128).to(torch.bfloat16)
    odd = torch.randn(40, 3).to(torch.bfloat16)
    on_cpu = BitSums([tensor, odd]).measure()
    on_gpu = BitSums([tensor.cuda(), odd.cuda()]).measure()
    assert torch.equal(on_cpu, on_gpu.cpu())


@pytest.mark.parametrize("backup", ["device", "host"])
def test_a_thousand_folds_leave_every_bit(backup, monkeypatch):
    if backup == "host":
        monkeypatch.setattr(folding, "free_bytes", lambda device: 2**20)
    model = with_lora(llama(torch.bfloat16)).cuda()
    before, fold = snapshot(model), Fold(model)
    ids = torch.arange(24, device="cuda").view(2, 12)
    for _ in range(1000):
        with folded(fold):
            pass
    assert_same_bits(model, before)
    with torch.no_grad():
        want = model(ids).logits.float()
        with folded(fold), model.disable_adapter():
            got = model(ids).logits.float()
    assert (got - want).abs().mean() < 0.02 * want.abs().mean()


def test_memory_comes_back_after_the_restore():
    model = with_lora(llama(torch.bfloat16, hidden_size=512, intermediate_size=1024)).cuda()
    fold = Fold(model)
    with folded(fold):
        pass
    before = torch.cuda.memory_allocated()
    with folded(fold):
        assert torch.cuda.memory_allocated() >= before + sum(w.nbytes for w in fold._weights)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_in_fp8_take_a_large_change_and_come_back(recipe):
    model, on_cpu = (in_fp8(recipe, change=0.4) for _ in range(2))
    before, fold = snapshot(model.cuda()), Fold(model)
    with folded(fold), folded(Fold(on_cpu)):
        for ours, theirs in zip(lora_sites(model), lora_sites(on_cpu), strict=True):
            made, expected = (
                dequantized(s.weight.cpu(), s.scale.cpu(), torch.float32) for s in (ours, theirs)
            )
            torch.testing.assert_close(made, expected, rtol=2**-3, atol=1e-4)  # a step of e4m3
    assert_same_bits(model, before)


def test_a_bit_lost_on_the_gpu_is_seen():
    model = with_lora(llama(torch.bfloat16)).cuda()
    fold = Fold(model)
    fold.apply()
    fold._backup._on_device._copies[2].view(torch.int16)[1, 1] ^= 1
    with pytest.raises(RestoreError, match=fold.names[2].replace(".", r"\.")):
        fold.restore()


def test_qwen3_1b7_folds_and_restores_in_the_time_of_sixteen_copies():
    """196 linears, 2.8 GB, rank 32, float32 factors.

    Sixteen copies of the weights take some 20 ms on an H200; measured here, so that the bound
    follows the card's memory.
    """
    block = nn.ModuleDict(
        {
            name: nn.Linear(inner, out, bias=False, dtype=torch.bfloat16, device="cuda")
            for name, inner, out in [
                ("q_proj", 2048, 2048),
                ("k_proj", 2048, 1024),
                ("v_proj", 2048, 1024),
                ("o_proj", 2048, 2048),
                ("gate_proj", 2048, 6144),
                ("up_proj", 2048, 6144),
                ("down_proj", 6144, 2048),
            ]
        }
    )
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(28)))
    names = sorted(block)
    wrapped = with_lora(model, r=32, lora_alpha=64, target_modules=names, task_type=None)
    fold = Fold(wrapped)
    assert len(fold.names) == 196
    assert sum(w.nbytes for w in fold._weights) == 28 * 2 * (2048 * 2048 * 3 + 6144 * 2048 * 3)
    times, copies = [], []
    for seed in range(5):
        fill(wrapped, seed)
        torch.cuda.synchronize()
        with folded(fold):
            pass
        times.append(fold.timings["fold"] + fold.timings["restore"])
        copies.append(seconds_of_a_copy(fold._weights))
    assert min(times) < 16 * min(copies), f"fold and restore took {times} s, a copy {copies} s"


def seconds_of_a_copy(weights):
    targets = [torch.empty_like(weight) for weight in weights]
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    torch._foreach_copy_(targets, weights)
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1e3
