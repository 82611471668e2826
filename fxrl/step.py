"""``TrainStep``: the user's loss over the user's model, optimized at the first batch."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from fxrl.capture._torch import never_captured
from fxrl.capture.captured_loss import CapturedLoss
from fxrl.capture.wrappers import Wrapper
from fxrl.compile._torch import start_inductor_workers
from fxrl.compile.backend import Backend
from fxrl.config import Config
from fxrl.errors import ConfigError, FxrlError
from fxrl.inspect.calibrate import LEAST_COSINE, calibrated
from fxrl.inspect.compare import VerifyReport
from fxrl.inspect.dump import write_dump
from fxrl.inspect.evaluate import LossFn
from fxrl.inspect.explain import explained
from fxrl.inspect.verify import Reference, verify_step
from fxrl.ir.capture_record import Capture, plan_of
from fxrl.ir.graph import gpu_of
from fxrl.ir.plan import Plan
from fxrl.ir.remark import Report
from fxrl.ops.context_parallel import (
    check_same,
    join_group,
    leave_groups,
    signs_of_batch,
    signs_of_weights,
)
from fxrl.planner.budget import Limits
from fxrl.planner.target import Target

log = logging.getLogger(__name__)


class TrainStep:
    """A loss over a model, captured, rewritten and compiled; call it like the loss.

    The first batch triggers the capture; a batch of another structure triggers another. Batch
    size and length may vary freely. A copy is a step of its own over a model of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        config: Config,
        plan: Plan | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self.config = config
        self._given = plan or Plan()
        self._backend = backend or Backend(config, self._given)
        self._look()

    def _look(self) -> None:
        """See what the model is in: ``fully_shard`` changes its class, also behind ``optimize``."""
        self._kind = type(self._model)
        self._wrapper = Wrapper.of(self._model)
        self._captured = CapturedLoss(self._wrapper.inner, self._loss_fn, self._backend)
        self._backend.judge(self._wrapper.report)

    def _look_again(self) -> None:
        if type(self._model) is not self._kind:
            self._look()

    @property
    def model(self) -> nn.Module:
        """The model; ``optimize`` makes a step over another one."""
        return self._model

    @property
    def loss_fn(self) -> LossFn:
        """The loss, fixed as the model is."""
        return self._loss_fn

    @never_captured("a step of fxrl compiles itself: call it outside of torch.compile")
    def __call__(self, batch: Any) -> Any:
        """What ``loss_fn(model, batch)`` returns; autograd works as for any PyTorch value.

        Raises:
            FxrlError: the loss function returned no tensor.
            MissedRewriteError: ``on_miss="error"`` and a loss head was not rewritten.
            ConfigError: ``context_parallel`` asks for ranks that do not run.
            FxrlError: ranks that share sequences were given different batches, or began with
                different weights.
        """
        self._look_again()
        self._meet(batch)
        if not self._backend.captures:
            log.info("capturing the step")
        known = self._captured.losses.remarks
        with self._backend.judge.after():
            result = self._wrapper.run(self._captured, batch)
            losses = self._captured.losses.remarks
            self._backend.judge(Report.of(lost for lost in losses if lost not in known))
        return result

    def _meet(self, batch: Any) -> None:
        """With the ranks that share this batch: each needs all of it, and the same weights."""
        ranks = self.config.context_parallel
        join_group(ranks)
        if ranks == 1:
            return
        if not self._backend.captures:
            check_same("weights", signs_of_weights(self.model), ranks)
        check_same("batches", signs_of_batch(batch), ranks)

    def __getattr__(self, name: str) -> Any:
        why = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not name.startswith("_") and hasattr(nn.Module, name):
            why += f": a step is no module, its model is one: step.model.{name}"
        raise AttributeError(why, name=name, obj=self)

    def __repr__(self) -> str:
        loss = getattr(self._loss_fn, "__qualname__", type(self._loss_fn).__qualname__)
        model, captures = type(self._model).__qualname__, len(self.captures)
        return f"<TrainStep of {loss} over {model}, captures: {captures}>"

    def __copy__(self) -> TrainStep:
        return TrainStep(self._model, self._loss_fn, self.config, self._given)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainStep:
        parts = copy.deepcopy((self._model, self._loss_fn), memo)
        return TrainStep(*parts, self.config, self._given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what it was made of; the other side captures anew."""
        try:
            pickle.dumps(self._loss_fn)
        except Exception as error:  # pickle raises what the parts raise
            raise FxrlError(
                f"this step cannot be pickled, because its loss function cannot: {error}; define "
                "the loss at the top level of a module, or pickle the model alone and call "
                "fxrl.optimize on the other side"
            ) from error
        return TrainStep, (self._model, self._loss_fn, self.config, self._given)

    @property
    def report(self) -> Report:
        """Every remark of every capture so far."""
        return self._wrapper.report + self._captured.report

    @property
    def plan(self) -> Plan:
        """The choices at each site of every capture so far."""
        return plan_of(self._backend.captures)

    def plan_for(
        self, batch: Any, *, target: Target | None = None, accumulated: bool = False
    ) -> Plan:
        """The plan for a batch of these sizes, and what it is predicted to take.

        Needs no weights and no GPU: without one it is made for an H200.

        Args:
            batch: gives sizes; may be fake or on ``meta``.
            target: the GPU to plan for (``fxrl.planner.target.TARGETS``).
            accumulated: for a micro-batch that is not the first of its update: the gradients of
                those before are there. Whether the model's weights have any now does not count.

        Raises:
            PlanError: no plan fits ``Config.gpu_memory``; says the longest context that would.
            ConfigError: the model is under ``fully_shard``, whose layers nothing is planned for.
        """
        self._look_again()
        if self._wrapper.parts:
            raise ConfigError(
                "there is no plan for layers that fully_shard gathers: each keeps what its "
                "checkpointing says; plan_for takes the model as it was before"
            )
        given = (self.model, self.loss_fn, batch, self.config, self._given)
        limits = self._backend.limits if target is None else None
        found = explained(
            *given, target=target, limits=limits, planned=True, accumulated=accumulated
        )
        return plan_of(found[1])

    def join(self, timeout: timedelta | None = None) -> None:
        """Make the groups of ranks that share sequences, as the first call does: for loops in which
        some processes call the step later than others, or never.

        Args:
            timeout: of their collectives.

        Raises:
            ConfigError: ``context_parallel`` asks for ranks that do not run.
        """
        join_group(self.config.context_parallel, timeout)

    def leave(self) -> None:
        """End the groups of ranks that share sequences: this process has failed, and on a CPU none
        of the others waits for it any longer."""
        leave_groups()

    def limits(self) -> Limits:
        """What its plans are made from: of its captures the tightest, before any the GPU's."""
        planners = [capture.planner for capture in self.captures if capture.planner is not None]
        if planners:
            return Limits.common([Limits(one.target, one.budget) for one in planners])
        return self._backend.limits_on(gpu_of(self._model.parameters()))

    def plan_within(self, each: Sequence[Limits]) -> None:
        """Plans from what all of these allow. Ranks that give each other their ``limits`` make the
        same plan for the same sizes: before the first batch, and again after each step, as memory
        may have run out on one of them."""
        limits = self._backend.limits = Limits.common(each)
        for capture in self.captures:
            if capture.planner is not None:
                target, budget = limits
                capture.planner = replace(capture.planner, target=target, budget=budget)

    def explain(self, batch: Any) -> Report:
        """Report what would be rewritten for this batch, found on fake tensors; nothing runs."""
        return explained(self.model, self.loss_fn, batch, self.config, self._given)[0]

    def dump(self, directory: str | Path) -> Path:
        """Write every capture to a folder: graphs before and after each pass, region bodies,
        generated code, AOT graphs, the report, and an index to start from."""
        functions = self._captured.functions
        return write_dump(directory, self.captures, self.report, functions=functions)

    def verify(self, batch: Any, *, reference: Reference = "auto") -> VerifyReport:
        """Compare loss, metrics and every gradient with eager; blame the rewrite at fault.

        Args:
            reference: what is compared with, as ``verify_step`` has it.
        """
        return verify_step(self.model, self.loss_fn, self, batch, reference=reference)

    def calibrate(self, batch: Any, *, least_cosine: float = LEAST_COSINE) -> Config:
        """A ``Config`` under which no product in FP8 is far from the one in full on this batch.

        Products whose cosine with those in full is below ``least_cosine`` stay in the model's
        dtype; where only their rows' gradient is, it alone is made in that. Make the step that
        trains with it, and keep it with the run: the same products round then from the first step
        to the last, and log-probs are scored as they are trained.

        Args:
            batch: as ``step(batch)`` takes it. It is run by the step and, with every product made
                twice, by eager, whose memory that needs: some sequences are enough. Gradients,
                buffers and random state are put back.

        Raises:
            ConfigError: the step's precision is not ``"fp8"``, or there is no such cosine.
        """
        step = self
        while (config := calibrated(step, batch, least_cosine)) != step.config:
            # Rows behind what is in full now are others: one of theirs may be far, too.
            step = TrainStep(self._model, self._loss_fn, config, self._given)
        return config

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The captures so far, for ``dump`` and ``verify``."""
        return tuple(self._backend.captures)

    def without(self, rewrites: frozenset[tuple[str, str]]) -> TrainStep:
        """A step of its own in which these passes leave these sites alone.

        Its lowered graph runs even where nothing is left to rewrite, so that what lowering does
        can be told from what the passes do.
        """
        quiet = replace(self.config, on_miss="ignore")
        plan = self._given.without(rewrites)
        backend = Backend(quiet, plan, always_rewritten=True)
        return TrainStep(self.model, self.loss_fn, quiet, plan, backend=backend)


def check_config(config: Config) -> None:
    """Raises ``ConfigError`` if ``config`` names a pass, or an option of one or of Inductor, that
    there is not, as ``optimize`` would."""
    Backend(config, Plan())


def optimize(
    model: nn.Module,
    loss_fn: LossFn,
    config: Config | None = None,
    *,
    plan: Plan | None = None,
) -> TrainStep:
    """Make a train step with the same numbers as ``loss_fn(model, batch)`` and less memory.

    Args:
        model: any module; its parameters may be trainable, frozen or LoRA adapters.
        loss_fn: ``loss_fn(model, batch)`` returns the loss, or ``(loss, {"name": tensor})``;
            plain PyTorch against the model's own logits.
        config: how to work; ``None`` takes the defaults.
        plan: choices to obey, by site, such as those of an earlier ``step.plan``; sites that it
            does not name are decided as ever.

    Returns:
        The step: call it with a batch (any pytree of tensors and Python scalars).

    Raises:
        ConfigError: an argument is of the wrong type, or ``config`` names an unknown pass
            or option.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; optimize needs a torch.nn.Module")
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is a {type(loss_fn).__name__}; optimize needs loss_fn(model, batch), "
            "such as fxrl.losses.grpo()"
        )
    if not isinstance(config, Config | None):
        raise ConfigError(
            f"config is a {type(config).__name__}; optimize needs a fxrl.Config, "
            "such as fxrl.Config(on_miss='error')"
        )
    if not isinstance(plan, Plan | None):
        raise ConfigError(
            f"plan is a {type(plan).__name__}; optimize needs a fxrl.Plan, such as "
            "fxrl.Plan.from_json(text)"
        )
    config = config or Config()
    if config.compile_regions and gpu_of(model.parameters()) is not None:
        start_inductor_workers()
    return TrainStep(model, loss_fn, config, plan)
