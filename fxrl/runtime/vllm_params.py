"""From fxrl's sampling parameters to vLLM's; no vLLM needed.

NOTE [Seeds]
Each sample has its own seed, mixed from the engine's seed, the number of the call and the sample's
place in it (splitmix64's finalizer: neighbours differ in half of their bits). What a sample draws
then does not depend on which other requests are in flight, beyond the rounding of logits; a
resumed run, which restores the number of the call, draws the same. In vLLM's V2 model runner (all
dense models on a GPU) every request has a seed anyway; the older runner keeps a generator for each
seeded request, which costs a few percent of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fxrl.runtime.engine import PromptError, SamplingParams, SamplingParamsError
from fxrl.runtime.vllm_options import VllmOptionError, check_names

OWNED_SAMPLING: Mapping[str, str] = MappingProxyType(
    {
        "logprobs": "every completion has the log-probability of each of its tokens",
        "prompt_logprobs": "completions have no place for them",
        "logprob_token_ids": "completions have no place for them",
        "flat_logprobs": "it is a matter of speed, and on where there is one",
        "detokenize": "engines never see text",
        "stop": "engines never see text; give stop_token_ids",
        "include_stop_str_in_output": "engines never see text",
        "skip_special_tokens": "engines never see text",
        "spaces_between_special_tokens": "engines never see text",
        "output_text_buffer_length": "engines never see text",
        "output_kind": "generate returns finished completions",
        "skip_clone": "requests are the engine's own",
    }
)
"""vLLM's sampling parameters that fxrl sets itself, and why."""

LEAST_TEMPERATURE = 0.01
"""vLLM raises anything between 0 and this to this."""


def sampling_arguments(
    params: SamplingParams, known: Collection[str], eos_token_ids: Collection[int]
) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams``, all but the seed.

    EOS ids are passed as stop tokens: which ids end a completion is fxrl's to say, not the
    checkpoint's generation config's.

    Args:
        known: the installed version's field names.

    Raises:
        SamplingParamsError: a value that vLLM would change.
        VllmOptionError: an unknown name in ``extra``, or one of fxrl's own.
    """
    if 0 < params.temperature < LEAST_TEMPERATURE:
        raise SamplingParamsError(
            f"temperature={params.temperature!r} is above 0 and below {LEAST_TEMPERATURE}, which "
            "vLLM would sample at; use 0 for greedy"
        )
    own = {name for name in SamplingParams.__dataclass_fields__ if name != "extra"}
    for name in params.extra:
        if name in own:
            raise VllmOptionError(f"sampling extra: {name!r} is a field of SamplingParams, set it")
        if name in OWNED_SAMPLING:
            raise VllmOptionError(f"sampling extra: {name!r} is fxrl's own: {OWNED_SAMPLING[name]}")
    check_names("sampling extra", params.extra.keys(), {k for k in known if k[:1] != "_"})
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    arguments: dict[str, Any] = {
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "top_k": params.top_k,
        "min_p": float(params.min_p),
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,
        "logprobs": 0,  # the sampled token's alone
        "detokenize": False,
        "skip_clone": True,
        "flat_logprobs": True,  # a list of floats instead of a dict of objects per token
    }
    arguments = {name: value for name, value in arguments.items() if name in known}
    return arguments | dict(params.extra)


def sample_seed(base: int, call: int, index: int) -> int:
    """The seed of sample number ``index`` of call number ``call``, in [0, 2**63)."""
    mixed = base
    for part in (call, index):
        mixed = (mixed + 0x9E3779B97F4A7C15 * (part + 1)) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1


def check_prompts(
    prompts: Sequence[Sequence[int]], params: SamplingParams, *, vocab_size: int, max_model_len: int
) -> None:
    """Refuses prompts that vLLM could not take, before any has been added.

    Raises:
        PromptError: which one, and why.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise PromptError(f"prompt {index} is empty; give at least one token, such as BOS")
        if not (min(prompt) >= 0 and max(prompt) < vocab_size):
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise PromptError(
                f"prompt {index} holds token id {wrong}, outside the model's {vocab_size} "
                "embeddings; is this the model's own tokenizer?"
            )
        if len(prompt) + params.max_tokens > max_model_len:
            raise PromptError(
                f"prompt {index} has {len(prompt)} tokens and max_tokens={params.max_tokens}: more "
                f"than max_model_len={max_model_len}; shorten the prompt, lower max_tokens or "
                "raise max_model_len"
            )
