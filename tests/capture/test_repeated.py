"""Equal layers are captured once; a layer that differs never stands for another."""

import gc
import math
import random
import re
import weakref
from collections import UserDict, defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import modeling_layers

import fxrl
from tests.capture.mixer import fixed

CONFIG = fxrl.Config(
    passes=("fuse-linear-logprob", "recompute"),
    min_saved_bytes=0,
    compile_regions=False,
    on_miss="ignore",
)
HIDDEN, VOCAB = 8, 19


class Layer(nn.Module):
    """Attention and an MLP; subclasses do what a layer may do besides."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.name = f"layers.{number}"
        self.gain = 1.0
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(16, HIDDEN))

    def forward(self, x, bias=None, seen=None):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
        return x + self.gain * self.out(heads.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kind=Layer, depth=4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(kind(number) for number in range(depth))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def body(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def loss_fn(model, batch):
    logp = model(batch["ids"]).log_softmax(-1)
    return -logp[:, :-1].gather(-1, batch["ids"][:, 1:, None]).mean()


def make(kind=Layer, model=Model, **options):
    torch.manual_seed(0)
    return model(kind, **options).double()


def batch(rows=2, length=7):
    return {"ids": torch.randint(VOCAB, (rows, length), generator=torch.manual_seed(length))}


#: Of one size, for which no size is symbolic: half the time, where sizes are not the matter.
ONE = fixed(batch())


def check(step, model, loss=loss_fn, given=ONE):
    """Loss and every gradient equal eager's."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    eager = loss(model, given)
    expected = torch.autograd.grad(eager, parameters, allow_unused=True)
    found = step(given)
    torch.testing.assert_close(found, eager, rtol=1e-10, atol=1e-10)
    gradients = torch.autograd.grad(found, parameters, allow_unused=True)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-11)


def once(step):
    """What the report says of layers that were captured once, in its last capture."""
    mine = [r for r in step.captures[-1].report.remarks if r.pass_name == "inline-layers"]
    return mine[0].reason if mine else ""


def optimized(model, loss=loss_fn):
    return fxrl.optimize(model, loss, CONFIG)


# ---------------------------------------------------------------------------- captured once
def test_equal_layers_are_captured_once():
    model = make()
    step = optimized(model)
    check(step, model, given=batch())
    assert once(step) == "4 layers were captured as 1"
    check(step, model, given=batch(3, 11))
    assert len(step.captures) == 1


def test_the_graph_does_not_grow_with_depth():
    calls = []
    for depth in (3, 9):
        step = optimized(make(depth=depth))
        step(batch())
        calls.append(sum(n.op != "placeholder" for n in step.captures[0].dynamo.graph.nodes))
    assert calls[1] - calls[0] == 6 * 3  # the graph's name, the call, and its result


def test_each_layer_is_a_site_of_its_own():
    step = optimized(make())
    step(ONE)
    assert {f"0:layers.{n}" for n in range(4)} <= step.plan.choices.keys()


class Numbered(Layer):
    def forward(self, x, bias=None, seen=None):
        return super().forward(x) * 0.5**self.number


class OddOneOut(Model):
    """Its first layer is of another kind, and reads its number, which all have."""

    def __init__(self, kind):
        super().__init__(kind)
        self.layers[0] = Numbered(0)


def test_a_number_that_another_layer_reads():
    model = make(model=OddOneOut)
    step = optimized(model)
    check(step, model)
    assert once(step) == "3 layers were captured as 1"


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is F.silu else result


class Moded(Model):
    """Some code is run under a mode: what the layers are given, and the last ones of them."""

    last = 0

    def body(self, x):
        with Doubled():
            x = x + F.silu(x)
        for layer in self.layers[: 4 - self.last]:
            x = layer(x)
        if self.last:
            with Doubled():
                for layer in self.layers[-self.last :]:
                    x = layer(x)
        return x


FORGETS = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11 compiles such a model to other numbers"
)


@pytest.mark.parametrize("last", [0, pytest.param(2, marks=FORGETS)])
def test_layers_after_a_mode_and_under_one(last):
    model = make(model=Moded)
    model.last = last
    step = optimized(model)
    check(step, model)
    assert once(step) == ("" if last else "4 layers were captured as 1")


class Flag(Layer):
    def __init__(self, number):
        super().__init__(number)
        self.wide = number % 2 == 1

    def forward(self, x, bias=None, seen=None):
        x = super().forward(x)
        return x * 2 if self.wide else x


class Dropout(Layer):
    def __init__(self, number):
        super().__init__(number)
        self.out.append(nn.Dropout(0.5))


class Scaled(torch.autograd.Function):
    """A product of weights times a tensor that the call makes."""

    @staticmethod
    def forward(ctx, a, b, scale):
        ctx.save_for_backward(a, b, scale)
        return (a @ b) * scale

    @staticmethod
    def backward(ctx, grad):
        a, b, scale = ctx.saved_tensors
        return grad * scale @ b.T, a.T @ grad * scale, None


class Constant(Layer):
    def __init__(self, number):
        super().__init__(number)
        self.a, self.b = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x, bias=None, seen=None):
        x = super().forward(x)
        return x + F.linear(x, Scaled.apply(self.a, self.b, torch.tensor(0.5)))


class Handed(Layer):
    def forward(self, x, turned):
        return super().forward(turned(x))


class Turned(nn.Module):
    """Of tokens by what is learned, as rotary embeddings are; it may count its calls."""

    def __init__(self, counts=False):
        super().__init__()
        self.gain, self.calls = nn.Parameter(torch.rand(HIDDEN)), 0
        self.counts = counts

    def forward(self, x):
        if self.counts:
            self.calls += 1
        return x * self.gain + self.calls % 2


def reversed_dims(x):
    return x.flip(-1)


class Handing(Model):
    """Hands each layer what it is to call first."""

    def __init__(self, kind=Layer, depth=4):
        super().__init__(kind, depth)
        self.handed = []

    def body(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x, self.handed[number % len(self.handed)])
        return x


@pytest.mark.parametrize(
    ("handed", "said"),
    [
        (lambda: [Turned()], "4 layers were captured as 1"),
        (lambda: [reversed_dims], "4 layers were captured as 1"),
        (lambda: [reversed_dims, torch.sin], ""),
        (lambda: [Turned(), Turned()], ""),
        (lambda: [Turned(counts=True)], ""),
        (lambda: [partial(torch.mul, other=2.0)], "4 layers were captured as 1"),
        (lambda: [partial(torch.mul, other=2.0), partial(torch.mul, other=3.0)], ""),
    ],
)
def test_layers_that_are_handed_what_they_call(handed, said):
    """Of equal layers, each is handed the same one, or they are no equals."""
    model = make(Handed, Handing)
    model.handed = [one.double() if isinstance(one, nn.Module) else one for one in handed()]
    model.also = nn.ModuleList(one for one in model.handed if isinstance(one, nn.Module))
    step = optimized(model)
    check(step, model)
    assert once(step) == said
    if said:  # another one
        model.handed = [Turned().double()]
        model.also = nn.ModuleList(model.handed)
        check(step, model)


class HandsItsOwn(Handing):
    """Makes what it hands as it runs, and may change what that holds: inside of layers or not."""

    def __init__(self, kind=Layer, depth=4, changes=""):
        super().__init__(kind, depth)
        self.changes = changes

    def body(self, x):
        first, times, inside = x.mean(), [0.5], self.changes == "inside"

        def turned(one):
            if inside:
                times.append(times[-1] * 2)
            return one * times[-1] + first

        for layer in self.layers:
            x = layer(x, turned)
            if self.changes == "between":
                times[0] += 1
        return x


@pytest.mark.parametrize("changes", ["", "inside", "between"])
def test_layers_that_are_handed_what_the_step_makes(changes):
    model = make(Handed, HandsItsOwn, changes=changes)
    step = optimized(model)
    check(step, model)
    assert once(step) == ("" if changes else "4 layers were captured as 1")


class Shelf:
    left = None


class FindsEmbeddings(Layer):
    """Adds what its model has left for all layers, and goes by whether it was given that, too."""

    shelf = Shelf()
    asks = False

    def forward(self, x, bias=None, seen=None):
        found = self.shelf.left
        return super().forward(x) + found * (2 if self.asks and x is found else 1)


class LeavesEmbeddings(Model):
    times = None

    def body(self, x):
        FindsEmbeddings.shelf.left = x if self.times is None else x * self.times
        found = super().body(x)
        FindsEmbeddings.shelf.left = None
        return found


@pytest.mark.parametrize(("times", "asks"), [(None, False), (2.0, False), (None, True)])
def test_layers_that_find_what_the_first_was_given(times, asks, monkeypatch):
    """The others were given something else, and find the same."""
    monkeypatch.setattr(FindsEmbeddings, "asks", asks)
    model = make(FindsEmbeddings, LeavesEmbeddings)
    model.times = times
    step = optimized(model)
    check(step, model)
    assert once(step) == ("" if asks else "4 layers were captured as 1")


class TellsSelfFromCross(Layer):
    def forward(self, x, also):
        return super().forward(x) * (2.0 if also[0] is x else 3.0)


class GivesTwice(Model):
    def body(self, x):
        for layer in self.layers:
            x = layer(x, (x,))
        return x


def test_layers_that_are_given_one_tensor_twice_know_it():
    model = make(TellsSelfFromCross, GivesTwice)
    step = optimized(model)
    check(step, model)
    assert once(step) == "4 layers were captured as 1"


class Sharing(Layer):
    """A layer that is given what is shared, and does with it what it is told."""

    def __init__(self, number):
        super().__init__(number)
        self.does = "nothing"

    def forward(self, x, shared):
        if self.does == "stores":
            shared["kv"] = self.out(x)
        elif self.does == "reads":
            x = x + shared["kv"]
        elif self.does == "counts":
            shared["n"] = shared.get("n", 0) + 1
            x = x * shared["n"]
        elif self.does == "hands on":
            x = x + shared.get("kv", 0.5)
            shared["kv"] = x.sin()
        return super().forward(x)


class Shared(Model):
    """As Gemma's from 3n on: some layers make keys and values for those behind them."""

    def body(self, x):
        shared = UserDict()
        for layer in self.layers:
            x = layer(x, shared)
        return x + shared.get("kv", 0.0) * shared.get("n", 1)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (["nothing"] * 2 + ["stores"] + ["reads"] * 3, "5 layers were captured as 2"),
        (["stores"] + ["reads"] * 2 + ["stores"] + ["reads"] * 2, ""),
        (["counts"] * 4, ""),
        (["hands on"] * 4, ""),
        (["stores"] * 3, ""),
    ],
    ids=lambda does: does if isinstance(does, str) else ", ".join(does),
)
def test_layers_that_share_what_some_make(does, said):
    model = make(Sharing, Shared, depth=len(does))
    for layer, what in zip(model.layers, does, strict=True):
        layer.does = what
    step = optimized(model)
    check(step, model)
    assert once(step) == said


def compiled(kind=Layer, depth=4):
    model = Model(kind, depth)
    model.layers = nn.ModuleList(torch.compile(one, backend="eager") for one in model.layers)
    return model


def compiled_in_place(kind=Layer, depth=4):
    model = Model(kind, depth)
    for layer in model.layers:
        layer.compile(backend="eager")
    model.layers[1].qkv.compile(backend="eager")
    return model


def shared(kind=Layer, depth=4):
    model = Model(kind, depth)
    model.layers[2].qkv.weight = model.layers[1].qkv.weight
    return model


def twice(kind=Layer, depth=4):
    model = Model(kind, depth)
    model.layers[2] = model.layers[1]
    return model


class InTwoLists(Model):
    def __init__(self, kind=Layer, depth=4):
        super().__init__(kind, depth)
        self.stack = nn.Sequential(*self.layers)

    def body(self, x):
        return self.stack(super().body(x))


def frozen(kind=Layer, depth=4):
    model = Model(kind, depth)
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    model.layers[1].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make_model", "said"),
    [
        pytest.param(lambda: make(Flag), "4 layers were captured as 2", marks=pytest.mark.slow),
        (lambda: make(Constant), "4 layers were captured as 1"),
        (lambda: make(model=shared), "4 layers were captured as 1"),
        (lambda: make(model=compiled), "4 layers were captured as 1"),
        (lambda: make(model=compiled_in_place), "3 layers were captured as 1"),
        (lambda: make(model=frozen), "4 layers were captured as 2"),
        (lambda: make(model=twice), "2 layers were captured as 1"),
        (lambda: make(model=InTwoLists), "8 layers were captured as 1"),
    ],
    ids=[
        *("two-kinds", "constant", "shared-weight", "compiled", "compiled-in-place"),
        *("frozen", "twice", "in-two-lists"),
    ],
)
def test_kinds_of_layers(make_model, said):
    model = make_model()
    step = optimized(model)
    check(step, model)
    assert once(step) == said
    assert step.captures[0].running


def dropping(layers):
    for number, layer in enumerate(layers):
        layer.out[1] = nn.Dropout(number / 8)


def renaming(layers):
    layers[2].other_name = layers[2]._modules.pop("out")
    layers[2].__dict__["out"] = layers[2].other_name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dropping, "layers.1 and 2 more are captured alone, .* differs from layers.0 in out.1.p"),
        (renaming, "layers.2 is captured alone, .* differs from layers.0 in other_name"),
    ],
)
def test_what_layers_differ_in_is_said(change, said):
    model = make()
    change(model.layers)
    step = optimized(model)
    step(ONE)
    (told,) = [r.reason for r in step.report.remarks if "takes longer" in r.reason]
    assert re.fullmatch(said, told)


class Nested(Model):
    """Stages of layers: a list in a list."""

    def __init__(self, kind=Layer, depth=4):
        super().__init__(kind, depth)
        stages = [
            nn.ModuleDict({"blocks": self.layers[:2]}),
            nn.ModuleDict({"blocks": self.layers[2:]}),
        ]
        del self.layers
        self.stages = nn.ModuleList(stages)

    def body(self, x):
        for stage in self.stages:
            for layer in stage["blocks"]:
                x = layer(x)
        return x


def test_layers_in_lists_in_lists_are_sites_of_their_own():
    model = make(model=Nested)
    step = optimized(model)
    check(step, model)
    assert once(step) == "4 layers were captured as 2"
    assert {f"0:stages.{s}.blocks.{b}" for s in (0, 1) for b in (0, 1)} <= step.plan.choices.keys()


class Windows(nn.Module):
    """Half of a layer: each token is mixed with its window, of which the last one is padded."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        length, windows = x.shape[1], x.shape[1] / 4
        if not windows.is_integer():
            padding = x.new_zeros(len(x), math.ceil(windows) * 4 - length, HIDDEN)
            x = torch.cat([x, padding], 1)
        mixed = self.mix(x.unflatten(1, (-1, 4)).softmax(-1).cumsum(2))
        return mixed.flatten(1, 2)[:, :length]


class Pairs(Model):
    """Attention and MLPs in lists of two, which the model adds to its stream."""

    def __init__(self, kind=Layer, depth=2):
        super().__init__(kind, depth)
        pairs = [nn.ModuleList([Windows(), layer.out]) for layer in self.layers]
        self.layers = nn.ModuleList(pairs)

    def body(self, x):
        for mix, mlp in self.layers:
            x = mix(x) + x
            x = mlp(x) + x
        return x


def test_pairs_of_windows_and_mlps_are_captured_once_for_all_lengths():
    model = make(model=Pairs)
    step = optimized(model)
    for length in (9, 14, 11):
        check(step, model, given=batch(length=length))
    assert len(step.captures) == 1
    assert {f"0:layers.{a}.{b}" for a in (0, 1) for b in (0, 1)} <= step.plan.choices.keys()
    assert not step.report.of_kind("missed")


class InADict(Model):
    """Layers by name: ``h0``, ``h1``."""

    def __init__(self, kind=Layer, depth=4):
        super().__init__(kind, depth)
        self.layers = nn.ModuleDict({f"h{i}": layer for i, layer in enumerate(self.layers)})

    def body(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


class AsAttributes(Model):
    def __init__(self, kind=Layer, depth=4):
        super().__init__(kind, depth)
        for i, layer in enumerate(self.layers):
            self.add_module(f"layer_{i}", layer)
        del self.layers

    def body(self, x):
        for i in range(4):
            x = getattr(self, f"layer_{i}")(x)
        return x


@pytest.mark.parametrize(
    ("kind", "sites"),
    [(InADict, "0:layers.h0 0:layers.h3"), (AsAttributes, "0:layer_0 0:layer_3")],
)
def test_layers_that_a_name_counts_are_captured_once(kind, sites):
    model = make(model=kind)
    step = optimized(model)
    check(step, model)
    assert once(step) == "4 layers were captured as 1"
    assert {*sites.split()} <= step.plan.choices.keys()


def test_layers_of_a_functional_call_are_regions():
    def lent(model, given):
        weights = dict(model.named_parameters())
        return loss_fn(lambda *args: torch.func.functional_call(model, weights, args), given)

    model = make()
    step = fxrl.optimize(model, lent, CONFIG)
    check(step, model, lent)
    assert {f"0:layers.{i}" for i in range(4)} <= step.plan.choices.keys()


class Drawn(Layer):
    def forward(self, x, bias=None, seen=None):
        return super().forward(x) * random.uniform(0.5, 1.5)


class DrawnByNumpy(Layer):
    def forward(self, x, bias=None, seen=None):
        return super().forward(x) * torch.from_numpy(np.random.rand(HIDDEN))


class DrawnByAGenerator(Layer):
    generator = random.Random()

    def forward(self, x, bias=None, seen=None):
        return super().forward(x) * self.generator.random()


def seed(number):
    for own in (torch.manual_seed, random.seed, np.random.seed, DrawnByAGenerator.generator.seed):
        own(number)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Dropout, "4 layers were captured as 1"),
        (Drawn, ""),
        pytest.param(DrawnByNumpy, "", marks=pytest.mark.slow),
        pytest.param(DrawnByAGenerator, "", marks=pytest.mark.slow),
    ],
    ids=["torch", "Python", "NumPy", "a generator"],
)
def test_random_numbers_are_drawn_by_each_layer(kind, said):
    model = make(kind)
    step = optimized(model)
    for number in range(2):
        seed(number)
        eager = loss_fn(model, ONE)
        seed(number)
        torch.testing.assert_close(step(ONE), eager)
    assert once(step) == said


class Norm(nn.Module):
    eps = 0.5

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class Normed(Layer):
    def __init__(self, number):
        super().__init__(number)
        self.first = Norm()

    def forward(self, x, bias=None, seen=None):
        return super().forward(self.first(x), bias, seen)


@pytest.mark.parametrize(
    "anew",
    [pytest.param(True, marks=pytest.mark.slow), False],
    ids=["another model", "the model itself"],
)
def test_a_number_of_the_layers_that_is_another_one_later(anew):
    """Another model's numbers say nothing of this one's, which are constants; a number that changes
    is a tensor to the region that reads it."""
    outlined = replace(CONFIG, passes=(*CONFIG.passes, "outline-layers"), on_miss="error")
    model = make(Normed)
    step = fxrl.optimize(model, loss_fn, outlined)
    for eps in (0.5, 0.25, 2.0):
        if anew:
            model = make(Normed)
            step = fxrl.optimize(model, loss_fn, outlined)
        for layer in model.layers:
            layer.first.eps = eps
        check(step, model)
        applied = {r.pass_name for r in step.captures[-1].report.of_kind("applied")}
        assert applied >= {"outline-layers", "recompute"}
        numbers = [r for r in step.report.remarks if r.pass_name == "tensorize-floats"]
        assert not (anew and numbers)


def test_a_loss_that_sets_the_learning_rate():
    """Dynamo would make constants of all weights that an optimizer has, and change the optimizer:
    the first layer's constants would be those of all."""
    model = make()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.5) for _ in range(2)]
    settings = [dict(group) for group in optimizers[0].param_groups]

    def warmed(optimizer, model, batch):
        optimizer.param_groups[0]["lr"] *= 0.5
        return loss_fn(model, batch) * optimizer.param_groups[0]["lr"]

    eager, captured = (partial(warmed, optimizer) for optimizer in optimizers)
    step = optimized(model, captured)
    for lr in (0.25, 0.125):
        check(step, model, eager)
        assert optimizers[1].param_groups == [{**settings[0], "lr": lr}]
    assert "4 layers were captured as 1" in {r.reason for r in step.report.remarks}
    assert not any("guarded" in vars(weight).values() for weight in model.parameters())


def test_layers_whose_weights_would_be_frozen():
    """Dynamo makes constants of weights for Inductor to fold, where no gradient is asked for."""
    model = make()
    step = optimized(model)
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        torch.testing.assert_close(step(ONE), loss_fn(model, ONE), rtol=1e-10, atol=1e-10)
    assert once(step) == "4 layers were captured as 1"


def test_checkpointed_layers_are_captured_once():
    class Checkpointed(Model):
        def body(self, x):
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    model = make(model=Checkpointed)
    step = optimized(model)
    check(step, model)
    assert once(step) == "4 layers were captured as 1"


# The last one takes what is left over.
@pytest.mark.parametrize("segments", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_layers_checkpointed_in_segments_are_captured(segments):
    class Segments(Model):
        def body(self, x):
            return torch.utils.checkpoint.checkpoint_sequential(
                list(self.layers), segments, input=x, use_reentrant=False
            )

    model = make(model=Segments)
    step = optimized(model)
    check(step, model)
    assert len(step.captures) == 1
    assert not [r for r in step.report.remarks if "graph break" in r.reason]


def test_a_loss_checkpointed_with_its_model_has_a_head():
    def whole(model, given):
        return torch.utils.checkpoint.checkpoint(
            lambda: loss_fn(model, given) * len(given["ids"]), use_reentrant=False
        )

    model = make(depth=1)  # a layer that is not captured once for all
    step = fxrl.optimize(model, whole, CONFIG)
    check(step, model, whole)
    assert any(r.pass_name == "fuse-linear-logprob" for r in step.report.of_kind("applied"))


@pytest.mark.parametrize("depth", [1, 4])
def test_a_model_checkpointed_with_its_head_has_a_head(depth):
    """The logits leave the checkpointed call, and its layers read sizes that it computes."""

    class Sized(Layer):
        def forward(self, x, bias=None, seen=None):
            return super().forward(x.view(seen, -1, HIDDEN))

    class Model_(Model):
        def body(self, x):
            rows = x.shape[0]
            for layer in self.layers:
                x = layer(x, seen=rows)
            return x

    def outside(model, given):
        call = torch.utils.checkpoint.checkpoint
        logp = call(model, given["ids"], use_reentrant=False).log_softmax(-1)
        return -logp[:, :-1].gather(-1, given["ids"][:, 1:, None]).mean()

    model = make(Sized, Model_, depth=depth)
    step = fxrl.optimize(model, outside, CONFIG)
    check(step, model, outside, batch())
    assert any(r.pass_name == "fuse-linear-logprob" for r in step.report.of_kind("applied"))
    assert not [r for r in step.report.remarks if "captured one by one" in r.reason]


class CheckpointedInside(Layer):
    def forward(self, x, bias=None, seen=None):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_layers_that_checkpoint_themselves_are_captured_once():
    model = make(CheckpointedInside, model=frozen)
    step = optimized(model)
    check(step, model)
    assert once(step) == "4 layers were captured as 2"


class CheckpointedAround(Layer):
    """As layers of transformers were checkpointed up to 5.17: around their forward."""

    gradient_checkpointing = False
    _gradient_checkpointing_func = staticmethod(
        partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    )

    def __call__(self, *args, **kwargs):
        if self.gradient_checkpointing and self.training:
            call = partial(super().__call__, **kwargs)
            return self._gradient_checkpointing_func(call, *args)
        return super().__call__(*args, **kwargs)

    def forward(self, x, bias=None, seen=None, use_cache=True):
        return super().forward(x) * (2 if use_cache else 1)


@pytest.mark.parametrize(
    ("named", "trained"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_layers_that_are_checkpointed_around_are_captured_once(monkeypatch, trained, named):
    """Switched on, off and on again; a hook is outside of it."""

    class Model_(Model):
        def body(self, x):
            for layer in self.layers:
                x = layer(x, seen=3, use_cache=False) if named else layer(x, None, 3)
            return x

    monkeypatch.setattr(modeling_layers, "GradientCheckpointingLayer", CheckpointedAround)
    model = make(CheckpointedAround, Model_)
    model.embed.requires_grad_(trained)
    step = optimized(model)

    def checkpointing(on):
        for layer in model.layers:
            layer.gradient_checkpointing = on
        check(step, model)
        calls = [str(node.target) for node in step.captures[-1].dynamo.graph.nodes]
        told = step.captures[-1].report.remarks
        taken_over = [r for r in told if r.pass_name == "open-layer-checkpoints"]
        return sum("checkpoint" in target for target in calls), len(taken_over)

    assert checkpointing(True) == (0, 4)  # in the graph that all layers share
    assert checkpointing(False) == (0, 0)
    checkpointing(True)
    assert len(step.captures) == 2
    model.layers[1].register_forward_hook(lambda module, args, out: out * 2)
    assert checkpointing(True) == (1, 3)  # what its hook computes is in no region
    for layer in model.layers:
        layer.forward = partial(CheckpointedAround.forward, layer)  # as accelerate wraps it
    assert checkpointing(True) == (4, 3)


def test_a_layer_that_is_checkpointed_around_has_one_name_in_all_forwards(monkeypatch):
    def loss(model, batch):
        with torch.no_grad():
            reference = model(batch["ids"])
        return (model(batch["ids"]) - reference).exp().mean()

    monkeypatch.setattr(modeling_layers, "GradientCheckpointingLayer", CheckpointedAround)
    model = make(CheckpointedAround)
    for layer in model.layers:
        layer.gradient_checkpointing = True
    step = optimized(model, loss)
    check(step, model, loss)
    layers = {site for site in step.plan.choices if "/" not in site}
    assert layers == {"0:layers.0-3", *(f"0:layers.{i}" for i in range(4))}


class Gated(Layer):
    """No attention, and checkpointed inside."""

    def forward(self, x, bias=None, seen=None):
        inner = lambda x: x + self.out(self.norm(x))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)


class CutOff(Model):
    """The last layer's input needs no gradient, the others' do."""

    def body(self, x):
        for layer in self.layers[:1]:
            x = layer(x)
        for _, layer in enumerate(self.layers[1:-1]):
            x = layer(x)
        return x + self.layers[-1](x.detach())


@pytest.mark.parametrize(
    "kind", [Gated, pytest.param(CheckpointedInside, marks=pytest.mark.slow), Layer]
)
def test_layers_that_need_other_gradients(kind):
    model = make(kind, CutOff)
    check(optimized(model), model)


# ---------------------------------------------------------------------------- captured one by one
class ReadsItsNumber(Layer):
    def forward(self, x, bias=None, seen=None):
        return super().forward(x) * (1 + self.number)


class ReadsItsName(Layer):
    def forward(self, x, bias=None, seen=None):
        return super().forward(x) * (2 if self.name == "layers.2" else 1)


class Counts(Layer):
    calls = 0

    def __init__(self, number):
        super().__init__(number)
        self.calls = 0

    def forward(self, x, bias=None, seen=None):
        self.calls += 1
        return super().forward(x)


class Leaks(Layer):
    def forward(self, x, bias=None, seen=None):
        x = super().forward(x)
        seen.append(x.square().mean())
        return x


class Collects(Model):
    def body(self, x):
        seen = []
        for layer in self.layers:
            x = layer(x, seen=seen)
        return x * sum(seen)


class Halves(Model):
    def body(self, x):
        for number, layer in enumerate(self.layers):
            with torch.set_grad_enabled(number != 2):
                x = layer(x)
        return x


class Biased(Model):
    def body(self, x):
        bias = x.new_zeros(x.shape[1], x.shape[1]).tril()
        for number, layer in enumerate(self.layers):
            x = layer(x, bias=bias if number == 3 else None)
        return x


class SwitchedInside(Model):
    def body(self, x):
        self.layers[2].gain = 0.5
        x = super().body(x)
        self.layers[2].gain = 1.0
        return x


class SwitchedTogether(Model):
    def body(self, x):
        x = super().body(x)
        for layer in self.layers:
            layer.gain = 0.5
        x = super().body(x)
        for layer in self.layers:
            layer.gain = 1.0
        return x


class Context:
    """What no layer holds, and all may read."""

    layer, seen, made = 0, [0.5], {}


class ReadsTheContext(Layer):
    def forward(self, x, bias=None, seen=None):
        return super().forward(x) * (1 + Context.now.layer)


class TellsTheContext(Model):
    def body(self, x):
        for number, layer in enumerate(self.layers):
            Context.now.layer = number
            x = layer(x)
        return x


class CountsInTheContext(Layer):
    def forward(self, x, bias=None, seen=None):
        Context.seen.append(1.0)
        return super().forward(x)


class ReadsTheCount(Model):
    def body(self, x):
        Context.seen.clear()
        return super().body(x) * len(Context.seen)


Context.now = Context()


class Makes(Model):
    """Its layers count in an object that is made anew in each step."""

    def body(self, x):
        kind = type(self.layers[0])
        Context.made["now"] = kind.make()
        return super().body(x) * kind.count(Context.made["now"])


class AddsToAList(Layer):
    make, count = list, len

    def forward(self, x, bias=None, seen=None):
        Context.made["now"].append(1)
        return super().forward(x)


class AddsInside(Layer):
    @staticmethod
    def make():
        return {"inside": ([], 0)}

    @staticmethod
    def count(made):
        return len(made["inside"][0])

    def forward(self, x, bias=None, seen=None):
        Context.made["now"]["inside"][0].append(1)
        return super().forward(x)


class AddsToAnObject(Layer):
    make = Context

    @staticmethod
    def count(made):
        return made.layer

    def forward(self, x, bias=None, seen=None):
        Context.made["now"].layer += 1
        return super().forward(x)


class AddsToACell(Layer):
    @staticmethod
    def make():
        made = 0

        def add(more):
            nonlocal made
            made += more
            return made

        return add

    @staticmethod
    def count(made):
        return made(0)

    def forward(self, x, bias=None, seen=None):
        Context.made["now"](1)
        return super().forward(x)


class LooksItsGainUp(Layer):
    def forward(self, x, bias=None, seen=None):
        return super().forward(x) * Context.gains[self]


class AsksForItself(Layer):
    def forward(self, x, bias=None, seen=None):
        first = Context.model().layers[0]
        return super().forward(x) * (2.0 if self is first else 1.0)


class ReadsTheFirst(Layer):
    def forward(self, x, bias=None, seen=None):
        return super().forward(x) + Context.first.out(x)


class AddsToItsArgument(Layer):
    def forward(self, x, bias=None, seen=None):
        if seen is None:
            x += super().forward(x.clone())  # the norm keeps its input
        else:
            x = super().forward(x)
            seen.add_(x.tanh())
        return x


class HandsASum(Model):
    def body(self, x):
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, seen=total)
        return x + total


class KnowsItsLayers(Model):
    def __init__(self, kind):
        super().__init__(kind)
        Context.model, Context.first = weakref.ref(self), self.layers[0]
        Context.gains = {layer: 1.0 + number for number, layer in enumerate(self.layers)}


def test_layers_that_are_written_into_alike_stay_equal():
    model = make(Layer, SwitchedTogether)
    step = optimized(model)
    check(step, model, given=batch())
    assert once(step) == "8 layers were captured as 1"
    check(step, model, given=batch(3, 11))
    assert len(step.captures) == 1


class Tracked(Model):
    """Written before its layers, which write nothing."""

    tracked = defaultdict(list)

    def body(self, x):
        self.tracked.clear()
        self.tracked["norms"].append(x.norm())
        return super().body(x)


def test_a_class_of_dict_that_is_written_elsewhere_is_harmless():
    model = make(Layer, Tracked)
    step = optimized(model)
    check(step, model)
    assert once(step) == "4 layers were captured as 1"


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        pytest.param(ReadsItsNumber, Model, marks=pytest.mark.slow),
        (ReadsItsName, Model),
        (Leaks, Collects),
        (Layer, Halves),
        (Layer, Biased),
        (Layer, SwitchedInside),
        (ReadsTheContext, TellsTheContext),
        pytest.param(CountsInTheContext, ReadsTheCount, marks=pytest.mark.slow),
        (AddsToItsArgument, HandsASum),
        (AddsToAList, Makes),
        pytest.param(AddsInside, Makes, marks=pytest.mark.slow),
        pytest.param(AddsToAnObject, Makes, marks=pytest.mark.slow),
        pytest.param(AddsToACell, Makes, marks=pytest.mark.slow),
        (LooksItsGainUp, KnowsItsLayers),
        (AsksForItself, KnowsItsLayers),
        pytest.param(ReadsTheFirst, KnowsItsLayers, marks=pytest.mark.slow),
    ],
    ids=[
        "number",
        "name",
        "leak",
        "modes",
        "arguments",
        "written",
        "context",
        "count",
        "sum",
        "made list",
        "made inside",
        "made object",
        "made cell",
        "lookup",
        "identity",
        "first",
    ],
)
def test_a_layer_that_differs_in_the_trace(kind, model):
    model = make(kind, model)
    step = optimized(model)
    check(step, model)
    assert not once(step)
    (told,) = [one.reason for one in step.report.remarks if "one by one" in one.reason]
    assert "fake tensor" not in told, "the reason is fxrl's own"


def test_what_a_layer_writes_into_and_nobody_reads_later_is_its_own():
    model = make(AddsToItsArgument)
    model.embed.requires_grad_(False)
    step = optimized(model)
    check(step, model)
    assert once(step) == "4 layers were captured as 1"


def test_an_error_that_dynamo_lets_through_is_not_the_calls(monkeypatch):
    """Two kinds of its own: IndexError, which PEFT's LoHa meets, and AssertionError."""
    env = torch.fx.experimental.symbolic_shapes.ShapeEnv

    def fails(*_, **__):
        monkeypatch.undo()
        raise IndexError("list index out of range")

    monkeypatch.setattr(env, "produce_guards_verbose", fails)
    model = make()
    step = optimized(model)
    check(step, model)
    assert not once(step)
    assert any("one by one" in remark.reason for remark in step.report.remarks)


def test_layers_that_count_their_calls_count_them():
    model = make(Counts)
    step = optimized(model)
    step(ONE)
    assert [layer.calls for layer in model.layers] == [1, 1, 1, 1]


def test_a_layer_with_a_hook_is_captured_by_itself():
    model = make()
    model.layers[1].out.register_forward_hook(lambda module, args, output: output * 2)
    step = optimized(model)
    check(step, model)
    assert once(step) == "3 layers were captured as 1"


class Scaling:
    """A hook that is an object with a number."""

    def __init__(self, by):
        self.by = by

    def __call__(self, module, args, output):
        return output * self.by


def test_each_layer_may_have_a_hook_object_of_its_own():
    model = make()
    hooks = [Scaling(2.0), Scaling(2.0), Scaling(2.0), Scaling(3.0)]
    for layer, one in zip(model.layers, hooks, strict=True):
        layer.norm.register_forward_hook(one)
    step = optimized(model)
    check(step, model)
    assert once(step) == "3 layers were captured as 1"
    hooks[1].by = 0.5
    check(step, model)


class MixedLayer(Layer):
    """Its queries come in float32, as where a norm that is not autocast follows the product."""

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q.float() * self.gain, k, v, is_causal=True)
        return x + self.out(heads.transpose(1, 2).flatten(2))


class Straight(torch.autograd.Function):
    """Rounds, and lets the gradient through."""

    @staticmethod
    def forward(ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx, grad):
        return grad


class Rounded(Layer):
    def __init__(self, number):
        super().__init__(number)
        self.qkv.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, x, bias=None, seen=None):
        return super().forward(x + Straight.apply(self.norm(x)))


class Lists(Rounded):
    def forward(self, x, bias=None, seen=None):
        return [super().forward(*x)]


class InLists(Model):
    def body(self, x):
        return super().body([x])[0]


@pytest.mark.parametrize(
    ("kind", "model", "said"),
    [
        pytest.param(Rounded, Model, "4 layers were captured as 1", marks=pytest.mark.slow),
        (Lists, InLists, ""),
    ],
    ids=["as an argument", "in a list"],
)
def test_a_first_layer_that_is_fed_no_gradient_stands_for_some_that_are(kind, model, said):
    """Dynamo looks into an ``autograd.Function``'s forward where none of its arguments has one."""
    model = make(kind, model)
    model.embed.requires_grad_(False)
    step = optimized(model)
    check(step, model)
    assert once(step) == said
    model.embed.requires_grad_(True)
    check(step, model)


class Scale:
    """Of a weight; an object of its own, as bitsandbytes has for each."""

    def __init__(self, number, kind):
        self.values = torch.full((HIDDEN,), 1.0 + number / 4, dtype=torch.double)
        self.kind, self.outer = kind, None


class Held(nn.Parameter):
    """A weight that knows how it is scaled."""


class Quantized(Layer):
    """Weights with scales beside them, in an object that the weight has, and in another."""

    kinds = ("a", "a", "a", "a")

    def __init__(self, number):
        super().__init__(number)
        self.factor = Held(torch.randn(HIDDEN, dtype=torch.double), requires_grad=False)
        self.factor.scale = Scale(number, self.kinds[number])
        self.factor.scale.outer = Scale(-number, "c")

    def forward(self, x, bias=None, seen=None):
        scale = self.factor.scale
        x = x * (self.factor * scale.values + scale.outer.values)
        return super().forward(x if scale.kind == "a" else x.cos())


class OfTwoKinds(Quantized):
    kinds = ("a", "b", "a", "b")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Quantized, "captured as 1"),
        pytest.param(OfTwoKinds, "captured as 2", marks=pytest.mark.slow),
    ],
)
def test_layers_whose_weights_have_objects_with_tensors(kind, said):
    model = make(kind)
    step = optimized(model)
    check(step, model)
    assert once(step) == f"4 layers were {said}"
    scale = model.layers[2].factor.scale
    scale.values = scale.values * 3
    check(step, model)
    scale.kind = "a" if scale.kind == "b" else "b"
    check(step, model)
    assert once(step) != f"4 layers were {said}"


class Variant:
    """What is done with a weight, as PEFT has an object for DoRA: of each its own."""

    def scaled(self, x, weight):
        return x * weight.norm(dim=1)[:HIDDEN]


class Adapted(Layer):
    """A class of its own for a module, with hooks for checkpoints, and a cache for evaluation."""

    def __init__(self, number):
        super().__init__(number)
        parametrizations.weight_norm(self.out[0])
        self.variant, self.cache = Variant(), {}

    def forward(self, x, bias=None, seen=None):
        if self.training:
            self.cache.clear()
        return super().forward(self.variant.scaled(x, self.qkv.weight))


def test_layers_with_parts_that_were_made_for_each():
    model = make(Adapted)
    step = optimized(model)
    check(step, model)
    assert once(step) == "4 layers were captured as 1"
    part = model.layers[2].out[0]
    type(part).weight = property(lambda self: 2 * self.parametrizations.weight())
    check(step, model)
    model.layers[1].variant.scaled = lambda x, weight: 3 * x
    check(step, model)


@pytest.mark.parametrize(
    "inside",
    [pytest.param(True, marks=pytest.mark.slow), False],
    ids=["inside the loss", "around the step"],
)
def test_layers_run_in_the_dtype_of_autocast(inside):
    def autocast(enabled):
        return torch.autocast("cpu", torch.bfloat16, enabled=enabled)

    def loss(model, given):
        with autocast(inside or torch.is_autocast_enabled("cpu")):
            hidden = model.body(model.embed(given["ids"]))
        with autocast(False):
            logp = model.head(hidden.float()).log_softmax(-1)
        return -logp[:, :-1].gather(-1, given["ids"][:, 1:, None]).mean()

    model = make(MixedLayer).float()
    step = optimized(model, loss)
    with autocast(not inside):
        got, wanted = step(ONE), loss(model, ONE)
    assert once(step)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------- changed later
def hook(model):
    model.layers[2].norm.register_forward_hook(lambda module, args, output: output * 3)


def hook_of_a_layer(model):
    model.layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 3,))


def replaced_weight(model):
    model.layers[1].qkv.weight = nn.Parameter(torch.randn_like(model.layers[1].qkv.weight))


def replaced_module(model):
    model.layers[3].out = nn.Sequential(nn.Linear(HIDDEN, HIDDEN).double(), nn.Tanh())


def replaced_layer(model):
    model.layers[2] = Layer(7).double()


def swapped_layers(model):
    model.layers[1], model.layers[2] = model.layers[2], model.layers[1]


def gain(model):
    model.layers[3].gain = 0.25


def thawed(model):
    model.layers[2].qkv.requires_grad_(False)


def patched(model):
    model.layers[1].forward = lambda x, **_: x * 2


def patched_class(model):
    Layer.forward = lambda self, x, **_: x * self.gain


def another_class(model):
    model.layers[1].__class__ = LooksItsGainUp
    Context.gains = {model.layers[1]: 0.5}


@pytest.mark.parametrize(
    "change",
    [
        hook,
        pytest.param(hook_of_a_layer, marks=pytest.mark.slow),
        pytest.param(another_class, marks=pytest.mark.slow),
        replaced_weight,
        pytest.param(replaced_module, marks=pytest.mark.slow),
        pytest.param(replaced_layer, marks=pytest.mark.slow),
        pytest.param(swapped_layers, marks=pytest.mark.slow),
        pytest.param(gain, marks=pytest.mark.slow),
        thawed,
        pytest.param(patched, marks=pytest.mark.slow),
        patched_class,
    ],
)
def test_a_layer_that_is_changed_later(change, monkeypatch):
    monkeypatch.setattr(Layer, "forward", Layer.forward)  # put back, if it becomes another
    model = make()
    step = optimized(model)
    check(step, model)
    change(model)
    check(step, model)


def test_an_update_in_place_needs_no_new_capture():
    model = make()
    step = optimized(model)
    check(step, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    check(step, model)
    assert len(step.captures) == 1


def test_a_model_whose_conversions_swap_its_weights():
    """So torch converts where it is asked to, and weights of a class of their own always."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    model = make()
    step = optimized(model)
    check(step, model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.float().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    check(step, model)
    assert len(step.captures) == 1


def test_a_state_that_comes_back_needs_no_new_capture():
    model = make()
    step = optimized(model)
    for gain in ("0.5", "2", "0.5", "2"):
        for layer in model.layers:
            layer.gain = float(gain)  # an equal number, another object
        check(step, model)
    assert len(step.captures) == 2


def test_adapters_that_are_switched():
    """No state runs another one's graph, and none is captured twice."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False)
    model = peft.get_peft_model(make(), lora, autocast_adapter_dtype=False)
    model.add_adapter("two", lora, autocast_adapter_dtype=False)
    step = optimized(model)
    found = []
    for name in ("default", "two", "default", "two"):
        model.set_adapter(name)
        check(step, model)
        found.append(step(ONE).item())
        with model.disable_adapter(), torch.no_grad():
            torch.testing.assert_close(step(ONE), loss_fn(model, ONE), rtol=1e-10, atol=0)
            found.append(step(ONE).item())
    assert len(set(found)) == 3
    assert len(step.captures) == 4  # each adapter, and its absence with either set


def test_nothing_of_a_step_outlives_it():
    """Weights, whoever captured them; the loss that it returned can still be differentiated."""
    model = make()
    step = optimized(model)
    loss = step(ONE)
    step.model.layers[1].gain = 0.5
    step(ONE)
    held = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(step._captured._repeated)]
    head = model.head.weight
    del model, step
    gc.collect()
    assert torch.autograd.grad(loss, head)[0].any()
    del loss, head
    gc.collect()
    assert not [ref() for ref in held if ref() is not None]
    torch._dynamo.reset()  # which asks every backend that there was


class Recurrent(Layer):
    """Mixes tokens without attention; groups of features are counted by what is left."""

    def __init__(self, number):
        super().__init__(number)
        self.narrow = nn.Linear(HIDDEN, 4, bias=False)

    def forward(self, x, bias=None, seen=None):
        groups = self.narrow(self.norm(x)).view(*x.shape[:2], -1, 2).cumsum(1) / x.shape[1]
        return x + groups.mean(2).repeat(1, 1, HIDDEN // 2)


class RoundedGroups(Recurrent):
    def forward(self, x, bias=None, seen=None):
        return super().forward(x + Straight.apply(x))


@pytest.mark.parametrize("kind", [Recurrent, RoundedGroups], ids=["plain", "with a function"])
def test_layers_without_attention(kind):
    model = make(kind)
    step = optimized(model)
    for given in (batch(), batch(3, 11)):
        check(step, model, given=given)
    assert once(step) == "4 layers were captured as 1"
    assert len(step.captures) == 1


class Doubling(Layer):
    """Tokens twice, as a mixture of experts has them."""

    def forward(self, x, bias=None, seen=None):
        rows = x.flatten(0, 1).repeat(2, 1)
        places = torch.arange(rows.shape[0]).view(2, -1).sum(0) % 5
        return super().forward(x + places.view(*x.shape[:2], 1) / 5 + rows.mean())


class Tripling(Doubling):
    def forward(self, x, bias=None, seen=None):
        return super().forward(x).tanh()


class InTurn(Model):
    def __init__(self, kind):
        super().__init__(kind)
        for number in (1, 3):
            self.layers[number] = Tripling(number)


def test_layers_of_two_kinds_that_compute_the_same_sizes():
    """Dynamo has each size once, where it is first computed: inside of another layer."""
    model = make(Doubling, InTurn)

    def loss(model, batch):
        logp = model(batch["ids"][:, :-1]).log_softmax(-1)
        return -(logp.gather(-1, batch["ids"][:, 1:, None])[..., 0] * batch["mask"]).mean()

    step = optimized(model, loss)
    for given in (batch(), batch(3, 11)):
        mask = torch.rand(given["ids"][:, 1:].shape).double()
        check(step, model, loss, given | {"mask": mask})
    assert once(step) == "4 layers were captured as 2"
    assert len(step.captures) == 1


# ---------------------------------------------------------------------------- transformers' layers
def qwen(*layer_types):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        sliding_window=3,
        use_sliding_window=True,
        layer_types=[f"{kind}_attention" for kind in layer_types],
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double()


@pytest.mark.parametrize(
    ("use_cache", "given"),
    [
        (False, ONE),
        pytest.param(True, ONE, marks=pytest.mark.slow),
        pytest.param(False, batch(), marks=pytest.mark.slow),
    ],
)
def test_transformers_layers_of_two_kinds(use_cache, given):
    model = qwen(*("full", "sliding") * 2)

    def loss(model, batch):
        logits = model(input_ids=batch["ids"], use_cache=use_cache).logits
        logp = logits[:, :-1].log_softmax(-1)
        return -logp.gather(-1, batch["ids"][:, 1:, None]).mean()

    step = optimized(model, loss)
    check(step, model, loss, given)
    assert once(step) == "4 layers were captured as 2"


@pytest.mark.parametrize("name", ["past_key_values", "cache", None])
def test_an_empty_cache_by_either_name_or_none(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(num_hidden_layers=4)

    class Caching(Layer):
        def forward(self, x, *unnamed, **given):
            cache = given[name] if name else unnamed[0]
            keys, values = cache.update(x[:, None], 2 * x[:, None], self.number)
            return super().forward((keys * values)[:, 0])

    class Cached(Model):
        def body(self, x):
            cache = transformers.DynamicCache(config=config)
            for layer in self.layers:
                x = layer(x, **{name: cache}) if name else layer(x, cache)
            return x

    model = make(Caching, Cached)
    step = optimized(model)
    check(step, model)
    assert once(step) == "4 layers were captured as 1"


@pytest.mark.parametrize("length", [2, 7], ids=["shorter than the kernel", "longer"])
def test_a_cache_of_states(length):
    """A layer with a convolution and a recurrence, one with both and attention, one with none."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers.cache_utils.Cache, "get_conv_state"):  # up to 5.17
        pytest.skip("transformers' caches give no states of convolutions")
    kinds = ["linear_attention", "hybrid", "moe"] * 2
    config = transformers.Qwen3Config(num_hidden_layers=6)
    config.layer_types = kinds

    class Caching(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.kind = ["linear", "hybrid", "none"][number % 3]
            self.taps = nn.Parameter(torch.rand(HIDDEN, 1, 4))

        def forward(self, x, cache):
            if self.kind == "hybrid":
                keys, values = cache.update(x[:, None], 2 * x[:, None], self.number)
                x = (keys * values)[:, 0].tanh()
            if self.kind != "none":
                assert cache.get_conv_state(self.number, state_idx=0) is None
                rows = x.transpose(1, 2)
                seen = cache.update_conv_state(rows, self.number, conv_kernel_size=4)
                mixed = F.conv1d(F.pad(seen, (3, 0)), self.taps, groups=HIDDEN)
                x = x + mixed[..., -x.shape[1] :].transpose(1, 2)
                cache.update_recurrent_state(x.sum(1), self.number)
            return super().forward(x)

    class Cached(Model):
        def __init__(self, kind):
            super().__init__(kind, 6)

        def body(self, x):
            cache = transformers.DynamicCache(config=config)
            for layer in self.layers:
                x = layer(x, cache=cache)
            return x

    model = make(Caching, Cached)
    step = optimized(model)
    given = fixed(batch(length=length))
    check(step, model, given=given)
    assert once(step) == "6 layers were captured as 3"


def test_a_cache_that_the_loss_reads():
    model = qwen("full", "full")

    def loss(model, batch):
        output = model(input_ids=batch["ids"], use_cache=True)
        keys = output.past_key_values.layers[1].keys
        return output.logits.logsumexp(-1).mean() + keys.square().mean()

    check(optimized(model, loss), model, loss)


@pytest.mark.parametrize("kind", [pytest.param("qwen", marks=pytest.mark.slow), "gpt2"])
def test_layers_of_a_batch_without_its_padding(kind):
    """Packed into one row, whose length the mask says; GPT-2 asks for its shape behind them."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    gpt = transformers.GPT2Config(**sizes, **dropout, bos_token_id=1, eos_token_id=1)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(gpt).double()
    model = qwen("full", "full") if kind == "qwen" else made

    def loss(model, batch):
        real, ids = batch["real"].bool(), batch["ids"]
        packed, places = ids[real][None], (real.cumsum(-1) - 1)[real][None]
        logits = model(input_ids=packed, position_ids=places, use_cache=False).logits.squeeze(0)
        logp = logits.log_softmax(-1).gather(-1, packed.roll(-1, 1)[0][:, None])[:, 0]
        steps = torch.diff(places[0], n=2, append=torch.zeros(1, dtype=torch.int64))
        return -torch.zeros(real.shape).double().masked_scatter(real, logp).mean() + steps.sum()

    step = optimized(model, loss)
    for given in padded():
        check(step, model, loss, given)
    assert once(step) == "2 layers were captured as 1"
    assert any(one.pass_name == "fuse-linear-logprob" for one in step.report.of_kind("applied"))
    assert len(step.captures) == 1


def padded():
    """Batches of rows of lengths of their own."""
    for rows, length in ((3, 6), (2, 8)):
        ids = torch.randint(0, VOCAB, (rows, length))
        real = torch.arange(length) < torch.tensor([length, length - 3, 4][:rows])[:, None]
        yield {"ids": ids, "real": real.long()}


def test_a_checkpointed_head_behind_as_many_tokens_as_the_mask_says():
    """And layers that ask whether there is one token alone, as grouped queries under a mask do."""
    model = qwen("full", "full")

    def head(hidden, ids):
        return model.lm_head(hidden).log_softmax(-1).gather(-1, ids[:, None]).mean()

    def loss(model, batch):
        real, ids = batch["real"].bool(), batch["ids"]
        packed, places = ids[real][None], (real.cumsum(-1) - 1)[real][None]
        made = model.model(input_ids=packed, position_ids=places, use_cache=False)
        return -checkpoint(head, made[0][0, :-1], packed[0, 1:], use_reentrant=False)

    step = optimized(model, loss)
    for given in padded():
        check(step, model, loss, given)
    applied = {one.pass_name for one in step.report.of_kind("applied")}
    assert applied >= {"fuse-linear-logprob", "outline-layers"}
    assert len(step.captures) == 1
