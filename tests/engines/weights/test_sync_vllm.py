"""The real vLLM with one copy of the weights: what the trainer writes is what vLLM samples from.

vLLM's weights stay visible here, as on a GPU (``shared_engine`` says how).
"""

import pytest
import torch

from fxrl.engines import EngineError, SamplingParams
from fxrl.models import lora
from tests.engines.conftest import assert_agrees

pytestmark = pytest.mark.vllm

PROMPTS = [[5, 9, 77, 31], [101, 44, 3], [60, 61, 62, 63, 64, 65, 66]]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
SAMPLED = SamplingParams(n=3, max_tokens=8, seed=2)


def tokens(groups):
    return [[one.token_ids for one in group] for group in groups]


@pytest.fixture
def trainer(shared_engine):
    """(engine, model) over the same storages; the weights are put back afterwards."""
    model, report = shared_engine.shared_model(dtype=torch.float32)
    assert report.shared_bytes > 0.99 * sum(p.nbytes for p in model.parameters())
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    inner = dict(model.named_parameters())
    yield shared_engine, model
    with torch.no_grad():
        for name, value in kept.items():
            inner[name].copy_(value)
    shared_engine.attach(model)
    shared_engine.update_weights(policy_version=shared_engine.policy_version)


def test_an_optimizer_step_in_place_is_what_the_next_rollout_samples_from(trainer):
    engine, model = trainer
    before = engine.generate(PROMPTS, GREEDY)
    assert_agrees(model, before)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with engine.standby():
        model(
            input_ids=torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])
        ).loss.backward()
        optimizer.step()
    engine.update_weights(policy_version=engine.policy_version + 1)
    assert engine.weight_sync.way == "shared"
    assert_agrees(model, engine.generate(PROMPTS, SAMPLED))
    assert tokens(engine.generate(PROMPTS, GREEDY)) != tokens(before)


def test_a_stale_prefix_is_never_reused(trainer):
    """The same long prompt before and after: its cached keys are the old weights'."""
    engine, model = trainer
    prompt = [list(range(5, 65))]
    engine.generate(prompt, GREEDY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "k_proj" in name or "v_proj" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    engine.update_weights(policy_version=engine.policy_version + 1)
    assert_agrees(model, engine.generate(prompt, SAMPLED))


def test_folded_adapter(trainer):
    """Zero B is the base; what is sampled is the adapted model; the base is back bit for bit."""
    engine, model = trainer
    plain = tokens(engine.generate(PROMPTS, GREEDY))
    base = {name: value.detach().clone() for name, value in model.named_parameters()}
    adapted = lora(model, r=4, alpha=8, seed=0).eval()
    engine.attach(adapted)
    assert engine.weight_sync.way == "fold"
    assert "without LoRA slots" in engine.weight_sync.reason
    assert tokens(engine.generate(PROMPTS, GREEDY)) == plain
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    engine.update_lora(policy_version=engine.policy_version + 1)
    groups = engine.generate(PROMPTS, SAMPLED)
    assert_agrees(adapted, groups)
    assert tokens(engine.generate(PROMPTS, GREEDY)) != plain
    assert {"fold", "restore", "generate", "sync"} <= engine.timings.keys()
    now = {n.replace("base_model.model.", "").replace(".base_layer", ""): p
           for n, p in adapted.named_parameters()}  # fmt: skip
    for name, value in base.items():
        assert torch.equal(now[name], value), name
    adapted.unload()


def test_copying_over_shared_weights_is_refused(trainer):
    engine, model = trainer
    adapted = lora(model, r=4, seed=0)
    with pytest.raises(EngineError, match="overwrite the trainer's base weights"):
        engine.attach(adapted, route="copy")
    adapted.unload()


def test_update_lora_without_an_adapter_is_refused(trainer):
    engine, model = trainer
    engine.attach(model)
    with pytest.raises(EngineError, match="has no LoRA adapter"):
        engine.update_lora(policy_version=engine.policy_version)
    with pytest.raises(EngineError, match="needs a LoRA adapter"):
        engine.attach(model, route="fold")
