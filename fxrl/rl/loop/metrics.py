"""What a loss returns: checked, and merged over micro-batches and updates."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxrl.errors import shown
from fxrl.rl.errors import LossError
from fxrl.rl.loop.batching import Share
from fxrl.rl.types import Metrics

RESERVED = re.compile(
    "(step|loss|reward|reward_std|frac_reward_zero_std|grad_norm|learning_rate|nonfinite|epoch"
    "|num_tokens|step_time|tokens_per_second|event)$"
    "|(completions|dynamic_sampling|engine|eval|memory|padding|ranks|rewards|time)/"
)
"""Names in ``metrics.jsonl`` that no loss may give its metrics."""


def checked_result(
    result: Any, named: str, *, own: Collection[str] = (), trained: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a loss returned, as its loss and detached metrics, tensors of one element each. If
    ``trained``, the loss must have a gradient; ``own`` are reserved names of metrics that this loss
    may use, since no rollout has them."""
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not _is_number(loss):
        raise LossError(
            f"{named} returned {_kind(loss)}; return a tensor with one real number, or that and a "
            "dict of metrics"
        )
    if trained and not loss.requires_grad:
        raise LossError(
            f"{named} returned a loss without a gradient; compute it from the model's output"
        )
    if not isinstance(metrics, Mapping):
        raise LossError(f"{named} returned {shown(metrics)} as metrics; return a dict of numbers")
    checked: dict[str, Tensor] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or (RESERVED.match(name) and name not in own):
            raise LossError(
                f"{named} returned a metric named {shown(name)}; take a text that metrics.jsonl "
                f"does not use itself, such as {shown(f'my_{name}')}"
            )
        if isinstance(value, int | float):
            value = torch.tensor(float(value), dtype=torch.float64)
        if not _is_number(value):
            raise LossError(
                f"{named} returned {_kind(value)} as its metric {name!r}; return one real number"
            )
        checked[name] = value.detach()
    return loss, checked


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {list(value.shape)}"
    return shown(value)


def merge_metrics(
    names: Sequence[str],
    rows: Sequence[Sequence[float]],
    weights: Sequence[float],
    shares: Sequence[Share],
    per_sequence: Collection[str] = (),
) -> Metrics:
    """Metrics of micro-batches as one: extremes by name, losses as the loss, means by token.

    ``rows`` are the values of the M ``names``, [micro-batches][M]; for ``weights`` and ``shares``
    see ``micro_batch_weights``. The metrics ``per_sequence`` are means over sequences and merged
    so.
    """
    merged: Metrics = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if (pick := extreme(name)) is not None:
            value = pick(values)
        else:
            by = [share.sequences if name in per_sequence else share.tokens for share in shares]
            if name.endswith("_loss"):
                by = list(weights)
            value = math.fsum(v * w for v, w in zip(values, by, strict=True))
        merged[name] = value if math.isfinite(value) else None
    return merged


def extreme(name: str) -> Callable[[Iterable[float]], float] | None:
    """``min`` or ``max`` for a metric that is named after it; ``None`` for a mean."""
    if name.endswith(("/min", "_min")):
        return min
    return max if name.endswith(("/max", "_max")) else None


def mean_of(updates: list[Metrics]) -> Metrics:
    """Metrics of one step's updates as one: extremes by name, means of the others; ``None`` where
    no update has a value."""
    if len(updates) == 1:
        return updates[0]
    merged: Metrics = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [v for update in updates if (v := update.get(name)) is not None]
        merged[name] = (extreme(name) or statistics.fmean)(values) if values else None
    return merged
