"""Which completions a batch holds: prompts of like length, as many as a KV cache has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxrl.engines.engine import PromptError


@dataclass(frozen=True, slots=True)
class Group:
    """``count`` completions of prompt number ``prompt``, numbered from ``first``."""

    prompt: int
    first: int
    count: int


def plan_microbatches(
    lengths: Sequence[int],
    n: int,
    max_tokens: int | Sequence[int],
    max_batch_tokens: int,
    *,
    only: Sequence[int] | None = None,
    pad: bool = True,
) -> list[tuple[Group, ...]]:
    """Groups prompts of like length; every completion appears exactly once.

    A batch of R rows whose longest prompt has L tokens costs R * (L + max_tokens) tokens of KV
    cache, padding included; where each prompt has its own ``max_tokens``, with the largest (unless
    only its own fits, which then is a batch for each row). Longest first: if memory is short, it
    shows at once and not after an hour. The completions of one prompt are split over batches only
    where they do not fit into one.
    With ``pad`` prompts of different lengths may share a batch; ``only`` are the prompts to draw
    for, all by default.
    """
    batches: list[tuple[Group, ...]] = []
    batch: list[Group] = []
    free = width = 0  # rows that still fit; the first prompt is the longest and so sets the width
    numbers = range(len(lengths)) if only is None else only
    limits = [max_tokens] * len(lengths) if isinstance(max_tokens, int) else max_tokens
    most = max((limits[i] for i in numbers), default=0)
    for prompt in sorted(numbers, key=lambda i: -lengths[i]):
        length, limit = lengths[prompt], limits[prompt]
        fits_alone = length + limit <= max_batch_tokens
        capacity = max_batch_tokens // (length + most) or int(fits_alone)
        if capacity < 1:
            raise PromptError(
                f"prompt {prompt} has {length} tokens and with max_tokens={limit} "
                f"does not fit into max_batch_tokens={max_batch_tokens}; raise the latter"
            )
        done = 0
        while done < n:
            left = n - done
            splits = free < left and left <= capacity
            if not batch or free == 0 or splits or not (pad or width == lengths[prompt]):
                if batch:
                    batches.append(tuple(batch))
                batch, free, width = [], capacity, lengths[prompt]
            count = min(left, free)
            batch.append(Group(prompt, done, count))
            done += count
            free -= count
    if batch:
        batches.append(tuple(batch))
    return batches
