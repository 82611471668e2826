"""Factors handed to objects shaped as vLLM's; the real vLLM is in test_slots_vllm.py."""

from types import SimpleNamespace

import peft
import pytest
import torch

from fxrl.engines import EngineError
from fxrl.engines.vllm.handle import ADAPTER_ID, adapter_tensors, put_adapter
from fxrl.engines.weights.lora.sites import lora_sites
from tests.engines.weights.lora.lora_models import (
    assert_same_bits,
    fill,
    llama,
    snapshot,
    with_lora,
)

PREFIX = "base_model.model."


class LoraModel:
    """vLLM's ``LoRAModel``, as far as it is used."""

    def __init__(self, tensors, options):
        names = (name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors)
        self.loras = dict.fromkeys(names)
        self.tensors, self.options = tensors, options

    @classmethod
    def from_lora_tensors(cls, lora_id, tensors, helper, **options):
        assert lora_id == ADAPTER_ID
        return cls(tensors, helper | options)


def worker(modules, packed=None, max_rank=8):
    """vLLM's worker with a manager that notes what is done to it."""
    done = []
    manager = SimpleNamespace(
        modules=dict.fromkeys(modules),
        packed_modules=packed or {},
        lora_config=SimpleNamespace(max_lora_rank=max_rank, lora_dtype=torch.bfloat16),
        model=None,
        remove_adapter=lambda lora_id: done.append("remove"),
        add_adapter=done.append,
        activate_adapter=lambda lora_id: done.append("activate"),
    )
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    return SimpleNamespace(model_runner=runner, device=torch.device("cpu")), done


def put(one, model):
    helper = SimpleNamespace(from_dict=dict)
    put_adapter(one, lora_sites(model), lora_model=LoraModel, peft_helper=helper)


@pytest.mark.parametrize("fp32_adapter", [True, False])
def test_factors_are_scaled_copies_by_pefts_names(fp32_adapter):
    model = with_lora(llama(torch.bfloat16), fp32_adapter=fp32_adapter, r=4, lora_alpha=7)
    before, sites = snapshot(model), lora_sites(model)
    tensors = adapter_tensors(sites)
    assert len(tensors) == 2 * len(sites)
    for site in sites:
        (f,) = site.factors()
        assert torch.equal(tensors[f"{PREFIX}{site.name}.lora_A.weight"], f.a)
        assert torch.equal(tensors[f"{PREFIX}{site.name}.lora_B.weight"], f.b * f.scaling)
    for tensor in tensors.values():
        tensor.zero_()
    assert_same_bits(model, before)  # nothing aliased, nothing scaled


def test_several_adapters_and_ranks_become_one():
    model = with_lora(llama(), r=3, rank_pattern={"q_proj": 5})
    model.add_adapter("more", peft.LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj"]))
    fill(model)
    model.base_model.set_adapter(["default", "more"])
    site = next(s for s in lora_sites(model) if s.name.endswith("0.self_attn.q_proj"))
    tensors = adapter_tensors([site])
    a, b = (tensors[f"{PREFIX}{site.name}.lora_{x}.weight"].double() for x in "AB")
    assert a.shape[0] == 7
    want = sum(f.scaling * f.b.double() @ f.a.double() for f in site.factors())
    torch.testing.assert_close(b @ a, want, rtol=1e-5, atol=1e-6)


def test_a_new_version_takes_the_old_ones_place():
    model = with_lora(llama(), target_modules=["k_proj", "down_proj"])
    packed = {
        f"model.layers.{i}.self_attn.qkv_proj": [
            f"model.layers.{i}.self_attn.{part}_proj" for part in "qkv"
        ]
        for i in range(2)
    }
    one, done = worker([*packed, *(f"model.layers.{i}.mlp.down_proj" for i in range(2))], packed)
    put(one, model)
    removed, made, activated = done
    assert (removed, activated) == ("remove", "activate")
    assert made.options["r"] == made.options["lora_alpha"] == 4
    assert made.options["target_modules"] == ["down_proj", "k_proj"]
    assert made.options["dtype"] is torch.bfloat16


@pytest.mark.parametrize(
    ("modules", "max_rank", "reason"),
    [
        (["model.layers.0.mlp.down_proj"], 8, r"no LoRA layer for model\.layers\.1\.mlp\.down"),
        ([], 8, "model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj; leave them out"),
        ([f"model.layers.{i}.mlp.down_proj" for i in range(2)], 3, "rank 4.*max_lora_rank=3"),
    ],
)
def test_what_the_slots_cannot_take_is_refused_before_anything_is_put(modules, max_rank, reason):
    one, done = worker(modules, max_rank=max_rank)
    with pytest.raises(EngineError, match=reason):
        put(one, with_lora(llama(), target_modules=["down_proj"]))
    assert not done


def test_projections_of_experts_are_inside_the_layer_that_holds_them():
    one, done = worker(["model.layers.0.mlp", "model.layers.1.mlp"])
    put(one, with_lora(llama(), target_modules=["down_proj"]))
    assert len(done) == 3
