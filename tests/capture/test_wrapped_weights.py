"""Weights of a tensor subclass, as torchao's quantised ones: rewritten, or refused in words."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import fxrl

aten = torch.ops.aten
HIDDEN, VOCAB = 8, 19
STRICT = fxrl.Config(min_saved_bytes=0, compile_regions=False, on_miss="error")


class Doubled(torch.Tensor):
    """Half of a weight, which each op doubles."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)

    def __init__(self, half):
        self.half_of_it = half

    def __tensor_flatten__(self):
        return ["half_of_it"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["half_of_it"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.t.default, aten.alias.default):
            return cls(func(args[0].half_of_it))
        if func.namespace != "aten":
            raise NotImplementedError(f"{cls.__name__} dispatch: {func}")
        return func(*pytree.tree_map_only(cls, lambda x: 2 * x.half_of_it, args), **(kwargs or {}))


class Untransposed(Doubled):
    """Has no transposed kind: ``linear`` is an op of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (F.linear, torch._C._nn.linear):
            return F.linear(args[0], 2 * args[1].half_of_it)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.t.default:
            raise NotImplementedError(f"{cls.__name__} dispatch: unimplemented {func}")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.inner(x).sin())


def loss_fn(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make(kind, name):
    torch.manual_seed(0)
    model = Model().double()
    linear = getattr(model, name)
    linear.weight = nn.Parameter(kind(linear.weight.detach() / 2), requires_grad=False)
    return model, torch.randint(VOCAB, (2, 7))


def test_a_weight_that_has_every_op_is_one_like_others():
    model, ids = make(Doubled, "inner")
    eager, found = loss_fn(model, ids), fxrl.optimize(model, loss_fn, STRICT)(ids)
    weights = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.autograd.grad(x, weights) for x in (found, eager)]
    torch.testing.assert_close(found, eager, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (Doubled, "head", "the head's weight is of class Doubled, .* leave the loss head out"),
        (Untransposed, "inner", r"a weight of class Untransposed has no aten\.t; quantise by"),
    ],
)
def test_one_that_lacks_an_op_is_a_miss_with_a_cure(kind, name, words):
    model, ids = make(kind, name)
    with pytest.raises(fxrl.errors.MissedRewriteError, match=words):
        fxrl.optimize(model, loss_fn, STRICT)(ids)
    step = fxrl.optimize(model, loss_fn, fxrl.Config(min_saved_bytes=0, on_miss="ignore"))
    torch.testing.assert_close(step(ids), loss_fn(model, ids))
