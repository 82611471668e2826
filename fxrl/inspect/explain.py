"""``explain``: what would be rewritten, found on fake tensors; nothing runs, no memory is taken.

The step is captured as ever, which is a matter of shapes alone; in place of each captured graph
runs a stand-in that returns zeros of the right shapes with one number of storage each. So a model
may be on any device or on none (``meta``), and code after a graph break is captured too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxrl.capture._torch import FakeTensor
from fxrl.capture.lower import example_of
from fxrl.capture.wrappers import Wrapper
from fxrl.compile.backend import Backend
from fxrl.compile.step import LossFunction, TrainStep
from fxrl.config import Config
from fxrl.errors import FxrlError
from fxrl.ir.capture_record import Capture
from fxrl.ir.graph import hint
from fxrl.ir.plan import Plan
from fxrl.ir.remark import Remark, RemarkKind, Report
from fxrl.planner.target import Target


class ExplainBackend(Backend):
    """Captures and rewrites like ``Backend``; what it returns does not compute."""

    def __init__(self, config: Config, plan: Plan, target: Target | None, *, planned: bool) -> None:
        super().__init__(config, plan, only_explain=True, always_planned=planned, target=target)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        super().__call__(gm, example_inputs)
        return _stand_in(gm)


def explain(
    model: nn.Module, loss_fn: LossFunction, batch: Any, config: Config, plan: Plan | None = None
) -> Report:
    """What fxrl would do with this loss at a batch of these sizes.

    Args:
        model: parameters real, fake or on ``meta``, on any device.
        batch: gives sizes and dtypes; its values do not count, nor does its device.
        config: as for ``optimize``; ``on_miss`` does not count, for the report is the answer.

    Returns:
        The remarks that ``TrainStep.report`` would have, with one more where the code after a
        graph break needs numbers that only a real run has.
    """
    return explained(model, loss_fn, batch, config, plan)[0]


def explained(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    config: Config,
    plan: Plan | None = None,
    *,
    target: Target | None = None,
    planned: bool = False,
) -> tuple[Report, Sequence[Capture]]:
    """The same, with the captures.

    Args:
        target: what to plan for; None for the GPU that the model is on.
        planned: predict, also where nothing bounds the memory.
    """
    config = replace(config, on_miss="ignore")
    plan = plan or Plan()
    backend = ExplainBackend(config, plan, target, planned=planned)
    twin = without_fakes(Wrapper(model).inner)  # no process waits for another
    step = TrainStep(twin, loss_fn, config, plan, backend=backend)
    captured_all = Report()
    try:
        with _without_kv_cache(twin):
            step(_like_model(twin, batch))
    except FxrlError:
        raise
    except _NEEDS_NUMBERS as error:
        if not backend.captures:
            raise
        reason = f"code after a graph break needs real numbers: {str(error).splitlines()[0][:200]}"
        cure = "look at step.report after one real step"
        captured_all = Report((Remark(RemarkKind.MISSED, "capture", "graph", "", reason, cure),))
    return step.report + captured_all, backend.captures


@contextmanager
def _without_kv_cache(model: nn.Module) -> Iterator[None]:
    """Transformers' ``config.use_cache`` off, for the time of the capture of a model on ``meta``.

    NOTE [Why]: a training forward fills a KV cache that nobody reads; on ``meta`` its first empty
    tensor is made while tracing and is no fake, so Dynamo refuses to concatenate with it. Anywhere
    else the cache stays: without one a model makes its masks otherwise than the step will see.
    """
    on_meta = any(tensor.is_meta for tensor in _tensors(model))
    configs = [getattr(module, "config", None) for module in model.modules() if on_meta]
    on = {id(c): c for c in configs if getattr(c, "use_cache", None) is True}
    for config in on.values():
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        for config in on.values():
            config.use_cache = True  # type: ignore[union-attr]


#: What stand-ins cannot serve: code outside of the captured graphs that reads numbers.
_NEEDS_NUMBERS = (NotImplementedError, RuntimeError, ValueError, IndexError)


def without_fakes(model: nn.Module) -> nn.Module:
    """The model itself; or, if it holds fake tensors, a twin of it on ``meta``.

    Dynamo makes fakes of its own and takes none of another fake mode.
    """
    held = list(_tensors(model))
    if not any(isinstance(tensor, FakeTensor) for tensor in held):
        return model
    memo: dict[int, Any] = {id(tensor): _on_meta(tensor) for tensor in held}
    return copy.deepcopy(model, memo)


def _on_meta(tensor: Tensor) -> Tensor:
    plain = torch.empty_strided(
        tuple(map(hint, tensor.shape)),
        tuple(map(hint, tensor.stride())),
        dtype=tensor.dtype,
        device="meta",
    )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(plain, requires_grad=tensor.requires_grad)
    return plain


def _like_model(model: nn.Module, batch: Any) -> Any:
    """The batch on ``meta`` if the model is, else as it is; fake tensors become real zeros."""
    devices = {tensor.device.type for tensor in _tensors(model)}
    on_meta = "meta" in devices

    def moved(tensor: Tensor) -> Tensor:
        if on_meta:
            return _on_meta(tensor).requires_grad_(tensor.requires_grad)
        if isinstance(tensor, FakeTensor):
            return _zeros(tensor)
        return tensor

    return pytree.tree_map_only(Tensor, moved, batch)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _stand_in(gm: fx.GraphModule) -> Callable[..., Any]:
    """A callable that returns what the graph returns in shape, dtype and device."""
    (output,) = gm.graph.find_nodes(op="output")
    results = [example_of(n) if isinstance(n, fx.Node) else n for n in output.args[0]]

    def run(*_: Any) -> list[Any]:
        return [
            _zeros(r) if isinstance(r, Tensor) else hint(r) if isinstance(r, torch.SymInt) else r
            for r in results
        ]

    return run


def _zeros(like: Tensor) -> Tensor:
    """Zeros of this shape over one number of storage."""
    one = torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)
    return one.expand(tuple(map(hint, like.shape)))
