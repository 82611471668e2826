"""One update over all micro-batches of a step."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from fxrl.distributed import RankError, Ranks
from fxrl.errors import FxrlError
from fxrl.files import replacing
from fxrl.losses import LossInfo
from fxrl.rl.config.tables import LossConfig, OptimConfig
from fxrl.rl.errors import LossError, NonFiniteError, raised, raised_at
from fxrl.rl.loop.batching import Share, micro_batch_weights
from fxrl.rl.loop.gradients import GradientSum
from fxrl.rl.loop.metrics import checked_result, merge_metrics
from fxrl.rl.loop.sharded import copied, local_optimizer, on_cpu
from fxrl.rl.process_state import ProcessState
from fxrl.rl.report.progress import jsonable
from fxrl.rl.types import Batch, Metrics

log = logging.getLogger(__name__)


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

    NOTE [Gradients of several ranks]
    Each rank takes losses and gradients of its own micro-batches, weighed by their share of the
    whole step; with the last backward the gradients are summed (``fxrl.rl.loop.gradients``). A rank
    without micro-batches adds zeros. Clipping, optimizer and schedule then do the same on every
    rank, so weights stay equal and none are sent, but by an optimizer whose states are shared out.
    """

    # ``fxrl.optimize``'s result, or a plain loss: ``step(batch)`` gives the loss, or the loss and
    # its metrics.
    step: Callable[[Batch], Any]
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR  # moved on after each update that was not skipped
    loss: LossConfig
    max_grad_norm: float | None  # gradients are scaled down to this norm; ``None`` leaves them
    max_nonfinite: int  # skipped updates in a row that stop the run
    run_dir: Path  # gets the batch that stopped the run
    num_skipped: int = 0
    num_skipped_in_a_row: int = 0
    num_begun: int = 0  # updates that have changed, or begun to change, a weight
    place: str = ""  # of the loss in its file, for messages
    process: ProcessState = field(default_factory=ProcessState)  # what the loss may not change
    info: LossInfo = field(default_factory=LossInfo)  # what the loss says of itself
    ranks: Ranks = field(default_factory=Ranks)  # that share a step's micro-batches
    # Of the parameters, by which they find their state in a checkpoint; by default their places.
    names: Sequence[str] = ()
    # Consecutive ranks that share sequences, and so have the same micro-batches and whole
    # gradients.
    context_parallel: int = 1
    _gradients: GradientSum = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sharing = self.context_parallel
        early = not self.sharded and sharing == 1
        self._gradients = GradientSum(self.parameters, self.ranks, early=early, sharing=sharing)
        self.names = self.names or [str(place) for place in range(len(self.parameters))]

    @property
    def sharded(self) -> bool:
        """Whether other ranks have some of the optimizer's states."""
        return local_optimizer(self.optimizer) is not self.optimizer

    @property
    def state_shards(self) -> int:
        """Ranks that share out the optimizer's states."""
        return self.ranks.size if self.sharded else 1

    def state_dict(self) -> dict[str, Any]:
        """State of optimizer and schedule, the optimizer's by index into ``names``. All ranks call
        it; if they share the optimizer's states, rank 0 returns all of them. Raises ``RankError``
        if a rank that holds states is gone."""
        local = local_optimizer(self.optimizer)
        saved = local.state_dict()
        if self.sharded:
            places = self._places(local)
            own = {places[here]: on_cpu(values) for here, values in saved["state"].items()}
            every = list(range(len(self.parameters)))
            groups = [group | {"params": every} for group in self.optimizer.param_groups]
            saved = {"state": self.ranks.collect(own), "param_groups": groups}
        return {
            "names": list(self.names),
            "optimizer": saved,
            "schedule": {"last_epoch": self.schedule.last_epoch},
        }

    def _places(self, local: torch.optim.Optimizer) -> list[int]:
        """Indices in ``parameters`` of an optimizer's parameters, in its own order."""
        places = {parameter: place for place, parameter in enumerate(self.parameters)}
        return [places[p] for group in local.param_groups for p in group["params"]]

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the optimizer's tensors, by parameter name, and the number of updates; learning
        rate, decay and other settings stay. Raises ``KeyError``, ``TypeError`` or ``ValueError`` if
        it is no state of this optimizer."""
        theirs = dict(enumerate(saved["names"]))
        if other := set(theirs.values()) ^ set(self.names):
            raise ValueError(f"it is of other parameters: {', '.join(sorted(map(str, other))[:5])}")
        ours = {name: place for place, name in enumerate(self.names)}
        by_place, updates = saved["optimizer"]["state"], saved["schedule"]["last_epoch"]
        state = {ours[theirs[place]]: values for place, values in by_place.items()}
        if type(updates) is not int or updates < 0:
            raise ValueError(f"{updates!r} updates")
        if updates and not state and self._state_of_one(self.parameters[0].dim()):
            raise ValueError(f"no state after {updates} updates")
        examples = {n: self._state_of_one(n) for n in {p.dim() for p in self.parameters}}
        for index, values in state.items():
            parameter = self.parameters[index]
            _check_state(parameter, values, examples[parameter.dim()])
        local = local_optimizer(self.optimizer)
        here = enumerate(self._places(local))
        own = {number: copied(state[place]) for number, place in here if place in state}
        groups = local.state_dict()["param_groups"]
        local.load_state_dict({"state": own, "param_groups": groups})
        self.schedule = LambdaLR(self.optimizer, self.schedule.lr_lambdas, last_epoch=updates - 1)

    def _state_of_one(self, num_dims: int) -> Mapping[str, Any]:
        """What this optimizer keeps of a parameter with so many dimensions: one is tried."""
        like = self.parameters[0]
        one = nn.Parameter(torch.zeros([2] * num_dims, dtype=like.dtype, device=like.device))
        one.grad = torch.zeros_like(one)
        local = local_optimizer(self.optimizer)
        make: Callable[..., torch.optim.Optimizer] = type(local)
        group, takes = local.param_groups[0], inspect.signature(make).parameters
        options = {name: group[name] for name in takes if name in group and name != "params"}
        trial = make([one], **options)
        trial.step()
        kept: Mapping[str, Any] = trial.state[one]
        return kept

    def backward(self, batches: Sequence[Batch]) -> tuple[float, float, Metrics]:
        """Leave the clipped gradients of the whole step in ``parameters``. ``batches`` are this
        rank's; at least one rank has some.

        Returns the loss, the gradient's norm before clipping, and the metrics, as one batch of
        everything would have given them; the device is waited for once, for all of these numbers.
        Raises ``LossError`` if the loss raised, or returned no number with a gradient,
        ``RankError`` if another rank failed.
        """
        weights, shares = self._weights(batches)
        self.optimizer.zero_grad(set_to_none=True)
        found: list[dict[str, Tensor]] = []
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True), 1):
            doing = f"training: micro-batch {number} of {len(batches)}"
            last = number == len(batches)
            early = self._gradients.early() if last else nullcontext()
            found.append(self._one_backward(batch, weight, doing, early))
        self._gradients.finish()
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        [[norm_value], *rows] = _to_host([[norm], *(list(values.values()) for values in found)])
        named = (
            dict(zip(values, row, strict=True)) for values, row in zip(found, rows, strict=True)
        )
        own = zip(weights, shares, named, strict=True)
        loss, metrics = self._merged(self.ranks.every(own, self.context_parallel))
        self.ranks.check_same("the gradient's norm", repr(norm_value))
        return loss, norm_value, metrics

    def measure(self, step: Callable[[Batch], Any], batches: Sequence[Batch]) -> Metrics:
        """Loss and metrics over the batches of all ranks, without gradients. Raises ``LossError``
        as ``backward`` does."""
        weights, shares = self._weights(batches)
        own = []
        for batch, weight, share in zip(batches, weights, shares, strict=True):
            with self._blamed():
                loss, metrics = self._checked(step(batch), trained=False)
            names, values = zip(*({"loss": loss} | metrics).items(), strict=True)
            [row] = _to_host([values])
            own.append((weight, share, dict(zip(names, row, strict=True))))
        merged, found = self._merged(self.ranks.every(own, self.context_parallel))
        return {"loss": jsonable(merged)} | found

    def _weights(self, batches: Sequence[Batch]) -> tuple[list[float], list[Share]]:
        over = self.info.mean_over if self.loss.normalize == "auto" else self.loss.normalize
        return micro_batch_weights(over, batches, self.ranks, self.context_parallel)

    def _merged(
        self, micro_batches: Sequence[tuple[float, Share, dict[str, float]]]
    ) -> tuple[float, Metrics]:
        """The whole step's loss and metrics, of each micro-batch's weight, share, and values."""
        weights, shares, found = zip(*micro_batches, strict=True)
        for values in found:
            if values.keys() != found[0].keys():
                differing = sorted(values.keys() ^ found[0].keys())
                raise LossError(
                    f"{self._named_loss()} returned the metrics {differing[:20]} for some "
                    "micro-batches of a step only; return the same for each"
                )
        loss = math.fsum(v["loss"] * weight for v, weight in zip(found, weights, strict=True))
        names = [name for name in found[0] if name != "loss"]
        rows = [[values[name] for name in names] for values in found]
        return loss, merge_metrics(names, rows, weights, shares, self.info.per_sequence)

    def _one_backward(
        self, batch: Batch, weight: float, doing: str, around: AbstractContextManager[None]
    ) -> dict[str, Tensor]:
        """Adds a micro-batch's gradients; ``loss``, then the metrics, as tensors."""
        with self._blamed():
            log.info("%s", doing)
            loss, metrics = self._checked(self.step(batch), trained=True)
            log.info("%s, backward", doing)
            with around:
                torch.autograd.backward(loss if weight == 1.0 else loss * weight)
        return {"loss": loss.detach()} | metrics

    def _checked(self, result: Any, *, trained: bool) -> tuple[Tensor, dict[str, Tensor]]:
        named = self._named_loss()
        return checked_result(result, named, own=self.info.per_sequence, trained=trained)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Say of an error in the block that it is the loss's; what user code switches is switched
        back."""
        peers = self.ranks.watched() if self.context_parallel > 1 else nullcontext()
        try:
            with self.process.kept(), peers:
                yield
        except (KeyboardInterrupt, RankError):
            raise
        except FxrlError as error:
            if not isinstance(error, LossError):
                error.add_note(f"this is of {self._named_loss()}")
            raise
        # User code may raise anything; the run must be saved and the loss named.
        except BaseException as error:
            told = raised(error)
            if isinstance(error, torch.OutOfMemoryError):
                told = f"ran out of memory{raised_at(error)}: {error}; lower micro_batch_tokens"
            raise LossError(f"{self._named_loss()} {told}") from error

    def _named_loss(self) -> str:
        return f"loss {self.loss.name!r}{self.place}"

    def update(self, batches: Sequence[Batch], step_number: int) -> Metrics:
        """One update, or none if loss or gradient is not finite; the same on all ranks. Raises
        ``NonFiniteError``, the batch saved, if ``max_nonfinite`` in a row were none."""
        loss, norm, metrics = self.backward(batches)
        rate = float(self.schedule.get_last_lr()[0])
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.num_begun += 1
            with self.ranks.watched():  # a sharded optimizer's own collectives
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
        saved = self.ranks.every(map(on_cpu, batches), self.context_parallel)
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {"step": step_number, "loss": loss, "grad_norm": norm, "batches": saved}
        with replacing(path) as stream:
            torch.save(found, stream)
        raise NonFiniteError(
            f"step {step_number}: loss {loss}, gradient norm {norm}: not finite "
            f"{self.num_skipped_in_a_row} updates in a row (max_nonfinite={self.max_nonfinite}); "
            f"no update was made, the batch is in {path}; lower optim.lr, or look at the reward "
            "and the loss with torch.load"
        )


def _check_state(parameter: Tensor, values: Any, example: Mapping[str, Any]) -> None:
    """Raises where ``values`` are not what an optimizer keeps of ``parameter``."""
    if not isinstance(values, dict) or values.keys() != example.keys():
        raise KeyError(f"a parameter's state must have {', '.join(example)}")
    for name, value in values.items():
        if type(value) is not type(example[name]):
            raise TypeError(f"{name} is {type(value).__name__}")
        if isinstance(value, Tensor) and value.dim():
            # Like its parameter, or reduced along some dimensions.
            sizes = [{1, size} for size in parameter.shape]
            if value.dim() != len(sizes) or any(
                n not in allowed for n, allowed in zip(value.shape, sizes, strict=True)
            ):
                raise ValueError(f"{name} is {list(value.shape)} for {list(parameter.shape)}")


def _to_host(rows: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """Scalar tensors as numbers, with one copy."""
    flat = [value.reshape(()) for row in rows for value in row]
    device = flat[0].device
    numbers = iter(torch.stack([value.to(device, torch.float64) for value in flat]).tolist())
    return [[next(numbers) for _ in row] for row in rows]
