"""Completions -> padded micro-batches whose losses add up to that of one big batch.

NOTE [Normalisation over the whole step]
A token-level loss divides by the number of completion tokens. If each micro-batch divided by its
own, a short one would weigh as much as a long one. Three kinds of loss, all exact:
``update``: it divides by ``num_items_in_batch``, the completion tokens of the whole step, which
every micro-batch carries; the losses just add up. ``sequences``: a mean over sequences; each
micro-batch weighs by its share of them. ``tokens``: a mean over tokens; by its share of tokens.
The count is a tensor: a Python number in a batch is a constant of the captured graph, and a new one
would mean a new capture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxrl.rl.types import Batch
from fxrl.runtime import Completion


def plan_micro_batches(
    lengths: Sequence[tuple[int, int]], max_tokens: int
) -> list[tuple[int, ...]]:
    """Groups rows of like length so that rows * padded length stays within ``max_tokens``.

    A single row that is longer than that gets a micro-batch of its own. Longest first, so that a
    lack of memory shows at once.

    Args:
        lengths: (prompt, completion) tokens of each row.
        max_tokens: padded tokens of one micro-batch.

    Returns:
        Row numbers; every row once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-sum(lengths[i]), i))
    groups: list[list[int]] = []
    widest = (0, 0)
    for row in order:
        prompt, completion = lengths[row]
        wider = (max(widest[0], prompt), max(widest[1], completion))
        if groups and (len(groups[-1]) + 1) * sum(wider) <= max_tokens:
            groups[-1].append(row)
            widest = wider
        else:
            groups.append([row])
            widest = (prompt, completion)
    return [tuple(sorted(group)) for group in groups]


def make_batch(
    completions: Sequence[Completion],
    advantages: Sequence[float],
    rows: Sequence[int],
    *,
    pad_token_id: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """One micro-batch of the given rows, B of them; T = P + C, the longest prompt and completion.

    Returns:
        ``input_ids`` and ``attention_mask`` [B, T] int64 (prompts padded on the left, completions
        on the right, so the last C positions are the completion), ``completion_mask`` [B, C],
        ``rollout_logps`` [B, C] (0 at padding), ``advantages`` [B], and ``num_items_in_batch``, the
        completion tokens of all ``completions``, 0-d; all floats of ``dtype``.
    """
    chosen = [completions[row] for row in rows]
    prompt_len = max(len(c.prompt_token_ids) for c in chosen)
    completion_len = max(len(c.token_ids) for c in chosen)
    input_ids = torch.full((len(rows), prompt_len + completion_len), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    completion_mask = torch.zeros(len(rows), completion_len, dtype=dtype)
    rollout_logps = torch.zeros(len(rows), completion_len, dtype=dtype)
    for i, c in enumerate(chosen):
        start, length = prompt_len - len(c.prompt_token_ids), len(c.token_ids)
        tokens = (*c.prompt_token_ids, *c.token_ids)
        input_ids[i, start : start + len(tokens)] = torch.tensor(tokens)
        attention_mask[i, start : start + len(tokens)] = 1
        completion_mask[i, :length] = 1
        rollout_logps[i, :length] = torch.tensor(c.logprobs, dtype=dtype)
    batch: Batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "completion_mask": completion_mask,
        "rollout_logps": rollout_logps,
        "advantages": torch.tensor([advantages[row] for row in rows], dtype=dtype),
        "num_items_in_batch": torch.tensor(
            float(sum(len(c.token_ids) for c in completions)), dtype=dtype
        ),
    }
    return {name: value.to(device) for name, value in batch.items()}


NORMALIZED_BY = {"dapo": "update", "cispo": "update", "bnpo": "tokens"}
"""fxrl's own losses that are no mean over sequences."""


def micro_batch_weights(
    normalize: str, name: str, batches: Sequence[Batch]
) -> tuple[list[float], list[float]]:
    """What each micro-batch's loss is multiplied by, and its share of the completion tokens.

    Args:
        normalize: ``auto``, ``update``, ``sequences`` or ``tokens``.
        name: of the loss, for ``auto``.
        batches: all micro-batches of the step.
    """
    rows = [batch["input_ids"].shape[0] for batch in batches]
    tokens = [float(batch["completion_mask"].sum()) for batch in batches]
    shares = [count / sum(tokens) for count in tokens]
    kind = NORMALIZED_BY.get(name, "sequences") if normalize == "auto" else normalize
    if kind == "update":
        return [1.0] * len(batches), shares
    if kind == "tokens":
        return shares, shares
    return [count / sum(rows) for count in rows], shares
