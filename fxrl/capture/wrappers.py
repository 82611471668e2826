"""Wrappers around the model: what of them runs inside a captured step, and what around it.

``DistributedDataParallel.forward`` readies its reducer, runs the module, and tells the reducer what
the result depends on. Dynamo ends the graph at the first of these, so the logits would leave it.
A step therefore runs the two outer parts itself, around model and loss together:

    before      buffers synchronised, buckets rebuilt, the reducer ready       eager, once a call
    captured    loss_fn(inner, batch); inner is the wrapper with the module's forward alone
    after       the reducer learns which parameters the *loss* depends on      eager, once a call

All else of DDP (``no_sync``, ``join``, ``static_graph``, unused parameters, communication hooks)
lives in these parts or in hooks of the parameters, and works as it does in eager code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree

from fxrl.ir.remark import Remark, RemarkKind, Report

_WHOLE = "give optimize the DDP wrapper itself for its model: wrap all of the model, once"


class Wrapper:
    """How a step treats what its model is wrapped in.

    Attributes:
        inner: what the captured loss gets for its model. It shares all state with the model.
        report: a miss for each wrapper that keeps a loss head behind it from being rewritten.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ddp: Any = model if _opens(model) else None
        self.inner = model if self._ddp is None else _without_reducer(self._ddp)
        self.report = Report.of(_misses(self.inner))

    def run(self, captured: Callable[[], Any]) -> Any:
        """``captured()`` between the two halves of DDP's own forward."""
        if self._ddp is None:
            return captured()
        self._ddp._pre_forward(None)  # it moves its first argument, so there must be one
        return self._ddp._post_forward(captured())


def _opens(model: nn.Module) -> bool:
    """Whether the model is a DDP wrapper with DDP's own forward, its module's dtypes untouched."""
    is_ddp = isinstance(model, DistributedDataParallel) and model.mixed_precision is None
    return is_ddp and type(model).forward is DistributedDataParallel.forward


def _without_reducer(ddp: nn.Module) -> nn.Module:
    """The wrapper under another class: one ``__dict__``, the module's forward alone."""
    kind: Any = type(ddp)
    inner = object.__new__(_inner_class(kind))
    inner.__dict__ = ddp.__dict__
    return inner


@cache
def _inner_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": _module_alone})


def _module_alone(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    if self.device_ids:
        device = torch.device(self.device_type, self.device_ids[0])
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(device), (args, kwargs))
    return self.module(*args, **kwargs)


def _misses(inner: nn.Module) -> Iterator[Remark]:
    """One remark for each kind of wrapper that stays closed, at the first place it stands."""
    seen: set[str] = set()
    for name, module in inner.named_modules():
        kind, reason, cure = _closed(module)
        if kind and kind not in seen and type(module).forward is not _module_alone:
            seen.add(kind)
            yield Remark(RemarkKind.MISSED, "capture", name or "model", "", reason, cure)
    if "FSDP" not in seen and (sharded := _first_dtensor(inner)):
        reason = (
            "it is a DTensor (tensor parallel, or sharded by hand): its ops talk to other ranks, "
            "which no region can hold"
        )
        cure = "give each rank a whole model, in DistributedDataParallel if there are several"
        yield Remark(RemarkKind.MISSED, "capture", sharded, "", reason, cure)


def _closed(module: nn.Module) -> tuple[str, str, str]:
    """Kind, reason and cure of a wrapper that Dynamo ends the graph at; empty for none."""
    if isinstance(module, DistributedDataParallel):
        what = "its mixed precision" if module.mixed_precision is not None else "its forward"
        reason = f"DistributedDataParallel: {what} runs eagerly, so the logits leave the graph"
        return "DDP", reason, _WHOLE if what == "its forward" else "use torch.autocast instead"
    if isinstance(module, DataParallel) and len(module.device_ids) > 1:
        reason = "DataParallel copies the module to each device, which cannot be captured"
        return "DP", reason, "use DistributedDataParallel, one process for each device"
    if _is_fsdp(module):
        reason = (
            "FSDP gathers and frees the parameters in hooks around each module, where Dynamo ends "
            "the graph: the logits leave it"
        )
        return "FSDP", reason, "wrap the model in DistributedDataParallel, or leave FSDP off"
    return "", "", ""


def _first_dtensor(model: nn.Module) -> str:
    """The name of a parameter that is one; empty without any."""
    tensor = sys.modules.get("torch.distributed.tensor")  # likewise
    kind = () if tensor is None else tensor.DTensor
    return next((name for name, p in model.named_parameters() if isinstance(p, kind)), "")


def _is_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it is not loaded, nothing is wrapped
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))
