"""Sharing with a fake of vLLM's model: aliases, refusals and their reasons, later checks."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fxrl.engines.engine import EngineError
from fxrl.engines.weights.share.binder import SharingError, share
from fxrl.engines.weights.share.layout import find_by_content
from fxrl.models import QuantizedLinear, lora
from fxrl.ops.fp8 import dequantized
from tests.engines.weights.share.fake_vllm import (
    checkpoint,
    fake_vllm,
    per_block,
    per_channel,
    per_tensor,
)

IDS = torch.randint(3, 300, (2, 11), generator=torch.Generator().manual_seed(0))


def bound(tmp_path, fake, **options):
    return share(fake, tmp_path, device="cpu", **options)


def storages(module):
    return {value.untyped_storage().data_ptr() for value in module.parameters()}


@pytest.mark.parametrize(
    ("kind", "fake_options"),
    [
        ("qwen3", {}),
        ("qwen2", {"stacked_mapper": True}),
        ("gemma3", {"prefix": "language_model.", "stacked_mapper": True}),
        ("llama", {"lora": True}),
        ("llama", {"prefix": "lm."}),
        ("phi3", {}),
        ("mistral", {"declared": False}),  # found by its bytes alone
    ],
)
def test_everything_is_shared(tmp_path, kind, fake_options):
    original = checkpoint(tmp_path, kind)
    fake = fake_vllm(original, **fake_options)
    model, report = bound(tmp_path, fake)
    assert report.complete, str(report)
    assert storages(model) <= storages(fake)
    assert report.copied_bytes == 0
    assert report.shared_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert not model.training
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    report.verify_again()


def test_writes_go_both_ways(tmp_path):
    """A real optimizer step is seen in vLLM's fused weight; a write there is seen here."""
    fake = fake_vllm(checkpoint(tmp_path))
    model, report = bound(tmp_path, fake)
    fused = fake.get_submodule("model.layers.0.self_attn.qkv_proj").weight
    before = fused.clone()
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.step()
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(fused, torch.cat([p.detach() for p in parts]))
    assert ((fused != before).float().mean(1) > 0.5).all()
    report.verify_again()  # trainable weights may change
    fake.get_submodule("lm_head").weight.zero_()
    assert float(model(input_ids=IDS).logits.detach().abs().max()) == 0


def test_tied_weights_stay_tied(tmp_path):
    fake = fake_vllm(checkpoint(tmp_path, "llama", tie=1))
    model, report = bound(tmp_path, fake)
    assert report.complete
    assert model.lm_head.weight is model.model.embed_tokens.weight
    (row,) = [row for row in report.rows if row.also]
    assert {row.name, *row.also} == {"model.embed_tokens.weight", "lm_head.weight"}


def interleaved(parts):
    """Rows of the parts in turns, as GPT-NeoX's checkpoints have them."""
    count = min(len(p) for p in parts)
    mixed = torch.stack([p[:count] for p in parts], 1).flatten(0, 1)
    return torch.cat([mixed, *(p[count:] for p in parts)])


def test_a_wrong_layout_is_noticed_and_copied(tmp_path):
    original = checkpoint(tmp_path)
    model, report = bound(tmp_path, fake_vllm(original, fuse=interleaved))
    copied = {row.name.split(".")[-2]: row for row in report.rows if not row.shared}
    assert copied.keys() == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert "holds other bytes than the checkpoint's tensor" in copied["q_proj"].reason
    assert "nowhere in vLLM's layer" in copied["q_proj"].reason
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, original.eval()(IDS).logits)
    assert "copied" in str(report)
    assert "layers.*.self_attn.qkv_proj.weight holds other bytes" in " ".join(str(report).split())
    assert len(str(report).splitlines()) < 10  # a line for each reason, not for each layer


def test_one_wrong_bit(tmp_path):
    def flip(name, value):
        if name == "model.layers.1.mlp.down_proj.weight":
            value.view(torch.int16)[3, 5] ^= 1
        return value

    _, report = bound(tmp_path, fake_vllm(checkpoint(tmp_path), change=flip))
    (row,) = [row for row in report.rows if not row.shared]
    assert row.name == "model.layers.1.mlp.down_proj.weight"


def test_another_dtype_is_copied(tmp_path):
    fake = fake_vllm(checkpoint(tmp_path))
    model, report = bound(tmp_path, fake, dtype=torch.float32)
    assert report.shared_bytes == 0
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert "in torch.bfloat16; rounded into it" in report.rows[0].reason


def test_a_checkpoint_in_float32_under_bf16(tmp_path):
    """vLLM rounds while it loads; so does the comparison."""
    fake = fake_vllm(checkpoint(tmp_path, dtype="fp32").to(torch.bfloat16))
    _, report = bound(tmp_path, fake)
    assert report.complete, str(report)


def test_packed_weights_of_a_cpu(tmp_path):
    """vLLM's CPU kernels keep a copy of their own: sharing the rest would train a stale model."""

    def pack(name, value):
        return value.new_empty(0) if "mlp" in name else value

    fake = fake_vllm(checkpoint(tmp_path), packed={}, change=pack)
    model, report = bound(tmp_path, fake)
    assert report.shared_bytes == 0
    assert not storages(model) & storages(fake)
    assert {row.reason for row in report.rows} == {report.rows[0].reason}
    assert "update_weights" in report.rows[0].reason


def test_tensor_parallel_shards_are_not_shared(tmp_path):
    def half(name, value):
        return value[: len(value) // 2].clone() if value.dim() == 2 else value

    _, report = bound(tmp_path, fake_vllm(checkpoint(tmp_path), change=half))
    reasons = {row.name: row.reason for row in report.rows if not row.shared}
    assert "model.layers.0.self_attn.o_proj.weight" in reasons
    assert "not [64, 64]" in reasons["model.layers.0.self_attn.o_proj.weight"]


def test_two_parameters_never_share_one_place(tmp_path):
    """Two equal weights in the checkpoint are still two weights."""
    original = checkpoint(tmp_path)
    attention = original.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.copy_(attention.k_proj.weight)
    original.save_pretrained(tmp_path)
    fake = fake_vllm(
        original, packed={"other": ["k_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    )
    model, report = bound(tmp_path, fake)
    attention = model.model.layers[0].self_attn
    assert attention.v_proj.weight.data_ptr() != attention.k_proj.weight.data_ptr()
    (row,) = [r for r in report.rows if not r.shared and r.name.startswith("model.layers.0.")]
    assert row.name.endswith("k_proj.weight")
    assert "several places" in row.reason


def test_what_vllm_ties_and_the_model_does_not(tmp_path):
    """One storage under two parameters would train both with the sum of two updates."""
    original = checkpoint(tmp_path, "llama")
    with torch.no_grad():
        original.lm_head.weight.copy_(original.model.embed_tokens.weight)
    original.save_pretrained(tmp_path)
    fake = fake_vllm(original)
    fake.lm_head = fake.get_submodule("model.embed_tokens")
    _, report = bound(tmp_path, fake)
    (row,) = [row for row in report.rows if not row.shared]
    assert row.name == "lm_head.weight"
    assert "shared with model.embed_tokens.weight already" in row.reason


def test_bytes_that_show_no_place():
    tensors = {"l.0.a": torch.zeros(4, 3), "l.0.b": torch.randn(6, 3), "l.1.b": torch.randn(6, 3)}
    tensors["l.0.c"] = tensors["l.0.b"].clone()
    part = tensors["l.0.b"][2:4]
    assert "all its values are equal" in find_by_content(
        "l.0.x", torch.zeros(4, 3), part.dtype, tensors
    )
    assert "several places" in find_by_content("l.0.x", part, part.dtype, tensors)
    assert "nowhere" in find_by_content("l.1.x", part, part.dtype, tensors)
    del tensors["l.0.c"]
    place = find_by_content("l.0.x", part, part.dtype, tensors)
    assert (place.name, place.start, place.length) == ("l.0.b", 2, 2)


@pytest.mark.parametrize("breakage", ["rebind", "move", "engine"])
def test_broken_aliases_are_found(tmp_path, breakage):
    fake = fake_vllm(checkpoint(tmp_path))
    model, report = bound(tmp_path, fake)
    model = lora(model, r=2)  # wraps the layers, keeps the base's parameters
    report.verify_again()
    name = "model.layers.0.mlp.down_proj"
    layer = model.get_submodule(f"base_model.model.{name}.base_layer")
    if breakage == "rebind":
        layer.weight.data = layer.weight.data.clone()
    elif breakage == "move":
        layer.to(torch.float32)
    else:
        weight = fake.get_submodule(name).weight
        fake.get_submodule(name).weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    with pytest.raises(SharingError, match=r"down_proj\.weight: lies in another storage"):
        report.verify_again()


def test_a_rearranged_copy_inside_vllm_is_told(tmp_path):
    fake = fake_vllm(checkpoint(tmp_path))
    fake.get_submodule("model.layers.0.self_attn").W_UV = torch.randn(64, 64)
    fake.get_submodule("model.layers.0.self_attn").kv_cache = torch.randn(64, 64)
    _, report = bound(tmp_path, fake)
    (warning,) = report.warnings
    assert "W_UV" in warning


def test_checkpoint_faults(tmp_path):
    fake = fake_vllm(checkpoint(tmp_path))
    with pytest.raises(EngineError, match="no such folder"):
        share(fake, tmp_path / "nowhere", device="cpu")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="transformers cannot load it"):
        bound(tmp_path, fake)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such"}))
    with pytest.raises(EngineError, match="no causal LM"):
        bound(tmp_path, fake)


def test_a_checkpoint_that_transformers_converts(tmp_path):
    """Experts are stored one by one and merged while loading: names differ from the model's."""
    original = checkpoint(tmp_path, "mixtral")
    fake = fake_vllm(original)
    experts = {n for n, _ in original.named_parameters() if "experts" in n}
    model, report = bound(tmp_path, fake)
    assert report.complete, str(report)
    assert experts <= {row.name for row in report.rows}
    assert storages(model) <= storages(fake)


@pytest.mark.parametrize("quantize", [per_channel, per_tensor, per_block])
def test_fp8(tmp_path, quantize):
    """Linear layers over vLLM's FP8 bytes, the rest as usual; a LoRA learns beside them."""
    original = checkpoint(tmp_path, "qwen3", hidden=192, intermediate=320, heads=6, head_dim=32)
    fake = fake_vllm(original, quantize=quantize)
    model, report = bound(tmp_path, fake)
    assert report.complete, str(report)
    apart = storages(model) - storages(fake)
    scales = [p for n, p in model.named_parameters() if n.endswith("weight_scale")]
    assert apart <= {scale.untyped_storage().data_ptr() for scale in scales}
    assert not apart or quantize is per_block, "rows that begin inside a block have scales each"
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 2 * 7
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            exact = original.get_submodule(name).weight.detach().float()
            error = (
                dequantized(module.weight, module.weight_scale, torch.float32) - exact
            ).norm() / exact.norm()
            assert 0.005 < error < 0.04, name
    assert model.lm_head.weight.dtype == torch.bfloat16
    with torch.no_grad():
        drift = model(IDS).logits.float() - original.eval()(IDS).logits.float()
        assert 0 < float(drift.norm() / original(IDS).logits.norm()) < 0.2
    adapted = lora(model, r=4, seed=0)
    loss = adapted(input_ids=IDS, labels=IDS).loss
    loss.backward()
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all(torch.isfinite(p.grad).all() for p in trained.values())
    assert all(p.grad.abs().sum() > 0 for n, p in trained.items() if "lora_B" in n)
    report.verify_again()


def test_broken_fp8_scales_are_found(tmp_path):
    fake = fake_vllm(checkpoint(tmp_path), quantize=per_channel)
    model, report = bound(tmp_path, fake)
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight_scale = torch.nn.Parameter(layer.weight_scale.clone(), requires_grad=False)
    with pytest.raises(SharingError, match=r"k_proj\.weight_scale: lies in another storage"):
        report.verify_again()


def test_fp8_is_frozen_and_says_so(tmp_path):
    fake = fake_vllm(checkpoint(tmp_path), quantize=per_channel)
    model, report = bound(tmp_path, fake)
    assert any("frozen" in warning for warning in report.warnings)
    assert not model.model.layers[0].self_attn.k_proj.weight.requires_grad
    assert model.model.norm.weight.requires_grad


def test_an_fp8_checkpoint(tmp_path):
    """Values and scales are in the files: vLLM loads them as they are, transformers cannot."""
    original = checkpoint(tmp_path, hidden=128, intermediate=256, heads=8, kv_heads=8)
    stored = {}
    for name, value in original.state_dict().items():
        is_linear = isinstance(original.get_submodule(name.rpartition(".")[0]), torch.nn.Linear)
        if is_linear and "lm_head" not in name:
            tensors = per_block(value)
            stored[name] = tensors["weight"]
            stored[f"{name}_scale_inv"] = tensors["weight_scale_inv"]
        else:
            stored[name] = value
    save_file(stored, tmp_path / "model.safetensors")
    model, report = bound(tmp_path, fake_vllm(original, quantize=per_block))
    assert report.complete, str(report)
    layer = model.model.layers[1].mlp.up_proj
    scale = stored["model.layers.1.mlp.up_proj.weight_scale_inv"]
    assert torch.equal(layer.weight_scale, scale)
    model, report = bound(tmp_path, fake_vllm(original))  # a vLLM that has dequantized it
    assert "model.layers.1.mlp.up_proj.weight" in report.copied
    close = model.model.layers[1].mlp.up_proj.weight.detach()
    torch.testing.assert_close(close, dequantized(layer.weight, layer.weight_scale, torch.bfloat16))
    del stored["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"up_proj\.weight' is FP8 and it has no scales"):
        bound(tmp_path, fake_vllm(original))


def test_buffers_of_the_checkpoint_count(tmp_path):
    """DeepSeek-V3's routing bias is a buffer, and it is trained."""
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=330, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=0, kv_lora_rank=16,
        q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    original = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    gate = original.model.layers[0].mlp.gate
    gate.e_score_correction_bias.copy_(torch.arange(8.0))
    original.save_pretrained(tmp_path)
    model, _ = bound(tmp_path, fake_vllm(original, packed={}))
    assert model.model.layers[0].mlp.gate.e_score_correction_bias.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t | {"weight_scale": t["weight_scale"] * 1.2}, "not the checkpoint's rounded"),
        (lambda t: t | {"weight_scale": t["weight_scale"].double()}, "scales are torch.float64"),
        (lambda t: t | {"weight_scale": t["weight_scale"][:3]}, "scales have shape"),
        (lambda t: {"weight": t["weight"]}, "0 known scale tensors"),
        (
            lambda t: {
                "weight": torch.zeros_like(t["weight"]),
                "weight_scale": t["weight_scale"] * 1e6,
            },
            "too coarse",
        ),
    ],
)
def test_fp8_that_is_not_the_checkpoint_is_copied(tmp_path, spoil, reason):
    original = checkpoint(tmp_path)
    fake = fake_vllm(original, quantize=lambda weight: spoil(per_channel(weight)))
    model, report = bound(tmp_path, fake)
    copied = [row for row in report.rows if not row.shared]
    assert len(copied) == 2 * 7
    assert report.copied == tuple(row.name for row in copied)
    assert all(reason in row.reason for row in copied), str(report)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, original.eval()(IDS).logits)
