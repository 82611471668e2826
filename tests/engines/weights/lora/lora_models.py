"""Small PEFT models with trained-looking adapters, for the tests of LoRA hand-over."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes)).to(dtype).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config).eval()


def with_lora(model: nn.Module, *, fp32_adapter: bool = True, **options: Any) -> nn.Module:
    """PEFT's wrapper; every adapter tensor is random, so that the delta is not zero."""
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        | options
    )
    wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=fp32_adapter)
    fill(wrapped)
    return wrapped


def fill(model: nn.Module, seed: int = 1) -> None:
    """New random numbers in every LoRA factor."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Clones of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_bits(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().view(torch.uint8), before[name].view(torch.uint8)), (
            name
        )


def stacked(manager: Any) -> list[torch.Tensor]:
    """Clones of all adapter slots of vLLM's manager."""
    layers = manager.modules.values()
    return [t.clone() for one in layers for t in (*one.lora_a_stacked, *one.lora_b_stacked)]


def same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
