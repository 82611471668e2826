"""A loss head and a table of 8 and 4 bits on a GPU: a piece is widened and multiplied in bf16."""

import pytest
import torch

from fxrl.kernels import register
from fxrl.ops import piecewise_head, sharded
from fxrl.ops.dequantized import dequantized_rows, quantized, widened
from fxrl.ops.linear_logprob import linear_logprob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
KINDS = [("fp8", "row"), ("fp8", "block"), ("fp8", "tensor"), ("nf4", "row"), ("int4", "row")]


@pytest.mark.parametrize(("format", "recipe"), KINDS)
def test_pieces_on_a_gpu_are_the_head_in_full(format, recipe, monkeypatch):
    monkeypatch.setattr(sharded, "WIDENED", 8 * 2**20)
    register()
    torch.manual_seed(0)
    weight = (torch.randn(20011, 1024, device="cuda") / 32).bfloat16()
    hidden = torch.randn(300, 1024, device="cuda").bfloat16()
    target = torch.randint(0, 20011, (300,), device="cuda")
    hidden[:50] = 8 * weight[target[:50]]  # confident tokens
    values, scale = quantized(weight, format, recipe)
    full = widened((values, scale), format, torch.bfloat16)
    ids = torch.randint(0, 20011, (3, 77), device="cuda")
    assert dequantized_rows(ids, [values, scale], format, torch.bfloat16).equal(full[ids])
    held = piecewise_head.Held(scale, format, 20011, torch.bfloat16)
    assert held.piece_rows(values) < 20011
    exact = hidden.float().requires_grad_()
    logps = torch.log_softmax(exact @ full.float().t(), -1).gather(1, target[:, None])[:, 0]
    weights = torch.randn(300, device="cuda")
    (truth,) = torch.autograd.grad((logps * weights).sum(), exact)
    errors = []
    for head, options in ((full, None), (values, held._asdict())):
        rows = hidden.clone().requires_grad_()
        if options is None:
            made = linear_logprob(rows, head, target).logprob
        else:
            made = torch.ops.fxrl.piecewise_logprob(rows, head, target, **options)[0]
        torch.testing.assert_close(made, logps, rtol=1e-5, atol=2e-5)
        (grad,) = torch.autograd.grad((made * weights).sum(), rows)
        errors.append(float((grad.float() - truth).norm() / truth.norm()))
    assert errors[1] < 1.5 * errors[0]
