"""The size of a KV cache: what transformers holds, and what a rollout takes beside it."""

import pytest
import torch

from fxrl.engines.kv_cache import KvCache, RolloutMemory
from fxrl.errors import ConfigError
from fxrl.models import build_from_config, lora, tiny_config

pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2"])
def test_as_transformers_holds_it(kind):
    model = build_from_config(tiny_config(kind), "fp32")
    ids = torch.zeros(1, 5, dtype=torch.long)
    layers = model(input_ids=ids, use_cache=True).past_key_values.layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert KvCache.of(model.config, 4).bytes(5) == held


def test_a_window_holds_no_more_than_itself():
    config = tiny_config("gemma2")
    cache = KvCache.of(config, 2)
    window = config.sliding_window
    assert cache.windowed == {window: config.layer_types.count("sliding_attention")}
    grown = cache.bytes(5 * window) - cache.bytes(4 * window)
    assert grown == cache.token_bytes * window * config.layer_types.count("full_attention")
    assert cache.sequence_bytes(17) == cache.sequence_bytes(32)  # whole blocks


def test_other_caches_are_refused():
    config = tiny_config("qwen3")
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        KvCache.of(config, 2)
    config.kv_lora_rank = 512
    with pytest.raises(ConfigError, match="kv_lora_rank=512"):
        KvCache.of(config, 2)


def test_a_rollout_takes_what_is_left():
    model = build_from_config(tiny_config("qwen3"), "bf16", "meta")
    weights = sum(p.nbytes for p in model.parameters())
    model = lora(model, r=4)
    adapter = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    one = RolloutMemory.of(model, 64, 1, available=2**40).sequence
    available = weights + 3 * adapter + 1000 + 5 * one
    found = RolloutMemory.of(model, 64, 8, available=available + one - 1, engine=1000)
    assert (found.weights, found.states) == (weights + adapter, 2 * adapter)
    assert (found.most, found.sequences, found.kv_bytes) == (5, 5, 5 * one)
    assert sum(found.parts.values()) == available
    assert RolloutMemory.of(model, 64, 8, available=1000).sequences == 0
