"""Batched decoding with a Hugging Face causal LM and the KV cache that it makes itself."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.dtypes import wide_dtype
from fxrl.engines.engine import Drawing, EngineError, SamplingParams
from fxrl.engines.torch.sampling import sample
from fxrl.models.quantized import dtype_of

DROP_SHARE = 1 / 8
"""Finished rows are dropped when they are this share of the batch: a drop copies the KV cache,
which is what the cache's growth costs at every step anyway."""


class Decoded:
    """What the R rows of a batch drew; gathered on the device, so that no step waits for a copy to
    the host.

    Attributes:
        tokens: [R, max_tokens] int64; entries at and after ``lengths`` mean nothing.
        logprobs: [R, max_tokens], likewise.
        lengths: [R] int64, tokens of each row, the stop token included.
    """

    def __init__(self, num_rows: int, max_tokens: int, logits: Tensor) -> None:
        dtype = wide_dtype(logits.dtype)
        self.tokens = torch.zeros(num_rows, max_tokens, dtype=torch.int64, device=logits.device)
        self.logprobs = torch.zeros(num_rows, max_tokens, dtype=dtype, device=logits.device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)

    def add(
        self, step: int, rows: Tensor, tokens: Tensor, logprobs: Tensor, running: Tensor
    ) -> None:
        self.tokens[rows, step] = tokens
        self.logprobs[rows, step] = logprobs
        self.lengths[rows] += running


#: What models call the cache that they take and give back: with attention, in state-space models,
#: and all of them from transformers 5.24 on.
_CACHES = ("past_key_values", "cache_params", "cache")


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
        self._cache = next((name for name in _CACHES if name in self.takes), "")
        if not self._cache:
            raise EngineError(
                f"{type(inner).__name__}.forward takes none of {', '.join(_CACHES)}, so it "
                "cannot decode with a cache; pass a Hugging Face causal LM"
            )
        text_config = inner.config.get_text_config()
        self._config = text_config
        self._embeddings = inner.get_input_embeddings()
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self.num_embeddings: int = self._embeddings.weight.shape[0]
        self.padding_differs = False  # found out while drawing

    @property
    def takes_padding(self) -> bool:
        """Whether prompts of different lengths may share a batch.

        NOTE [Why float64 with eager attention is not padded]
        A padding token on the left sees no token at all: every entry of its row is the mask's
        finfo(dtype).min. Transformers' eager attention takes its softmax in float32 whatever the
        model's dtype, where float64's least number is -inf, so the row is NaN; one layer later
        0 * NaN puts it into every real token of the sequence. (Narrower dtypes stay finite, SDPA
        handles such rows itself.) The batch then has to consist of equally long prompts.

        NOTE [Why models that take no positions are not padded]
        They number tokens by their place in the batch, padding included, or carry a state through
        padding that their mask leaves out of the prompt only. With ALiBi it would do no harm, which
        no signature tells.
        """
        eager = getattr(self._config, "_attn_implementation", None) == "eager"
        float64 = dtype_of(self._embeddings) == torch.float64
        ruled_out = self.padding_differs or (eager and float64)
        return "position_ids" in self.takes and not ruled_out

    def score(self, ids: Tensor, count: int) -> Tensor:
        """Logits [count, V] that the last ``count`` tokens of ``ids`` [T] were drawn from, by one
        forward without padding or cache."""
        few = {"logits_to_keep": count + 1} if "logits_to_keep" in self.takes else {}
        logits: Tensor = self.model(input_ids=ids[None], use_cache=False, **few).logits
        return logits[0, -count - 1 : -1]

    def rounding(self, logits: Tensor) -> float:
        """How far log-probs may be apart in the mean that two ways of one model give: half the
        digits of the narrowest dtype in it, at most float32's, which most models have inside."""
        dtypes = (torch.float32, logits.dtype, dtype_of(self._embeddings))
        return math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes))

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
        arguments[self._cache] = cache
        out = self.model(input_ids=input_ids, attention_mask=mask, use_cache=True, **arguments)
        if (kept := getattr(out, self._cache, None)) is None:
            raise EngineError(
                f"{type(self.model).__name__} gives no cache back although use_cache=True; only a "
                "decoder can draw (a BERT-like model is one with config.is_decoder=True)"
            )
        return out.logits[:, -1], kept


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
    drawing: Drawing,
    limits: Sequence[int],
) -> Decoded:
    """Draw ``counts[i]`` completions of ``prompts[i]``; rows are ordered by prompt. ``uniforms``
    [sum(counts), max_tokens] float64 on the CPU, ``None`` for greedy. ``pad_id``, any valid id,
    fills prompts on the left, where it is masked."""
    expand = torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts)).to(device)
    ids, mask = left_pad(prompts, pad_id)
    padded = not bool(mask.all())
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, cache = model(ids, mask if padded else None, positions, None)

    num_rows = len(expand)
    draws = None if uniforms is None else uniforms.to(device)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
    drawn = Decoded(num_rows, params.max_tokens, logits)
    rows = torch.arange(num_rows, device=device)  # the row of the request at each batch row
    running = torch.ones(num_rows, dtype=torch.bool, device=device)
    logits = logits[expand]
    if num_rows != len(prompts):
        cache.reorder_cache(expand)  # the cache's own index_select over the batch, any layer kind
    next_position = positions[expand, -1:] + 1
    last = torch.tensor(limits, device=device)[expand] - 1  # the step that ends a row at the latest
    mask = torch.cat([mask[expand], mask.new_ones(num_rows, max(limits))], 1)
    before = num_rows

    for step in range(max(limits)):
        banned = stop_ids if step < params.min_tokens else ()
        uniform = None if draws is None else draws[rows, step]
        tokens, logprobs = sample(logits, uniform, params, banned)
        drawn.add(step, rows, tokens, logprobs, running)
        running = running & ~torch.isin(tokens, stops) & (step < last[rows])
        num_running = int(running.sum())
        drawing.add(before, before - num_running)
        before = num_running
        if num_running == 0:
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
    return drawn


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, [P, L] int64 each, right-aligned; the mask is 0 on padding."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask
