"""Cuts a request into batches that fit a token budget; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxrl.runtime.engine import PromptError


@dataclass(frozen=True, slots=True)
class Group:
    """``count`` completions of prompt number ``prompt``, numbered from ``first``."""

    prompt: int
    first: int
    count: int


def plan_microbatches(
    lengths: Sequence[int], n: int, max_tokens: int, max_batch_tokens: int, *, pad: bool = True
) -> list[tuple[Group, ...]]:
    """Groups prompts of like length; every completion appears exactly once.

    A batch of R rows whose longest prompt has L tokens costs R * (L + max_tokens) tokens of KV
    cache, padding included. Longest first: if memory is short, it shows at once and not after an
    hour. The completions of one prompt are split over batches only where they do not fit into one.

    Args:
        lengths: tokens of each prompt.
        n: completions per prompt.
        max_tokens: longest completion.
        max_batch_tokens: the budget.
        pad: prompts of different lengths may share a batch.

    Raises:
        PromptError: not even one row fits.
    """
    batches: list[tuple[Group, ...]] = []
    batch: list[Group] = []
    free = width = 0  # rows that still fit; the first prompt is the longest and so sets the width
    for prompt in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        capacity = max_batch_tokens // (lengths[prompt] + max_tokens)
        if capacity < 1:
            raise PromptError(
                f"prompt {prompt} has {lengths[prompt]} tokens and with max_tokens={max_tokens} "
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
