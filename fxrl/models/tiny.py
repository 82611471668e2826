"""Tiny random models of real architectures, made on the fly: no download, a few milliseconds.

``tiny:qwen3`` or, with other sizes, ``tiny:qwen3:layers=4,hidden=128``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from fxrl.errors import optional
from fxrl.models.hf import ModelError, byte_level

PREFIX = "tiny:"
PAD, BOS, EOS = "<|pad|>", "<|im_start|>", "<|im_end|>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
NUM_USED = 3 + 256
"""Special tokens and bytes; ids above are reserved tokens that decode to nothing."""

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}"
    "{{ 'tool ' + tool.function.name + ' ' + tool.function.parameters.properties | join(' ') }}"
    "{{ '\n' }}{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinySize:
    """Sizes of a tiny model. ``intermediate`` is the MLP's (each expert's) inner width,
    ``window`` the sliding window of architectures that have one, ``experts`` of those that have."""

    vocab: int = 320
    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    positions: int = 1024
    window: int = 32
    experts: int = 4
    tie: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "tie" and value < 1:
                raise ModelError(f"tiny model: {item.name}={value} is below 1; give at least 1")
        if self.vocab < NUM_USED:
            raise ModelError(
                f"tiny model: vocab={self.vocab} is below {NUM_USED}, the bytes and special tokens "
                "of its tokenizer; raise it"
            )
        if self.heads % self.kv_heads:
            raise ModelError(
                f"tiny model: heads={self.heads} is no multiple of kv_heads={self.kv_heads}; "
                "give a divisor"
            )


@dataclass(frozen=True, slots=True)
class _Kind:
    """``model_type`` as transformers knows it and what is special about its configuration."""

    model_type: str
    extra: dict[str, Any] = field(default_factory=dict)
    from_size: dict[str, str] = field(default_factory=dict)


# grouped_mm, the default, has no float64; "eager" loops over experts, which breaks graphs.
_MOE = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # YaRN's lengths would not fit
_WINDOW, _EXPERTS = {"sliding_window": "window"}, {"num_local_experts": "experts"}
_KINDS = {
    "qwen2": _Kind("qwen2"),
    "qwen3": _Kind("qwen3"),
    "llama": _Kind("llama"),
    "mistral": _Kind("mistral", from_size=_WINDOW),
    "gemma2": _Kind("gemma2", {"query_pre_attn_scalar": 16}, _WINDOW),
    "gemma3": _Kind("gemma3_text", {"query_pre_attn_scalar": 16}, _WINDOW),
    "cohere": _Kind("cohere", {"logit_scale": 0.5}),
    "granite": _Kind("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "phi3": _Kind("phi3", from_size=_WINDOW),
    "olmo2": _Kind("olmo2"),
    "smollm3": _Kind("smollm3"),
    "gpt2": _Kind("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "mixtral": _Kind("mixtral", _MOE, _EXPERTS),
    "gpt-oss": _Kind("gpt_oss", _MOE | {"rope_parameters": _PLAIN_ROPE}, _EXPERTS | _WINDOW),
}
TINY_KINDS = tuple(_KINDS)
"""What may follow ``tiny:``."""


def parse_tiny(model_id: str) -> tuple[str, TinySize]:
    """``"tiny:qwen3:layers=4"`` -> ``("qwen3", TinySize(layers=4))``."""
    kind, _, options = model_id.removeprefix(PREFIX).partition(":")
    if kind not in _KINDS:
        raise ModelError(f"{model_id!r}: unknown kind {kind!r}; one of {', '.join(_KINDS)}")
    names = [item.name for item in fields(TinySize)]
    sizes: dict[str, int] = {}
    for option in filter(None, options.split(",")):
        name, equals, value = option.partition("=")
        if name not in names or not equals or not value.isdecimal():
            raise ModelError(
                f"{model_id!r}: {option!r} is not name=number with a name out of {', '.join(names)}"
            )
        sizes[name] = int(value)
    return kind, TinySize(**sizes)


def tiny_config(kind: str, size: TinySize | None = None, **sizes: int) -> Any:
    """A ``PretrainedConfig`` of architecture ``kind`` (one of ``TINY_KINDS``), of ``size`` changed
    by ``sizes``. Raises ``ModelError`` for an unknown kind or a size that does not work,
    ``MissingPackageError`` without transformers."""
    if kind not in _KINDS:
        raise ModelError(f"tiny model: unknown kind {kind!r}; one of {', '.join(_KINDS)}")
    hf = optional("transformers", "a tiny model")
    this, size = _KINDS[kind], replace(size or TinySize(), **sizes)
    values: dict[str, Any] = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": size.positions,
        # The usual 0.02 makes a narrow model's logits all but flat: nothing to test against.
        "initializer_range": 0.1,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if kind == "gpt2":
        values["n_inner"] = size.intermediate
    else:
        values["num_key_value_heads"] = size.kv_heads
        values["head_dim"] = size.head_dim
        values["intermediate_size"] = size.intermediate
    if size.tie is not None:
        values["tie_word_embeddings"] = bool(size.tie)
    values |= {name: getattr(size, source) for name, source in this.from_size.items()}
    return hf.AutoConfig.for_model(this.model_type, **values, **this.extra)


def tiny_tokenizer(vocab_size: int = 320) -> Any:
    """A tokenizer with one token per byte, ChatML and padding on the left, exact both ways and made
    without data. Raises ``MissingPackageError`` without transformers."""
    tk = optional("tokenizers", "a tiny tokenizer")
    alphabet = sorted(tk.pre_tokenizers.ByteLevel.alphabet())
    reserved = [f"<|reserved_{i}|>" for i in range(vocab_size - NUM_USED)]
    return byte_level(
        [PAD, BOS, EOS, *alphabet, *reserved],
        [],
        [PAD, BOS, EOS, *reserved],
        regex=False,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
    )
