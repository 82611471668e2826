"""What of PEFT can be handed over as W + scaling * B A, and what is refused by name."""

import math

import peft
import pytest
import torch
from torch import nn

from fxrl.engines.weights.lora.sites import AdapterError, check_storages, lora_sites
from tests.engines.weights.lora.lora_models import fill, gpt2, llama, with_lora


def test_names_are_the_checkpoints_and_factors_the_trainers_own():
    base = llama()
    plain = {name for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    model = with_lora(base)
    sites = lora_sites(model)
    assert {site.name for site in sites} == plain - {"lm_head"}
    for site in sites:
        (factors,) = site.factors()
        assert factors.a.data_ptr() == site.layer.lora_A["default"].weight.data_ptr()
        assert factors.scaling == 1.5
        want = site.layer.get_delta_weight("default")
        torch.testing.assert_close(factors.scaling * factors.b @ factors.a, want)


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({"use_rslora": True}, 6 / math.sqrt(4)),
        ({"alpha_pattern": {"q_proj": 12}}, 3.0),
        ({"rank_pattern": {"q_proj": 2}}, 3.0),
    ],
)
def test_scaling_is_per_module(options, scaling):
    sites = lora_sites(with_lora(llama(), **options))
    (factors,) = next(site for site in sites if site.name.endswith("q_proj")).factors()
    assert factors.scaling == pytest.approx(scaling)


def test_gpt2_stores_its_weights_transposed():
    sites = lora_sites(with_lora(gpt2(), fan_in_fan_out=True))
    assert all(site.is_transposed for site in sites)
    site = next(site for site in sites if site.name.endswith("c_attn"))
    assert site.weight.shape == (32, 96)
    assert site.factors()[0].a.shape == (4, 32)


def test_without_adapters_says_what_to_do():
    with pytest.raises(AdapterError, match=r"no active LoRA adapter.*full fine-tuning"):
        lora_sites(llama())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "DoraLinearVariant"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable tokens"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "PEFT's Embedding"),
        ({"target_modules": ["gate_proj"], "alora_invocation_tokens": [3]}, "ALoraLinearVariant"),
    ],
)
def test_what_is_not_b_times_a_is_refused_by_name(options, reason):
    with pytest.raises(AdapterError, match=reason):
        lora_sites(with_lora(llama(), **options))


def test_other_peft_methods_and_layers_are_refused():
    model = peft.get_peft_model(
        llama(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    with pytest.raises(AdapterError, match="not LoRA"):
        lora_sites(model)
    convolution = nn.Sequential(nn.Conv1d(4, 4, 3))
    model = peft.get_peft_model(convolution, peft.LoraConfig(r=2, target_modules=["0"]))
    with pytest.raises(AdapterError, match="Conv1d"):
        lora_sites(model)


def test_a_bias_on_b_is_refused():
    model = nn.Sequential(nn.Linear(8, 8))
    config = peft.LoraConfig(r=2, target_modules=["0"], lora_bias=True)
    with pytest.raises(AdapterError, match="lora_bias"):
        lora_sites(peft.get_peft_model(model, config))


def test_merged_and_disabled_adapters_are_refused():
    model = with_lora(llama())
    with model.disable_adapter(), pytest.raises(AdapterError, match="disabled now"):
        lora_sites(model)
    model.merge_adapter()
    with pytest.raises(AdapterError, match="merged already"):
        lora_sites(model)


def test_only_active_adapters_count():
    model = with_lora(llama(), target_modules=["q_proj"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"]))
    fill(model)
    assert {site.name.rsplit(".")[-1] for site in lora_sites(model)} == {"q_proj"}
    model.set_adapter("other")
    assert {site.name.rsplit(".")[-1] for site in lora_sites(model)} == {"k_proj"}


def test_meta_and_integer_weights_are_refused():
    model = with_lora(llama(), target_modules=["q_proj"])
    layer = lora_sites(model)[0].layer.get_base_layer()
    weight = layer.weight
    layer.weight = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
    with pytest.raises(AdapterError, match="meta device"):
        lora_sites(model)
    layer.weight = nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(AdapterError, match=r"torch\.int8"):
        lora_sites(model)


def test_a_tied_head_is_refused_and_an_untied_one_is_not():
    for tied in (True, False):
        model = with_lora(llama(tie_word_embeddings=tied), target_modules=["lm_head"])
        sites = lora_sites(model)
        if tied:
            with pytest.raises(AdapterError, match=r"embed_tokens.*share memory|share memory.*emb"):
                check_storages(model, sites)
        else:
            check_storages(model, sites)


def test_row_slices_of_one_storage_are_fine_and_overlaps_are_not():
    model = with_lora(llama(), target_modules=["q_proj", "k_proj"])
    attention = model.base_model.model.model.layers[0].self_attn
    query, key = attention.q_proj.base_layer, attention.k_proj.base_layer
    both = torch.cat([query.weight, key.weight]).detach()
    query.weight = nn.Parameter(both[:32], requires_grad=False)
    key.weight = nn.Parameter(both[32:], requires_grad=False)
    check_storages(model, lora_sites(model))
    key.weight = nn.Parameter(both[16:32], requires_grad=False)
    with pytest.raises(AdapterError, match="share memory"):
        check_storages(model, lora_sites(model))


def test_a_weight_with_gaps_is_refused():
    model = with_lora(llama(), target_modules=["q_proj"])
    layer = lora_sites(model)[0].layer.get_base_layer()
    layer.weight = nn.Parameter(torch.zeros(32, 64)[:, ::2], requires_grad=False)
    with pytest.raises(AdapterError, match="not contiguous"):
        check_storages(model, lora_sites(model))
