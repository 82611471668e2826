"""What ``allow_in_graph`` keeps from Dynamo has the backward that it was given."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxrl
from tests.capture.mixer import fixed

HIDDEN, VOCAB = 8, 19
STRICT = fxrl.Config(min_saved_bytes=0, compile_regions=False, on_miss="error")


@dataclass(frozen=True)
class Settings:
    """An argument that no FX graph can hold."""

    gain: float = 3.0


SETTINGS = Settings()


class Clipped(torch.autograd.Function):
    """A product whose backward is no derivative of its forward, as of float8's."""

    @staticmethod
    def forward(ctx, x, weight, settings):
        ctx.save_for_backward(x, weight)
        ctx.gain = settings.gain
        return (ctx.gain * x).clamp(-1, 1) @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        found = x.flatten(0, -2).t() @ grad.flatten(0, -2)
        return ctx.gain * grad @ weight.t(), 2 * found, None


@torch.compiler.allow_in_graph
class Allowed(Clipped):
    pass


def by_class(x, weight):
    return Allowed.apply(x, weight, SETTINGS)


@torch.compiler.allow_in_graph
def by_function(x, weight):
    return Clipped.apply(x, weight, SETTINGS).sin()


@torch.compiler.allow_in_graph
def by_block(x, weight):
    with torch.no_grad():
        largest = x.abs().amax()
    return (x / largest) @ weight


@torch.compiler.allow_in_graph
def by_hook(x, weight):
    y = x @ weight
    if y.requires_grad:
        y.register_hook(lambda grad: 3 * grad)
    return y


@torch.compiler.allow_in_graph
def by_leaf(x, weight):
    return (x.sin() if x.is_leaf or x.grad_fn is None else x.cos()) @ weight


@torch.compiler.allow_in_graph
def by_mode(x, weight):
    return (x.sin() if torch.is_grad_enabled() else x.cos()) @ weight


@torch.compiler.allow_in_graph
def by_saved_tensors(x, weight):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: 2 * saved, lambda packed: packed):
        return x.sin() @ weight


@torch._dynamo.nonstrict_trace
def by_trace(x, weight):
    return Clipped.apply(x, weight, SETTINGS)


LIBRARY = torch.library.Library("fxrl_test_allowed", "FRAGMENT")
LIBRARY.define("product(Tensor x, Tensor weight) -> Tensor")
LIBRARY.impl("product", lambda x, w: Clipped.apply(x, w, SETTINGS), "Autograd")
LIBRARY.impl("product", lambda x, w: x @ w, "CPU")
LIBRARY.impl("product", lambda x, w: x @ w, "Meta")
LIBRARY.define("clipped(Tensor x, Tensor weight) -> Tensor")
LIBRARY.impl("clipped", lambda x, w: Clipped.apply(x, w, SETTINGS), "CompositeImplicitAutograd")
LIBRARY.define("scaled(Tensor x, Tensor weight, float gain=1.0) -> Tensor")
LIBRARY.impl(
    "scaled",
    lambda x, w, gain=1.0: gain * Clipped.apply(x, w, SETTINGS),
    "CompositeImplicitAutograd",
)
LIBRARY.define("block(Tensor x, Tensor weight) -> Tensor")
LIBRARY.impl("block", lambda x, w: torch.no_grad()(torch.relu)(x) @ w, "CompositeImplicitAutograd")
LIBRARY.define("asking(Tensor x, Tensor weight) -> Tensor")
LIBRARY.impl(
    "asking", lambda x, w: (x.sin() if x.requires_grad else x) @ w, "CompositeImplicitAutograd"
)


class Doubled(torch.autograd.Function):
    """Calls the op that it is the autograd of, as a library's own do, for another input."""

    @staticmethod
    def forward(ctx, x):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fxrl_test_allowed.doubled(2 * x)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.impl("doubled", Doubled.apply, "Autograd")
LIBRARY.impl("doubled", torch.sin, "CPU")
LIBRARY.impl("doubled", torch.sin, "Meta")


def by_op_with_a_number(x, weight):
    return torch.ops.fxrl_test_allowed.scaled(x, weight, gain=3.0)


def by_block_in_an_op(x, weight):
    return torch.ops.fxrl_test_allowed.block(x, weight) + x @ weight


def by_asking_op(x, weight):
    return torch.ops.fxrl_test_allowed.asking(x, weight)


def by_op_of_itself(x, weight):
    return torch.ops.fxrl_test_allowed.doubled(x) @ weight


def by_composite_op(x, weight):
    return torch.ops.fxrl_test_allowed.clipped(x, weight)


def by_autograd_key(x, weight):
    return torch.ops.fxrl_test_allowed.product(x, weight)


@torch.compiler.allow_in_graph
def without(x, weight):
    return x @ weight


def under_autocast(x, weight):
    with torch.autocast("cpu", torch.bfloat16):
        return by_function(x.float(), weight.float()).double()


def without_gradient(x, weight):
    return by_function(x.detach(), weight.detach()) + x


class Layer(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.call = call

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + self.call(self.norm(x), self.weight)


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer(call) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def through_log_probs(model, ids):
    logps = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    return -by_class(logps.expand(-1, -1, HIDDEN), torch.eye(HIDDEN).double()).mean()


@pytest.mark.parametrize(
    ("call", "loss"),
    [
        pytest.param(by_class, loss_fn, marks=pytest.mark.slow),
        (by_function, loss_fn),
        pytest.param(by_block, loss_fn, marks=pytest.mark.slow),
        (by_hook, loss_fn),
        pytest.param(by_leaf, loss_fn, marks=pytest.mark.slow),
        (by_mode, loss_fn),
        pytest.param(by_saved_tensors, loss_fn, marks=pytest.mark.slow),
        (by_trace, loss_fn),
        pytest.param(by_op_with_a_number, loss_fn, marks=pytest.mark.slow),
        pytest.param(by_block_in_an_op, loss_fn, marks=pytest.mark.slow),
        (by_asking_op, loss_fn),
        pytest.param(by_op_of_itself, loss_fn, marks=pytest.mark.slow),
        pytest.param(by_composite_op, loss_fn, marks=pytest.mark.slow),
        (by_autograd_key, loss_fn),
        (without, loss_fn),
        (under_autocast, loss_fn),
        (without_gradient, loss_fn),
        (without, through_log_probs),
    ],
)
def test_gradients_are_those_of_its_own_backward(call, loss):
    torch.manual_seed(0)
    model = Model(call).double()
    step = fxrl.optimize(model, loss, STRICT)
    lengths = (7, 9) if call in (by_function, by_hook) else (7,)
    for length in lengths:
        ids = torch.randint(VOCAB, (2, length), generator=torch.manual_seed(length))
        if len(lengths) == 1:
            fixed(ids)
        eager, found = loss(model, ids), step(ids)
        torch.testing.assert_close(found, eager, rtol=1e-12, atol=1e-12)
        weights = [*model.parameters()]
        grads = [torch.autograd.grad(x, weights, allow_unused=True) for x in (found, eager)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)
    assert len(step.captures) == 1
    assert any(r.pass_name == "fuse-linear-logprob" for r in step.report.of_kind("applied"))


def own_logits(model, ids):
    return by_function(model(ids), torch.eye(VOCAB).double())


def own_head(model, ids):
    return by_class(model.layers[0](model.embed(ids)), model.head.weight.t())


@pytest.mark.parametrize(
    ("make_logits", "why"),
    [
        (own_logits, "by_function, an autograd"),
        (own_head, "one call multiplies by the head itself, and returns logits"),
    ],
)
def test_logits_of_its_own_are_a_miss(make_logits, why):
    torch.manual_seed(0)
    model = Model(without).double()

    def loss(model, ids):
        logits = make_logits(model, ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    with pytest.raises(fxrl.errors.MissedRewriteError, match=why):
        fxrl.optimize(model, loss, STRICT)(torch.randint(VOCAB, (2, 7)))


@torch.compiler.allow_in_graph
def writing(x, weight):
    with torch.no_grad():
        largest = x.abs().amax()
    x.mul_(2)
    return x / largest @ weight


def test_what_it_writes_into_is_written_once():
    def loss(model, ids):
        x = 1 * model.embed(ids)
        logits = model.head(writing(x, model.layers[0].weight) + x)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    torch.manual_seed(0)
    model, ids = Model(without).double(), torch.randint(VOCAB, (2, 7))
    with pytest.warns(UserWarning, match="writing, which is not looked into, writes into"):
        found = fxrl.optimize(model, loss, dataclasses.replace(STRICT, on_miss="warn"))(ids)
    torch.testing.assert_close(found, loss(model, ids), rtol=1e-12, atol=1e-12)
