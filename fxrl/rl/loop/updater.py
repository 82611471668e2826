"""The optimizer out of ``torch.optim``, and one update over all micro-batches of a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fxrl.rl.config.named import optimizer_class
from fxrl.rl.config.tables import LossConfig, OptimConfig
from fxrl.rl.errors import BadConfigError, NonFiniteError
from fxrl.rl.loop.batching import micro_batch_weights
from fxrl.rl.types import Batch, Metrics

log = logging.getLogger(__name__)


def build_optimizer(
    config: OptimConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer over the trainable ones of ``parameters``.

    Raises:
        BadConfigError: the optimizer refuses its keywords.
    """
    trained = [p for p in parameters if p.requires_grad]
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config.options.items()}
    make: Callable[..., torch.optim.Optimizer] = optimizer_class(config.name)
    try:
        return make(trained, lr=config.lr, **options)
    except (TypeError, ValueError) as error:
        raise BadConfigError(f"optim: {config.name} refuses {options}: {error}") from error


def lr_factor(config: OptimConfig, update: int, num_updates: int) -> float:
    """What the learning rate of update number ``update`` (from 0) is multiplied by: linear warmup,
    then constant, linear or cosine.

    Warmup ends at 1 at update ``warmup_steps``; decay would reach 0 at update ``num_updates``, one
    past the last, so no update is lost.
    """
    if update < config.warmup_steps:
        return (update + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    span = max(1, num_updates - config.warmup_steps)
    done = min(1.0, (update - config.warmup_steps) / span)
    return 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(slots=True)
class Updater:
    """Loss, backward, clip, step.

    Attributes:
        step: ``fxrl.optimize``'s result, or a plain loss: ``step(batch)`` gives the loss, or the
            loss and its metrics.
        schedule: moved on after each update that was not skipped.
        max_grad_norm: gradients are scaled down to this norm; ``None`` leaves them.
        max_nonfinite: skipped updates in a row that stop the run.
        run_dir: gets the batch that stopped the run.
    """

    step: Callable[[Batch], Any]
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    loss: LossConfig
    max_grad_norm: float | None
    max_nonfinite: int
    run_dir: Path
    num_skipped: int = 0
    num_skipped_in_a_row: int = 0

    def backward(self, batches: Sequence[Batch]) -> tuple[float, float, Metrics]:
        """Gradients of the whole step in ``parameters``, clipped.

        The device is waited for once, at the end: its numbers come over together.

        Returns:
            The loss and the metrics that one batch of everything would have given, and between
            them the gradient's norm before it was clipped.
        """
        weights, shares = micro_batch_weights(self.loss.normalize, self.loss.name, batches)
        self.optimizer.zero_grad(set_to_none=True)
        found: list[dict[str, Tensor]] = []
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True), 1):
            log.info("training: micro-batch %d of %d", number, len(batches))
            result = self.step(batch)
            loss, metrics = result if isinstance(result, tuple) else (result, {})
            log.info("training: micro-batch %d of %d, backward", number, len(batches))
            (loss if weight == 1.0 else loss * weight).backward()
            found.append({"loss": loss.detach()} | {k: v.detach() for k, v in metrics.items()})
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        [[norm_value], *rows] = _to_host([[norm], *(list(values.values()) for values in found)])
        losses = [row[0] * weight for row, weight in zip(rows, weights, strict=True)]
        merged = merge_metrics(list(found[0])[1:], [row[1:] for row in rows], weights, shares)
        return math.fsum(losses), norm_value, merged

    def update(self, batches: Sequence[Batch], step_number: int) -> Metrics:
        """One update, or none if loss or gradient is not finite.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``learning_rate``, ``nonfinite`` (1.0 if the
            update was skipped) and the loss's metrics.

        Raises:
            NonFiniteError: ``max_nonfinite`` updates in a row were skipped; the batch is saved.
        """
        loss, norm, metrics = self.backward(batches)
        rate = float(self.schedule.get_last_lr()[0])
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self.schedule.step()
            self.num_skipped_in_a_row = 0
        else:
            self.num_skipped += 1
            self.num_skipped_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.num_skipped_in_a_row >= self.max_nonfinite:
            self._stop(batches, step_number, loss, norm)
        return metrics | {
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "learning_rate": rate,
            "nonfinite": float(not finite),
        }

    def no_update(self) -> Metrics:
        """The metrics of an update on nothing, which is none."""
        rate = float(self.schedule.get_last_lr()[0])
        return {"loss": None, "grad_norm": None, "learning_rate": rate, "nonfinite": 0.0}

    def _stop(self, batches: Sequence[Batch], step_number: int, loss: float, norm: float) -> None:
        path = self.run_dir / f"nonfinite-step-{step_number}.pt"
        saved = [
            {name: v.cpu() if isinstance(v, Tensor) else v for name, v in batch.items()}
            for batch in batches
        ]
        torch.save({"step": step_number, "loss": loss, "grad_norm": norm, "batches": saved}, path)
        raise NonFiniteError(
            f"step {step_number}: loss {loss}, gradient norm {norm}: not finite "
            f"{self.num_skipped_in_a_row} updates in a row (max_nonfinite={self.max_nonfinite}); "
            f"no update was made, the batch is in {path}; lower optim.lr, or look at the reward "
            "and the loss with torch.load"
        )


def _to_host(rows: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """Scalar tensors as numbers, with one copy."""
    flat = [value.reshape(()) for row in rows for value in row]
    device = flat[0].device
    numbers = iter(torch.stack([value.to(device, torch.float64) for value in flat]).tolist())
    return [[next(numbers) for _ in row] for row in rows]


def merge_metrics(
    names: Sequence[str],
    rows: Sequence[Sequence[float]],
    weights: Sequence[float],
    shares: Sequence[float],
) -> Metrics:
    """Metrics of micro-batches as one: extremes by name, losses as the loss, means by token.

    Args:
        names: M metrics.
        rows: their values, [micro-batches][M].
        weights, shares: see ``micro_batch_weights``.
    """
    merged: Metrics = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if name.endswith(("/min", "_min")):
            value = min(values)
        elif name.endswith(("/max", "_max")):
            value = max(values)
        else:
            by = weights if name.endswith("_loss") else shares
            value = math.fsum(v * w for v, w in zip(values, by, strict=True))
        merged[name] = value if math.isfinite(value) else None
    return merged
