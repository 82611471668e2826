"""Outputs that transformers records by hooks, and mappings that layers fill for others."""

from collections import UserDict, defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.capture.test_repeated import ONE, VOCAB, check, loss_fn, make, once, optimized

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)


def dense():
    return transformers.Qwen3Config(**SIZES)


def weighed():
    return transformers.Qwen3Config(**SIZES, attn_implementation="eager")


def experts():
    return transformers.Qwen3MoeConfig(
        **SIZES,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        experts_implementation="eager",
    )


def policy(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double().train()


def loss_with(read, **asked):
    def loss(model, batch):
        found = model(input_ids=batch["ids"], use_cache=False, **asked)
        logp = found.logits[:, :-1].log_softmax(-1)
        return -logp.gather(-1, batch["ids"][:, 1:, None]).mean() + read(found)

    return loss


def squares(values):
    return sum(value.square().mean() for value in values)


HIDDEN = loss_with(lambda found: squares(found.hidden_states), output_hidden_states=True)
SELECTED = loss_with(lambda found: squares(found.hidden_states[1:2]), output_hidden_states=[1])
ATTENTION = loss_with(lambda found: squares(found.attentions), output_attentions=True)
ROUTER = loss_with(
    lambda found: found.aux_loss + found.router_logits[1].square().mean(),
    output_router_logits=True,
)


@pytest.mark.parametrize(
    ("config", "loss"),
    [
        (dense, HIDDEN),
        pytest.param(dense, SELECTED, marks=pytest.mark.slow),
        (weighed, ATTENTION),
        pytest.param(experts, ROUTER, marks=pytest.mark.slow),  # as of checkpointed layers
    ],
)
def test_layers_whose_outputs_are_recorded(config, loss):
    model = policy(config())
    step = optimized(model, loss)
    check(step, model, loss)
    assert once(step) == "2 layers were captured as 1"


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointed_layers_record(reentrant):
    """What a reentrant checkpoint does not return has no gradient."""
    model = policy(experts())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    step = optimized(model, ROUTER)
    found, expected = (gradients(model, each) for each in (step, partial(ROUTER, model)))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert once(step) == "2 layers were captured as 1"
    assert len(step.captures) == 1


def gradients(model, loss):
    """By ``backward``: nothing else goes through a reentrant checkpoint."""
    model.zero_grad()
    loss(ONE).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_hooks_that_record_nothing_now():
    """They stay from the first call that asked for something."""
    model, loss = policy(dense()), loss_with(lambda found: 0)
    HIDDEN(model, ONE)
    step = optimized(model, loss)
    check(step, model, loss)
    assert once(step) == "2 layers were captured as 1"


def test_hidden_states_of_parts():
    """The first one is recorded with what the part was given, which no other layer does."""
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    model, recorder = make(), capturing._active_collector
    for layer in model.layers:
        capturing.install_output_capuring_hook(layer.out, "hidden_states", 0)

    def loss(model, batch):
        found = {"hidden_states": []}
        token = recorder.set(found)
        nll = loss_fn(model, batch)
        recorder.reset(token)
        assert len(found["hidden_states"]) == 5
        return nll + squares(found["hidden_states"])

    step = optimized(model, loss)
    check(step, model, loss)
    (told,) = [r.reason for r in step.report.remarks if "one by one" in r.reason]
    assert "records hidden states of its parts" in told


# ---------------------------------------------------------------------------- hooks of users
def scaled(by):
    def hook(module, args, output):
        return output * by

    return hook


def defaulted(by):
    return lambda module, args, output, by=by: output * by


def counting():
    calls = 0

    def hook(module, args, output):
        nonlocal calls
        calls += 1
        return output * calls

    return hook


def around(layer, number):
    layer.register_forward_hook(scaled(1 + number))


def inside(layer, number):
    layer.out.register_forward_hook(scaled(3))


def inside_apart(layer, number):
    layer.out.register_forward_hook(scaled(1 + number))


def inside_by_default(layer, number):
    layer.out.register_forward_hook(defaulted(1 + number))


def two_inside(layer, number):
    layer.out.register_forward_hook(scaled(3))
    layer.norm.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs), with_kwargs=True
    )


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (around, "4 layers were captured as 1"),
        (inside, "4 layers were captured as 1"),
        (two_inside, "4 layers were captured as 1"),
        (inside_apart, ""),
        pytest.param(inside_by_default, "", marks=pytest.mark.slow),
    ],
)
def test_hooks_that_each_layer_has_of_its_own(register, said):
    model = make()
    for number, layer in enumerate(model.layers):
        register(layer, number)
    step = optimized(model)
    check(step, model)
    assert once(step) == said


def test_a_hook_of_a_layer_that_counts():
    """Each call of the step moves it on, as written."""
    model, other = make(), make()
    for each in (model, other):
        for layer in each.layers:
            layer.out.register_forward_hook(counting())
    step = optimized(model)
    for _ in range(3):
        torch.testing.assert_close(step(ONE), loss_fn(other, ONE), rtol=1e-10, atol=1e-10)


def test_what_a_hook_was_made_with_is_another_later():
    """Of a layer that was not traced."""
    model, hooks = make(), [scaled(1.5) for _ in range(4)]
    for hook, layer in zip(hooks, model.layers, strict=True):
        layer.out.register_forward_hook(hook)
    step = optimized(model)
    check(step, model)
    hooks[2].__closure__[0].cell_contents = 2.5
    check(step, model)
    assert once(step) == "3 layers were captured as 1"


def test_copies_with_other_hooks_around_their_layers():
    model, reference = make(), [make()]

    def loss(model, batch):
        ours, theirs = (each(batch["ids"]).log_softmax(-1) for each in (model, reference[0]))
        return (ours - theirs.detach()).square().mean()

    step = optimized(model, loss)
    for by in (2, 3, None):
        reference[0] = make()
        for layer in reference[0].layers if by else ():
            layer.register_forward_hook(partial(_times, by=by))
        check(step, model, loss)


def _times(module, args, output, by):
    return output * by


# ---------------------------------------------------------------------------- mappings
class Filling(nn.Module):
    """Its keys are those of the next layer, too. That no key is filled twice and read between is
    what eager needs: it runs a layer again when all have filled theirs."""

    def __init__(self, number):
        super().__init__()
        self.fills, self.name = number % 2 == 0, "ab"[number // 2]
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, shared):
        if self.fills:
            shared[self.name] = (self.keys(x), x.tanh())
        keys, before = shared[self.name]
        shared["last"] = x
        return self.values(x) + keys.tanh() * before


class Sharing(nn.Module):
    def __init__(self, run, kind=dict, layer=Filling):
        super().__init__()
        self.run, self.kind = run, kind
        self.table = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(map(layer, range(4)))
        self.head = nn.Linear(8, VOCAB, bias=False)

    def forward(self, ids):
        x, shared = self.table(ids), self.kind()
        for layer in self.layers:
            x = self.run(layer, x, shared)
        return self.head(x + shared["last"])


def by_place(layer, x, shared, **options):
    return checkpoint(layer, x, shared, **{"use_reentrant": False, **options})


def by_name(layer, x, shared):
    return checkpoint(layer, x, shared=shared, use_reentrant=False)


def within(layer, x, shared):
    return checkpoint(partial(layer, shared=shared), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (by_place, UserDict),
        (by_name, dict),
        pytest.param(by_place, partial(defaultdict, list), marks=pytest.mark.slow),
        (within, UserDict),
    ],
)
def test_mappings_that_checkpointed_layers_fill(run, kind):
    torch.manual_seed(0)
    model = Sharing(run, kind).double()
    step = optimized(model)
    check(step, model)
    (capture,) = step.captures
    assert not capture.graph_breaks


class Taking(Filling):
    def forward(self, x, shared):
        result = super().forward(x, shared)
        if self.fills:
            shared.pop("last")
        return result


class Finding(Filling):
    """Reads what it has put into its argument as it finds it elsewhere."""

    def forward(self, x, shared, also=None):
        shared[self.name] = (self.keys(x), x)
        shared["last"] = x
        found = self.holder.shared if also is None else also
        return self.values(x) + found[self.name][0].tanh()


def kept_by_an_object(layer, x, shared):
    layer.holder.shared = shared
    return by_place(layer, x, shared)


@pytest.mark.parametrize(
    "run",
    [kept_by_an_object, lambda layer, x, shared: by_place(layer, x, shared, also=shared)],
    ids=["kept", "handed twice"],
)
def test_mappings_to_which_there_is_another_way(run):
    torch.manual_seed(0)
    model = Sharing(run, layer=Finding).double()
    for layer in model.layers:
        layer.holder = SimpleNamespace()
    step = optimized(model)
    found, expected = (gradients(model, each) for each in (step, partial(loss_fn, model)))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("layer", "reentrant"),
    [(Taking, False), (Filling, True)],
    ids=["taken out of", "filled in a reentrant one"],
)
def test_mappings_at_which_the_graph_ends(layer, reentrant):
    torch.manual_seed(0)
    model = Sharing(partial(by_place, use_reentrant=reentrant), layer=layer).double()
    step = optimized(model)
    found, expected = (gradients(model, each) for each in (step, partial(loss_fn, model)))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert any(capture.graph_breaks for capture in step.captures)
