"""The model and batch that the benchmarks share: decoders of any shape, random weights, LoRA.

Weights are drawn on the device, so nothing is downloaded. LoRA's B starts at small random values,
not at zero: with zeros the gradient of every A would be exactly zero and could not be compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-1.7b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
WEIGHT_STD = 0.02
LORA_B_STD = 0.01
MASKS = ("none", "ones", "causal", "padded", "packed")
_DOCUMENTS = 8
_LOGIT_ROWS = 2048


def make_config(shape: str, layers: int | None = None, **more: Any) -> Any:
    """A key of ``SHAPES`` as transformers' configuration; ``layers`` overrides its number of
    layers."""
    from transformers import AutoConfig

    numbers = {"model_type": "qwen3", "tie_word_embeddings": False} | SHAPES[shape] | more
    return AutoConfig.for_model(**numbers | ({"num_hidden_layers": layers} if layers else {}))


def make_model(
    shape: str,
    device: str,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rank: int = 32,
    checkpointing: bool = True,
    input_hook: bool = True,
    seed: int = 0,
    scalar_head: bool = False,
    bitsandbytes: bool = False,
) -> nn.Module:
    """A PEFT LoRA model (all linear layers but the head) in training mode, or one to train in full.

    Args:
        shape: a key of ``SHAPES``.
        layers: overrides the shape's number of layers.
        rank: 0 leaves LoRA out.
        checkpointing: switches Hugging Face's gradient checkpointing on, as users do.
        input_hook: keeps the hook that checkpointing puts on the embeddings' output to make it
            require a gradient; LoRA with non-reentrant checkpointing does not need it.
        scalar_head: makes a sequence classifier with one label, a reward model, without LoRA.
        bitsandbytes: holds the weights under LoRA in that library's NF4, scales quantised too.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = make_config(shape, layers, max_position_embeddings=2**20)
    config._attn_implementation = "sdpa"
    config.use_cache = False  # as every trainer sets it; else transformers logs while it is traced
    made = AutoModelForCausalLM
    if scalar_head:
        made, config.num_labels = AutoModelForSequenceClassification, 1
    with torch.device("meta"):
        base = made.from_config(config, dtype=dtype)
    base = base.to_empty(device=device)
    base.tie_weights()  # a weight that is tied became two
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.normal_(0, WEIGHT_STD) if parameter.dim() > 1 else parameter.fill_(1.0)
    # to_empty left the rotary frequencies unset: they are a buffer, made anew.
    with torch.device(device):
        base.model.rotary_emb = type(base.model.rotary_emb)(config)
    if bitsandbytes:
        _quantize(base.model, dtype)
        base.is_loaded_in_4bit = True  # by which PEFT knows
    model = _with_lora(base, rank, dtype) if rank else base
    if checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if not input_hook:
            base.disable_input_require_grads()
    return model.train()


def _with_lora(base: nn.Module, rank: int, dtype: torch.dtype) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
                if "lora_B" in name:
                    parameter.normal_(0, LORA_B_STD)
    return model


def _quantize(part: nn.Module, dtype: torch.dtype) -> None:
    """Each Linear of a part of a model in NF4, as ``BitsAndBytesConfig`` loads it for QLoRA."""
    import bitsandbytes as bnb

    kind = {"quant_type": "nf4", "compress_statistics": True}
    for name, child in list(part.named_children()):
        if not isinstance(child, nn.Linear):
            _quantize(child, dtype)
            continue
        sizes = child.in_features, child.out_features
        made = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=dtype, device="meta", **kind)
        weight, device = child.weight.detach(), child.weight.device
        held = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, module=made, **kind)
        made.weight = held.to(device)
        setattr(part, name, made)


def widen(model: nn.Module) -> None:
    """Let a model compute in fp32, with the weights that it has."""
    model.float()
    for module in model.modules():
        if hasattr(module, "compute_dtype"):  # bitsandbytes'
            module.compute_dtype = module.weight.quant_state.dtype = torch.float32


def base_model(model: nn.Module) -> Any:
    """The model under LoRA's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def drawn_batch(
    model: Any, rows: int, tokens: int, draw: torch.Generator
) -> dict[str, torch.Tensor]:
    """A GRPO batch of rows of ``tokens``, all but the first completion; no forward is run for it.

    Returns:
        ``input_ids [B, T]``, ``completion_mask`` and ``old_logps [B, T - 1]``, ``advantages [B]``.
    """
    vocab = model.get_input_embeddings().num_embeddings
    device = draw.device
    return {
        "input_ids": torch.randint(0, vocab, (rows, tokens), device=device, generator=draw),
        "completion_mask": torch.ones(rows, tokens - 1, device=device),
        "old_logps": torch.full((rows, tokens - 1), -12.0, device=device),
        "advantages": torch.randn(rows, device=device, generator=draw),
    }


def make_batch(
    model: nn.Module,
    *,
    device: str,
    tokens: int,
    completion: int,
    prompt: int,
    mask: str = "none",
    seed: int = 0,
) -> dict[str, Any]:
    """A GRPO batch of ``tokens`` completion tokens in rows of ``completion``, with old log-probs.

    The old log-probs are the model's own, moved by N(0, 0.1): some ratios leave the clip range and
    most do not, as in a real off-policy step.

    Args:
        mask: ``"none"`` leaves ``attention_mask`` out, ``"ones"`` gives a mask of ones,
            ``"causal"`` a mapping that tells transformers to make no mask: plain causal
            attention, also where the model is traced; ``"padded"`` pads prompts on the left, each
            row's less than the next one's; ``"packed"`` makes eight documents of each row.

    Returns:
        ``input_ids [B, prompt + completion]``, ``completion_mask``, ``old_logps [B, completion]``,
        ``advantages [B]``; ``attention_mask`` or ``position_ids`` of the ids' shape.
    """
    rows, rest = divmod(tokens, completion)
    if rest or not rows:
        raise SystemExit(f"--tokens {tokens} is not a multiple of --completion {completion}")
    draw = torch.Generator(device).manual_seed(seed)
    vocab = base_model(model).config.vocab_size
    ids = torch.randint(0, vocab, (rows, prompt + completion), device=device, generator=draw)
    old = torch.cat([token_logps(model, row[None], completion) for row in ids])
    batch: dict[str, Any] = {
        "input_ids": ids,
        "completion_mask": torch.ones(rows, completion, device=device),
        "old_logps": old + 0.1 * torch.randn(old.shape, device=device, generator=draw),
        "advantages": torch.randn(rows, device=device, generator=draw),
    }
    if mask == "causal":
        batch["attention_mask"] = {"full_attention": None}
    if mask == "ones":
        batch["attention_mask"] = torch.ones_like(ids)
    return batch | layout(ids, mask, prompt)


def layout(ids: torch.Tensor, mask: str, prompt: int) -> dict[str, torch.Tensor]:
    """What ``mask="padded"`` and ``"packed"`` add to a batch (see ``make_batch``)."""
    rows, length = ids.shape
    places = torch.arange(length, device=ids.device).expand_as(ids)
    if mask == "padded":
        begins = torch.arange(rows, device=ids.device) * prompt // rows
        return {"attention_mask": (places >= begins[:, None]).long()}
    if mask == "packed":
        return {"position_ids": places % -(-length // _DOCUMENTS)}
    return {}


@torch.no_grad()
def token_logps(model: nn.Module, ids: torch.Tensor, completion: int) -> torch.Tensor:
    """Log-probs of the last ``completion`` tokens, fp32 ``[B, completion]``, some rows of logits at
    a time."""
    base = base_model(model)
    hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state[:, -completion - 1 : -1]
    targets = ids[:, -completion:, None]
    parts = zip(hidden.split(_LOGIT_ROWS, 1), targets.split(_LOGIT_ROWS, 1), strict=True)
    found = [
        torch.log_softmax(base.lm_head(rows).float(), -1).gather(-1, wanted)[..., 0]
        for rows, wanted in parts
    ]
    return torch.cat(found, 1)


@contextlib.contextmanager
def attention(name: str) -> Iterator[None]:
    """Restricts scaled dot-product attention: ``cudnn``, ``flash``, ``math`` or ``any``.

    ``cudnn`` lets the other fused kernels stand in where cuDNN refuses a shape or a mask.
    """
    order = {
        "cudnn": [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ],
        "flash": [SDPBackend.FLASH_ATTENTION],
        "math": [SDPBackend.MATH],
    }
    if name == "any":
        yield
        return
    with sdpa_kernel(order[name], set_priority=True):
        yield


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer gets, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def loss_value(output: Any) -> torch.Tensor:
    """The loss out of what a loss function returns."""
    return output[0] if isinstance(output, tuple) else output


def backward_fn(step: Callable[[Any], Any], batch: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """One forward and backward as a call without arguments; returns the loss."""

    def run() -> torch.Tensor:
        loss = loss_value(step(batch))
        loss.backward()
        return loss.detach()

    return run
