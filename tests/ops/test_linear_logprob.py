"""``fxrl::linear_logprob`` in float64 against plain PyTorch: every option, every gradient."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from fxrl.errors import FxrlError
from fxrl.ops.linear_logprob import LinearLogprobError, TargetError, linear_logprob

sys.path.insert(0, str(Path(__file__).parent))
from linear_logprob_reference import DIFFERENTIABLE, OUTPUTS, drawn_head, random_head, reference

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


@st.composite
def problems(draw):
    (hidden, weight, target), options, gen = drawn_head(draw, most_entries=12)
    if draw(st.booleans()):
        mask = torch.rand(len(target), generator=gen) < draw(st.sampled_from([0.0, 0.5, 0.9]))
        options["row_mask"] = mask
        target = torch.where(mask, target, -100)
    tensors = [hidden, weight, *(options[k] for k in ("bias", "temperature") if k in options)]
    trained = [t for t in tensors if draw(st.booleans())] or [hidden]
    for tensor in trained:
        tensor.requires_grad_()
    outputs = draw(st.lists(st.sampled_from(OUTPUTS), min_size=1, unique=True))
    return (hidden, weight, target), options, outputs, trained, draw(st.sampled_from([0, 1, 3]))


@settings(max_examples=80, deadline=None)
@given(problems())
def test_values_and_gradients_equal_plain_pytorch(problem):
    args, options, outputs, trained, chunk_tokens = problem
    fused = linear_logprob(*args, **options, outputs=outputs, chunk_tokens=chunk_tokens)
    expected = reference(*args, **options)
    for name in OUTPUTS:
        if name in outputs:
            torch.testing.assert_close(getattr(fused, name), expected[name], **CLOSE)
        else:
            assert getattr(fused, name).shape == (0,)
    asked = [name for name in DIFFERENTIABLE if name in outputs]
    if not asked:
        return
    gen = torch.Generator().manual_seed(7)
    upstream = [torch.randn(args[2].shape, generator=gen, dtype=torch.float64) for _ in asked]
    made = torch.autograd.grad([getattr(fused, n) for n in asked], trained, upstream)
    # The reference's unused tensors (a temperature that no row reads) have no gradient: zero.
    truth = torch.autograd.grad(
        [expected[n] for n in asked], trained, upstream, allow_unused=True, materialize_grads=True
    )
    for ours, theirs in zip(made, truth, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("trainable_head", [False, True])
def test_gradcheck(name, trainable_head):
    hidden, weight, target = random_head(4, 6, 3)
    temperature = torch.tensor([0.7, 1.0, 1.3, 2.0], dtype=torch.float64, requires_grad=True)
    bias = torch.linspace(-1, 1, 6, dtype=torch.float64)
    tensors = (hidden.requires_grad_(), temperature)
    if trainable_head:
        tensors = (*tensors, weight.requires_grad_(), bias.requires_grad_())

    def run(*_):
        out = linear_logprob(
            hidden,
            weight,
            target,
            bias=bias,
            temperature=temperature,
            softcap=3.0,
            outputs=[name],
            chunk_tokens=3,
        )
        return getattr(out, name)

    assert gradcheck(run, tensors)


def saved_by(outputs, **options):
    """Shapes that a frozen head keeps for its backward, and whether it keeps its input."""
    hidden, weight, target = random_head(4, 6, 3)
    hidden.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_logprob(hidden, weight, target, outputs=outputs, **options)
    shapes = sorted(tuple(tensor.shape) for tensor in saved)
    return shapes, any(tensor.data_ptr() == hidden.data_ptr() for tensor in saved)


@pytest.mark.parametrize("outputs", [["logprob"], ["lse"], ["logprob", "lse"]], ids=str)
def test_a_frozen_head_keeps_vectors_and_not_the_inputs(outputs):
    assert saved_by(outputs) == ([(len(outputs), 4, 3)], False)
    cold = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    shapes, keeps_input = saved_by(outputs, temperature=cold)
    assert shapes == [(), (len(outputs), 4, 3), (4,), (4,), (4,)]
    assert not keeps_input


@pytest.mark.parametrize("name", ["entropy", "sum_p2", "mean_logit"])
def test_other_differentiated_outputs_are_recomputed(name):
    assert saved_by(["logprob", name], grad_outputs=["logprob"])[0] == [(1, 4, 3)]
    shapes, keeps_input = saved_by(["logprob", name])
    assert keeps_input
    assert (2, 4, 3) not in shapes


def test_the_backward_reads_what_the_forward_computed_and_hides_it():
    hidden, weight, target = random_head(4, 6, 3)
    seen = {}

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            if "linear_logprob" in str(op):
                seen[str(op).split(".")[1]] = (args, result)
            return result

    mask = torch.tensor([True, False, True, True])
    with Recorder():
        out = linear_logprob(
            hidden.requires_grad_(), weight, target, row_mask=mask, outputs=["entropy"]
        )
        out.entropy.sum().backward()
    values = dict(zip(OUTPUTS, seen["linear_logprob_forward"][1], strict=False))
    given = seen["linear_logprob_backward"][0][10:14]
    for name, tensor in zip(("logprob", "lse", "entropy"), given, strict=False):
        assert torch.equal(tensor, values[name])
        assert tensor[1] == 0
    assert given[3] is None
    assert out.logprob.shape == out.lse.shape == (0,)


def test_outputs_left_out_of_grad_outputs_are_detached():
    hidden, weight, target = random_head(4, 6, 3)
    hidden.requires_grad_()
    outputs = ("logprob", "entropy", "max_logit", "argmax_hit")
    out = linear_logprob(hidden, weight, target, outputs=outputs, grad_outputs=["logprob"])
    assert out.logprob.requires_grad
    assert not out.entropy.requires_grad
    assert not out.max_logit.requires_grad
    out.logprob.sum().backward()
    truth = torch.autograd.grad(reference(hidden, weight, target)["logprob"].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, truth, **CLOSE)


@pytest.mark.parametrize("trainable_head", [False, True])
def test_double_use_and_expanded_and_strided_gradients(trainable_head):
    hidden, weight, target = random_head(6, 9, 4)
    leaves = [hidden.requires_grad_()]
    if trainable_head:
        leaves.append(weight.requires_grad_())

    def loss(logprob):
        ratio, strided = logprob.exp(), logprob.expand(3, 6).t()
        return logprob.sum() + (ratio * logprob.detach()).mean() + strided[:, ::2].sum()

    fused = torch.autograd.grad(loss(linear_logprob(hidden, weight, target).logprob), leaves)
    plain = torch.autograd.grad(loss(reference(hidden, weight, target)["logprob"]), leaves)
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_a_second_derivative_is_an_error_and_not_a_zero():
    hidden, weight, target = random_head(6, 9, 4)
    logprob = linear_logprob(hidden.requires_grad_(), weight.requires_grad_(), target).logprob
    (grad,) = torch.autograd.grad(logprob.sum(), hidden, create_graph=True)
    with pytest.raises(FxrlError, match="linear_logprob_backward has no second derivative"):
        grad.sum().backward()


def test_a_second_derivative_of_a_frozen_head_is_refused_at_once():
    hidden, weight, target = random_head(6, 9, 4)
    logprob = linear_logprob(hidden.requires_grad_(), weight, target).logprob
    with pytest.raises(LinearLogprobError, match="second derivative"):
        torch.autograd.grad(logprob.sum(), hidden, create_graph=True)


def test_strided_hidden_and_tied_weight_views():
    base_hidden, base_weight, target = random_head(10, 8, 6)
    hidden = base_hidden.t().contiguous().t()[::2].requires_grad_()
    weight = base_weight.t().contiguous().t().requires_grad_()
    assert not hidden.is_contiguous()
    assert not weight.is_contiguous()
    ours = linear_logprob(hidden, weight, target[::2], chunk_tokens=2).logprob
    theirs = reference(hidden, weight, target[::2])["logprob"]
    torch.testing.assert_close(ours, theirs, **CLOSE)
    for left, right in zip(
        torch.autograd.grad(ours.sum(), [hidden, weight]),
        torch.autograd.grad(theirs.sum(), [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(left, right, **CLOSE)


@pytest.mark.parametrize("trainable_head", [False, True])
@pytest.mark.parametrize("num_rows", [0, 5])
def test_no_rows_and_all_masked_are_a_differentiable_zero(num_rows, trainable_head):
    hidden, weight, _ = random_head(num_rows, 6, 3)
    hidden.requires_grad_()
    weight.requires_grad_(trainable_head)
    target = torch.full((num_rows,), -100)
    mask = torch.zeros(num_rows, dtype=torch.bool)
    out = linear_logprob(hidden, weight, target, row_mask=mask, outputs=OUTPUTS[:3])
    loss = sum(value.sum() for value in out[:3])
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    if trainable_head:
        assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_masked_row_is_never_read():
    hidden, weight, target = random_head(5, 6, 3)
    mask = torch.tensor([True, False, True, True, False])
    hidden[~mask] = torch.nan
    hidden.requires_grad_()
    out = linear_logprob(hidden, weight, target, row_mask=mask, outputs=OUTPUTS)
    assert all(torch.isfinite(value.double()).all() for value in out)
    out.logprob.sum().backward()
    assert torch.equal(hidden.grad[~mask], torch.zeros(2, 3, dtype=torch.float64))


def test_a_banned_token_has_no_probability_and_no_nan():
    hidden, weight, target = random_head(5, 6, 3)
    bias = torch.zeros(6, dtype=torch.float64)
    bias[2] = -torch.inf
    target = torch.where(target == 2, 0, target)
    kept = [0, 1, 3, 4, 5]
    hidden.requires_grad_()
    cold = torch.tensor(0.5, dtype=torch.float64)  # doubles the entropy's weight in the gradient
    options = {"temperature": cold, "outputs": ["logprob", "entropy"]}
    out = linear_logprob(hidden, weight, target, bias=bias, **options)
    smaller = reference(hidden, weight[kept], target - (target > 2).long(), temperature=cold)
    torch.testing.assert_close(out.entropy, smaller["entropy"], **CLOSE)
    grad = torch.autograd.grad((out.logprob + out.entropy).sum(), hidden)[0]
    truth = torch.autograd.grad((smaller["logprob"] + smaller["entropy"]).sum(), hidden)[0]
    torch.testing.assert_close(grad, truth, **CLOSE)


def test_argmax_hit_is_the_first_maximum():
    hidden, weight = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [2.0]])
    out = linear_logprob(hidden, weight, torch.tensor([0, 1, 2]), outputs=["argmax_hit"])
    assert out.argmax_hit.tolist() == [False, True, False]


@pytest.mark.parametrize("bad", [-100, 6])
def test_a_bad_target_is_an_error(bad):
    hidden, weight, target = random_head(5, 6, 3)
    target[3] = bad
    with pytest.raises(TargetError, match=rf"target\[3\]={bad} is outside .* \[0, 6\); give"):
        linear_logprob(hidden, weight, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(1, 5, 3)}, "hidden has 3 dims, expected 2"),
        ({"weight": torch.zeros(6, 3).bfloat16()}, "cast both to one float dtype"),
        ({"weight": torch.zeros(6, 4)}, "weight has width 4, hidden 3"),
        ({"target": torch.zeros(5, dtype=torch.int32)}, "use .long()"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, "target has 4 entries, expected 5"),
        ({"bias": torch.zeros(5)}, "bias has 5 entries, expected 6"),
        ({"row_mask": torch.ones(5)}, "use .bool()"),
        ({"temperature": torch.ones(5, 1)}, "temperature has 2 dims"),
        ({"temperature": torch.ones(2)}, "temperature has 2 entries, expected 1 or 5"),
        ({"scale": 0.0}, "scale=0"),
        ({"softcap": -1.0}, "softcap=-1.0 is negative"),
        ({"outputs": ["logp"]}, "'logp' is not one of"),
        ({"outputs": ["max_logit"], "grad_outputs": ["max_logit"]}, "'max_logit' is not one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_name_the_cure(change, message):
    arguments = {
        "hidden": torch.zeros(5, 3),
        "weight": torch.zeros(6, 3),
        "target": torch.zeros(5, dtype=torch.int64),
    }
    with pytest.raises(LinearLogprobError) as error:
        linear_logprob(**{**arguments, **change})
    assert message in str(error.value)


def test_another_device_is_named():
    hidden, weight, target = random_head(5, 9, 4)
    with pytest.raises(LinearLogprobError, match="target is on meta and hidden on cpu"):
        linear_logprob(hidden, weight, target.to("meta"))
