"""Random loss heads, run by the kernels and by the op's float64 reference on the CPU.

``python kernel_cases.py`` with ``TRITON_INTERPRET=1`` runs them without a GPU, in small blocks.
"""

import random
import sys

import torch

from fxrl.ops.linear_logprob_checks import DIFFERENTIABLE, OUTPUTS
from fxrl.ops.linear_logprob_opaque import linear_logprob_backward, linear_logprob_forward

FORWARD = ("hidden", "weight", "target", "bias", "temperature", "row_mask", "scale", "softcap")


def make_case(seed, rows, vocab, width, dtype, device):
    """Keyword arguments that forward and backward share, and what only one of them takes."""
    draw, gen = random.Random(seed), torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    mask = torch.rand(rows, generator=gen) < draw.choice([0.0, 0.5, 0.9])
    mask = draw.choice([None, mask])
    target = torch.randint(0, vocab, (rows,), generator=gen)
    temperature = draw.choice([None, (), (1,), (rows,)])
    bias = draw.choice([None, randn(vocab)])
    scale, softcap = draw.choice([(1.0, 0.0), (0.3, 0.0), (-1.5, 30.0), (1.0, 3.0)])
    if bias is not None and vocab > 2 and scale > 0 and draw.random() < 0.3:  # a banned token
        bias[(target[0] + 1) % vocab if rows else 0] = -torch.inf
        target = torch.where(bias[target] == -torch.inf, (target + 1) % vocab, target)
    shared = {
        "hidden": (randn(rows, width) * draw.choice([0.2, 1.0, 2.0])).to(dtype),
        "weight": randn(vocab, width).to(dtype),
        "target": target if mask is None else torch.where(mask, target, -100),
        "bias": None if bias is None else bias.to(dtype),
        "temperature": None if temperature is None else 0.5 + randn(*temperature).abs(),
        "row_mask": mask,
        "scale": scale,
        "softcap": softcap,
    }
    names = [n for n in DIFFERENTIABLE if draw.random() < 0.5] or ["logprob"]
    if bias is not None and bias.isinf().any() and "mean_logit" in names:
        names = ["entropy"]  # the mean of -inf has no gradient
    grads = randn(len(names), rows) * (torch.rand(len(names), rows, generator=gen) < 0.8)
    shared = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in shared.items()}
    return shared, ",".join(names), grads.to(device), draw.choice([0, 1, 16])


def to_truth(value):
    """The same numbers as float64 on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu().double() if value.is_floating_point() else value.cpu()
    return value


def check_close(name, made, truth, rtol, atol):
    made = made.cpu().double() if made.dtype != torch.bool else made.cpu()
    scale = 1.0
    if truth.dtype != torch.bool and truth.numel():
        finite = truth[truth.isfinite()].abs()
        scale = max(1.0, finite.max().item()) if finite.numel() else 1.0
    torch.testing.assert_close(
        made, truth, rtol=rtol, atol=atol * scale, msg=lambda m: f"{name}: {m}"
    )


def check_case(forward, backward, case, tolerance, grad_tolerance):
    """Forward with every output, then the recomputing backward with every gradient."""
    shared, names, grads, chunk_tokens = case
    wide = {k: to_truth(v) for k, v in shared.items()}
    last = (",".join(OUTPUTS), names, chunk_tokens, True, True)
    made = forward(*shared.values(), *last)
    truth = linear_logprob_forward(*wide.values(), *last)
    for name, ours, theirs in zip(OUTPUTS, made[:7], truth[:7], strict=True):
        check_close(name, ours, theirs, *tolerance)
    check_close("vectors", made[7], truth[7], *grad_tolerance)
    check_close("factors", made[8], truth[8], *tolerance)

    some_bias, some_temperature = shared["bias"] is not None, shared["temperature"] is not None
    last = (names, chunk_tokens, True, True, some_bias, some_temperature)
    made = backward(grads.to(made[0].dtype), *shared.values(), *last)
    truth = linear_logprob_backward(grads.cpu().to(torch.float64), *wide.values(), *last)
    for name, ours, theirs in zip(("hidden", "weight", "bias"), made[:3], truth[:3], strict=True):
        check_close(f"d_{name}", ours, theirs, *grad_tolerance)
    rtol, atol = tolerance  # a sum over rows: errors add up where its terms cancel
    check_close("d_temperature", made[3], truth[3], rtol, atol * max(1, grads.shape[1]))


def main():
    from fxrl.kernels import linear_logprob, linear_logprob_launch

    linear_logprob_launch._BLOCK = 16  # several programs a row
    draw = random.Random(0)
    for seed in range(int(sys.argv[1])):
        rows, vocab = draw.randint(0, 5), draw.choice([1, 2, 15, 16, 17, 33, 50])
        exact = seed % 2 == 0
        dtype = torch.float64 if exact else torch.float32
        case = make_case(seed, rows, vocab, draw.randint(1, 6), dtype, "cpu")
        tolerance = (1e-9, 1e-10) if exact else (1e-5, 1e-5)
        try:
            check_case(linear_logprob.forward, linear_logprob.backward, case, tolerance, tolerance)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    print("all agree")


if __name__ == "__main__":
    main()
