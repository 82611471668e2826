"""GGUF file -> a Hugging Face folder in bf16 safetensors that can be trained.

NOTE [Three traps of loading GGUF through transformers 5]
1. Weights stay packed in their blocks by default (slow on a CPU, no gradient, cannot be saved):
   ``GgufConfig(dequantize=True)`` makes them dense.
2. The dense model still says that it is quantised, and ``save_pretrained`` refuses: the marks must
   go before it is saved.
3. The tokenizer read from GGUF may name the wrong EOS and no padding token (SmolLM2: the start of
   a turn in place of its end): generation would never stop. So the caller names both, and they are
   written to the tokenizer, the model's and the generation config alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fxrl.models.errors import FetchError
from fxrl.models.hf import no_progress_bars, optional


def convert_gguf(gguf: Path, folder: Path, *, eos_token: str, pad_token: str) -> None:
    """Writes model, tokenizer and generation config of ``gguf`` into ``folder``.

    Args:
        gguf: the file.
        folder: made if missing.
        eos_token: text of the token that ends a turn; must be in the vocabulary.
        pad_token: likewise, for padding.

    Raises:
        MissingPackageError: transformers or gguf is not installed.
        FetchError: a token is not in the vocabulary.
    """
    purpose = f"{gguf.name}: converting GGUF"
    optional("gguf", purpose)  # transformers needs it; say so before the slow part
    hf = optional("transformers", purpose)
    with no_progress_bars():
        _convert(hf, gguf, folder, eos_token, pad_token)


def _convert(hf: Any, gguf: Path, folder: Path, eos_token: str, pad_token: str) -> None:
    source, name = str(gguf.parent), gguf.name
    tokenizer = hf.AutoTokenizer.from_pretrained(source, gguf_file=name, local_files_only=True)
    vocab = tokenizer.get_vocab()
    for token in (eos_token, pad_token):
        if token not in vocab:
            raise FetchError(f"{name}: {token!r} is not in its vocabulary; name another token")
    tokenizer.eos_token, tokenizer.pad_token = eos_token, pad_token
    tokenizer.padding_side = "left"
    tokenizer.clean_up_tokenization_spaces = False  # would change decoded text; BPE has no need

    model = hf.AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=hf.GgufConfig(dequantize=True),
        local_files_only=True,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
