"""The Hopper route without its GEMM: a stand-in in plain PyTorch writes what the epilogue would.

``python hopper_cases.py`` with ``TRITON_INTERPRET=1`` runs the loops, the Triton kernels around the
products and the backward's coefficients on the CPU, against the op's float64 reference.
"""

import math
import random
import sys
from pathlib import Path

import torch

from fxrl.kernels.hopper import head, module, plan
from fxrl.kernels.hopper.head import RowTile
from fxrl.ops.linear_logprob.arguments import (
    OUTPUTS,
    BackwardArguments,
    ForwardArguments,
    LossHead,
    RowValues,
)
from fxrl.ops.linear_logprob.reference import reference_backward, reference_forward

sys.path.insert(0, str(Path(__file__).parent))
from interpreted import mend_interpreter
from kernel_cases import check_close, check_kept, make_case, to_truth

EXCLUDED = -1e30
VALUES, GRADIENTS = (1e-5, 2e-5), (2**-8, 2**-8)


def stand_in(tile, mode, vocab, per_row, out, weighted=False):
    """What ``loss_head.cu`` writes, by its own definitions."""
    scratch, lossy = tile.call, tile.call.head
    x = tile.hidden.float() @ lossy.weight[vocab].float().t()
    biased = lossy.bias is not None
    if biased:
        x = x + lossy.bias[vocab].float()
    scale = tile.row_scale[:, None]
    t = (torch.tanh(x * (lossy.scale / lossy.softcap)) if lossy.softcap else x) * scale
    t = t.clamp(min=EXCLUDED) if biased else t  # clamp keeps a NaN
    slope = 1 - (t / scale) ** 2 if lossy.softcap else torch.ones_like(t)
    at = tile.target[:, None] - vocab.start
    inside = (at >= 0) & (at < t.shape[1])
    at = at.clamp(0, t.shape[1] - 1)
    partial, info = scratch.partial(tile.count), scratch.target_info(tile.count)
    blocks = range(vocab.start // 256, -(-vocab.stop // 256))
    if mode == module.GRADIENT:
        log_sum, a, b, c, d, at_target, log_p_target = per_row[:7, :, None]
        log_p = t - log_sum
        made = torch.exp2(log_p) * (a + b * log_p + c * torch.exp2(log_p)) + d
        made = torch.where(inside, made.scatter(1, at, at_target), made)
        log_p = torch.where(inside, log_p.scatter(1, at, log_p_target), log_p)
        out.copy_(made * slope)
        if weighted:
            for k, piece in zip(blocks, (made * log_p).split(256, 1), strict=True):
                partial[0, k] = piece.sum(1)
        return
    mean = t
    t_y = t.gather(1, at)
    before = torch.arange(t.shape[1]) < at
    same_block = (torch.arange(t.shape[1]) + vocab.start) // 256 == (at + vocab.start) // 256
    beaten = ((t >= t_y) & before & same_block).any(1, keepdim=True)
    beaten |= ((t > t_y) & same_block).any(1, keepdim=True)
    rows = inside[:, 0]
    info[0, rows], info[1, rows] = t_y[rows, 0], beaten[rows, 0].float()
    t = torch.where(inside, t.scatter(1, at, EXCLUDED), t)
    pieces = zip(blocks, t.split(256, 1), mean.split(256, 1), strict=True)
    for k, piece, whole in pieces:
        largest = piece.amax(1)
        below = piece - largest.ceil().clamp(min=-1e29)[:, None]
        e = torch.exp2(below)
        made = (largest, e.sum(1), (e * below).sum(1), (e * e).sum(1), whole.sum(1))
        for s in range(scratch.statistics):
            partial[s, k] = made[s]
    if mode == module.EXPONENTIALS:
        stored = torch.exp2(t - per_row[:, None]) * slope
        out.copy_(torch.where(t == EXCLUDED, 0, stored))


def add_product(total, a, b, *, begin):
    made = a.float() @ b.float()
    total.copy_(made if begin else total + made)


def install(rows, vocab):
    """Small tiles, so that every loop turns more than once."""
    RowTile._launch = stand_in
    head.add_product = add_product
    module.multiprocessors = lambda device: 132
    plan.for_product = lambda *sizes: plan.TilePlan(rows, vocab)
    plan.for_scoring = lambda *sizes: plan.TilePlan(rows, 2**20)
    plan.for_gradient = lambda *sizes: plan.TilePlan(2 * rows, 1024)
    plan.launch_rows = lambda width: rows


def check_head(seed, draw):
    rows, vocab = draw.randint(1, 9), draw.choice([1000, 1100, 1537])
    case = make_case(seed, rows, vocab, draw.choice([8, 13]), torch.bfloat16, "cpu")
    narrow, names, grads = case
    narrow = narrow._replace(chunk_tokens=0)
    wide = LossHead(*(to_truth(v) for v in narrow))
    saved = tuple(n for n in names if n in ("logprob", "lse"))
    for outputs, save in ((OUTPUTS, False), (("logprob", "lse"), True), (OUTPUTS, True)):
        save = save and bool(saved)
        options = (outputs, saved if save else (), save)
        made = head.forward(ForwardArguments(narrow, *options))
        right = reference_forward(ForwardArguments(wide, *options))
        for name in outputs:
            check_close(name, made.values[name], right.values[name], *VALUES)
        check_close("vectors", made.vectors, right.vectors, *GRADIENTS)

    right = reference_forward(ForwardArguments(wide, OUTPUTS, (), False))
    values = RowValues(*(right.values[n] for n in RowValues._fields))
    has_temperature = narrow.temperature is not None
    for want_weight in (False, True):
        wants = (True, want_weight, False, has_temperature)
        theirs = reference_backward(BackwardArguments(grads, wide, values, names, *wants))
        small = RowValues(*(v.float() for v in values))
        ours = head.backward(BackwardArguments(grads.float(), narrow, small, names, *wants))
        check_close("d_hidden", ours.hidden, theirs.hidden, *GRADIENTS)
        check_close("d_temperature", ours.temperature, theirs.temperature, 1e-4, 1e-4 * rows)
        if want_weight:
            check_close("d_weight", ours.weight, theirs.weight, *GRADIENTS)
    check_kept(head.keeping, case, VALUES, GRADIENTS)


def check_banned_target():
    """A target that a bias of -inf bans: log-prob -inf, and no NaN in any gradient."""
    gen = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, generator=gen).bfloat16() for n in (5, 1000))
    target, bias = torch.randint(0, 1000, (5,), generator=gen), torch.zeros(1000)
    bias[target[1]] = -torch.inf
    narrow = LossHead(hidden, weight, target, bias, torch.tensor(0.7))
    made = head.forward(ForwardArguments(narrow, OUTPUTS, ("logprob",), True))
    assert made.values["logprob"].isinf().tolist() == [False, True, False, False, False]
    assert made.vectors.isfinite().all()
    values = RowValues(*(made.values[n] for n in RowValues._fields))
    wide, exact = (type(v)(*map(to_truth, v)) for v in (narrow, values))
    for names in (("logprob",), ("entropy", "sum_p2")):
        grads, wants = torch.ones(len(names), 5), (True, False, False, True)
        ours = head.backward(BackwardArguments(grads, narrow, values, names, *wants))
        theirs = reference_backward(BackwardArguments(grads.double(), wide, exact, names, *wants))
        check_close("d_hidden", ours.hidden, theirs.hidden, *GRADIENTS)
        check_close("d_temperature", ours.temperature, theirs.temperature, 1e-4, 1e-4)


def check_nan():
    """A NaN in the head or in a bias shows in every value of the rows that read it."""
    gen = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 8, generator=gen).bfloat16() for n in (5, 1000))
    target = torch.randint(0, 900, (5,), generator=gen)
    broken = weight.clone()
    broken[950, 0] = torch.nan
    bias = torch.zeros(1000)
    bias[950] = torch.nan
    for case in ((broken, None), (broken, torch.zeros(1000)), (weight, bias)):
        narrow = LossHead(hidden, case[0], target, case[1])
        arguments = ForwardArguments(narrow, ("logprob", "lse"), ("logprob",), True)
        made = head.forward(arguments)
        assert made.values["logprob"].isnan().all()
        assert made.vectors.isnan().all()


def check_misfits():
    """Rows whose target is far below the maximum are made again, the rest is not."""
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 16, generator=gen).bfloat16()
    hidden[::2] *= 200
    weight = torch.randn(1200, 16, generator=gen).bfloat16()
    target = torch.randint(0, 1200, (6,), generator=gen)
    for bias, softcap in ((None, 0.0), (torch.randn(1200, generator=gen), 0.0), (None, 250.0)):
        narrow = LossHead(hidden, weight, target, bias, softcap=softcap)
        options = ("logprob", "lse"), ("logprob", "lse"), True
        made = head.forward(ForwardArguments(narrow, *options))
        wide = LossHead(*(to_truth(v) for v in narrow))
        right = reference_forward(ForwardArguments(wide, *options))
        x = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
        t = (softcap * torch.tanh(x / softcap) if softcap else x) / math.log(2)
        gap = t.scatter(1, target[:, None], -torch.inf).amax(1).ceil() - (
            t.gather(1, target[:, None])[:, 0].ceil() + 20
        )
        assert 0 < (gap.abs() > 90).sum() < 6
        check_close("vectors", made.vectors, right.vectors, *GRADIENTS)
        check_kept(head.keeping, (narrow, None, torch.randn(1, 6)), VALUES, GRADIENTS)


def main():
    mend_interpreter()
    draw = random.Random(0)
    for seed in range(int(sys.argv[1])):
        install(draw.choice([2, 4, 16]), draw.choice([256, 512, 2**20]))
        try:
            check_head(seed, draw)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    install(4, 512)
    check_misfits()
    check_banned_target()
    check_nan()
    print("all agree")


if __name__ == "__main__":
    main()
