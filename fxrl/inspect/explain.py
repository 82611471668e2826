"""``explain``: what would be rewritten, found on fake tensors; nothing runs, no memory is taken.

The step is captured as ever, which is a matter of shapes alone; in place of each captured graph
runs a stand-in that returns something of the right shapes. So a model may be on any device or on
none (``meta``), and code after a graph break is captured too.

NOTE [Why nothing is captured on meta]: code asks tensors for their device, and what it then does on
``meta`` is done nowhere else: PEFT enters autocast of a device that has none, mixtures of experts
count in a dtype that a CPU does not count in, KV caches mix real with fake. So fake tensors of a
CPU take the place of a model's on ``meta`` while it is captured. The lowered graph is on ``meta``
again, which stands for the GPU that it is planned for: rules that depend on the device take it so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxrl.capture._torch import FakeTensor, FakeTensorMode, TorchRuntimeError
from fxrl.capture.captured_loss import CapturedLoss
from fxrl.capture.held_models import models_held
from fxrl.capture.wrappers import Wrapper, gathered_dtypes
from fxrl.compile.backend import Backend
from fxrl.config import Config
from fxrl.errors import FxrlError, reason_of
from fxrl.inspect.evaluate import LossFn
from fxrl.ir.capture_record import Capture
from fxrl.ir.graph import example_of, hint
from fxrl.ir.plan import Plan
from fxrl.ir.remark import Remark, RemarkKind, Report
from fxrl.planner.budget import Limits
from fxrl.planner.target import Target


@dataclass(eq=False, kw_only=True)
class ExplainBackend(Backend):
    """Captures and rewrites like ``Backend``, but returns stand-ins that compute nothing."""

    only_explain: bool = True
    # Of the fake tensors in place of the model's, None if the model's are real.
    mode: FakeTensorMode | None

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        super().__call__(gm, example_inputs)
        return _stand_in(gm, self.mode)

    def _lowered(self, gm: fx.GraphModule) -> fx.GraphModule:
        lowered = super()._lowered(gm)
        if self.mode is not None:
            _put_on_meta(lowered)
        return lowered


def explained(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    config: Config,
    plan: Plan | None = None,
    *,
    target: Target | None = None,
    limits: Limits | None = None,
    planned: bool = False,
    accumulated: bool = False,
) -> tuple[Report, Sequence[Capture]]:
    """What fxrl would do with this loss at a batch of these sizes.

    Args:
        model: parameters real, fake or on ``meta``, on any device.
        batch: gives sizes and dtypes; its values do not count, nor does its device.
        config: as for ``optimize``; ``on_miss`` does not count, for the report is the answer.
        target: what to plan for; None for the GPU that the model is on.
        limits: what to plan from; None for those of ``target``.
        planned: predict, also where nothing bounds the memory.
        accumulated: of a micro-batch that is not the first of its update.

    Returns:
        The remarks that ``TrainStep.report`` would have, with one more where the code after a
        graph break needs numbers that only a real run has; and the captures.
    """
    config = replace(config, on_miss="ignore")
    wrapper = Wrapper.of(model)
    lost = Report()
    with _without_meta(wrapper.inner, loss_fn) as mode:
        backend = ExplainBackend(
            config,
            plan or Plan(),
            always_planned=planned,
            accumulated=accumulated,
            target=target,
            limits=limits,
            mode=mode,
        )
        captured = CapturedLoss(wrapper.inner, loss_fn, backend)  # no process waits for another
        inputs = pytree.tree_map_only(Tensor, lambda x: _input(x, mode), batch)
        try:
            with _told_once(), wrapper.out_of_the_way(captured):
                captured(inputs)
        except FxrlError:
            raise
        except _NEEDS_NUMBERS as error:
            if not backend.captures:
                if mode is not None and isinstance(error, TorchRuntimeError):
                    # the user's own error, from its line; this one is of torch's lines
                    with mode, _told_once():
                        loss_fn(wrapper.inner, inputs)
                raise
            reason = f"code after a graph break needs real numbers: {reason_of(error)}"
            cure = "look at step.report after one real step"
            missed = Remark(RemarkKind.MISSED, "capture", "graph", "", reason, cure)
            lost = Report((missed,))
    return wrapper.report + captured.report + lost, backend.captures


@contextmanager
def _told_once() -> Iterator[None]:
    """Inside, torch does not log an error of an op over fakes with its traceback: it raises it."""

    def untold(record: logging.LogRecord) -> bool:
        return "failed while attempting to run meta" not in str(record.msg)

    log = logging.getLogger(FakeTensorMode.__module__)
    log.addFilter(untold)
    try:
        yield
    finally:
        log.removeFilter(untold)


#: What stand-ins cannot serve: code outside of the captured graphs that reads numbers.
_NEEDS_NUMBERS = (NotImplementedError, RuntimeError, ValueError, IndexError)


@contextmanager
def _without_meta(model: nn.Module, loss_fn: LossFn) -> Iterator[FakeTensorMode | None]:
    """Replace tensors of the model, and of other models that the loss holds, by fake CPU tensors if
    they are on ``meta`` or fake, or FSDP has a part of them. Yields the fakes' mode, None if all
    tensors are real."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    roots = (model, *models_held(loss_fn).values())
    modules = {module for root in roots for module in root.modules()}
    tables: list[dict[str, Any]] = [
        table for m in modules for table in (m._parameters, m._buffers, vars(m))
    ]
    held = [(t, name, x) for t in tables for name, x in t.items() if isinstance(x, Tensor)]
    parts = gathered_dtypes(model)
    shapes = [
        (table, name, x)
        for table, name, x in held
        if x.is_meta or isinstance(x, FakeTensor) or id(x) in parts
    ]
    fakes = {id(x): _fake(x, mode, parts.get(id(x))) for _, _, x in shapes}
    try:
        for table, name, x in shapes:
            table[name] = fakes[id(x)]
        yield mode if shapes else None
    finally:
        for table, name, x in shapes:
            table[name] = x


def _fake(like: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Tensor:
    shape, stride = tuple(map(hint, like.shape)), tuple(map(hint, like.stride()))
    with mode:
        fake = torch.empty_strided(shape, stride, dtype=dtype or like.dtype)
    if isinstance(like, nn.Parameter):
        return nn.Parameter(fake, requires_grad=like.requires_grad)
    return fake.requires_grad_(like.requires_grad)


def _input(tensor: Tensor, mode: FakeTensorMode | None) -> Tensor:
    """A tensor of the batch, which is where the model is; a fake one becomes real zeros."""
    if mode is not None:
        return _fake(tensor, mode)
    return _zeros(tensor) if isinstance(tensor, FakeTensor) else tensor


def _put_on_meta(gm: fx.GraphModule) -> None:
    """Moves the fake values of a lowered graph, and what its calls say of a device."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    bodies = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for node in [node for body in bodies for node in body.graph.nodes]:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, FakeTensor):
                value.fake_device = meta
        node.args, node.kwargs = pytree.tree_map_only(
            torch.device, lambda x: meta if x == cpu else x, (node.args, node.kwargs)
        )


def _stand_in(gm: fx.GraphModule, mode: FakeTensorMode | None) -> Callable[..., Any]:
    """A callable that returns what the graph returns in shape, dtype and device."""
    returned: Any = gm.graph.output_node().args[0]
    results = [example_of(n) if isinstance(n, fx.Node) else n for n in returned]
    make = _zeros if mode is None else functools.partial(_fake, mode=mode)
    made = [
        make(r) if isinstance(r, Tensor) else hint(r) if isinstance(r, torch.SymInt) else r
        for r in results
    ]
    return lambda *_: made


def _zeros(like: Tensor) -> Tensor:
    """Zeros of this shape over one number of storage."""
    one = torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)
    return one.expand(tuple(map(hint, like.shape)))
