"""Tiny models and their tokenizer."""

import json

import pytest
import torch

from fxrl.models import (
    TINY_KINDS,
    ModelError,
    TinySize,
    build_from_config,
    load_model,
    tiny_config,
    tiny_tokenizer,
)
from fxrl.models.tiny import parse_tiny


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_every_kind_is_small_trains_and_has_logits_worth_testing(kind):
    model, tokenizer = load_model(f"tiny:{kind}", "fp32")
    assert sum(p.numel() for p in model.parameters()) < 300_000
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) == 320
    logits = model(input_ids=torch.tensor([tokenizer("3 + 4 = 7").input_ids])).logits
    logits.logsumexp(-1).sum().backward()
    assert logits.std() > 0.2, "flat logits would hide errors"
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_sizes_reach_the_configuration():
    kind, size = parse_tiny("tiny:mixtral:layers=3,hidden=32,heads=2,kv_heads=1,experts=8,tie=1")
    config = tiny_config(kind, size)
    assert config.num_hidden_layers == 3
    assert config.hidden_size == 32
    assert config.num_key_value_heads == 1
    assert config.num_local_experts == 8
    assert config.tie_word_embeddings is True
    assert tiny_config("gemma3", window=8).sliding_window == 8
    assert tiny_config("gpt2", TinySize(hidden=32)).n_embd == 32


@pytest.mark.parametrize(
    ("model_id", "message"),
    [
        ("tiny:qwen9", r"unknown kind 'qwen9'; one of qwen2, qwen3"),
        ("tiny:", r"unknown kind ''"),
        ("tiny:qwen3:depth=3", r"'depth=3' is not name=number with a name out of vocab, hidden"),
        ("tiny:qwen3:layers", r"'layers' is not name=number"),
        ("tiny:qwen3:layers=two", r"'layers=two' is not"),
        ("tiny:qwen3:layers=0", r"layers=0 is below 1"),
        ("tiny:qwen3:vocab=100", r"vocab=100 is below 259"),
        ("tiny:qwen3:heads=3", r"heads=3 is no multiple of kv_heads=2"),
    ],
)
def test_wrong_ids(model_id, message):
    with pytest.raises(ModelError, match=message):
        load_model(model_id)


@pytest.mark.parametrize("text", ["3 + 4 = 7\n", "  né 数 🙂\t", "<|im_start|>", ""])
def test_tokenizer_is_exact_both_ways(text):
    tokenizer = tiny_tokenizer(300)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert text == "<|im_start|>" or len(ids) == len(text.encode())


def test_tokenizer_chat_padding_and_reserved_tokens(tmp_path):
    tokenizer = tiny_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(["a", "abc"], padding=True).attention_mask == [[0, 0, 1], [1, 1, 1]]
    assert tokenizer.decode([5, 319, 2], skip_special_tokens=True) == tokenizer.decode([5])
    tokenizer.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text).input_ids == tokenizer(text).input_ids
    assert again.chat_template == tokenizer.chat_template


def test_the_global_generator_stays():
    before = torch.get_rng_state()
    load_model("tiny:qwen3")
    assert torch.get_rng_state().equal(before)


def test_a_full_size_configuration_costs_nothing_on_meta(tmp_path):
    config = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_from_config(tmp_path / "config.json", "bf16", "meta")
    assert sum(p.numel() for p in model.parameters()) > 7e9
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_build_under_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        model = build_from_config(tiny_config("llama"), "fp32")
    assert all(
        isinstance(p.data, FakeTensor) or isinstance(p, FakeTensor) for p in model.parameters()
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"is not JSON"),
        ("[]", r"has no model_type"),
        ('{"hidden_size": 3}', r"has no model_type"),
        ('{"model_type": "nonsense"}', r"model_type='nonsense' does not work with transformers"),
        ('{"model_type": "vit"}', r"makes no causal LM of it"),
    ],
)
def test_wrong_configurations(tmp_path, text, message):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        build_from_config(tmp_path / "c.json")


def test_a_missing_configuration():
    with pytest.raises(ModelError, match=r"no-such.json': No such file.*give a config.json's path"):
        build_from_config("no-such.json")
