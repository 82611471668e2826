"""``TrainStep``: the user's loss over the user's model, optimized at the first batch."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from fxrl.capture.dynamic import mark_batch
from fxrl.capture.scoped_hooks import Takeover
from fxrl.capture.wrappers import Wrapper
from fxrl.compile.backend import Backend
from fxrl.config import Config
from fxrl.errors import ConfigError, FxrlError
from fxrl.ir.capture_record import Capture, plan_of
from fxrl.ir.on_miss import judge_misses
from fxrl.ir.plan import Plan
from fxrl.ir.remark import Report

LossFunction = Callable[[nn.Module, Any], Any]

#: Dynamo's settings while a step runs (and may compile); scoped, never global.
_DYNAMO: dict[str, Any] = {
    "capture_dynamic_output_shape_ops": True,  # rows selected by a mask
    "capture_scalar_outputs": True,
    "recompile_limit": 64,  # code shared by many models, such as a library's forward
    "fail_on_recompile_limit_hit": True,  # never run eager in silence
}


class TrainStep:
    """A loss over a model, captured, rewritten and compiled; call it like the loss.

    The first batch triggers the capture; a batch of another structure triggers another. Batch
    size and length may vary freely.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        config: Config,
        plan: Plan | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.config = config
        self._given = plan or Plan()
        self._backend = backend or Backend(config, self._given)
        self._wrapper = Wrapper(model)
        judge_misses(self._wrapper.report, config.on_miss)
        self._takeover = Takeover(model)
        self._compiled = torch.compile(self._fresh_function(), backend=self._backend)

    def __call__(self, batch: Any) -> Any:
        """What ``loss_fn(model, batch)`` returns; autograd works as for any PyTorch value."""
        mark_batch(batch)
        return self._wrapper.run(lambda: self._run_captured(batch))

    def _run_captured(self, batch: Any) -> Any:
        settings = torch._dynamo.config.patch(_DYNAMO)
        with settings, self._takeover.active():
            try:
                return self._compiled(batch)
            except BackendCompilerFailed as error:
                if isinstance(error.inner_exception, FxrlError):
                    raise error.inner_exception from None  # its text is all a user needs
                raise

    @property
    def report(self) -> Report:
        """Every remark of every capture so far."""
        captured = Report(tuple(r for c in self._backend.captures for r in c.report.remarks))
        return self._wrapper.report + self._takeover.report + captured

    @property
    def plan(self) -> Plan:
        """What was chosen for each site of every capture so far."""
        return plan_of(self._backend.captures)

    def plan_for(self, batch: Any) -> Plan:
        """The plan for a batch of these sizes; needs no weights and no GPU."""
        from fxrl.inspect.explain import explained

        return plan_of(explained(self.model, self.loss_fn, batch, self.config, self._given)[1])

    def explain(self, batch: Any) -> Report:
        """What would be rewritten for this batch, found on fake tensors; nothing runs."""
        from fxrl.inspect.explain import explain

        return explain(self.model, self.loss_fn, batch, self.config, self._given)

    def dump(self, directory: str | Path) -> Path:
        """Write every capture to a folder: graphs before and after each pass, region bodies,
        generated code, AOT graphs, the report, and an index to start from."""
        from fxrl.inspect.dump import write_dump
        from fxrl.inspect.records import record_of

        records = [record_of(capture) for capture in self.captures]
        return write_dump(directory, records, self.report, functions=[self._compiled])

    def verify(self, batch: Any, **options: Any) -> Any:
        """Compare loss, metrics and every gradient with eager; blame the region at fault."""
        from fxrl.inspect.verify import verify_step

        return verify_step(self.model, self.loss_fn, self, batch, **options)

    @property
    def captures(self) -> tuple[Capture, ...]:
        """What was captured so far, for ``dump`` and ``verify``."""
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

    def _fresh_function(self) -> Callable[[Any], Any]:
        """The function to capture, with a code object of its own.

        NOTE [Why a fresh code object]: Dynamo keeps compiled code per code object. Steps that
        shared one would share a recompile limit and run past it into eager mode.
        """
        model, loss_fn = self._wrapper.inner, self.loss_fn

        def loss_step(batch: Any) -> Any:
            return loss_fn(model, batch)

        code = loss_step.__code__.replace(co_name="loss_step")
        fresh = types.FunctionType(
            code, loss_step.__globals__, "loss_step", None, loss_step.__closure__
        )
        return fresh


def optimize(model: nn.Module, loss_fn: LossFunction, config: Config | None = None) -> TrainStep:
    """Make a train step with the same numbers as ``loss_fn(model, batch)`` and less memory.

    Args:
        model: any module; its parameters may be trainable, frozen or LoRA adapters.
        loss_fn: ``loss_fn(model, batch)`` returns the loss, or ``(loss, {"name": tensor})``;
            plain PyTorch against the model's own logits.
        config: how to work; ``None`` takes the defaults.

    Returns:
        The step: call it with a batch (any pytree of tensors and Python scalars).

    Raises:
        ConfigError: an argument is of the wrong type, or ``config`` names an unknown pass.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; optimize needs a torch.nn.Module")
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is a {type(loss_fn).__name__}; optimize needs loss_fn(model, batch), "
            "such as fxrl.losses.grpo()"
        )
    return TrainStep(model, loss_fn, config or Config())
