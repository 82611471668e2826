"""GGUF file of a Llama -> a Hugging Face folder in bf16 safetensors that can be trained.

NOTE [Why not through transformers]
``from_pretrained(gguf_file=...)`` reads the file's metadata three times and makes the table of all
tensor names once per module: 70 s of a first run, for a model of 135M parameters. It also leaves
marks of quantisation that ``save_pretrained`` refuses, and prints its own progress. The format is
plain: llama.cpp's names, its order of rotary rows, and a vocabulary.

NOTE [The file's own EOS may be wrong]
SmolLM2's names the start of a turn in place of its end, and no padding token: generation would
never stop. So the caller names both, and they are written to the tokenizer, the model's and the
generation config alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxrl.models.errors import FetchError
from fxrl.models.hf import no_progress_bars, optional

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # llama.cpp's type of tokens such as <|im_start|>


def convert_gguf(gguf: Path, folder: Path, *, eos_token: str, pad_token: str) -> None:
    """Writes model, tokenizer and generation config of ``gguf`` into ``folder``.

    Args:
        gguf: the file: a Llama with a byte-level BPE vocabulary.
        folder: made if missing.
        eos_token: text of the token that ends a turn; must be in the vocabulary.
        pad_token: likewise, for padding.

    Raises:
        MissingPackageError: transformers or gguf is not installed.
        FetchError: a token is not in the vocabulary, or the model is no Llama.
    """
    purpose = f"{gguf.name}: converting GGUF"
    reader = optional("gguf", purpose).GGUFReader(str(gguf))
    hf = optional("transformers", purpose)
    values = {name: field.contents() for name, field in reader.fields.items()}
    kind = values["general.architecture"], values["tokenizer.ggml.model"]
    if kind != ("llama", "gpt2"):
        raise FetchError(f"{gguf.name}: architecture and vocabulary are {kind}, not a Llama's BPE")
    tokenizer = _tokenizer(hf, gguf.name, values, eos_token, pad_token)
    model = _model(hf, reader, values, tokenizer)
    with no_progress_bars():
        model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _tokenizer(hf: Any, name: str, values: dict[str, Any], eos_token: str, pad_token: str) -> Any:
    tk = optional("tokenizers", f"{name}: converting GGUF")
    words: list[str] = values["tokenizer.ggml.tokens"]
    vocab = {word: number for number, word in enumerate(words)}
    for token in (eos_token, pad_token):
        if token not in vocab:
            raise FetchError(f"{name}: {token!r} is not in its vocabulary; name another token")
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    tokenizer = tk.Tokenizer(tk.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tk.decoders.ByteLevel()
    kinds = values["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [word for word, kind in zip(words, kinds, strict=True) if kind == _CONTROL]
    )
    unknown = values.get("tokenizer.ggml.unknown_token_id")
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=words[values["tokenizer.ggml.bos_token_id"]],
        unk_token=None if unknown is None else words[unknown],
        eos_token=eos_token,
        pad_token=pad_token,
        padding_side="left",
        clean_up_tokenization_spaces=False,  # would change decoded text; BPE has no need
        chat_template=values.get("tokenizer.chat_template"),
    )


def _model(hf: Any, reader: Any, values: dict[str, Any], tokenizer: Any) -> Any:
    size = {name.removeprefix("llama."): value for name, value in values.items()}
    heads, kv_heads = size["attention.head_count"], size["attention.head_count_kv"]
    weights = {_name(t.name): _dense(t, heads, kv_heads) for t in reader.tensors}
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size["embedding_length"],
        intermediate_size=size["feed_forward_length"],
        num_hidden_layers=size["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=size["context_length"],
        rms_norm_eps=size["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": size["rope.freq_base"]},
        tie_word_embeddings="lm_head.weight" not in weights,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def _name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name == "output.weight":
        return "lm_head.weight"
    *block, part, kind = name.split(".")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{_NAMES[part]}.{kind}"


def _dense(tensor: Any, heads: int, kv_heads: int) -> Tensor:
    """bf16. llama.cpp keeps a head's rotary rows as pairs, Hugging Face as two halves."""
    values = optional("gguf", "converting GGUF").dequantize(tensor.data, tensor.tensor_type)
    dense = torch.tensor(values).to(torch.bfloat16)  # a copy: the file is mapped read-only
    rotated = {"attn_q": heads, "attn_k": kv_heads}.get(tensor.name.split(".")[-2])
    if rotated is None:
        return dense
    pairs = dense.view(rotated, -1, 2, dense.shape[1])
    return pairs.transpose(1, 2).reshape(dense.shape)
