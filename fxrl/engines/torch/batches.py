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
    limits: Sequence[int],
    max_batch_tokens: int,
    *,
    only: Sequence[int],
    pad: bool,
) -> list[list[Group]]:
    """Groups the prompts ``only`` of like length; each of their ``n`` completions appears once.

    A batch of R rows whose longest prompt has L tokens costs R * (L + limit) tokens of KV cache,
    padding included, with the largest of the ``limits`` of completions (unless only its own fits,
    which then is a batch for each row). Longest first: if memory is short, it shows at once and not
    after an hour. The completions of one prompt are split over batches only where they do not fit
    into one. With ``pad`` prompts of different lengths may share a batch.
    """
    batches: list[list[Group]] = []
    free = width = 0  # rows that still fit; the first prompt is the longest and so sets the width
    most = max((limits[i] for i in only), default=0)
    for prompt in sorted(only, key=lambda i: -lengths[i]):
        length, limit = lengths[prompt], limits[prompt]
        fits_alone = length + limit <= max_batch_tokens
        capacity = max_batch_tokens // (length + most) or int(fits_alone)
        if capacity < 1:
            raise PromptError(
                f"prompt {prompt} has {length} tokens and with max_tokens={limit} "
                f"does not fit into max_batch_tokens={max_batch_tokens}; raise the latter"
            )
        done = 0
        while (left := n - done) > 0:
            splits = free < left <= capacity
            if free == 0 or splits or not (pad or width == length):
                batches.append([])
                free, width = capacity, length
            count = min(left, free)
            batches[-1].append(Group(prompt, done, count))
            done += count
            free -= count
    return batches
