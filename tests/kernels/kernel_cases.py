"""Random loss heads, run by the kernels and by the op's float64 reference on the CPU.

``python kernel_cases.py`` with ``TRITON_INTERPRET=1`` runs them without a GPU, in small blocks.
"""

import random
import sys
from dataclasses import replace
from functools import partial

import torch

from fxrl.ops.linear_logprob.arguments import (
    DIFFERENTIABLE,
    MADE_IN_FORWARD,
    OUTPUTS,
    BackwardArguments,
    ForwardArguments,
    LossHead,
    RowValues,
)
from fxrl.ops.linear_logprob.kept import (
    kept_backward,
    linear_logprob_kept_backward,
    reference_keeping,
)
from fxrl.ops.linear_logprob.reference import reference_backward, reference_forward

KERNELS = (
    "partial_statistics",
    "combine_statistics",
    "probabilities",
    "gradient",
    "scaled_sum",
)


def make_case(seed, rows, vocab, width, dtype, device):
    """A head, the differentiated outputs of its recomputing backward, their incoming scalars."""
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
    head = LossHead(**shared, chunk_tokens=draw.choice([0, 1, 16]))
    return head, tuple(names), grads.to(device)


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
    """Forward with every output and vectors, then the backward with every gradient."""
    head, names, grads = case
    wide = LossHead(*map(to_truth, head))
    made = forward(ForwardArguments(head, OUTPUTS, MADE_IN_FORWARD, True))
    truth = reference_forward(ForwardArguments(wide, OUTPUTS, MADE_IN_FORWARD, True))
    for name in OUTPUTS:
        check_close(name, made.values[name], truth.values[name], *tolerance)
    check_close("vectors", made.vectors, truth.vectors, *grad_tolerance)

    def gradients(run, head, grads, result):
        values = RowValues(*(result.values[name] for name in RowValues._fields))
        wants = (True, True, head.bias is not None, head.temperature is not None)
        arguments = BackwardArguments(grads.to(head.dtype), head, values, names, *wants)
        return run(arguments).pack(arguments)

    made = gradients(backward, head, grads, made)
    truth = gradients(reference_backward, wide, grads.cpu(), truth)
    for name, ours, theirs in zip(("hidden", "weight", "bias"), made[:3], truth[:3], strict=True):
        check_close(f"d_{name}", ours, theirs, *grad_tolerance)
    rtol, atol = tolerance  # a sum over rows: errors add up where its terms cancel
    check_close("d_temperature", made[3], truth[3], rtol, atol * max(1, grads.shape[1]))


def check_kept(keeping, case, tolerance, grad_tolerance, backward=linear_logprob_kept_backward):
    """The forward that keeps exponentials, all of whose rows count, and the gradients of these."""
    head, _, grads = case
    head = head._replace(row_mask=None, target=head.target.clamp(min=0))
    wide = LossHead(*map(to_truth, head))
    asked = ForwardArguments(head, ("logprob", "entropy"), ("logprob",), False)
    values, *kept = keeping(asked)
    truth, *exact = reference_keeping(replace(asked, head=wide))
    for name in asked.outputs:
        check_close(name, values[name], truth[name], *tolerance)
    for incoming in (grads[0], torch.ones_like(grads[0])):  # rows picked out, and all of them
        incoming = incoming.to(head.dtype)
        made = backward(incoming, head.hidden, head.weight, *kept, True)
        right = linear_logprob_kept_backward(
            to_truth(incoming), wide.hidden, wide.weight, *exact, True
        )
        rtol, atol = grad_tolerance  # both factors of dW are rounded
        for name, ours, theirs in zip(("d_hidden", "d_weight"), made, right, strict=True):
            check_close(name, ours, theirs, rtol, 2 * atol)


def check_ahead(kernels, case):
    """A call ahead launches what the step's own does, but for gradients of weights."""
    head, names, grads = case
    mask = None if head.row_mask is None else torch.ones_like(head.row_mask)
    fewer = head._replace(hidden=torch.zeros_like(head.hidden), row_mask=mask)
    head, fewer = (one._replace(hidden=one.hidden.requires_grad_()) for one in (head, fewer))
    fewer = fewer._replace(target=torch.zeros_like(head.target))
    for save in (True, False):
        named = MADE_IN_FORWARD if save else names
        asked = ForwardArguments(head, OUTPUTS, named, save)

        def itself(asked=asked, save=save):
            result, incoming = kernels.forward(asked), grads.to(head.dtype)
            if save:
                incoming = torch.ones(2, head.hidden.shape[0], dtype=head.dtype)
                return kernels.scale(incoming, result.vectors, head.hidden.dtype)
            values = RowValues(*(result.values[name] for name in RowValues._fields))
            wants = True, False, False, False
            return kernels.backward(BackwardArguments(incoming, head, values, names, *wants))

        with torch.no_grad():
            wanted = launched_by(kernels, itself)
        made = launched_by(
            kernels, lambda asked=asked: kernels.run_both(replace(asked, head=fewer))
        )
        assert made >= wanted, wanted - made


def launched_by(kernels, run):
    """The kernels, by name, that were launched; with the constants that they were compiled for."""
    launched = set()

    class Noted:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(kernels, name)

        def __getitem__(self, grid):
            def launch(*args, **options):
                constants = {k: v for k, v in options.items() if isinstance(v, (int, float, bool))}
                launched.add((self.name, *sorted(constants.items())))
                return self.kernel[grid](*args, **options)

            return launch

    noted = {name: Noted(name) for name in KERNELS}
    try:
        for name, one in noted.items():
            setattr(kernels, name, one)
        run()
    finally:
        for name, one in noted.items():
            setattr(kernels, name, one.kernel)
    return launched


def main():
    from interpreted import mend_interpreter

    from fxrl.kernels.linear_logprob import cuda

    mend_interpreter()
    cuda._BLOCK = 16  # several programs a row
    draw = random.Random(0)
    for seed in range(int(sys.argv[1])):
        rows, vocab = draw.randint(0, 5), draw.choice([1, 2, 15, 16, 17, 33, 50])
        exact = seed % 2 == 0
        dtype = torch.float64 if exact else torch.float32
        case = make_case(seed, rows, vocab, draw.randint(1, 6), dtype, "cpu")
        tolerance = (1e-9, 1e-10) if exact else (1e-5, 1e-5)
        try:
            check_case(cuda.forward, cuda.backward, case, tolerance, tolerance)
            check_kept(cuda.keeping, case, tolerance, tolerance, partial(kept_backward, cuda.pick))
            if seed % 4 == 0:
                check_ahead(cuda, case)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    print("all agree")


if __name__ == "__main__":
    main()
