"""``linear_logprob(keep_exponentials=True)`` in float64 against plain PyTorch."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from fxrl.errors import FxrlError
from fxrl.ops.linear_logprob import kept, linear_logprob

sys.path.insert(0, str(Path(__file__).parent))
from linear_logprob_reference import OUTPUTS, drawn_head, random_head, reference

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
KEEPING = torch.ops.fxrl.linear_logprob_keeping.default


def called(run):
    """The opaque ops that a call and its backward run."""
    seen = []

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "fxrl":
                seen.append(op._opname.removeprefix("linear_logprob_"))
            return op(*args, **(kwargs or {}))

    with Noted():
        run()
    return seen


@st.composite
def problems(draw):
    args, options, gen = drawn_head(draw, most_entries=20)
    options |= {
        "chunk_tokens": draw(st.sampled_from([0, 1, 3])),
        "outputs": draw(st.lists(st.sampled_from(OUTPUTS), unique=True).map(with_logprob)),
        "grad_outputs": ["logprob"],
    }
    num_rows = len(args[2])
    upstream = torch.randn(num_rows, generator=gen, dtype=torch.float64)
    upstream *= torch.rand(num_rows, generator=gen) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return args, options, upstream, draw(st.booleans()), draw(st.booleans())


def with_logprob(names):
    return ["logprob", *(name for name in names if name != "logprob")]


@settings(max_examples=60, deadline=None)
@given(problems())
def test_values_and_gradients_equal_plain_pytorch(problem):
    (hidden, weight, target), options, upstream, both, few_bytes = problem
    trained = [weight.requires_grad_()] + [hidden.requires_grad_()] * both
    picked = kept.PICKED_BYTES
    kept.PICKED_BYTES = 64 if few_bytes else picked
    try:
        fused = linear_logprob(hidden, weight, target, **options, keep_exponentials=True)
        made = torch.autograd.grad(fused.logprob, trained, upstream)
    finally:
        kept.PICKED_BYTES = picked
    told = ("outputs", "grad_outputs", "chunk_tokens")
    plain = {name: value for name, value in options.items() if name not in told}
    expected = reference(hidden, weight, target, **plain)
    for name in options["outputs"]:
        torch.testing.assert_close(getattr(fused, name), expected[name], **CLOSE)
    truth = torch.autograd.grad(expected["logprob"], trained, upstream)
    for ours, theirs in zip(made, truth, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_gradcheck():
    hidden, weight, target = random_head(4, 6, 3)

    def run(hidden, weight):
        return linear_logprob(hidden, weight, target, softcap=3.0, keep_exponentials=True).logprob

    assert gradcheck(run, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        ({}, {"weight"}),
        ({"outputs": ["lse"]}, set()),
        ({"outputs": ["logprob", "entropy"]}, set()),
        ({"temperature": torch.tensor(0.5, dtype=torch.float64, requires_grad=True)}, set()),
        ({"bias": torch.zeros(6, dtype=torch.float64, requires_grad=True)}, set()),
        ({"row_mask": torch.tensor([True, False, True, True])}, set()),
    ],
    ids=["frozen", "lse", "entropy", "temperature", "bias", "mask"],
)
def test_what_cannot_be_kept_is_made_again(options, frozen):
    hidden, weight, target = random_head(4, 6, 3)
    hidden.requires_grad_()
    weight.requires_grad_("weight" not in frozen)

    def run(keep):
        out = linear_logprob(hidden, weight, target, **options, keep_exponentials=keep)
        made = [value.sum() for value in out if value.requires_grad and value.numel()]
        return torch.autograd.grad(sum(made), hidden)

    assert called(lambda: run(True)) == called(lambda: run(False))
    assert torch.equal(*run(True), *run(False))


def test_what_is_kept_spares_the_backward_the_logits():
    hidden, weight, target = random_head(4, 6, 3)
    hidden.requires_grad_()
    weight.requires_grad_()
    saved = []

    def run():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = linear_logprob(hidden, weight, target, keep_exponentials=True)
        out.logprob.sum().backward()

    assert called(run) == ["keeping", "kept_backward"]
    assert [tuple(t.shape) for t in saved] == [(4, 3), (6, 3), (4, 6), (4,)]
    with torch.no_grad():
        assert called(lambda: linear_logprob(hidden, weight, target, keep_exponentials=True)) == [
            "forward"
        ]


def test_values_are_those_of_scoring_bit_for_bit():
    hidden, weight, target = (
        t.float() if t.is_floating_point() else t for t in random_head(9, 50, 4)
    )
    weight.requires_grad_()
    kept = linear_logprob(hidden, weight, target, outputs=OUTPUTS, grad_outputs=["logprob"],
                          keep_exponentials=True)  # fmt: skip
    with torch.no_grad():
        scored = linear_logprob(hidden, weight, target, outputs=OUTPUTS)
    assert all(map(torch.equal, kept, scored))


def test_a_banned_target_and_a_row_that_nothing_comes_in_for():
    hidden, weight, target = random_head(4, 6, 3)
    bias = torch.zeros(6, dtype=torch.float64)
    bias[target[1]] = -torch.inf
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    out = linear_logprob(hidden, weight, target, bias=bias, keep_exponentials=True)
    live = target != target[1]
    made = torch.autograd.grad(torch.where(live, out.logprob, 0).sum(), leaves)
    theirs = reference(hidden, weight, target, bias=bias)["logprob"]
    truth = torch.autograd.grad(torch.where(live, theirs, 0).sum(), leaves)
    assert out.logprob[1] == -torch.inf
    for ours, right in zip(made, truth, strict=True):
        torch.testing.assert_close(ours, right, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_as_exact_as_what_is_made_again(dtype):
    hidden, weight, target = random_head(40, 300, 16)

    def gradients(**options):
        leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
        out = linear_logprob(*leaves, target, **options).logprob
        return torch.autograd.grad(out.sum(), leaves)

    truth = [t.to(dtype).double().requires_grad_() for t in (hidden, weight)]
    right = torch.autograd.grad(reference(*truth, target)["logprob"].sum(), truth)
    again, made = gradients(), gradients(keep_exponentials=True)
    for ours, other, theirs in zip(made, again, right, strict=True):
        assert (ours.double() - theirs).norm() <= 1.2 * (other.double() - theirs).norm()


def test_a_second_derivative_is_an_error_and_not_a_zero():
    hidden, weight, target = random_head(6, 9, 4)
    out = linear_logprob(
        hidden.requires_grad_(), weight.requires_grad_(), target, keep_exponentials=True
    )
    (grad,) = torch.autograd.grad(out.logprob.sum(), hidden, create_graph=True)
    with pytest.raises(FxrlError, match="kept_backward has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("vocab", [9, 16])
def test_the_ops_are_what_they_say(vocab):
    hidden, weight, target = random_head(6, vocab, 4)
    args = (hidden.requires_grad_(), weight.requires_grad_(), target, None, None, None, 1.0, 0.0, 0)
    torch.library.opcheck(KEEPING, (*args, "logprob,entropy"))
    *_, exponentials, masses = KEEPING(*args, "logprob")
    leaves = hidden.detach(), weight.detach()
    given = torch.ones(6, dtype=torch.float64), *leaves, exponentials, masses, True
    torch.library.opcheck(torch.ops.fxrl.linear_logprob_kept_backward.default, given)
