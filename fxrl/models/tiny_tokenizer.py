"""A tokenizer for tiny models: one token a byte, ChatML, exact both ways, made without data."""

from __future__ import annotations

from typing import Any

from fxrl.models.hf import optional

PAD, BOS, EOS = "<|pad|>", "<|im_start|>", "<|im_end|>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
NUM_USED = 3 + 256
"""Special tokens and bytes; ids above are reserved tokens that decode to nothing."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(vocab_size: int = 320) -> Any:
    """A ``PreTrainedTokenizerFast`` with ``vocab_size`` tokens, padding on the left.

    Raises:
        MissingPackageError: transformers is not installed.
    """
    hf = optional("transformers", "a tiny tokenizer")
    tk = optional("tokenizers", "a tiny tokenizer")
    alphabet = sorted(tk.pre_tokenizers.ByteLevel.alphabet())
    reserved = [f"<|reserved_{i}|>" for i in range(vocab_size - NUM_USED)]
    words = [PAD, BOS, EOS, *alphabet, *reserved]
    tokenizer = tk.Tokenizer(
        tk.models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[])
    )
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tk.decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, BOS, EOS, *reserved])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
