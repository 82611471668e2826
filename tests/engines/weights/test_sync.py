"""How the trainer's weights get into an engine, on one that only writes down what it is given."""

import pytest
import torch

from fxrl.engines import EngineError
from fxrl.engines.weights.lora.sites import merged_weights
from fxrl.engines.weights.sync import RouteError, WeightSync
from fxrl.models import load_model, lora, quantize


class Engine:
    """A handle; ``slots`` is the reason against them, empty if there are some."""

    def __init__(self, slots=""):
        self.takes_adapters, self.adapters, self.weights = slots, [], []

    def set_adapter(self, sites):
        self.adapters.append([site.factors()[0].b.clone() for site in sites])

    def reload(self, weights):
        self.weights.append({name: value.clone() for name, value in weights})


def make(slots="none built"):
    engine = Engine(slots)
    return WeightSync(engine, {}), engine


def base_model(kind="tiny:qwen3"):
    return load_model(kind, "fp32")[0]


def adapted_model(model=None, **options):
    model = lora(base_model() if model is None else model, r=4, alpha=6, seed=0, **options).eval()
    move_adapter(model)
    return model


def move_adapter(model, size=0.1):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * size)


def test_nothing_attached_cannot_be_updated():
    sync, _ = make()
    assert sync.way == "own"
    with sync.rollout():
        pass
    for adapter in (False, True):
        with pytest.raises(EngineError, match=r"no model is attached; attach\(\)"):
            sync.update(lora=adapter)


def test_a_model_of_its_own_is_copied_once_per_update():
    sync, engine = make()
    model = base_model()
    sync.attach(model)
    assert sync.way == "copy"
    for _ in range(2):
        with sync.rollout():
            pass
    assert len(engine.weights) == 1  # at the first rollout: the engine had the checkpoint's
    sync.update(lora=False)
    with sync.rollout():
        pass
    assert len(engine.weights) == 2
    own = dict(model.named_parameters())
    assert engine.weights[1].keys() == own.keys()


def test_shared_weights_move_nothing():
    sync, engine = make()
    model = base_model()
    sync.share(model)
    sync.attach(model)
    sync.update(lora=False)
    with sync.rollout():
        pass
    assert sync.way == "shared"
    assert not engine.weights
    assert not engine.adapters


def test_a_fold_lasts_as_long_as_the_rollout():
    sync, engine = make()
    base = base_model()
    sync.share(base)
    model = adapted_model(base)
    sync.attach(model)
    assert sync.way == "fold"
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    before = layer.base_layer.weight.clone()
    delta = layer.get_delta_weight("default")
    with sync.rollout():
        torch.testing.assert_close(layer.base_layer.weight, before + delta)
    assert torch.equal(layer.base_layer.weight, before)
    with pytest.raises(ZeroDivisionError), sync.rollout():
        raise ZeroDivisionError
    assert torch.equal(layer.base_layer.weight, before)
    assert not engine.weights


def test_slots_are_written_at_each_update():
    sync, engine = make(slots="")
    base = base_model()
    sync.share(base)
    model = adapted_model(base)
    sync.attach(model)
    assert sync.way == "slots"
    for _ in range(2):
        with sync.rollout():
            pass
    assert len(engine.adapters) == 1
    move_adapter(model)
    sync.update(lora=True)
    with sync.rollout():
        pass
    assert len(engine.adapters) == 2
    assert not torch.equal(engine.adapters[0][0], engine.adapters[1][0])


@pytest.mark.parametrize(
    ("slots", "shared", "asked", "way", "reason"),
    [
        ("", True, None, "slots", "max_lora_rank"),
        ("", False, None, "slots", "max_lora_rank"),
        ("", True, "fold", "fold", "asked for"),
        ("", False, "copy", "copy", "asked for"),
        ("none built", True, None, "fold", "slots: none built"),
        ("none built", False, None, "copy", "slots: none built; fold: the trainer's base weights"),
    ],
)
def test_slots_then_a_fold_then_a_copy(slots, shared, asked, way, reason):
    """Slots are there only if they were asked for; the reason says what was passed over."""
    sync, _ = make(slots)
    base = base_model()
    if shared:
        sync.share(base)
    sync.attach(adapted_model(base), route=asked)
    assert sync.way == way
    assert reason in sync.reason


def test_weights_in_fp8_take_slots_and_a_fold_only_where_it_loses_little():
    base = quantize(base_model().requires_grad_(False), "fp8")
    model = lora(base, r=4, alpha=6, seed=0).eval()
    (sync, engine), (bare, _) = make(slots=""), make()
    for one in (sync, bare):
        one.share(base)
    sync.attach(model)
    with sync.rollout():
        pass
    assert (sync.way, len(engine.adapters)) == ("slots", 1)
    why = r"fold: .* in FP8 .* is zero yet, .*LoRA slots.*; copy: copying would"
    with pytest.raises(RouteError, match=why):
        bare.attach(model)
    move_adapter(model, 1e-3)
    with pytest.raises(RouteError, match=r"fold: 14 of 14 weights are in FP8.*loses \d+% of its"):
        bare.attach(model)
    with pytest.raises(RouteError, match=r"its weight is fp8, and a merge would round it again"):
        make()[0].attach(model)


def test_a_route_that_is_not_there_names_those_that_are():
    sync, _ = make(slots="")
    base = base_model()
    sync.share(base)
    model = adapted_model(base)
    with pytest.raises(RouteError, match=r"'copy' is not possible.*base weights; possible: slots"):
        sync.attach(model, route="copy")
    with pytest.raises(RouteError, match="'merge' is unknown"):
        sync.attach(model, route="merge")
    assert sync.way == "shared"  # a refusal changes nothing


def test_no_route_at_all_names_every_reason():
    sync, _ = make()
    base = base_model()
    sync.share(base)
    with pytest.raises(RouteError, match=r"slots: none built; fold: .*not plain.*; copy: copying"):
        sync.attach(dora_model(base))


def test_update_lora_without_an_adapter():
    sync, _ = make()
    model = base_model()
    sync.share(model)
    with pytest.raises(EngineError, match=r"has no LoRA adapter; update_weights"):
        sync.update(lora=True)
    with pytest.raises(EngineError, match="route 'slots' needs a LoRA adapter"):
        sync.attach(model, route="slots")


def test_an_adapter_that_is_no_plain_lora_is_refused_with_the_reason():
    sync, _ = make(slots="")
    with pytest.raises(EngineError, match="not plain LoRA"):
        sync.attach(dora_model(), route="slots")


def test_what_cannot_be_merged_is_not_copied():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    sync, _ = make()
    with pytest.raises(EngineError, match=r"lm_head.*trains the module itself"):
        sync.attach(get_peft_model(base_model(), config), route="copy")


def dora_model(base=None):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True)
    model = get_peft_model(base_model() if base is None else base, config).eval()
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
