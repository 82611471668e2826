"""Adapters that a loss switches off within itself: the forward without them is captured too."""

from dataclasses import replace

import pytest
import torch

import fxrl
from fxrl.ir.graph import inputs_of
from tests.capture.test_repeated import CONFIG, ONE, batch, check, make, once
from tests.rows import rows

peft = pytest.importorskip("peft", reason="needs PEFT")

LORA = {"r": 2, "target_modules": ["qkv"], "init_lora_weights": False}


def adapted(depth=2, **options):
    lora = peft.LoraConfig(**LORA | options)
    return peft.get_peft_model(make(depth=depth), lora, autocast_adapter_dtype=False)


def logps(model, given):
    logits = model(given["ids"])[:, :-1]
    return logits.log_softmax(-1).gather(-1, given["ids"][:, 1:, None])


def dpo(logp, reference):
    return -torch.nn.functional.logsigmoid((logp - reference).mean((1, 2)) - 0.1).mean()


def policy_first(model, given):
    logp = logps(model, given)
    with torch.no_grad(), model.disable_adapter():
        reference = model(given["ids"])[:, :-1].log_softmax(-1)
    return dpo(logp, reference.gather(-1, given["ids"][:, 1:, None]))


def reference_first(model, given):
    with model.disable_adapter():
        logits = model(given["ids"])[:, :-1]
        reference = logits.log_softmax(-1).gather(-1, given["ids"][:, 1:, None])
    return dpo(logps(model, given), reference.detach())


def nested(model, given):
    with torch.no_grad(), model.disable_adapter():
        with model.disable_adapter():
            one = logps(model, given)
        reference = (one + logps(model, given)) / 2
    return dpo(logps(model, given), reference)


def raising(model, given):
    try:
        with torch.no_grad(), model.disable_adapter():
            reference = logps(model, given)
            raise ValueError("the flags are put back")
    except ValueError:
        pass
    return dpo(logps(model, given), reference)


@pytest.mark.parametrize(
    "loss",
    rows([policy_first, reference_first, nested, raising], [reference_first, nested, raising]),
)
def test_both_forwards_are_rewritten(loss):
    """LoRA, and under ``raising`` a head that is trained as a copy of the frozen one."""
    model = adapted(modules_to_save=["head"] if loss is raising else None)
    step = fxrl.optimize(model, loss, replace(CONFIG, on_miss="error"))
    for given in (batch(), batch(3, 11)):
        check(step, model, loss, given)
    assert len(step.captures) == 1
    forwards = 3 if loss is nested else 2
    assert once(step) == f"{2 * forwards} layers were captured as 1"
    heads = [r for r in step.report.of_kind("applied") if r.pass_name == "fuse-linear-logprob"]
    assert heads[0].site.startswith("0:base_model.model.head")
    calls = [node.target for node in step.captures[0].rewritten.gm.graph.nodes]
    assert calls.count(torch.ops.fxrl.linear_logprob.default) == forwards
    assert "disable_adapter" not in vars(model)
    assert not any(getattr(part, "_disable_adapters", False) for part in model.modules())


def test_no_state_of_the_adapters_runs_the_graph_of_another():
    model = adapted(depth=1)
    model.add_adapter("two", peft.LoraConfig(**LORA), autocast_adapter_dtype=False)
    step = fxrl.optimize(model, policy_first, CONFIG)
    found = []
    for name in ("default", "two", "default", "two"):
        model.set_adapter(name)
        check(step, model, policy_first)
        with model.disable_adapter(), torch.no_grad():
            assert step(ONE).item() == pytest.approx(policy_first(model, ONE).item())
            assert all(part.disable_adapters for part in model.modules() if hasattr(part, "lora_A"))
        found.append(step(ONE).item())
    assert len(set(found)) == 2
    assert len(step.captures) == 4  # each adapter, and its absence with either set


def test_a_weight_that_peft_would_wake_is_woken():
    """PEFT's block ends with every weight of the adapter trained; then its own is what runs."""
    model, theirs = adapted(depth=1), adapted(depth=1)
    for one in (model, theirs):
        one.base_model.model.layers[0].qkv.lora_A.requires_grad_(False)
    step = fxrl.optimize(model, policy_first, CONFIG)
    for _ in range(2):
        found, wanted = step(ONE), policy_first(theirs, ONE)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
        for one, loss in ((model, found), (theirs, wanted)):
            one.zero_grad()
            loss.backward()
        for mine, its in zip(model.parameters(), theirs.parameters(), strict=True):
            assert mine.requires_grad is its.requires_grad
            assert (mine.grad is None) is (its.grad is None)
            if its.grad is not None:
                torch.testing.assert_close(mine.grad, its.grad, rtol=1e-9, atol=1e-11)
    assert any("requires_grad" in remark.reason for remark in step.report.remarks)


def test_an_adapter_that_is_off_later_is_multiplied_by_nothing():
    model = adapted()
    step = fxrl.optimize(model, lambda model, given: -logps(model, given).mean(), CONFIG)
    step(ONE)
    with model.disable_adapter(), torch.no_grad():
        step(ONE)
    assert len(step.captures) == 2
    inputs = [node.name for node in inputs_of(step.captures[1].lowered.graph)]
    assert not any("scaling" in name for name in inputs)  # it is 0, a constant
