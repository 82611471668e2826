"""A module tree that keeps its weights as vLLM does: fused, padded, renamed, quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.models.load import build_from_config
from fxrl.models.tiny import tiny_config

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def checkpoint(
    folder: Path, kind: str = "qwen3", *, dtype: str = "bf16", **sizes: int
) -> nn.Module:
    """Saves a tiny random model, norms and biases random as well, and returns it."""
    model = build_from_config(tiny_config(kind, **({"vocab": 330} | sizes)), dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=generator).to(value.dtype))
    model.save_pretrained(folder)
    return model


def fake_vllm(
    model: nn.Module,
    *,
    packed: Mapping[str, list[str]] = PACKED,
    declared: bool = True,
    stacked_mapper: bool = False,
    prefix: str = "",
    lora: bool = False,
    fuse: Callable[[list[Tensor]], Tensor] = torch.cat,
    quantize: Callable[[Tensor], dict[str, Tensor]] | None = None,
    pad_to: int = 64,
    change: Callable[[str, Tensor], Tensor] | None = None,
) -> nn.Module:
    """The fake's weights are the model's, in storages of their own.

    Args:
        declared: it has ``packed_modules_mapping``.
        stacked_mapper: it declares the packing in ``hf_to_vllm_mapper`` instead.
        prefix: in front of vLLM's names, with a mapper that adds it.
        lora: layers are wrapped, names have ``.base_layer.``.
        fuse: makes a fused weight of its parts.
        quantize: makes a linear weight's tensors.
        pad_to: rows of the embeddings are filled up to a multiple.
        change: the last word on every tensor.
    """
    fused_of = {shard: fused for fused, shards in packed.items() for shard in shards}
    parts: dict[str, list[Tensor]] = {}
    sources: dict[str, nn.Module] = {}
    for name, value in model.named_parameters():
        path, leaf = name.rsplit(".", 1)
        head, _, last = path.rpartition(".")
        target = f"{head}.{fused_of.get(last, last)}" if head else last
        parts.setdefault(f"{target}.{leaf}", []).append(value.detach().clone())
        sources[f"{target}.{leaf}"] = model.get_submodule(path)
    root = nn.Module()
    for name, values in parts.items():
        whole = values[0] if len(values) == 1 else fuse(values)
        whole = change(name, whole) if change else whole
        path, leaf = name.rsplit(".", 1)
        is_linear = isinstance(sources[name], nn.Linear) and leaf == "weight"
        owner = _module(root, prefix + path + (".base_layer" if lora and is_linear else ""))
        if is_linear and len(values) > 1:
            owner.output_sizes = [len(value) for value in values]
        if isinstance(sources[name], nn.Embedding) or path == "lm_head":
            owner.org_vocab_size = len(whole)
            whole = torch.cat([whole, whole.new_zeros(-len(whole) % pad_to, whole.shape[1])])
        tensors = {leaf: whole}
        if quantize is not None and is_linear and path != "lm_head":
            tensors = quantize(whole)
        for leaf_name, value in tensors.items():
            owner.register_parameter(leaf_name, nn.Parameter(value, requires_grad=False))
    if "lm_head.weight" not in parts:  # tied
        root.add_module("lm_head", _module(root, f"{prefix}model.embed_tokens"))
    if declared and not stacked_mapper:
        root.packed_modules_mapping = dict(packed)  # type: ignore[assignment]
    _declare_mapper(root, prefix, packed if stacked_mapper else {})
    return root


def _declare_mapper(root: Any, prefix: str, stacked: Mapping[str, list[str]]) -> None:
    if stacked:
        root.hf_to_vllm_mapper = SimpleNamespace(
            orig_to_new_stacked={
                f".{shard}": (f".{fused}", position if fused != "qkv_proj" else "qkv"[position])
                for fused, shards in reversed(stacked.items())
                for position, shard in enumerate(shards)
            },
            map_name=lambda name: prefix + name,
        )
    elif prefix:
        root.hf_to_vllm_mapper = SimpleNamespace(map_name=lambda name: prefix + name)


def _module(root: nn.Module, path: str) -> Any:
    for part in path.split("."):
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


def per_channel(weight: Tensor) -> dict[str, Tensor]:
    """As vLLM's ``fp8_per_channel``: [K, N] view of [N, K], one scale a row."""
    scale = weight.float().abs().amax(1, keepdim=True) / LARGEST
    return {"weight": (weight.float() / scale).to(FP8).t(), "weight_scale": scale}


def per_tensor(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.float().abs().amax() / LARGEST
    return {"weight": (weight.float() / scale).to(FP8).t(), "weight_scale": scale}


def per_block(weight: Tensor, block: int = 128) -> dict[str, Tensor]:
    """As vLLM's ``fp8_per_block``: [N, K], a scale for 128 x 128."""
    rows, columns = weight.shape
    padded = nn.functional.pad(weight.float(), (0, -columns % block, 0, -rows % block))
    blocks = padded.view(len(padded) // block, block, -1, block)
    scale = blocks.abs().amax((1, 3)) / LARGEST
    values = (blocks / scale[:, None, :, None]).to(FP8).view(padded.shape)
    return {"weight": values[:rows, :columns].contiguous(), "weight_scale_inv": scale}
