"""What the kernels promise beside right numbers; the same checks with and without a GPU.

``python head_checks.py`` with ``TRITON_INTERPRET=1`` attaches the CUDA kernels to the CPU and runs
every check there. Each takes the device.
"""

import sys
from pathlib import Path

import torch

from fxrl.ops.linear_logprob import DIFFERENTIABLE, OUTPUTS, attach, linear_logprob

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
from linear_logprob_reference import random_head, reference


def leaves_of(hidden, weight, *, train_head):
    trained = (hidden, weight) if train_head else (hidden,)
    return [tensor.detach().requires_grad_() for tensor in trained]


def close(made, truth, rtol=1e-9, atol=1e-10):
    torch.testing.assert_close(made.double(), truth.double(), rtol=rtol, atol=atol)


def no_rows(device):
    for train_head in (False, True):
        for rows in (0, 3):
            hidden, weight, target = random_head(rows, 37, 5, device=device)
            leaves = leaves_of(hidden, weight, train_head=train_head)
            mask = torch.zeros(rows, dtype=torch.bool, device=device)
            out = linear_logprob(
                leaves[0], leaves[-1] if train_head else weight, target, row_mask=mask,
                outputs=OUTPUTS,
            )  # fmt: skip
            assert all(value.shape == (rows,) and not value.any() for value in out)
            total = sum(getattr(out, name).sum() for name in DIFFERENTIABLE)
            for leaf, grad in zip(leaves, torch.autograd.grad(total, leaves), strict=True):
                assert grad.shape == leaf.shape
                assert not grad.any()


def odd_sizes(device):
    for rows, vocab, width in ((1, 1, 1), (2, 2, 3), (3, 33, 1), (2, 63, 9)):
        hidden, weight, target = random_head(rows, vocab, width, device=device, seed=vocab)
        compare((hidden, weight, target), {"softcap": 4.0})


def strided_inputs(device):
    """Every tensor argument as a view whose memory is not in its own order."""
    wide_hidden, wide_weight, wide_target = random_head(10, 70, 10, device=device)
    gen = torch.Generator().manual_seed(1)

    def per_row(*shape):
        return torch.rand(shape, generator=gen, dtype=torch.float64).to(device)

    hidden = wide_hidden.t().contiguous().t()[::2, 1:]
    weight = wide_weight.t().contiguous().t()[::2, 1:]
    target = (wide_target % 35)[::2]
    options = {
        "bias": per_row(35, 2)[:, 1],
        "temperature": (0.5 + per_row(5, 3))[:, 1],
        "row_mask": (torch.arange(15).to(device) % 5 > 0)[::3],
    }
    assert not any(t.is_contiguous() for t in (hidden, weight, target, *options.values()))
    compare((hidden, weight, target), options)
    options["temperature"] = (0.5 + per_row(1)).expand(5)
    compare((hidden, weight, target), options)


def compare(inputs, options):
    """Values and gradients, of a frozen and a trained head, against plain PyTorch in float64."""
    hidden, weight, target = inputs
    for train_head in (False, True):
        for names in (("logprob", "lse"), DIFFERENTIABLE):
            leaves = leaves_of(hidden, weight, train_head=train_head)
            head = (leaves[0], leaves[-1] if train_head else weight, target)
            out = linear_logprob(*head, **options, outputs=OUTPUTS, grad_outputs=names)
            truth = reference(*head, **options)
            for name in OUTPUTS:
                close(getattr(out, name), truth[name])
            # expand: an incoming gradient of stride 0, as every sum has
            made = torch.autograd.grad(sum(getattr(out, n).sum() for n in names), leaves)
            right = torch.autograd.grad(sum(truth[n].sum() for n in names), leaves)
            for ours, theirs in zip(made, right, strict=True):
                close(ours, theirs)


def grad_scaler(device):
    """1 - p_y is 2e-9: below float16's smallest number, 6e-8, and above it times 2^16."""
    weight = torch.tensor([[0.0], [20.0], [-1.0]], dtype=torch.float16, device=device)
    p = torch.tensor([-20.0, -21.0], dtype=torch.float64).exp()
    truth = 2**16 * (20 * p[0] + 21 * p[1])
    for train_head in (False, True):
        for names in (["logprob"], ["logprob", "entropy"]):
            leaves = leaves_of(torch.ones(1, 1).to(weight), weight, train_head=train_head)
            head = (leaves[0], leaves[-1], torch.tensor([1], device=device))
            out = linear_logprob(*(head if train_head else (leaves[0], weight, head[2])),
                                 outputs=names, grad_outputs=names)  # fmt: skip
            (2**16 * out.logprob.sum() + 0 * out[2].sum()).backward()
            close(leaves[0].grad, truth.to(device).reshape(1, 1), rtol=2**-10, atol=0)
            if train_head:
                others = (-(2**16) * p).to(device)
                # float16 near 2^-14 and below is subnormal: absolute steps of 2^-24
                close(leaves[1].grad[[0, 2], 0], others, rtol=2**-10, atol=2**-25)


def repeatable(device):
    """Scoring is training to the last bit, whatever is asked beside; a second run is the first."""
    some = torch.arange(2, device=device) > 0
    for dtype, mask in ((torch.float32, some), (torch.bfloat16, None), (torch.float16, some)):
        hidden, weight, target = random_head(2, 40, 8, dtype=dtype, device=device)
        check_same_bits(hidden, weight, target, row_mask=mask, softcap=9.0, chunk_tokens=1)


def check_same_bits(hidden, weight, target, **options):
    """Scoring and training give the same log-probs, and everything the same again."""

    def run(outputs, train_hidden, train_weight):
        leaves = [hidden.clone().requires_grad_(train_hidden)]
        leaves.append(weight.detach().requires_grad_(train_weight))
        out = linear_logprob(*leaves, target, outputs=outputs, **options)
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        return out, torch.autograd.grad(out.logprob.sum(), trained) if trained else ()

    scored, _ = run(["logprob"], False, False)
    for outputs in (["logprob"], ["logprob", "entropy"], OUTPUTS):
        for train in ((False, False), (True, False), (True, True)):
            out, grads = run(outputs, *train)
            assert torch.equal(out.logprob, scored.logprob)
            again, grads_again = run(outputs, *train)
            assert all(torch.equal(a, b) for a, b in zip(out, again, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))


def full_precision_products(device):
    """Where the user has switched on TF32 (or bf16 products on a CPU), the head does not use it."""
    hidden, weight, target = random_head(6, 100, 256, dtype=torch.float32, device=device)
    hidden = hidden / 4

    def run():
        results = []
        for train_head in (False, True):
            leaves = leaves_of(hidden, weight, train_head=train_head)
            head = (leaves[0], leaves[-1] if train_head else weight, target)
            logprob = linear_logprob(*head).logprob
            results += [logprob, *torch.autograd.grad(logprob.sum(), leaves)]
        return results

    before = run()
    try:
        torch.set_float32_matmul_precision("medium")
        after = run()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    truth = reference(hidden.double(), weight.double(), target)["logprob"]
    close(after[0], truth, rtol=1e-5, atol=1e-4)


def not_a_number(device):
    hidden, weight, target = random_head(3, 50, 4, dtype=torch.float32, device=device)
    weight[41, 0] = torch.nan
    for names in (["logprob"], ["logprob", "entropy"]):
        leaf = hidden.detach().requires_grad_()
        out = linear_logprob(leaf, weight, target % 40, outputs=names)
        out.logprob.sum().backward()
        assert out.logprob.isnan().all()
        assert leaf.grad.isnan().all()


def scaled_vectors(device):
    """The op on views of every layout against float64, rounded to the result's dtype."""
    gen = torch.Generator().manual_seed(0)
    for count, rows, width in ((1, 5, 33), (2, 3, 1), (2, 0, 4), (1, 2, 100)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            wide = torch.promote_types(dtype, torch.float32)
            grads = torch.randn(rows, count, generator=gen).to(device, wide).t()
            vectors = torch.randn(count, width, rows, generator=gen).to(device, dtype).mT
            made = torch.ops.fxrl.linear_logprob_scale.default(grads, vectors, dtype)
            assert made.dtype == dtype
            truth = torch.einsum("kn,knh->nh", grads.double(), vectors.double())
            # half an ulp, but the interpreter cuts bfloat16 off
            close(made, truth, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-6)


def exponentials_kept(device):
    """Values are those of scoring, bit for bit, and gradients those of what is made again."""
    for rows, vocab, width in ((0, 3, 2), (1, 1, 1), (9, 70, 5)):
        hidden, weight, target = random_head(rows, vocab, width, device=device, seed=vocab)
        upstream = torch.arange(rows, device=device, dtype=torch.float64) % 3  # some rows are 0
        made = {}
        for keep in (True, False):
            leaves = leaves_of(hidden, weight, train_head=True)
            options = {"softcap": 4.0, "keep_exponentials": keep, "chunk_tokens": 4}
            logprob = linear_logprob(*leaves, target, **options).logprob
            made[keep] = logprob, *torch.autograd.grad(logprob, leaves, upstream)
        assert torch.equal(made[True][0], made[False][0])
        for ours, theirs in zip(made[True], made[False], strict=True):
            close(ours, theirs)


CHECKS = (
    exponentials_kept,
    scaled_vectors,
    no_rows,
    odd_sizes,
    strided_inputs,
    grad_scaler,
    repeatable,
    full_precision_products,
    not_a_number,
)


def main():
    from interpreted import mend_interpreter

    from fxrl.kernels.linear_logprob import cuda as kernels

    mend_interpreter()
    kernels._BLOCK = 32  # several programs a row
    calls = []

    def counted(run):
        return lambda *arguments: calls.append(run.__name__) or run(*arguments)

    names = "forward", "backward", "scale", "keeping", "pick"
    attach("cpu", *(counted(getattr(kernels, name)) for name in names))
    beside = {scaled_vectors: {"scale"}, exponentials_kept: {"keeping", "pick"}}
    for check in CHECKS:
        calls.clear()
        check("cpu")
        expected = beside.get(check, {"forward", "backward"})
        assert expected <= {*calls}, check.__name__
    print("all agree")


if __name__ == "__main__":
    main()
