"""One batch: prefill once per prompt, then one token a step for every row that still runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.engines.engine import EngineError, SamplingParams
from fxrl.engines.torch.sampling import sample

DROP_SHARE = 1 / 8
"""Finished rows are dropped when they are this share of the batch: a drop copies the KV cache,
which is what the cache's growth costs at every step anyway."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a batch of R rows drew, on the CPU.

    Attributes:
        tokens: [R, S] int64, S steps; entries at and after ``lengths`` mean nothing.
        logprobs: [R, S], likewise.
        lengths: [R] int64, tokens of each row, the stop token included.
        stopped: [R] bool, ended by a stop token.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    stopped: Tensor


class CausalLM:
    """Calls a Hugging Face causal LM, bare or wrapped by PEFT, for the last position's logits.

    It asks the model only for what its ``forward`` takes: models without ``position_ids`` (ALiBi)
    or ``logits_to_keep`` work too. Which cache is right (sliding windows, linear attention) is the
    model's business: the first call passes none and takes what it makes.
    """

    def __init__(self, model: nn.Module) -> None:
        inner: Any = model
        while hasattr(inner, "get_base_model"):  # PEFT hides the signature behind **kwargs
            inner = inner.get_base_model()
        self.model = model
        self.takes = frozenset(inspect.signature(inner.forward).parameters)
        if "past_key_values" not in self.takes:
            raise EngineError(
                f"{type(inner).__name__}.forward takes no past_key_values, so it cannot decode "
                "with a KV cache; pass a Hugging Face causal LM"
            )
        text_config = inner.config.get_text_config()
        self._config = text_config
        self._embeddings = inner.get_input_embeddings()
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self.num_embeddings: int = self._embeddings.weight.shape[0]

    @property
    def takes_padding(self) -> bool:
        """Whether prompts of different lengths may share a batch.

        NOTE [Why float64 with eager attention is not padded]
        A padding token on the left sees no token at all: every entry of its row is the mask's
        finfo(dtype).min. Transformers' eager attention takes its softmax in float32 whatever the
        model's dtype, where float64's least number is -inf, so the row is NaN; one layer later
        0 * NaN puts it into every real token of the sequence. (Narrower dtypes stay finite, SDPA
        handles such rows itself.) The batch then has to consist of equally long prompts.
        """
        eager = getattr(self._config, "_attn_implementation", None) == "eager"
        return not (eager and self._embeddings.weight.dtype == torch.float64)

    def __call__(
        self, input_ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        """Logits [R, V] of the last position, and the cache with the new tokens in it.

        Args:
            input_ids: [R, T] int64.
            mask: [R, past + T] int64, or ``None`` if nothing is padding.
            positions: [R, T] int64.
            cache: what the last call returned, ``None`` at first.
        """
        arguments: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        arguments = {name: value for name, value in arguments.items() if name in self.takes}
        out = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **arguments,
        )
        return out.logits[:, -1], out.past_key_values


def decode(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    params: SamplingParams,
    *,
    uniforms: Tensor | None,
    stop_ids: Sequence[int],
    pad_id: int,
    device: torch.device,
) -> Decoded:
    """Draws ``counts[i]`` completions of ``prompts[i]``; rows are ordered by prompt.

    Args:
        uniforms: [R, max_tokens] float64 on the CPU, R = sum(counts); ``None`` for greedy.
        stop_ids: tokens that end a completion.
        pad_id: fills prompts on the left; any valid id, its positions are masked.
    """
    expand = torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts)).to(device)
    ids, mask = left_pad(prompts, pad_id)
    padded = not bool(mask.all())
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, cache = model(ids, mask if padded else None, positions, None)

    num_rows = len(expand)
    draws = None if uniforms is None else uniforms.to(device)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
    record = _Record(num_rows, params.max_tokens, logits)
    rows = torch.arange(num_rows, device=device)  # the row of the request at each batch row
    running = torch.ones(num_rows, dtype=torch.bool, device=device)
    logits = logits[expand]
    if num_rows != len(prompts):
        cache.reorder_cache(expand)  # the cache's own index_select over the batch, any layer kind
    next_position = positions[expand, -1:] + 1
    mask = torch.cat([mask[expand], mask.new_ones(num_rows, params.max_tokens)], 1)

    for step in range(params.max_tokens):
        banned = stop_ids if step < params.min_tokens else ()
        uniform = None if draws is None else draws[rows, step]
        tokens, logprobs = sample(logits, uniform, params, banned)
        record.add(step, rows, tokens, logprobs, running)
        running = running & ~torch.isin(tokens, stops)
        num_running = int(running.sum())
        if num_running == 0 or step + 1 == params.max_tokens:
            break
        if len(rows) - num_running >= DROP_SHARE * len(rows):
            keep = running.nonzero()[:, 0]
            cache.reorder_cache(keep)
            rows, running, tokens = rows[keep], running[keep], tokens[keep]
            mask, next_position = mask[keep], next_position[keep]
        seen = ids.shape[1] + step + 1
        logits, cache = model(
            tokens[:, None], mask[:, :seen] if padded else None, next_position, cache
        )
        next_position = next_position + 1
    return record.finish(stops)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, [P, L] int64 each, right-aligned; the mask is 0 on padding."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


class _Record:
    """Gathers what is drawn on the device, so that a step does not wait for a copy to the host."""

    def __init__(self, num_rows: int, max_tokens: int, logits: Tensor) -> None:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        self.tokens = torch.zeros(num_rows, max_tokens, dtype=torch.int64, device=logits.device)
        self.logprobs = torch.zeros(num_rows, max_tokens, dtype=dtype, device=logits.device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)

    def add(
        self, step: int, rows: Tensor, tokens: Tensor, logprobs: Tensor, running: Tensor
    ) -> None:
        self.tokens[rows, step] = tokens
        self.logprobs[rows, step] = logprobs
        self.lengths[rows] += running

    def finish(self, stops: Tensor) -> Decoded:
        last = self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]
        stopped = torch.isin(last, stops)
        return Decoded(self.tokens.cpu(), self.logprobs.cpu(), self.lengths.cpu(), stopped.cpu())
