"""However a model or a loss is written, its head is rewritten, and numbers are eager's.

A use is a row of ``USES``: what a model's forward does, the loss, and its batches in their order.
Misses are errors; loss, gradients and buffers are compared in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any, Required, TypedDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxrl.ir.on_miss import open_misses
from fxrl.step import TrainStep, optimize
from tests.capture.mixer import (
    CONFIG,
    VOCAB,
    WIDTH,
    Mixer,
    assert_same,
    fixed,
    fused,
    grads,
    make_batch,
    token_logps,
)
from tests.rows import rows

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


HEADS = {"fuse-linear-logprob", "chunk-vocab-region"}
Output = make_dataclass("Output", ["logits"])


class Silu(torch.autograd.Function):
    """An activation with a backward of its own, as Bloom's and RecurrentGemma's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return gradient * gate * (1 + x * (1 - gate))


class Model(Mixer):
    """A mixer with an MLP that widens and a norm with running statistics."""

    def __init__(self, answer: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.answer = answer
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, VOCAB, bias=False)
        self.magnitude = nn.Parameter(torch.rand(VOCAB) + 1)
        self.double()

    def forward(self, ids: Tensor) -> Any:
        return self.answer(self, ids)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + torch.tanh(self.mix(x.cumsum(1) / 3))


def plain(model: Model, ids: Tensor) -> Any:
    return Output(model.head(model.hidden(ids)))


def namespace(model: Model, ids: Tensor) -> Any:
    return SimpleNamespace(logits=model.head(model.hidden(ids)), aux=None)


class Keys(dict):
    """Small programs keep their settings so."""

    __getattr__ = dict.__getitem__


SETTINGS = Keys(scale=2.0, softcap=Keys(value=30.0))


def keys_as_attributes(model: Model, ids: Tensor) -> Any:
    scaled = model.head(model.hidden(ids)) / SETTINGS.scale
    assert "scale" in SETTINGS
    assert SETTINGS.copy is not None  # a method, no key
    return Output(SETTINGS.softcap.value * torch.tanh(scaled / SETTINGS.softcap.value))


def written_namespace(model: Model, ids: Tensor) -> Any:
    found = SimpleNamespace(hidden=model.hidden(ids), scale=0)
    found.scale = 2
    found.logits = model.head(found.hidden) / found.scale
    assert isinstance(found, SimpleNamespace)
    assert hasattr(found, "logits")
    assert "logits" in vars(found)
    return found if vars(found)["scale"] == 2 else None


class TypedOutput(TypedDict, total=False):
    """Some keys may be missing."""

    logits: Required[Tensor]
    hidden: Tensor


def typed_dict(model: Model, ids: Tensor) -> Any:
    """As prime-rl's heads answer."""
    found = TypedOutput({"hidden": model.hidden(ids)}, logits=model.embed(ids))
    found["logits"] = model.head(found.get("hidden"))
    return Output(**TypedOutput(logits=found["logits"] if "hidden" in found else found))


def class_names(model: Model, ids: Tensor) -> Any:
    """As PEFT asks whether a weight is quantised."""
    hidden, weight = model.hidden(ids), model.head.weight
    quantised = type(weight).__module__.startswith("torchao.")
    named = weight.__class__.__name__ in ("Params4bit", "Int8Params")
    known = type(hidden).__qualname__ == "Tensor"
    return Output(model.head(hidden) if known and not quantised and not named else None)


def own_activation(model: Model, ids: Tensor) -> Any:
    x = model.hidden(ids)
    return Output(model.head(x + model.down(Silu.apply(model.up(x)))))


def running_statistics(model: Model, ids: Tensor) -> Any:
    x = model.norm(model.hidden(ids).transpose(1, 2)).transpose(1, 2)
    return Output(model.head(x))


def weighed_adapter(model: Model, ids: Tensor) -> Any:
    """DoRA on the head: a norm of head and adapter, found by the adapter's product of ones."""
    x, weight = model.hidden(ids), model.head.weight
    adapter = model.lora_b(model.lora_a(torch.eye(WIDTH, dtype=x.dtype))).T
    scale = model.magnitude / torch.linalg.norm(weight + adapter, dim=1).detach()
    return Output(scale * (model.head(x) + model.lora_b(model.lora_a(x))))


def rotated(model: Model, ids: Tensor) -> Any:
    """As BOFT: a Cayley transform, whose solve raises where there is no solution."""
    skew, one = model.mix.weight - model.mix.weight.T, torch.eye(WIDTH, dtype=torch.float64)
    return Output(model.head(model.hidden(ids) @ torch.linalg.solve(one + skew, one - skew)))


def inverted(model: Model, ids: Tensor) -> Any:
    return Output(model.head(model.hidden(ids) @ torch.linalg.inv(model.mix.weight)))


def in_chunks(model: Model, ids: Tensor) -> Any:
    """As Qwen3-Next's linear attention: features first, and the last chunk of four filled up, by
    nothing where it is full."""
    x, length = model.hidden(ids), ids.size(1)
    rows = nn.functional.pad(x.transpose(1, 2), (0, -length % 4))
    mixed = rows.reshape(rows.size(0) * WIDTH, -1, 4).cumsum(-1).reshape(rows.shape)
    return Output(model.head(x + mixed[..., :length].transpose(1, 2)))


def heads_in_chunks(model: Model, ids: Tensor) -> Any:
    """As Bamba's scan: what a convolution left lies as images do whose channels come last."""
    x, length = model.hidden(ids), ids.size(1)
    heads = x.transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, (2, -1))
    rows = nn.functional.pad(heads, (0, 0, 0, 0, 0, -length % 4))
    mixed = rows.permute(0, 2, 1, 3).reshape(2 * rows.size(0), -1, rows.size(3)).cumsum(1)
    back = mixed.unflatten(0, (rows.size(0), 2)).transpose(1, 2).flatten(2)
    return Output(model.head(x + back[:, :length]))


def noise_of_a_bound(model: Model, ids: Tensor) -> Any:
    """As NEFTune's hook: a draw takes numbers, and is given tensors."""
    x = model.embed(ids)
    bound = 5 / torch.sqrt(torch.tensor(x.size(1) * x.size(2)))
    x = x + torch.zeros_like(x).uniform_(-bound, bound)
    spread = x.detach().abs().mean()
    x = x + torch.empty_like(x).normal_(0, std=spread) + torch.empty_like(x).uniform_(-1, to=spread)
    return Output(model.head(x + torch.tanh(model.mix(x.cumsum(1) / 3))))


def checkpointed_head(model: Model, ids: Tensor) -> Any:
    """The product alone; what is read of it stands outside."""
    return Output(checkpoint(model.head, model.hidden(ids), use_reentrant=False))


def mean_logp(model: nn.Module, batch: Any) -> Tensor:
    logps = token_logps(model(batch["ids"]).logits, batch["ids"])
    return -(logps * batch["adv"] * batch["mask"]).sum()


def at_temperature(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"]).logits / batch["temperature"]
    return -(token_logps(logits, batch["ids"]) * batch["mask"]).sum()


def pairs_in_two_forwards(model: nn.Module, batch: Any) -> Tensor:
    pairs = batch["ids"].size(0) // 2
    parts = batch["ids"][:pairs], batch["ids"][pairs : 2 * pairs]
    good, bad = (token_logps(model(ids).logits, ids).sum(-1) for ids in parts)
    return -nn.functional.logsigmoid(good - bad).mean()


def pairs_joined(model: nn.Module, batch: Any) -> Tensor:
    ids = batch["ids"]
    pairs = ids.size(0) // 2
    logits = torch.cat([model(ids[:pairs]).logits, model(ids[pairs:]).logits])
    logps = (token_logps(logits, ids) * batch["mask"]).sum(-1)
    return -nn.functional.logsigmoid(logps[:pairs] - logps[pairs:]).mean()


def shifted_by_zeros(model: nn.Module, batch: Any) -> Tensor:
    """As prime-rl: the logits of a token stand at the token that they are for."""
    logits = model(batch["ids"]).logits
    first = torch.zeros(logits.size(0), 1, logits.size(2), dtype=logits.dtype)
    logps = torch.log_softmax(torch.cat([first, logits[:, :-1]], dim=1) / 0.9, -1)
    logps = logps.gather(-1, batch["ids"][..., None])[:, 1:, 0]
    return -(logps * batch["adv"] * batch["mask"]).sum()


def lists_of_numbers(model: nn.Module, batch: Any) -> Tensor:
    return mean_logp(model, {name: torch.tensor(rows) for name, rows in batch.items()})


DRAWS = (make_batch(), make_batch(4, 9, seed=2))
ONE = (fixed(make_batch()),)  # where sizes are not the matter
USES: list[tuple[Callable[..., Any], Callable[..., Tensor], tuple[Any, ...]]] = [
    (namespace, mean_logp, DRAWS),
    (written_namespace, mean_logp, ONE),
    (keys_as_attributes, mean_logp, ONE),
    (typed_dict, mean_logp, ONE),
    (class_names, mean_logp, ONE),
    (own_activation, mean_logp, ONE),
    (running_statistics, mean_logp, DRAWS),
    (weighed_adapter, mean_logp, ONE),
    # a graph that AOTAutograd takes, for its function, and a number that it wants written in
    (own_activation, at_temperature, tuple(fixed(make_batch(temperature=t)) for t in (0.7, 0.9))),
    # half of two sequences is one, which only a guard tells
    (plain, pairs_in_two_forwards, (make_batch(4), make_batch(2))),
    (plain, pairs_joined, (make_batch(4), make_batch(6, 9, seed=2))),
    (plain, lists_of_numbers, ({k: v.tolist() for k, v in DRAWS[0].items()},)),
    (rotated, mean_logp, ONE),
    (checkpointed_head, mean_logp, ONE),
    (noise_of_a_bound, mean_logp, DRAWS),
    (in_chunks, mean_logp, (make_batch(3, 8), make_batch(2, 9), make_batch(2, 12))),
    (heads_in_chunks, mean_logp, (make_batch(2, 9), make_batch(3, 8), make_batch(2, 12))),
]


@pytest.mark.parametrize(
    ("answer", "loss_fn", "batches"), USES, ids=[f"{a.__name__}-{f.__name__}" for a, f, _ in USES]
)
def test_a_use(answer: Any, loss_fn: Any, batches: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    model = Model(answer)
    eager = copy.deepcopy(model)
    step = optimize(model, loss_fn, CONFIG)
    for batch in batches:
        assert_same_update(step, model, loss_fn, eager, batch)
        assert_same(model.state_dict(), eager.state_dict())
    assert {remark.pass_name for remark in step.report.of_kind("applied")} & HEADS
    assert not open_misses(step.report)
    assert not any(capture.graph_breaks for capture in step.captures)


def assert_same_update(
    step: TrainStep, model: nn.Module, loss_fn: Any, eager: nn.Module, batch: Any
) -> None:
    drawn = torch.get_rng_state()
    losses = [step(batch)]
    torch.set_rng_state(drawn)
    losses.append(loss_fn(eager, batch))
    for loss in losses:
        loss.backward()
    assert_same(losses[0].detach(), losses[1].detach())
    assert_same(grads(model), grads(eager))


def test_a_draw_between_bounds_that_are_none() -> None:
    def widened(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.empty_like(batch["adv"]).uniform_(0, batch["bound"])
        return mean_logp(model, batch | {"adv": batch["adv"] + noise})

    model = Model(plain)
    step = optimize(model, widened, CONFIG)
    good = make_batch(bound=torch.tensor(2.0))
    assert_same_update(step, model, widened, copy.deepcopy(model), good)
    with pytest.raises(RuntimeError, match="expects to return a"):
        step(good | {"bound": torch.tensor(-2.0)})
    assert len(step.captures) == 1


def test_a_matrix_without_an_inverse_is_still_found() -> None:
    model = Model(inverted)
    step = optimize(model, mean_logp, CONFIG)
    assert_same_update(step, model, mean_logp, copy.deepcopy(model), DRAWS[0])
    model.mix.weight.data.zero_()
    with pytest.raises(torch.linalg.LinAlgError, match=r"singular|inversion"):
        step(DRAWS[0])
    assert fused(step)


def llama(depth: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=depth,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config).double()
    return model


def hidden_states_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(input_ids=batch["ids"], output_hidden_states=True)
    values = out.hidden_states[-2].mean(-1)
    return -token_logps(out.logits, batch["ids"]).mean() + values.square().mean()


@pytest.mark.parametrize("depth", rows([1, 2], [1]))  # of one layer none is captured once for all
def test_hidden_states_that_hooks_of_the_library_collect(depth: int) -> None:
    """transformers installs them at the first call that asks: here the one that is traced."""
    model = llama(depth)
    eager = copy.deepcopy(model)
    step = optimize(model, hidden_states_loss, CONFIG)
    for batch in DRAWS:
        assert_same_update(step, model, hidden_states_loss, eager, batch)
    assert_same(hidden_states_loss(model, DRAWS[0]), hidden_states_loss(eager, DRAWS[0]))
    assert fused(step)
    assert len(step.captures) == 1


def reference_logps(model: nn.Module, batch: Any) -> Tensor:
    return token_logps(model(input_ids=batch["ids"]).logits, batch["ids"])


def test_an_adapter_that_is_merged() -> None:
    """It is trainable and nobody reads it, so nothing requires grad, in grad mode too."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    step = optimize(model, reference_logps, CONFIG)
    model.merge_adapter()
    found, wanted = step(ONE[0]), reference_logps(model, ONE[0])
    assert_same(found, wanted)
    assert not found.requires_grad
    model.unmerge_adapter()
    assert step(ONE[0]).requires_grad
    assert fused(step)


def test_zeros_that_are_put_around_tokens_make_no_size_constant() -> None:
    torch.manual_seed(0)
    model = Model(plain)
    eager, step = copy.deepcopy(model), optimize(model, shifted_by_zeros, CONFIG)
    for batch in DRAWS:
        assert_same_update(step, model, shifted_by_zeros, eager, batch)
    assert len(step.captures) == 1
