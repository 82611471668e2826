"""How the trainer's weights get into an engine, on one that only writes down what it is given."""

import pytest
import torch

from fxrl.models import load_model, lora
from fxrl.runtime import EngineError
from fxrl.runtime.merged_weights import merged_weights
from fxrl.runtime.policy import Policy


class Engine:
    """``Served``; ``slots`` is the reason against them, empty if there are some."""

    def __init__(self, slots=""):
        self.takes_adapters, self.adapters, self.weights = slots, [], []

    def set_adapter(self, sites):
        self.adapters.append([site.factors()[0].b.clone() for site in sites])

    def reload(self, weights):
        self.weights.append({name: value.clone() for name, value in weights})

    def free_device_bytes(self):
        return None


def make(slots="none built"):
    engine = Engine(slots)
    return Policy(engine, {}), engine


def attach(policy, model, force=None, decode_steps=64.0):
    policy.attach(model, force=force, decode_steps=decode_steps, num_sequences=32)


def base_model(kind="tiny:qwen3"):
    return load_model(kind, "fp32")[0]


def adapted_model(model=None, **options):
    model = lora(base_model() if model is None else model, r=4, alpha=6, seed=0, **options).eval()
    move_adapter(model)
    return model


def move_adapter(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def test_nothing_attached_wants_tensors():
    policy, engine = make()
    assert policy.way == "own"
    with policy.rollout():
        pass
    with pytest.raises(EngineError, match=r"no model is attached, so pass the tensors"):
        policy.update(None, lora=False)
    policy.update({"w": torch.ones(2)}, lora=False)
    assert engine.weights[0].keys() == {"w"}
    with pytest.raises(EngineError, match=r"attach\(\) the model first"):
        policy.update({"w": torch.ones(2)}, lora=True)


def test_a_model_of_its_own_is_copied_once_per_update():
    policy, engine = make()
    model = base_model()
    attach(policy, model)
    assert policy.way == "copy"
    for _ in range(2):
        with policy.rollout():
            pass
    assert len(engine.weights) == 1  # at the first rollout: the engine had the checkpoint's
    policy.update(None, lora=False)
    with policy.rollout():
        pass
    assert len(engine.weights) == 2
    own = dict(model.named_parameters())
    assert engine.weights[1].keys() == own.keys()


def test_shared_weights_move_nothing():
    policy, engine = make()
    model = base_model()
    policy.share(model)
    attach(policy, model)
    policy.update(None, lora=False)
    with policy.rollout():
        pass
    assert policy.way == "shared"
    assert not engine.weights
    assert not engine.adapters


def test_given_weights_go_into_the_shared_model():
    policy, _ = make()
    model = base_model()
    policy.share(model)
    name, value = next(iter(model.named_parameters()))
    policy.update({name: torch.full_like(value, 3.0)}, lora=False)
    assert (value == 3).all()
    with pytest.raises(EngineError, match="the model has no 'nonsense'"):
        policy.update({"nonsense": torch.ones(1)}, lora=False)


def test_a_fold_lasts_as_long_as_the_rollout():
    policy, engine = make()
    base = base_model()
    policy.share(base)
    model = adapted_model(base)
    attach(policy, model)
    assert policy.way == "fold"
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    before = layer.base_layer.weight.clone()
    delta = layer.get_delta_weight("default")
    with policy.rollout():
        torch.testing.assert_close(layer.base_layer.weight, before + delta)
    assert torch.equal(layer.base_layer.weight, before)
    with pytest.raises(ZeroDivisionError), policy.rollout():
        raise ZeroDivisionError
    assert torch.equal(layer.base_layer.weight, before)
    assert not engine.weights


def test_slots_where_the_kernels_are_cheaper_and_written_at_each_update():
    policy, engine = make(slots="")
    base = base_model()
    policy.share(base)
    policy.costs.observe("fold_device", 1.0)
    model = adapted_model(base)
    attach(policy, model, decode_steps=4.0)
    assert policy.way == "slots"
    assert policy.uses_slots
    for _ in range(2):
        with policy.rollout():
            pass
    assert len(engine.adapters) == 1
    move_adapter(model)
    policy.update(None, lora=True)
    with policy.rollout():
        pass
    assert len(engine.adapters) == 2
    assert not torch.equal(engine.adapters[0][0], engine.adapters[1][0])


def test_update_lora_without_an_adapter():
    policy, _ = make()
    model = base_model()
    policy.share(model)
    with pytest.raises(EngineError, match=r"has no LoRA adapter; update_weights"):
        policy.update(None, lora=True)
    with pytest.raises(EngineError, match="route 'slots' needs a LoRA adapter"):
        attach(policy, model, force="slots")


def test_an_adapter_that_is_no_plain_lora_is_refused_with_the_reason():
    policy, _ = make(slots="")
    with pytest.raises(EngineError, match="not plain LoRA"):
        attach(policy, dora_model(), force="slots")


def test_what_cannot_be_merged_is_not_copied():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    policy, _ = make()
    with pytest.raises(EngineError, match=r"lm_head.*trains the module itself"):
        attach(policy, get_peft_model(base_model(), config), force="copy")


def dora_model():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True)
    model = get_peft_model(base_model(), config).eval()
    move_adapter(model)
    return model


@pytest.mark.parametrize(
    "make_model",
    [
        adapted_model,
        lambda: adapted_model(base_model("tiny:gpt2")),
        lambda: adapted_model(base_model("tiny:llama:tie=1")),
        dora_model,
    ],
    ids=["qwen3", "gpt2", "tied", "dora"],
)
def test_merged_weights_are_a_checkpoint(make_model):
    """By the names that ``save_pretrained`` gives, and PEFT's own merge is the reference."""
    model = make_model()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    found = dict(merged_weights(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name
    expected = dict(model.merge_and_unload().named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_weights_without_an_adapter_are_given_as_they_are():
    model = base_model()
    found = dict(merged_weights(model))
    assert found.keys() == dict(model.named_parameters()).keys()
