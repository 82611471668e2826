"""LoRA through PEFT: what trains, in which dtype, and that it starts as the identity."""

import pytest
import torch

from fxrl.models import ModelError, load_model, lora

IDS = torch.arange(3, 20)[None]


@pytest.mark.parametrize("kind", ["qwen3", "phi3", "gpt2", "mixtral"])
def test_starts_as_the_identity_and_trains_adapters_only(kind):
    model, _ = load_model(f"tiny:{kind}", "fp64")
    with torch.no_grad():
        before = model(input_ids=IDS).logits
    wrapped = lora(model, r=4, fp32_adapter=False)
    with torch.no_grad():
        assert wrapped(input_ids=IDS).logits.equal(before)
    trainable = {n for n, p in wrapped.named_parameters() if p.requires_grad}
    assert trainable
    assert all(".lora_" in name for name in trainable)
    assert not any(part in name for name in trainable for part in ("lm_head", "experts", "gate."))


def test_formula_scale_and_targets():
    model, _ = load_model("tiny:qwen3", "fp64")
    wrapped = lora(model, r=2, alpha=6.0, target_modules=["o_proj"], fp32_adapter=False)
    layer = wrapped.base_model.model.model.layers[1].self_attn.o_proj
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(5, 64, dtype=torch.float64)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = x @ layer.base_layer.weight.T + 6.0 / 2 * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), expected)
    assert {n.split(".")[-4] for n, p in wrapped.named_parameters() if p.requires_grad} == {
        "o_proj"
    }


@pytest.mark.parametrize(("fp32", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_adapter_dtype_on_a_bf16_base(fp32, dtype):
    model, _ = load_model("tiny:qwen3", "bf16")
    wrapped = lora(model, r=4, fp32_adapter=fp32)
    assert {p.dtype for p in wrapped.parameters() if p.requires_grad} == {dtype}
    assert {p.dtype for p in wrapped.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_alpha_defaults_to_twice_the_rank_and_the_seed_decides_a():
    def first_a(seed):
        wrapped = lora(load_model("tiny:qwen3")[0], r=3, seed=seed)
        assert wrapped.peft_config["default"].lora_alpha == 6
        return next(p for n, p in wrapped.named_parameters() if "lora_A" in n)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert first_a(5).equal(first_a(5))
    assert torch.get_rng_state().equal(state)
    assert not first_a(5).equal(first_a(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, r"r=0 is below 1"),
        ({"dropout": 1.0}, r"dropout=1.0 is outside \[0, 1\)"),
        ({"target_modules": ["nope"]}, r"target_modules=\['nope'\] does not work.*'all-linear'"),
    ],
)
def test_wrong_values(options, message):
    with pytest.raises(ModelError, match=message):
        lora(load_model("tiny:qwen3")[0], **options)
