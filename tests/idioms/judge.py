"""Run one idiom in eager mode and through ``fxrl.optimize``, and compare."""

import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fxrl
from fxrl.ir.remark import RemarkKind, Report

#: Rewrite whatever is legal, in tiles that split the 40 rows of an idiom unevenly.
CONFIG = fxrl.Config(min_saved_bytes=0, chunk_tokens=8, compile_regions=False, on_miss="ignore")


@dataclass(frozen=True)
class Outcome:
    """Loss and gradients (None where there is none) of both ways, and what fxrl says it did."""

    eager: torch.Tensor
    fused: torch.Tensor
    eager_grads: dict[str, torch.Tensor | None]
    fused_grads: dict[str, torch.Tensor | None]
    eager_metrics: dict[str, torch.Tensor]
    fused_metrics: dict[str, torch.Tensor]
    report: Report

    @property
    def applied(self) -> bool:
        return bool(self.report.of_kind(RemarkKind.APPLIED))


def arguments(fn: Callable, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs that ``fn`` names: tensors that nobody reads only cost Dynamo time."""
    return {k: v for k, v in inputs.items() if k in inspect.signature(fn).parameters}


def gradients(loss: torch.Tensor, batch: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """d loss / d leaf for every leaf of the batch that asks for one."""
    names = [k for k, v in batch.items() if isinstance(v, torch.Tensor) and v.requires_grad]
    found = torch.autograd.grad(loss, [batch[k] for k in names], allow_unused=True)
    return dict(zip(names, found, strict=True))


def run_both(fn: Callable, make_inputs: Callable[[], dict[str, Any]]) -> Outcome:
    """``fn(**batch)``, a loss or a loss and metrics, eager and optimized, on equal inputs."""
    batch = arguments(fn, make_inputs())
    eager, eager_metrics = _parts(fn(**batch))
    eager_grads = gradients(eager, batch)
    batch = arguments(fn, make_inputs())
    step = fxrl.optimize(nn.Module(), lambda model, batch: fn(**batch), CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Dynamo's own, on some torch versions
        fused, fused_metrics = _parts(step(batch))
    fused_grads = gradients(fused, batch)
    return Outcome(
        eager.detach(),
        fused.detach(),
        eager_grads,
        fused_grads,
        eager_metrics,
        fused_metrics,
        step.report,
    )


def _parts(result: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return result if isinstance(result, tuple) else (result, {})


def assert_same_numbers(outcome: Outcome, loss: float = 1e-9, grad: float = 1e-7) -> None:
    """Loss and gradients agree (absolute and relative), and are None in the same places."""
    torch.testing.assert_close(outcome.fused, outcome.eager, rtol=loss, atol=loss)
    torch.testing.assert_close(
        outcome.fused_metrics, outcome.eager_metrics, rtol=loss, atol=loss, check_device=False
    )
    assert outcome.fused_grads.keys() == outcome.eager_grads.keys()
    for name, expected in outcome.eager_grads.items():
        found = outcome.fused_grads[name]
        assert (found is None) == (expected is None), f"gradient of {name}: {found} != {expected}"
        torch.testing.assert_close(
            found, expected, rtol=grad, atol=grad, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_verdict(outcome: Outcome, fusable: bool) -> None:
    """Fusable: applied. Otherwise: nothing applied, and a missed remark says why and where."""
    assert outcome.applied == fusable, str(outcome.report)
    if not fusable:
        missed = outcome.report.of_kind(RemarkKind.MISSED)
        assert missed, "nothing was applied, and no remark says why"
        for remark in missed:
            assert remark.reason.strip()
            assert re.search(r"\.py:\d+$", remark.source), f"no file:line in {remark!r}"
