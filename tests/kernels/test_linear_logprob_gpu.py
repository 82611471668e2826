"""The CUDA kernels of ``fxrl::linear_logprob`` against the op's float64 reference on the CPU.

Tolerances are those of ``tests/ops/test_linear_logprob_precision.py``: values to 1e-4 (float32
sums), gradients to half an ulp of the input's dtype, twice.
"""

import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import fxrl.kernels
from fxrl.kernels.hopper import module, rows
from fxrl.kernels.linear_logprob import tile
from fxrl.kernels.linear_logprob.cuda import backward, forward, keeping, run_both
from fxrl.ops.linear_logprob import LossHead, linear_logprob
from fxrl.ops.linear_logprob.op import asked_of_forward

sys.path.insert(0, str(Path(__file__).parent))
from head_checks import CHECKS, check_same_bits
from kernel_cases import check_case, check_kept, make_case

pytestmark = pytest.mark.gpu
TOLERANCES = {
    torch.bfloat16: ((1e-5, 1e-4), (2**-8, 2**-8)),
    torch.float16: ((1e-5, 1e-4), (2**-10, 2**-10)),
    torch.float32: ((1e-5, 1e-4), (1e-4, 1e-4)),
    torch.float64: ((1e-9, 1e-10), (1e-9, 1e-10)),
}
SIZES = [(0, 7, 8), (5, 1, 8), (9, 2, 3), (50, 1000, 24), (33, 8193, 16), (17, 20001, 40)]


@pytest.fixture(autouse=True)
def kernels():
    """Attached for the whole process, as a run would have them."""
    assert fxrl.kernels.register()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients_equal_the_float64_reference(sizes, dtype):
    for seed in range(3):
        case = make_case(seed, *sizes, dtype, "cuda")
        check_case(forward, backward, case, *TOLERANCES[dtype])
        check_kept(keeping, case, *TOLERANCES[dtype])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_promises(check):
    check("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_scoring_and_training_are_bitwise_equal_and_repeatable(dtype, masked):
    gen = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 64, generator=gen, device="cuda", dtype=dtype)
    weight = torch.randn(30011, 64, generator=gen, device="cuda", dtype=dtype) / 4
    target = torch.randint(0, 30011, (300,), generator=gen, device="cuda")
    mask = torch.arange(300, device="cuda") % 3 > 0 if masked else None
    check_same_bits(hidden, weight, target, softcap=20.0, row_mask=mask, chunk_tokens=128)


@pytest.mark.parametrize("margin", [10.0, 20.0, 40.0])
def test_a_confident_token_keeps_its_log_prob_and_gradient(margin):
    weight = torch.tensor([[64.0], [64.0 + margin], [67.0]], device="cuda")
    hidden = torch.ones(1, 1, device="cuda", requires_grad=True)
    logprob = linear_logprob(hidden, weight, torch.tensor([1], device="cuda")).logprob
    (grad,) = torch.autograd.grad(logprob.sum(), hidden)
    p_others = [math.exp(-margin), math.exp(3 - margin)]
    total = 1 + sum(p_others)
    truth = (p_others[0] * margin + p_others[1] * (margin - 3)) / total
    assert logprob.item() == pytest.approx(-math.log1p(sum(p_others)), rel=5e-6)
    assert grad.item() == pytest.approx(truth, rel=1e-4)


def test_argmax_hit_is_the_first_maximum():
    hidden, weight = torch.ones(3, 1).cuda(), torch.tensor([[1.0], [2.0], [2.0]]).cuda()
    out = linear_logprob(hidden, weight, torch.arange(3).cuda(), outputs=["argmax_hit"])
    assert out.argmax_hit.tolist() == [False, True, False]


def test_a_nan_is_not_hidden():
    hidden, weight = torch.ones(2, 4).cuda(), torch.randn(9000, 4).cuda()
    weight[8500, 0] = torch.nan
    out = linear_logprob(hidden.requires_grad_(), weight, torch.tensor([0, 1]).cuda())
    out.logprob.sum().backward()
    assert out.logprob.isnan().all()
    assert hidden.grad.isnan().all()


def test_a_tile_of_more_than_2_to_31_logits():
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    rows, vocab = 2**31 // 65536 + 100, 65536
    hidden = torch.randn(rows, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, 16, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, vocab, (rows,), device="cuda")
    logprob = linear_logprob(hidden, weight, target, chunk_tokens=rows).logprob
    logprob.sum().backward()
    last = hidden[-64:].detach().double().requires_grad_()
    truth = torch.log_softmax(last @ weight.double().t(), -1).gather(1, target[-64:, None])
    (grad,) = torch.autograd.grad(truth.sum(), last)
    torch.testing.assert_close(logprob[-64:].double(), truth[:, 0], rtol=1e-5, atol=1e-4)
    assert (hidden.grad[-64:].double() - grad).norm() < 2**-7 * grad.norm()


@pytest.mark.parametrize("outputs", [["logprob", "lse"], ["logprob", "entropy"]], ids=str)
def test_scratch_is_one_tile_of_logits_and_one_of_its_gradient(outputs):
    rows, vocab, width, tile = 2048, 65536, 128, 256
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16) / 4
    target = torch.randint(0, vocab, (rows,), device="cuda")
    linear_logprob(hidden[:8], weight, target[:8])  # cuBLAS's workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = linear_logprob(hidden, weight, target, outputs=outputs, chunk_tokens=tile)
    sum(getattr(out, name).sum() for name in outputs).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < tile * vocab * (4 + 2) + 12 * rows * width + 4 * 2**20


def test_rows_of_a_head_of_more_than_2_to_31_numbers():
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    width, vocab = 8192, 2**18 + 40
    hidden = torch.randn(3, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) / 64
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16)
    target = torch.tensor([0, vocab - 1, vocab - 40], device="cuda")
    leaf = hidden.detach().requires_grad_()
    logprob = linear_logprob(leaf, weight, target).logprob
    (made,) = torch.autograd.grad(logprob.sum(), leaf)
    wide = hidden.detach().float().requires_grad_()
    logits = torch.cat([wide @ part.float().t() for part in weight.split(2**15)], 1).double()
    truth = torch.log_softmax(logits, -1).gather(1, target[:, None]).squeeze(1)
    (right,) = torch.autograd.grad(truth.sum(), wide)
    torch.testing.assert_close(logprob.double(), truth, rtol=1e-5, atol=1e-4)
    assert (made.float() - right).norm() < 2**-7 * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_a_call_ahead_leaves_nothing_to_compile(trained, dtype):
    softcap = 11.0 + trained + 0.25 * (dtype == torch.float32)  # no other test's constant
    weight = torch.randn(20001, 64, device="cuda", dtype=dtype, requires_grad=trained)

    def head(rows):
        hidden = torch.zeros(rows, 64, device="cuda", dtype=dtype, requires_grad=True)
        target = torch.zeros(rows, dtype=torch.int64, device="cuda")
        return LossHead(hidden, weight, target, softcap=softcap)

    before = compilations()
    run_both(asked_of_forward(head(64), "logprob,entropy", "logprob"))
    ahead = compilations()
    assert ahead > before
    values = linear_logprob(**drop_defaults(head(1000)), outputs=("logprob", "entropy"),
                            grad_outputs=("logprob",))  # fmt: skip
    values.logprob.sum().backward()
    assert compilations() == ahead


def drop_defaults(head):
    defaults = LossHead._field_defaults
    return {k: v for k, v in head._asdict().items() if k not in defaults or v is not defaults[k]}


def compilations():
    """How often the head's kernels were compiled so far."""
    kernels = [value for m in (tile, rows) for value in vars(m).values() if hasattr(value, "run")]
    made = sum(len(held[0]) for kernel in kernels for held in kernel.device_caches.values())
    return made + module._cubin.cache_info().misses
