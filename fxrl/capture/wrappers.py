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
            yield _miss(name or "model", reason, cure or _cure_of_sharding(inner))
    for name, parameter in inner.named_parameters() if not seen & _SHARDING else ():
        if reason := _taken_apart(parameter):
            yield _miss(name, reason, _cure_of_sharding(inner))
            break


def _miss(site: str, reason: str, cure: str) -> Remark:
    return Remark(RemarkKind.MISSED, "capture", site, "", reason, cure)


#: Kinds of wrappers that take parameters apart.
_SHARDING = frozenset({"FSDP", "DeepSpeed"})


def _closed(module: nn.Module) -> tuple[str, str, str]:
    """Kind, reason and cure of a wrapper that Dynamo ends the graph at; empty for none, and no cure
    where it is that of all sharding."""
    if isinstance(module, DistributedDataParallel):
        what = "its mixed precision" if module.mixed_precision is not None else "its forward"
        reason = f"DistributedDataParallel: {what} runs eagerly, so the logits leave the graph"
        return "DDP", reason, _WHOLE if what == "its forward" else "use torch.autocast instead"
    if isinstance(module, DataParallel) and len(module.device_ids) > 1:
        reason = "DataParallel copies the module to each device, which cannot be captured"
        return "DP", reason, "use DistributedDataParallel, one process for each device"
    if _is_a(module, _REPLICATED):
        reason = (
            "replicate readies and tells its reducer in hooks around the module, where Dynamo ends "
            "the graph: the logits leave it"
        )
        return "replicate", reason, f"wrap it in DistributedDataParallel instead, and {_WHOLE}"
    if _is_a(module, _FSDP):
        reason = (
            "FSDP gathers and frees the parameters in hooks around each module, where Dynamo ends "
            "the graph: the logits leave it"
        )
        return "FSDP", reason, ""
    if _is_a(module, _DEEPSPEED):
        reason = (
            "DeepSpeed's engine runs the module between timers and hooks of its own, where Dynamo "
            "ends the graph, and its backward takes the loss from the caller"
        )
        return "DeepSpeed", reason, ""
    return "", "", ""


def _taken_apart(parameter: nn.Parameter) -> str:
    """Why ops with a parameter cannot be captured; empty where they can."""
    if _is_a(parameter, _DTENSOR):
        return (
            "it is a DTensor (tensor parallel, or sharded by hand): its ops talk to other ranks, "
            "which no region can hold"
        )
    if hasattr(parameter, "ds_id"):
        return "DeepSpeed's ZeRO 3 holds a part of it, and gathers it in hooks around each module"
    return ""


def _cure_of_sharding(model: nn.Module) -> str:
    """Who shards weights means to save their memory; frozen ones may be shared out otherwise."""
    whole = "give each rank a whole model, in DistributedDataParallel if there are several"
    if all(parameter.requires_grad for parameter in model.parameters()):
        return f"{whole}; torch's ZeroRedundancyOptimizer shares out the optimizer's states"
    return (
        f"{whole}; frozen weights that do not fit are shared out by fxrl.models.shard(model), or "
        "model.sharded in fxrl train"
    )


#: Module and names of classes. Where the module is not loaded, nothing is one of them.
_FSDP = ("torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel")
_REPLICATED = ("torch.distributed._composable.replicate", "DDP")
_DEEPSPEED = ("deepspeed", "DeepSpeedEngine")
_DTENSOR = ("torch.distributed.tensor", "DTensor")


def _is_a(value: object, names: tuple[str, ...]) -> bool:
    module, *classes = names
    found = sys.modules.get(module)
    return found is not None and isinstance(value, tuple(getattr(found, name) for name in classes))
