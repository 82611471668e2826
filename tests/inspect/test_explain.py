"""explain: the same remarks as a real step, with nothing run."""

import functools
import importlib.util
import time

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxrl
from fxrl.ir.pipeline import Pipeline


class Lm(nn.Module):
    def __init__(self, vocab=300, hidden=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids):
        return self.head(self.embed(ids))


def explain(model, loss, batch, config):
    return fxrl.optimize(model, loss, config).explain(batch)


def loss_fn(model, batch):
    logp = torch.log_softmax(model(batch["ids"]).float(), -1)
    return -logp.gather(-1, batch["ids"][..., None]).mean()


def batch_of(rows=2, length=6):
    return {"ids": torch.randint(0, 300, (rows, length))}


CONFIG = fxrl.Config(min_saved_bytes=0)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def applied(report):
    return [(r.pass_name, r.saved_bytes) for r in report.remarks if r.kind == "applied"]


def test_it_says_what_a_real_step_says():
    model, batch = Lm(), batch_of()
    step = fxrl.optimize(model, loss_fn, CONFIG)
    step(batch)
    found = step.explain(batch)
    assert applied(found) == applied(step.report) != []
    assert [r.source for r in found.remarks] == [r.source for r in step.report.remarks]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("mask", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_says_what_a_real_step_of_a_transformer_says(mask):
    """With its KV cache on: with and without one, a model makes its masks in different ways."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=60, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_hidden_layers=1, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    batch = {"ids": torch.randint(0, 60, (2, 6))}
    inputs = {"attention_mask": torch.ones(2, 6, dtype=torch.long)} if mask else {}
    step = fxrl.optimize(
        Qwen3ForCausalLM(config),
        lambda m, b: loss_fn(lambda ids: m(ids, **inputs).logits, b),
        fxrl.Config(min_saved_bytes=0, compile_regions=False),
    )
    step(batch)
    torch._dynamo.reset()
    assert step.explain(batch) == step.report


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_it_needs_no_weights(kind):
    with torch.device("meta") if kind == "meta" else FakeTensorMode():
        model = Lm(vocab=200_000, hidden=4096)
    batch = {"ids": torch.zeros(8, 4096, dtype=torch.long)}
    (remark,) = applied(explain(model, loss_fn, batch, fxrl.Config()))
    assert remark[1] > 8 * 4096 * 200_000 * 4  # at least one fp32 copy of the logits


def holding(how, reference):
    """``loss_fn`` and a term of a reference: in a closure, a decorator's, a partial, an object."""

    def drift(batch):
        with torch.no_grad():
            return reference(batch["ids"]).logsumexp(-1).mean()

    @functools.wraps(loss_fn)
    def decorated(model, batch):
        return loss_fn(model, batch) + drift(batch)

    def given(drift, model, batch):
        return loss_fn(model, batch) + drift(batch)

    class Holder:
        def __init__(self):
            self.models = [reference]

        def loss(self, model, batch):
            with torch.no_grad():
                drift = self.models[0](batch["ids"]).logsumexp(-1).mean()
            return loss_fn(model, batch) + drift

    def closure(model, batch):
        return loss_fn(model, batch) + drift(batch)

    return {
        "closure": closure,
        "decorator": decorated,
        "partial": functools.partial(given, drift),
        "object": Holder().loss,
    }[how]


@pytest.mark.parametrize("how", ["closure", "decorator", "partial", "object"])
def test_a_reference_that_the_loss_holds_needs_none_either(how):
    with torch.device("meta"):
        model, reference = Lm(), Lm()
    kept = dict(reference.named_parameters())
    assert applied(explain(model, holding(how, reference), batch_of(), CONFIG))
    assert all(p is kept[name] and p.is_meta for name, p in reference.named_parameters())


def test_code_that_asks_for_the_device_finds_one_that_exists():
    """On ``meta`` autocast is an error, and what is written for GPUs does not run on a CPU."""

    class Asking(Lm):
        def forward(self, ids):
            with torch.autocast(self.head.weight.device.type, enabled=False):
                return super().forward(ids)

    with torch.device("meta"):
        model = Asking()
    report = explain(model, loss_fn, batch_of(), CONFIG)
    assert applied(report)
    assert not [r for r in report.remarks if r.kind == "missed"]


@torch.library.custom_op("fxrl_tests::bomb", mutates_args=())
def bomb(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("this ran")


bomb.register_fake(lambda x: torch.empty_like(x))


def test_nothing_runs():
    def armed(model, batch):
        logits = model(batch["ids"])
        return loss_fn(lambda ids: logits, batch) + bomb(logits.detach().sum())

    with pytest.raises(AssertionError, match="this ran"):
        armed(Lm(), batch_of())
    report = explain(Lm(), armed, batch_of(), CONFIG)
    assert report.remarks


def test_a_loss_that_fails_says_so_itself():
    def wrong(model, batch):
        return (model(batch["ids"]).log_softmax(-1)[:, :3, 0] * torch.ones(7)).sum()

    with torch.device("meta"):
        model = Lm()
    with pytest.raises(RuntimeError, match="length 7 at -1") as raised:
        explain(model, wrong, batch_of(), CONFIG)
    assert wrong.__code__ in [frame.frame.code.raw for frame in raised.traceback]


def test_a_miss_is_reported_and_never_raised():
    def leaky(model, batch):
        return model(batch["ids"]).softmax(1).square().mean()

    report = explain(Lm(), leaky, batch_of(), fxrl.Config(min_saved_bytes=0, on_miss="error"))
    assert [r.kind for r in report.remarks if r.kind == "missed"]


def test_code_after_a_graph_break_is_explained_too():
    def broken(model, batch):
        hidden = model.embed(batch["ids"])
        torch._dynamo.graph_break()
        logp = torch.log_softmax(model.head(hidden), -1)
        return -logp.gather(-1, batch["ids"][..., None]).mean()

    report = explain(Lm(), broken, batch_of(), CONFIG)
    assert applied(report)
    assert any("graph break" in r.reason and "test_explain.py" in r.source for r in report.remarks)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_full_size_model_in_cpu_seconds(monkeypatch):
    """Layers that equal an earlier one cost next to nothing; each took three seconds once."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def seconds(layers):
        config = Qwen3Config(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
            num_hidden_layers=layers, num_key_value_heads=8, head_dim=128,
        )  # fmt: skip
        with torch.device("meta"):
            model = Qwen3ForCausalLM(config)
        torch._dynamo.reset()
        start = time.process_time()
        report = explain(
            model,
            lambda m, b: loss_fn(lambda ids: m(ids, use_cache=False).logits, b),
            {"ids": torch.zeros(4, 4096, dtype=torch.long)},
            fxrl.Config(),
        )
        assert applied(report)
        return time.process_time() - start

    monkeypatch.setattr(Pipeline, "check_values", False)  # as users run it
    few = seconds(2)
    assert seconds(12) - few < 10 * 0.5
