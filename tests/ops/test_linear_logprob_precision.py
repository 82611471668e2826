"""Narrow dtypes and confident tokens of ``fxrl::linear_logprob``, against float64.

Tolerances: values and weight sums are accumulated in float32, so a value is off by a few hundred
float32 roundings (2^-24) of sums of order ten: 1e-4 is ample. A gradient of hidden is rounded to
the input's dtype at most twice (the saved vector, the scaled result), each half an ulp: 2^-8
relative for bf16 (8 significand bits), 2^-10 for float16 (11 bits).
"""

import math
import sys
from pathlib import Path

import pytest
import torch

from fxrl.ops.linear_logprob import linear_logprob

sys.path.insert(0, str(Path(__file__).parent))
from linear_logprob_reference import DIFFERENTIABLE, OUTPUTS, random_head, reference

GRAD_RTOL = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-4}
NARROW = pytest.mark.parametrize("dtype", list(GRAD_RTOL), ids=str)


@NARROW
@pytest.mark.parametrize("outputs", [["logprob"], ["logprob", "entropy"], list(DIFFERENTIABLE)])
@pytest.mark.parametrize("trainable_head", [False, True])
def test_narrow_dtypes_against_float64_of_the_same_inputs(dtype, outputs, trainable_head):
    hidden, weight, target = random_head(33, 300, 24, dtype=dtype)
    leaves = [hidden.requires_grad_()] + [weight.requires_grad_()] * trainable_head
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    temperature = torch.tensor(0.8)
    ours = linear_logprob(
        hidden, weight, target, temperature=temperature, outputs=outputs, chunk_tokens=16
    )
    theirs = reference(*wide, target, temperature=temperature.double())
    upstream = torch.randn(33, generator=torch.Generator().manual_seed(3))
    for name in outputs:
        assert getattr(ours, name).dtype == torch.float32
        torch.testing.assert_close(getattr(ours, name).double(), theirs[name], rtol=1e-5, atol=1e-4)
    made = torch.autograd.grad(sum(getattr(ours, n) @ upstream for n in outputs), leaves)
    truth = torch.autograd.grad(sum(theirs[n] @ upstream.double() for n in outputs), wide)
    for grad, expected in zip(made, truth, strict=False):
        assert grad.dtype == dtype
        # atol: an entry is a sum of terms as large as the largest entry, rounded term by term.
        atol = GRAD_RTOL[dtype] * expected.abs().max().item() / 2
        torch.testing.assert_close(grad.double(), expected, rtol=GRAD_RTOL[dtype], atol=atol)


@pytest.mark.parametrize("margin", [10.0, 20.0, 40.0])
def test_a_confident_token_keeps_its_log_prob_and_gradient(margin):
    # Logits (0, margin, 3) + 64 exactly, from a hidden of one: all numbers are exact in float32.
    weight = torch.tensor([[64.0], [64.0 + margin], [67.0]])
    hidden, target = torch.ones(1, 1, requires_grad=True), torch.tensor([1])
    logprob = linear_logprob(hidden, weight, target).logprob
    (grad,) = torch.autograd.grad(logprob.sum(), hidden)
    others = math.exp(-margin) + math.exp(3 - margin)
    p_others = [math.exp(-margin) / (1 + others), math.exp(3 - margin) / (1 + others)]
    truth = p_others[0] * margin + p_others[1] * (margin - 3)  # sum_v p_v (w_y - w_v)
    assert logprob.item() == pytest.approx(-math.log1p(others), rel=2e-6)
    # The products with W cancel (67 against 64 + margin), each exact to 2^-24.
    assert grad.item() == pytest.approx(truth, rel=1e-4)
    eager = torch.log_softmax(torch.nn.functional.linear(hidden, weight), -1)[0, 1]
    assert margin < 15 or eager.item() == 0  # what the split target is for


def test_log_prob_is_never_positive():
    hidden, weight, target = random_head(200, 50, 16, dtype=torch.float32)
    target = (hidden @ weight.t()).argmax(-1)
    assert (linear_logprob(hidden * 3, weight, target).logprob <= 0).all()


@NARROW
@pytest.mark.parametrize("masked", [False, True])
def test_scoring_and_training_take_the_same_route(dtype, masked):
    hidden, weight, target = random_head(50, 400, 32, dtype=dtype)
    mask = (torch.arange(50) % 3 > 0) if masked else None
    runs = []
    for train_hidden, train_weight in ((False, False), (True, False), (True, True)):
        out = linear_logprob(
            hidden.detach().requires_grad_(train_hidden),
            weight.detach().requires_grad_(train_weight),
            target,
            row_mask=mask,
            outputs=OUTPUTS,
            chunk_tokens=16,
        )
        runs.append(out)
        alone = linear_logprob(hidden, weight, target, row_mask=mask, chunk_tokens=16)
        assert torch.equal(alone.logprob, out.logprob)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("trainable_head", [False, True])
def test_a_grad_scaler_saves_small_float16_gradients(trainable_head):
    # 1 - p_y is 2e-9: below float16's smallest number, 6e-8, and above it times 2^16.
    weight = torch.tensor([[0.0], [20.0], [-1.0]], dtype=torch.float16)
    weight.requires_grad_(trainable_head)
    hidden = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    logprob = linear_logprob(hidden, weight, torch.tensor([1])).logprob
    (2**16 * logprob.sum()).backward()
    p = [math.exp(-20), math.exp(-21)]
    truth = 2**16 * (20 * p[0] + 21 * p[1])
    assert hidden.grad.item() == pytest.approx(truth, rel=2**-10)


def test_autocast_around_the_op_changes_nothing():
    hidden, weight, target = random_head(9, 40, 16, dtype=torch.float32)
    grads = []
    for enabled in (False, True):
        leaf = hidden.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = linear_logprob(leaf, weight, target, outputs=["logprob", "entropy"])
            loss = out.logprob.sum() + out.entropy.sum()
            loss.backward()
        grads.append((leaf.grad, out.logprob))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("trainable_head", [False, True])
def test_the_reference_on_a_gpu(dtype, trainable_head):
    hidden, weight, target = random_head(70, 500, 64, dtype=dtype, device="cuda")
    hidden, weight = (hidden / 4).requires_grad_(), weight.requires_grad_(trainable_head)
    leaves = [hidden] + [weight] * trainable_head
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    mask = torch.arange(70, device="cuda") % 5 > 0
    out = linear_logprob(
        hidden, weight, target, row_mask=mask, outputs=["logprob", "entropy"], chunk_tokens=32
    )
    truth = reference(*wide, target, row_mask=mask)
    torch.testing.assert_close(out.logprob.double(), truth["logprob"], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out.entropy.double(), truth["entropy"], rtol=1e-5, atol=1e-4)
    made = torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), leaves)
    expected = torch.autograd.grad(truth["logprob"].sum() + truth["entropy"].sum(), wide)
    for grad, exact in zip(made, expected, strict=False):
        error = (grad.double() - exact).norm() / exact.norm()
        assert error < 2 * GRAD_RTOL[dtype]
