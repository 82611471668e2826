"""The Hopper route of ``fxrl::linear_logprob`` against the op's float64 reference on the CPU.

Tolerances as in ``test_linear_logprob_gpu.py``: values are float32 sums, gradients are rounded to
bf16 once as a factor of the product and once as a result.
"""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import fxrl.kernels
from fxrl.kernels.hopper import head as hopper
from fxrl.kernels.linear_logprob import cuda as kernels
from fxrl.ops.linear_logprob import linear_logprob

sys.path.insert(0, str(Path(__file__).parent))
from head_checks import check_same_bits
from kernel_cases import check_case, check_kept, make_case

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper, reason="needs an sm_90 GPU")]
VALUES, GRADIENTS = (1e-5, 1e-4), (2**-8, 2**-8)
SIZES = [
    (64, 1000, 64),
    (129, 1001, 72),
    (300, 1333, 200),
    (513, 5000, 512),
    (1000, 2049, 8),
    (256, 3000, 1000),
]


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Attached, with a record of which calls took this route."""
    assert fxrl.kernels.register()
    calls = []
    for name in ("forward", "backward", "keeping"):
        run = getattr(hopper, name)

        def recorded(*args, run=run, name=name, **options):
            calls.append(name)
            return run(*args, **options)

        monkeypatch.setattr(hopper, name, recorded)
    return calls


def random_inputs(rows, vocab, width, scale=1.0, seed=0):
    gen = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(rows, width, generator=gen, device="cuda") * scale / width**0.5
    weight = torch.randn(vocab, width, generator=gen, device="cuda")
    target = torch.randint(0, vocab, (rows,), generator=gen, device="cuda")
    return hidden.bfloat16(), weight.bfloat16(), target


def truth(hidden, weight, target):
    """Log-probs and the gradient of their sum, of confident tokens too."""
    logits, at = hidden.double() @ weight.double().t(), target[:, None]
    lse_others = logits.scatter(1, at, -torch.inf).logsumexp(1, keepdim=True)
    behind = lse_others - logits.gather(1, at)
    grad = -torch.exp(logits - lse_others) * torch.sigmoid(behind)
    grad.scatter_(1, at, torch.sigmoid(behind))
    return -torch.nn.functional.softplus(behind, threshold=1e9)[:, 0], grad @ weight.double()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients_equal_the_float64_reference(sizes, served):
    cases = [make_case(seed, *sizes, torch.bfloat16, "cuda") for seed in range(6)]
    for case in cases:
        check_case(kernels.forward, kernels.backward, case, VALUES, GRADIENTS)
        check_kept(kernels.keeping, case, VALUES, GRADIENTS)
    assert served.count("forward") == served.count("keeping") == 6
    # A bias's gradient goes the general way.
    assert served.count("backward") == sum(head.bias is None for head, *_ in cases)


@pytest.mark.parametrize("width", [64, 576])
@pytest.mark.parametrize("train_head", [False, True])
def test_several_tiles_of_rows_and_chunks_of_the_vocabulary(train_head, width, served, monkeypatch):
    from fxrl.kernels.hopper import plan

    monkeypatch.setattr(plan, "for_product", lambda *sizes: plan.TilePlan(256, 768))
    monkeypatch.setattr(plan, "for_scoring", lambda *sizes: plan.TilePlan(512, 2**20))
    monkeypatch.setattr(plan, "for_gradient", lambda *sizes: plan.TilePlan(384, 1280))
    monkeypatch.setattr(plan, "launch_rows", lambda width: 256)
    hidden, weight, target = random_inputs(1000, 3001, width, scale=3.0)
    leaves = [hidden.requires_grad_()] + [weight.requires_grad_()] * train_head
    for outputs in (["logprob"], ["logprob", "lse"], ["logprob", "entropy"]):
        out = linear_logprob(hidden, weight, target, outputs=outputs)
        upstream = torch.randn(1000, device="cuda")
        total = sum((getattr(out, name) * upstream).sum() for name in outputs)
        made = torch.autograd.grad(total, leaves)
        wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
        logps = torch.log_softmax(wide[0] @ wide[1].t(), -1)
        values = {
            "logprob": logps.gather(1, target[:, None])[:, 0],
            "lse": (wide[0] @ wide[1].t()).logsumexp(-1),
            "entropy": -(logps.exp() * logps).sum(-1),
        }
        right = torch.autograd.grad(sum((values[n] * upstream).sum() for n in outputs), wide)
        for name in outputs:
            torch.testing.assert_close(
                getattr(out, name).double(), values[name], rtol=1e-5, atol=1e-4
            )
        for ours, theirs in zip(made, right, strict=False):
            assert (ours.double() - theirs).norm() < 2**-8 * theirs.norm()
    assert "forward" in served


def test_scoring_and_training_are_bitwise_equal_and_repeatable(served):
    hidden, weight, target = random_inputs(700, 30011, 128, scale=4.0)
    check_same_bits(hidden, weight, target, softcap=20.0)
    assert "backward" in served


def test_a_target_far_below_the_maximum_goes_the_general_way():
    """Exponentials relative to such a target's logit would overflow."""
    hidden, weight, target = random_inputs(200, 2000, 64, scale=1.0)
    hidden[::3] *= 64  # logits of +-200: targets up to 300 nats below the maximum
    right, grad = truth(hidden, weight, target)
    assert right.min() < -100
    leaf = hidden.requires_grad_()
    logprob = linear_logprob(leaf, weight, target).logprob
    (made,) = torch.autograd.grad(logprob.sum(), leaf)
    torch.testing.assert_close(logprob.double(), right, rtol=1e-5, atol=1e-4)
    assert (made.double() - grad).norm() < 2**-8 * grad.norm()


def test_confident_tokens_keep_their_log_prob_and_gradient():
    hidden, weight, target = random_inputs(128, 1500, 512)
    rows = weight[target].float()
    lift = torch.linspace(8, 55, 128, device="cuda")[:, None]
    hidden = (hidden.float() + lift * rows / rows.square().sum(1, True)).bfloat16()
    right, grad = truth(hidden, weight, target)
    assert -1e-12 < right.max() < -1e-20
    leaf = hidden.requires_grad_()
    logprob = linear_logprob(leaf, weight, target).logprob
    (made,) = torch.autograd.grad(logprob.sum(), leaf)
    torch.testing.assert_close(logprob.double(), right, rtol=1e-4, atol=0)
    assert ((made.double() - grad).norm(dim=1) / grad.norm(dim=1)).max() < 2**-7


@pytest.mark.parametrize("where", ["head", "head of a head with bias", "bias"])
def test_a_nan_is_not_hidden(where):
    hidden, weight, target = random_inputs(100, 3000, 64)
    bias = None if where == "head" else torch.zeros(3000, device="cuda", dtype=torch.bfloat16)
    target %= 2000
    if bias is not None and where == "bias":
        bias[2500] = torch.nan
    else:
        weight[2500, 0] = torch.nan
    out = linear_logprob(hidden.requires_grad_(), weight, target, bias=bias)
    out.logprob.sum().backward()
    assert out.logprob.isnan().all()
    assert hidden.grad.isnan().all()


def test_views_are_read_as_they_lie():
    hidden, weight, target = random_inputs(300, 1000, 64)
    right, grad = truth(hidden, weight, target)
    for view in (
        torch.cat([hidden, hidden], 1)[:, 3:67].copy_(hidden),  # rows not 16 bytes aligned
        hidden.t().contiguous().t(),
        torch.stack([hidden, hidden], 1)[:, 0],
    ):
        leaf = view.detach().requires_grad_()
        logprob = linear_logprob(leaf, weight, target).logprob
        (made,) = torch.autograd.grad(logprob.sum(), leaf)
        torch.testing.assert_close(logprob.double(), right, rtol=1e-5, atol=1e-4)
        assert (made.double() - grad).norm() < 2**-8 * grad.norm()


def test_rows_of_a_head_of_more_than_2_to_31_numbers(served):
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    hidden, weight, target = random_inputs(64, 2**18 + 40, 8192, scale=4.0)
    target[:3] = torch.tensor([0, 2**18 + 39, 2**18], device="cuda")
    right, grad = zip(
        *(truth(h[None], weight, t[None]) for h, t in zip(hidden[:3], target[:3], strict=True)),
        strict=True,
    )
    leaf = hidden.requires_grad_()
    logprob = linear_logprob(leaf, weight, target).logprob
    (made,) = torch.autograd.grad(logprob.sum(), leaf)
    torch.testing.assert_close(logprob[:3].double(), torch.cat(right), rtol=1e-5, atol=1e-4)
    assert (made[:3].double() - torch.cat(grad)).norm() < 2**-8 * torch.cat(grad).norm()
    assert served == ["forward"]


def test_more_than_2_to_31_logits(served):
    rows, vocab = 2**15 + 300, 2**16 + 8
    hidden, weight, target = random_inputs(rows, vocab, 64, scale=4.0)
    leaf = hidden.requires_grad_()
    logprob = linear_logprob(leaf, weight, target).logprob
    (made,) = torch.autograd.grad(logprob.sum(), leaf)
    right, grad = truth(hidden[-50:].detach(), weight, target[-50:])
    torch.testing.assert_close(logprob[-50:].double(), right, rtol=1e-5, atol=1e-4)
    assert (made[-50:].double() - grad).norm() < 2**-8 * grad.norm()
    assert served == ["forward"]


@pytest.mark.parametrize("near", [True, False])
def test_a_softcap_is_exact_near_zero_and_at_the_cap(near, served):
    hidden, weight, target = random_inputs(300, 3001, 128, scale=1.0)
    hidden[::7] *= 0.5 if near else 20.0
    out = linear_logprob(hidden.requires_grad_(), weight, target, softcap=10.0)
    (made,) = torch.autograd.grad(out.logprob.sum(), hidden)
    exact = hidden.detach().double().requires_grad_()
    logits = exact @ weight.double().t()
    assert (logits.abs().max() < 7.0) == near
    logps = torch.log_softmax(10.0 * torch.tanh(logits / 10.0), -1).gather(1, target[:, None])
    (right,) = torch.autograd.grad(logps.sum(), exact)
    torch.testing.assert_close(out.logprob.double(), logps[:, 0], rtol=1e-5, atol=2e-5)
    assert (made.double() - right).norm() <= 2**-8 * right.norm()
    alone = linear_logprob(hidden[1:65], weight, target[1:65], softcap=10.0).logprob
    assert torch.equal(alone, out.logprob[1:65])  # other rows beside it, the same bits
    assert "forward" in served
