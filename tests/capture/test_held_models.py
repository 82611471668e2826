"""Models that a loss holds are captured as the one that it is given: equal layers once."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxrl
from tests.capture.mixer import fixed
from tests.rows import rows

CONFIG = fxrl.Config(
    passes=("fuse-linear-logprob",), min_saved_bytes=0, compile_regions=False, on_miss="ignore"
)
HIDDEN, VOCAB = 8, 19


class Layer(nn.Module):
    """Attention that keeps its number, as those of language models do."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.settings = {"scale": 0.5}
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.drop = nn.Dropout(0.0)
        self.gate = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.gate * self.drop(heads.transpose(1, 2).flatten(2))
        return x if self.training else x * self.settings["scale"]


class Model(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(map(Layer, range(depth)))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(seed=0):
    torch.manual_seed(seed)
    return Model().double()


def frozen(seed=1):
    return make(seed).requires_grad_(False)


def ids(length=6):
    return torch.randint(VOCAB, (2, length), generator=torch.manual_seed(length))


#: Of one length, for which no size is symbolic: half the time, where lengths are not the matter.
ONE = fixed(ids())


def logps(model, ids):
    return model(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])


def against(reference, model, ids):
    with torch.no_grad():
        before = logps(reference, ids)
    return -(logps(model, ids) - before).exp().mean()


class Held:
    """A loss that is an object, which names its reference in one of several ways."""

    def __init__(self, reference=None, **inside):
        self.reference, self.inside = reference, inside

    def __call__(self, model, ids):
        return against(self.reference, model, ids)

    def method(self, model, ids):
        return self.named(model, ids)

    def named(self, model, ids):
        return against(self.reference, model, ids)

    @property
    def teacher(self):
        return self.reference

    def of_a_property(self, model, ids):
        return against(self.teacher, model, ids)

    def in_a_list(self, model, ids):
        return against(self.inside["teachers"][0], model, ids)


class Module(nn.Module):
    """A trainer that is a module; its policy may be the model."""

    def __init__(self, reference=None, policy=None):
        super().__init__()
        self.reference, self.policy = reference, policy

    def loss(self, model, ids):
        return against(self.reference, model, ids)


def in_a_closure(reference):
    def loss(model, ids):
        return against(reference, model, ids)

    return loss


def by_default(reference):
    def loss(model, ids, reference=reference):
        return against(reference, model, ids)

    return loss


def in_a_global(reference):
    globals()["REFERENCE"] = reference
    return reads_a_global


def reads_a_global(model, ids):
    return against(REFERENCE, model, ids)  # noqa: F821


def frozen_copy_of(model):
    return copy.deepcopy(model).requires_grad_(False)


def captured_once(step):
    """What the last capture says of layers that were captured once."""
    told = [r.reason for r in step.captures[-1].report.remarks if r.pass_name == "inline-layers"]
    return told[0] if told else ""


def check(step, model, loss, given=ONE):
    """Loss and every gradient equal eager's."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    eager, found = loss(model, given), step(given)
    torch.testing.assert_close(found, eager, rtol=1e-10, atol=1e-10)
    expected = torch.autograd.grad(eager, parameters)
    gradients = torch.autograd.grad(found, parameters)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-11)


#: The one way in which sizes vary, too.
VARIED = in_a_closure


@pytest.mark.parametrize(
    "hold",
    [
        VARIED,
        pytest.param(in_a_global, marks=pytest.mark.slow),
        pytest.param(lambda reference: partial(against, reference), marks=pytest.mark.slow),
        pytest.param(Held, marks=pytest.mark.slow),
        lambda reference: Held(reference).method,
        lambda reference: Held(teachers=[reference]).in_a_list,
        pytest.param(lambda reference: Held(reference).of_a_property, marks=pytest.mark.slow),
        lambda reference: Module(reference).loss,
        pytest.param(lambda reference: partial(in_a_closure(reference)), marks=pytest.mark.slow),
        pytest.param(by_default, marks=pytest.mark.slow),
    ],
    ids=[
        "closure",
        "global",
        "partial",
        "object",
        "method",
        "list",
        "property",
        "module",
        "nested",
        "default",
    ],
)
def test_layers_of_a_held_model_are_captured_once(hold):
    model, reference = make(), frozen()
    loss = hold(reference)
    step = fxrl.optimize(model, loss, CONFIG)
    for given in (ids(6), ids(9)) if hold is VARIED else (ONE,):
        check(step, model, loss, given)
    assert captured_once(step) == "8 layers were captured as 2"
    assert len(step.captures) == 1
    assert not any("one by one" in r.reason for r in step.report.remarks)


@pytest.mark.parametrize("holder", rows([Held, Module], [Module]))
def test_a_held_model_that_is_replaced_is_followed_and_let_go(holder):
    model, held = make(), holder(frozen())
    loss = getattr(held, "method", None) or held.loss
    step = fxrl.optimize(model, loss, CONFIG)
    check(step, model, loss)
    for _ in range(2):
        old = [weakref.ref(p) for p in held.reference.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        held.reference = frozen_copy_of(model)
        check(step, model, loss)
        gc.collect()
        assert not [ref for ref in old if ref() is not None]
    assert captured_once(step) == "8 layers were captured as 2"
    assert len(step.captures) == 1


def deeper(model, held):
    held.reference = Model(6).double().requires_grad_(False)


def evaluated_copy(model, held):
    held.reference = copy.deepcopy(held.reference).eval()


def layer_of_the_policy(model, held):
    held.reference.layers[1] = model.layers[1]


def layer_of_another_kind(model, held):
    held.reference.layers[2].gate = nn.Parameter(torch.randn(1).double(), requires_grad=False)


def tied_otherwise(model, held):
    held.reference = copy.deepcopy(held.reference)
    held.reference.layers[3].gate = held.reference.layers[2].gate


def tied_to_the_policy(model, held):
    held.reference = copy.deepcopy(held.reference)
    held.reference.layers[3].qkv.weight = model.layers[2].qkv.weight


def settings_of_all_layers(model, held):
    held.reference = copy.deepcopy(held.reference).eval()
    for layer in held.reference.layers:
        layer.settings["scale"] = 0.25


def settings_of_a_layer(model, held):
    held.reference = copy.deepcopy(held.reference).eval()
    held.reference.layers[2].settings["scale"] = 0.25


def hook_of_a_layer(model, held):
    held.reference.layers[2].register_forward_hook(lambda module, args, output: output * 3)


def the_policy(model, held):
    held.reference = model


def none_in_layers(model, held):
    held.reference = nn.Sequential(nn.Embedding(VOCAB, VOCAB)).double().requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(deeper, marks=pytest.mark.slow),
        pytest.param(evaluated_copy, marks=pytest.mark.slow),
        layer_of_the_policy,
        pytest.param(layer_of_another_kind, marks=pytest.mark.slow),
        pytest.param(tied_otherwise, marks=pytest.mark.slow),
        pytest.param(tied_to_the_policy, marks=pytest.mark.slow),
        pytest.param(settings_of_all_layers, marks=pytest.mark.slow),
        pytest.param(settings_of_a_layer, marks=pytest.mark.slow),
        pytest.param(hook_of_a_layer, marks=pytest.mark.slow),
        the_policy,
        pytest.param(none_in_layers, marks=pytest.mark.slow),
    ],
)
def test_a_held_model_that_is_another_kind_later(change):
    model, held = make(), Held(frozen())
    step = fxrl.optimize(model, held, CONFIG)
    check(step, model, held)
    before = held.reference
    change(model, held)
    check(step, model, held)
    held.reference = before
    check(step, model, held)


def test_weights_that_are_swapped_need_no_new_capture():
    """An average's, in the place of the reference's own and in that of the policy."""
    model, held = make(), Held(frozen())
    step = fxrl.optimize(model, held, CONFIG)
    check(step, model, held)
    for seed in (2, 3):
        old = [weakref.ref(p) for p in held.reference.parameters()]
        held.reference.load_state_dict(make(seed).state_dict(), assign=True)
        held.reference.requires_grad_(False)
        check(step, model, held)
        gc.collect()
        assert not [ref for ref in old if ref() is not None]
    policy, average = model.state_dict(keep_vars=True), make(4).state_dict(keep_vars=True)
    for weights in (average, policy):
        model.load_state_dict(weights, assign=True)
        check(step, model, held)
    assert len(step.captures) == 1


def test_two_references_that_are_swapped_need_no_new_capture():
    model, held = make(), Held()
    references = [frozen(1), frozen(2)]
    step = fxrl.optimize(model, held, CONFIG)
    for turn in range(4):
        held.reference = references[turn % 2]
        check(step, model, held)
    assert len(step.captures) == 1


def test_a_held_model_in_two_modes():
    """Each is captured once, also if the model is another copy meanwhile."""
    model, held = make(), Held(frozen())
    step = fxrl.optimize(model, held, CONFIG)
    for turn in range(3):
        for training in (True, False):
            held.reference.train(training)
            check(step, model, held)
        old = [weakref.ref(p) for p in held.reference.parameters()]
        held.reference = copy.deepcopy(held.reference)
        check(step, model, held)
        gc.collect()
        assert not [ref for ref in old if ref() is not None], turn
    assert captured_once(step) == "8 layers were captured as 2"
    assert len(step.captures) == 2


def lower_layers(model, reference):
    reference.layers = nn.ModuleList([*model.layers[:2], *reference.layers[2:]])


def upper_layers(model, reference):
    reference.layers = nn.ModuleList([*reference.layers[:2], *model.layers[2:]])


def weights(model, reference):
    for mine, its in zip(model.layers[1:], reference.layers, strict=False):
        its.qkv.weight = mine.qkv.weight
    reference.embed.weight = model.embed.weight


@pytest.mark.parametrize(
    ("tie", "said"),
    [
        (lower_layers, "8 layers were captured as 3"),
        pytest.param(upper_layers, "8 layers were captured as 3", marks=pytest.mark.slow),
        (weights, "7 layers were captured as 2"),
    ],
)
def test_a_reference_that_is_tied_to_the_policy(tie, said):
    model, reference = make(), frozen()
    tie(model, reference)
    loss = in_a_closure(reference)
    step = fxrl.optimize(model, loss, CONFIG)
    check(step, model, loss)
    assert captured_once(step) == said
    assert len(step.captures) == 1


def test_a_policy_whose_adapter_is_off_is_the_reference():
    """It is held by two names, and is one model."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False)
    model = peft.get_peft_model(make(), lora, autocast_adapter_dtype=False)

    class Trainer(Held):
        def __call__(self, policy, ids):
            with self.reference.disable_adapter(), torch.no_grad():
                before = logps(self.inside["base"], ids)
            return -(logps(policy, ids) - before).exp().mean()

    trainer = Trainer(model, base=model.get_base_model())
    step = fxrl.optimize(model, trainer, CONFIG)
    check(step, model, trainer)
    assert captured_once(step)
    assert len(step.captures) == 1


def difference(model, x, reference):
    other, one = (head(x).log_softmax(-1)[..., 0] for head in (reference, model))
    return (one - other.detach()).square().mean()


def in_a_closure(reference):
    return lambda model, x: difference(model, x, reference)


def in_a_wrapped_function(reference):
    inner = in_a_closure(reference)
    return lambda model, x: 2 * inner(model, x)


def as_a_keyword(reference):
    return partial(difference, reference=reference)


@pytest.mark.parametrize("hold", [in_a_closure, in_a_wrapped_function, as_a_keyword])
def test_sites_of_a_held_model_have_the_name_that_the_loss_has_for_it(hold):
    model, reference = torch.nn.Linear(3, 7), torch.nn.Linear(3, 7)
    report = fxrl.optimize(model, hold(reference)).explain(torch.randn(4, 3))
    paths = {r.site.partition("/")[0] for r in report.remarks if r.pass_name != "capture"}
    assert "0:reference" in paths
    assert not any("loss_fn" in path for path in paths)


class Placed(Model):
    """With something ahead of the layers and behind them."""

    def forward(self, ids):
        x = self.embed(ids) + self.embed.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(F.layer_norm(x.clone(), (HIDDEN,)))


def test_a_model_in_a_list_is_no_layer_that_cannot_be_outlined():
    """What runs under no_grad is known by its module, so nothing ahead of the layers goes with what
    is behind them."""
    torch.manual_seed(0)
    teachers = [Placed(2).double().requires_grad_(False) for _ in range(2)]

    def loss(model, ids):
        return sum(against(teacher, model, ids) for teacher in teachers)

    model = Placed(2).double()
    passes = ("fuse-linear-logprob", "outline-layers")
    config = fxrl.Config(passes=passes, min_saved_bytes=0, compile_regions=False, on_miss="error")
    step = fxrl.optimize(model, loss, config)
    expected, found = loss(model, ONE), step(ONE)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(value, parameters) for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_models_of_an_ensemble_are_no_layers_but_have_heads():
    """Equal ones are captured once, as layers are, and what they give is logits."""

    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            self.models = nn.ModuleList(Model(2) for _ in range(2))

        def forward(self, ids):
            return sum(model(ids).log_softmax(-1) for model in self.models) / 2

    def loss(model, ids):
        return -model(ids)[:, :-1].gather(-1, ids[:, 1:, None]).mean()

    torch.manual_seed(0)
    model = Ensemble().double()
    config = fxrl.Config(min_saved_bytes=0, compile_regions=False, on_miss="error")
    step = fxrl.optimize(model, loss, config)
    parameters = list(model.parameters())
    values = loss(model, ONE), step(ONE)
    gradients = [torch.autograd.grad(value, parameters) for value in values]
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert any(r.pass_name == "chunk-vocab-region" for r in step.report.of_kind("applied"))
