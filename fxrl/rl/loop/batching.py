"""Rows of tokens -> padded micro-batches whose losses add up to that of one big batch.

NOTE [Normalisation over the whole step]
A token-level loss divides by the number of completion tokens. If each micro-batch divided by its
own, a short one would weigh as much as a long one. Three kinds of loss, all exact:
``update``: it divides by ``num_items_in_batch``, the completion tokens of the whole step, which
every micro-batch carries; the losses just add up. ``sequences``: a mean over sequences; each
micro-batch weighs by its share of them. ``tokens``: a mean over tokens; by its share of tokens.
Which kind a loss is, it says itself (``fxrl.losses.loss_info``). Its entropy bonus is a mean over
tokens under all three, for which every micro-batch carries the step's sequences as well.
The counts are tensors: a Python number in a batch is a constant of the captured graph, and a new
one would mean a new capture.

NOTE [Where the host's time goes]
A step has up to some hundred thousand tokens. They leave Python once, into flat arrays that reach
the device in two copies; micro-batches are cut out of those there, by sizes the host knows, so
nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fxrl.distributed import Ranks, deal
from fxrl.losses.reduce import Over
from fxrl.rl.types import Batch, TokenRow

OVERHEAD = 16
"""One more micro-batch must save a sixteenth of the budget in padding: its kernels have a floor."""


def plan_micro_batches(
    lengths: Sequence[tuple[int, int]], max_tokens: int
) -> list[tuple[int, ...]]:
    """Groups rows, given as (prompt, completion) tokens, so that rows * longest row stays within
    ``max_tokens``; returns the numbers of the rows in each group.

    A single row that is longer than that gets a micro-batch of its own. Longest first, so that a
    lack of memory shows at once. Rows are ordered by length (and then by the prompt's, which keeps
    the head's work small), and cut where padding plus a charge per micro-batch is least.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-sum(lengths[i]), lengths[i][0], i))
    widths = np.array([sum(lengths[i]) for i in order], dtype=np.int64)
    num = len(order)
    cost = np.zeros(num + 1, dtype=np.int64)  # cost[i]: of the best cut of the first i rows
    cut = np.zeros(num + 1, dtype=np.int64)
    for end in range(1, num + 1):
        # The widest row is the group's first, so what fits is a suffix of the starts.
        starts = np.arange(end)
        padded = (end - starts) * widths[:end]
        fits = (padded <= max_tokens) | (starts == end - 1)
        total = np.where(fits, cost[:end] + padded, np.iinfo(np.int64).max)
        cut[end] = best = int(total.argmin())
        cost[end] = total[best] + max_tokens // OVERHEAD
    groups: list[tuple[int, ...]] = []
    end = num
    while end:
        groups.append(tuple(sorted(order[cut[end] : end])))
        end = int(cut[end])
    return groups[::-1]


def plan_ranks(
    lengths: Sequence[tuple[int, int]], max_tokens: int, num_ranks: int
) -> list[list[tuple[int, ...]]]:
    """The micro-batches of each rank: rows dealt by their tokens, then ``plan_micro_batches``.

    A rank may have none. Whatever is dealt to whom, losses, gradients and metrics add up to the
    same (NOTE [Normalisation over the whole step]).
    """
    plans = []
    for rows in deal([sum(pair) for pair in lengths], num_ranks):
        plan = plan_micro_batches([lengths[row] for row in rows], max_tokens)
        plans.append([tuple(rows[place] for place in group) for group in plan])
    return plans


def make_batches(
    rows: Sequence[TokenRow],
    plan: Sequence[Sequence[int]],
    *,
    pad_token_id: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[Batch]:
    """One micro-batch for each group of ``rows`` in ``plan``.

    A group of B rows is T = its longest row wide; its last C = T - its shortest prompt positions
    are those that may hold completion tokens (``fxrl.losses.batch``, NOTE [Padding on the right]).

    Returns:
        Of each: ``input_ids`` and ``attention_mask`` [B, T] int64, ``right_padded`` True,
        ``completion_mask`` [B, C], what the rows have ``per_token`` [B, C] (0 behind them) and
        ``per_row`` [B], and, 0-d, ``num_items_in_batch`` and ``num_sequences_in_batch``, the
        tokens of all ``rows`` that count and their number; all floats of ``dtype``.
    """
    if not plan:  # other ranks have all rows
        return []
    step = _Flat([rows[row] for group in plan for row in group], device, dtype)
    counted = float(sum(row.num_counted for row in rows))
    num_items = torch.full((), counted, device=device, dtype=dtype)
    num_sequences = torch.full((), float(len(rows)), device=device, dtype=dtype)
    batches: list[Batch] = []
    first = 0
    for group in plan:
        batches.append(step.cut(first, first + len(group), pad_token_id))
        batches[-1]["num_items_in_batch"] = num_items
        batches[-1]["num_sequences_in_batch"] = num_sequences
        first += len(group)
    return batches


class _Flat:
    """All rows of a step behind each other, on the device, in the order of the cuts."""

    def __init__(self, rows: Sequence[TokenRow], device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.prompts = [len(row.prompt) for row in rows]
        self.lengths = [sum(row.lengths) for row in rows]
        total = sum(self.lengths)
        ids = np.fromiter(
            chain.from_iterable(chain(row.prompt, row.completion) for row in rows),
            dtype=np.int64,
            count=total,
        )
        num_tokens = total - sum(self.prompts)
        starts = np.cumsum([0, *self.lengths])[:-1]
        own_starts = starts - np.cumsum([0, *self.prompts])[:-1]
        whole = np.concatenate([ids, starts, own_starts, self.prompts, self.lengths])
        numbers = _to_device(whole.astype(np.int64), device)
        self.ids, table = numbers[:total], numbers[total:].view(4, len(rows))
        self.starts, self.own_starts, self.prompt_lens, self.row_lens = table.unbind()
        names, row_names = (list(of) for of in (rows[0].per_token, rows[0].per_row))
        by_token = chain.from_iterable(row.per_token[name] for name in names for row in rows)
        by_row = (row.per_row[name] for name in row_names for row in rows)
        size, row_size = num_tokens * len(names), len(rows) * len(row_names)
        values = np.fromiter(chain(by_token, by_row), dtype=np.float64, count=size + row_size)
        floats = _to_device(values, device).to(dtype)
        of_tokens, of_rows = floats[:size].view(-1, num_tokens), floats[size:].view(-1, len(rows))
        self.per_token = dict(zip(names, of_tokens, strict=True))
        self.per_row = dict(zip(row_names, of_rows, strict=True))

    def cut(self, first: int, end: int, pad_token_id: int) -> Batch:
        """Rows ``first`` to ``end`` as a batch (without the step's counts)."""
        span = slice(first, end)
        width = max(self.lengths[span])
        skipped = min(self.prompts[span])
        starts, row_lens = self.starts[span, None], self.row_lens[span, None]
        prompt_lens = self.prompt_lens[span, None]
        place = torch.arange(width, device=self.ids.device)
        real = place < row_lens  # [B, T]
        ids = _take(self.ids, starts + place, real, pad_token_id)
        own = (real & (place >= prompt_lens))[:, skipped:]  # [B, C]
        at = self.own_starts[span, None] + place[skipped:] - prompt_lens
        return {
            "input_ids": ids,
            "attention_mask": real.to(torch.int64),
            "right_padded": True,
            "completion_mask": own.to(self.dtype),
            **{name: _take(values, at, own, 0.0) for name, values in self.per_token.items()},
            **{name: values[span].clone() for name, values in self.per_row.items()},
        }


def _take(values: Tensor, index: Tensor, where: Tensor, other: float) -> Tensor:
    """``values[index]`` where ``where``; any index elsewhere."""
    return torch.where(where, values[index.clamp(0, len(values) - 1)], other)


def _to_device(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: Any) -> Tensor:
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def padding_fraction(lengths: Sequence[tuple[int, int]], plan: Sequence[Sequence[int]]) -> float:
    """Share of the padded tokens of all micro-batches that is padding, in [0, 1)."""
    totals = [sum(pair) for pair in lengths]
    padded = sum(len(group) * max(totals[row] for row in group) for group in plan)
    return 1.0 - sum(totals[row] for group in plan for row in group) / padded


class Share(NamedTuple):
    """A micro-batch's part of the step, as fractions of its completion tokens and sequences."""

    tokens: float
    sequences: float


def micro_batch_weights(
    over: Over, batches: Sequence[Batch], ranks: Ranks, sharing: int = 1
) -> tuple[list[float], list[Share]]:
    """The factor of each of this rank's micro-batches' losses, and its share of the step of all
    ranks, which all call this. ``sharing`` consecutive ranks have the same micro-batches."""
    rows = [batch["input_ids"].shape[0] for batch in batches]
    counts = [batch["completion_mask"].sum() for batch in batches]
    # One wait for the device, not one a batch.
    tokens: list[float] = torch.stack(counts).tolist() if counts else []
    sums = ranks.every([(sum(rows), math.fsum(tokens))], sharing)
    all_rows, all_tokens = sum(n for n, _ in sums), math.fsum(n for _, n in sums)
    shares = [Share(n / all_tokens, num / all_rows) for n, num in zip(tokens, rows, strict=True)]
    if over == "update":
        return [1.0] * len(batches), shares
    return [share.tokens if over == "tokens" else share.sequences for share in shares], shares
