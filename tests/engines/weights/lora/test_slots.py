"""Slot writes against objects shaped as vLLM's; the real vLLM is in test_slots_vllm.py."""

from types import SimpleNamespace

import peft
import pytest
import torch

from fxrl.engines.weights.lora.sites import lora_sites
from fxrl.engines.weights.lora.slots import SlotError, SlotWriter
from tests.engines.weights.lora.lora_models import (
    assert_same_bits,
    fill,
    llama,
    same_bits,
    snapshot,
    stacked,
    with_lora,
)

MAX_RANK = 8
WIDTHS = {
    "self_attn.qkv_proj": ("self_attn", ["q_proj", "k_proj", "v_proj"], 32, [32, 16, 16]),
    "self_attn.o_proj": ("self_attn", ["o_proj"], 32, [32]),
    "mlp.gate_up_proj": ("mlp", ["gate_proj", "up_proj"], 32, [48, 48]),
    "mlp.down_proj": ("mlp", ["down_proj"], 48, [32]),
}


def layer(inner, outs, slots=2, rank=MAX_RANK, dtype=torch.bfloat16):
    """Slots full of rubbish, as they are after another adapter."""
    made = SimpleNamespace(
        tp_size=1,
        lora_a_stacked=tuple(torch.full((slots, 1, rank, inner), 7.0, dtype=dtype) for _ in outs),
        lora_b_stacked=tuple(torch.full((slots, 1, out, rank), 7.0, dtype=dtype) for out in outs),
    )

    def reset_lora(slot):
        for slots in made.lora_a_stacked + made.lora_b_stacked:
            slots[slot] = 0

    made.reset_lora = reset_lora
    return made


def manager(dtype=torch.bfloat16):
    made = SimpleNamespace(modules={}, packed_modules={}, lora_index_to_id=[None, 5])
    for index in range(2):
        for name, (parent, inner_names, inner, outs) in WIDTHS.items():
            full = f"model.layers.{index}.{name}"
            made.modules[full] = layer(inner, outs, dtype=dtype)
            if len(inner_names) > 1:
                made.packed_modules[full] = [
                    f"model.layers.{index}.{parent}.{inner_name}" for inner_name in inner_names
                ]
    return made


def delta_in(layer, part, slot):
    a, b = layer.lora_a_stacked[part][slot, 0], layer.lora_b_stacked[part][slot, 0]
    return b.double() @ a.double()


def rounded_once(factors, dtype):
    return factors.a.to(dtype), (factors.b * factors.scaling).to(dtype)


@pytest.mark.parametrize("fp32_adapter", [True, False])
def test_every_part_lands_in_its_slice_and_the_rest_is_zero(fp32_adapter):
    model = with_lora(llama(torch.bfloat16), fp32_adapter=fp32_adapter, r=4, lora_alpha=7)
    before, slots = snapshot(model), manager()
    sites = {site.name: site for site in lora_sites(model)}
    SlotWriter(slots, tuple(sites.values()), 5).write()
    assert_same_bits(model, before)  # nothing aliased, nothing scaled
    for name, made in slots.modules.items():
        for part, inner in enumerate(slots.packed_modules.get(name, [name])):
            a, b = rounded_once(sites[inner].factors()[0], torch.bfloat16)
            assert torch.equal(made.lora_a_stacked[part][1, 0, :4], a)
            assert torch.equal(made.lora_b_stacked[part][1, 0, :, :4], b)
            assert not made.lora_a_stacked[part][1, 0, 4:].any()
            assert not made.lora_b_stacked[part][1, 0, :, 4:].any()
            assert (made.lora_a_stacked[part][0] == 7).all()  # the other slot is not ours


def test_a_new_version_replaces_the_old_one():
    model, slots = with_lora(llama()), manager(torch.float32)
    writer = SlotWriter(slots, lora_sites(model), 5)
    writer.write()
    fill(model, seed=9)
    writer.write()
    for site in lora_sites(model):
        if site.name.endswith("down_proj"):
            (f,) = site.factors()
            got = delta_in(slots.modules[site.name], 0, 1)
            torch.testing.assert_close(
                got, f.scaling * f.b.double() @ f.a.double(), rtol=1e-5, atol=1e-6
            )


def test_modules_without_an_adapter_are_zero():
    model = with_lora(llama(), target_modules=["k_proj"])
    slots = manager(torch.float32)
    SlotWriter(slots, lora_sites(model), 5).write()
    qkv = slots.modules["model.layers.0.self_attn.qkv_proj"]
    assert [bool(delta_in(qkv, part, 1).any()) for part in range(3)] == [False, True, False]
    assert not slots.modules["model.layers.1.mlp.down_proj"].lora_a_stacked[0][1].any()


def test_several_adapters_and_ranks_lie_side_by_side():
    model = with_lora(llama(), r=3, rank_pattern={"q_proj": 5})
    model.add_adapter("more", peft.LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj"]))
    fill(model)
    model.base_model.set_adapter(["default", "more"])
    slots = manager(torch.float32)
    SlotWriter(slots, lora_sites(model), 5).write()
    site = next(s for s in lora_sites(model) if s.name.endswith("0.self_attn.q_proj"))
    want = sum(f.scaling * f.b.double() @ f.a.double() for f in site.factors())
    got = delta_in(slots.modules["model.layers.0.self_attn.qkv_proj"], 0, 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_one_checkpoint_module_over_several_slices():
    """Phi-3's qkv_proj is one module there and three slices here: A goes into each of them."""
    model = with_lora(llama(), target_modules=["gate_proj"])
    slots = SimpleNamespace(
        modules={
            f"model.layers.{i}.mlp.gate_proj": layer(32, [16, 20, 12], dtype=torch.float32)
            for i in range(2)
        },
        packed_modules={},
        lora_index_to_id=[5],
    )
    sites = lora_sites(model)
    SlotWriter(slots, sites, 5).write()
    made = slots.modules[sites[0].name]
    (f,) = sites[0].factors()
    got = torch.cat([delta_in(made, part, 0) for part in range(3)])
    torch.testing.assert_close(got, f.scaling * f.b.double() @ f.a.double(), rtol=1e-5, atol=1e-6)


def test_a_head_keeps_its_slots_as_one_tensor_with_padded_rows():
    model = with_lora(llama(tie_word_embeddings=False), target_modules=["lm_head"])
    a, b = torch.ones(1, 1, 8, 32), torch.ones(1, 1, 128, 8)
    head = SimpleNamespace(lora_a_stacked=a, lora_b_stacked=b)
    slots = SimpleNamespace(modules={"lm_head": head}, packed_modules={}, lora_index_to_id=[5])
    SlotWriter(slots, lora_sites(model), 5).write()
    (f,) = lora_sites(model)[0].factors()
    assert torch.equal(b[0, 0, :96, :4], f.b * f.scaling)
    assert not b[0, 0, 96:].any()


def test_the_slot_is_looked_up_at_each_write():
    model, slots = with_lora(llama()), manager()
    writer = SlotWriter(slots, lora_sites(model), 5)
    assert writer.slot == 1
    writer.write()
    slots.lora_index_to_id = [5, None]
    writer.write()
    assert not slots.modules["model.layers.0.mlp.down_proj"].lora_a_stacked[0][0, 0, 4:].any()
    slots.lora_index_to_id = [3, None]
    with pytest.raises(SlotError, match=r"adapter 5 is not active in vLLM \(active: \[3\]\)"):
        writer.write()


def test_the_same_factors_written_again_change_no_byte():
    model, slots = with_lora(llama()), manager()
    SlotWriter(slots, lora_sites(model), 5).write()
    before = stacked(slots)
    made = slots.modules["model.layers.1.self_attn.qkv_proj"]
    made.lora_b_stacked[2][1, 0, 3, 1] += 1
    assert not same_bits(before, stacked(slots))
    SlotWriter(slots, lora_sites(model), 5).write()
    assert same_bits(before, stacked(slots))


def change(slots, name, **attributes):
    for key, value in attributes.items():
        setattr(slots.modules[f"model.layers.0.{name}"], key, value)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda s: change(s, "mlp.down_proj", tp_size=2), "split over 2 devices"),
        (lambda s: s.modules.pop("model.layers.1.mlp.down_proj"), r"no LoRA layer for .*down_proj"),
        (lambda s: s.__delattr__("packed_modules"), "has no .*packed_modules"),
        (
            lambda s: change(s, "mlp.down_proj", lora_a_stacked=(torch.ones(2, 4, 8, 48),)),
            "mixture of experts",
        ),
        (lambda s: change(s, "mlp.down_proj", lora_a_stacked=None), "does not keep its adapters"),
        (
            lambda s: s.modules.update({"model.layers.0.mlp.down_proj": layer(48, [16])}),
            "16 rows for .*32",
        ),
        (
            lambda s: s.modules.update({"model.layers.0.mlp.gate_up_proj": layer(32, [48] * 3)}),
            "3 slices for 2 modules",
        ),
        (
            lambda s: s.modules.update({"model.layers.0.mlp.down_proj": layer(40, [32])}),
            "do not fit",
        ),
        (
            lambda s: s.modules.update({"model.layers.0.mlp.down_proj": layer(48, [32], rank=2)}),
            "max_lora_rank >= 4",
        ),
    ],
)
def test_slots_that_cannot_take_it_are_refused_before_anything_is_written(spoil, reason):
    slots = manager()
    spoil(slots)
    with pytest.raises(SlotError, match=reason):
        SlotWriter(
            slots, lora_sites(with_lora(llama(), target_modules=["down_proj", "up_proj"])), 5
        )
