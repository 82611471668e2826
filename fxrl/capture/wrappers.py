"""Wrappers around the model: what of them runs inside a captured step, and what around it.

``DistributedDataParallel.forward`` readies its reducer, runs the module, and tells the reducer what
the result depends on. Dynamo ends the graph at the first of these, so the logits would leave it.
A step therefore runs the two outer parts itself, around model and loss together:

    before      buffers synchronised, buckets rebuilt, the reducer ready       eager, once a call
    captured    loss_fn(inner, batch); inner is the wrapper with the module's forward alone
    after       the reducer learns which parameters the *loss* depends on      eager, once a call

All else of DDP (``no_sync``, ``join``, ``static_graph``, unused parameters, communication hooks)
lives in these parts or in hooks of the parameters, and works as it does in eager code.

``fully_shard`` (FSDP2) does the same in two hooks of each module that it was called on. Those of
the whole model, and of a unit that has its loss head, run around the step:

    before      the weights that no other unit gathers: embeddings, last norm, loss head
    captured    loss_fn(inner, batch); inner casts as the hooks would
    after       backward of the *loss*, not of the logits, begins with their gathering

Graphs end at the other units, whose two hooks run around all else that a call of them does: layers
are captured one by one, equal ones once, and the head behind them together with the loss.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree

from fxrl.capture._torch import mark_static_address, never_captured
from fxrl.ir.remark import Remark, RemarkKind, Report
from fxrl.scoped import swapped

_WHOLE = "give optimize the DDP wrapper itself for its model: wrap all of the model, once"


class Captured(Protocol):
    """A loss that is captured, and what it calls by itself."""

    def __call__(self, batch: Any) -> Any: ...

    def alone(self, function: Callable[..., Any], *args: Any) -> Any: ...


class Wrapper:
    """How a step treats what its model is wrapped in: this is no wrapper, or one that stays closed.

    Attributes:
        inner: what the captured loss gets for its model. It shares all state with the model.
        parts: whether modules inside are captured by themselves.
        report: a miss for each wrapper that keeps a loss head behind it from being rewritten.
    """

    parts = False

    def __init__(self, model: nn.Module) -> None:
        self.inner: nn.Module = model
        self.report = Report.of(_misses(model, self))

    @staticmethod
    def of(model: nn.Module) -> Wrapper:
        """How a step treats this model."""
        return next((kind for kind in (_Reduced, _Sharded) if kind.opens(model)), Wrapper)(model)

    def run(self, captured: Captured, batch: Any) -> Any:
        """``captured(batch)`` between the two halves of the wrapper's own forward."""
        return captured(batch)

    def out_of_the_way(self, captured: Captured) -> AbstractContextManager[None]:
        """Inside, nothing of the wrapper runs that would end a graph, nor talks to other ranks."""
        return nullcontext()


class _Reduced(Wrapper):
    """A model in DDP."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._ddp = model
        self.inner = _under(model, _ModuleAlone)

    @staticmethod
    def opens(model: nn.Module) -> bool:
        """Whether it has DDP's own forward, and its module's dtypes are untouched."""
        is_ddp = isinstance(model, DistributedDataParallel) and model.mixed_precision is None
        return is_ddp and type(model).forward is DistributedDataParallel.forward

    def run(self, captured: Captured, batch: Any) -> Any:
        self._ddp._pre_forward(None)  # it moves its first argument, so there must be one
        return self._ddp._post_forward(captured(batch))


class _ModuleAlone:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device_ids:
            args, kwargs = _moved(
                (args, kwargs), torch.device(self.device_type, self.device_ids[0])
            )
        return self.module(*args, **kwargs)


class _Sharded(Wrapper):
    """A model that ``fully_shard`` was called on, as a whole and mostly on its layers before."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._state = state = _state_of(model)  # looked up by the module's identity
        self.inner = _under(model, _AsSharded, _get_fsdp_state=lambda self: state)
        self._heads = [*dict.fromkeys(map(_state_of, _heads_apart(model)))]
        beside = {module for head in self._heads for module in head._modules}
        # The other modules inside that gather weights, and the class of each in a step.
        self._units = [*_units(model, beside)]
        self.parts = bool(self._units)
        self._beside = [(module, _as_sharded(module)) for module in beside]
        for buffer in model.buffers():  # Dynamo does so itself where FSDP gathers nothing
            mark_static_address(buffer, guard=False)

    @staticmethod
    def opens(model: Any) -> bool:
        """Whether it is one, and its gathered weights are plain tensors: not shared out further, as
        those of tensor parallelism are."""
        if not _is_a(model, _FSDP2):
            return False
        state = _state_of(model)
        groups = vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group]  # torch 2.11
        return not any(shard.is_dtensor for group in groups if group for shard in group.fsdp_params)

    def run(self, captured: Captured, batch: Any) -> Any:
        states, result = [self._state, *self._heads], None
        for state in states:  # torch 2.11 takes the first argument that it moves
            state._pre_forward(state._modules[0], (None,), {})
        try:
            with self._without_hooks(_Parts(captured.alone)):
                result = captured(batch)
        finally:  # also where the loss raises, as eager code's forward is over by then
            for state in reversed(states):
                with swapped(state, _mp_policy=replace(state._mp_policy, output_dtype=None)):
                    state._post_forward(state._modules[0], (), result)
        return result

    def out_of_the_way(self, captured: Captured) -> AbstractContextManager[None]:
        return self._without_hooks(_Parts(captured.alone, gathers=False))

    @contextmanager
    def _without_hooks(self, parts: _Parts) -> Iterator[None]:
        with ExitStack() as stack:
            for state in (self._state, *self._heads):
                for hooks, key in _hooks(state):
                    stack.enter_context(_without(hooks, key))
            for module, kind in self._beside:
                stack.enter_context(swapped(module, __class__=kind))
            for unit, kind in self._units:
                stack.enter_context(_apart(unit, kind))
            token = _PARTS.set(parts)
            stack.callback(_PARTS.reset, token)
            yield


class _AsSharded:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        if state._device.type != "cpu":
            args, kwargs = _moved((args, kwargs), state._device)
        if state._mp_policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), state._mp_policy.param_dtype)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return _cast(output, state._mp_policy.output_dtype)


#: The hooks that one is of, and its key there.
_Hook = tuple[OrderedDict[int, Any], int]


@dataclass(frozen=True, slots=True)
class _Parts:
    """How the step that runs now treats modules that gather weights of their own."""

    alone: Callable[..., Any]  # captures what a function does by itself
    gathers: bool = True  # else weights are there


_AS_WRITTEN = _Parts(lambda function, *args: function(*args))
_PARTS = ContextVar("parts", default=_AS_WRITTEN)


def gathered_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """By id, the dtype that each weight has when FSDP2 has gathered it."""
    found: dict[int, torch.dtype] = {}
    for module in model.modules():  # an inner unit's has the last word
        if _is_a(module, _FSDP2):
            policy = _state_of(module)._mp_policy
            weights = (one for one in module.parameters() if _is_a(one, _DTENSOR))
            found |= {id(one): policy.param_dtype or one.dtype for one in weights}
    return found


def _state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def _heads_apart(model: nn.Module) -> Iterator[nn.Module]:
    """The Linears that widen to what some embedding has entries for, of units of their own."""
    parts = [*model.modules()]
    vocabularies = {one.num_embeddings for one in parts if isinstance(one, nn.Embedding)}
    for one in parts:
        if isinstance(one, nn.Linear) and _is_a(one, _FSDP2) and one.out_features in vocabularies:
            yield one


def _as_sharded(module: Any) -> type:
    state, kind = _state_of(module), type(module)
    return type(kind.__name__, (_AsSharded, kind), {"_get_fsdp_state": lambda self: state})


def _units(model: nn.Module, beside: Container[nn.Module]) -> Iterator[tuple[Any, type]]:
    named = ((name, one) for name, one in model.named_modules() if name and one not in beside)
    units = {name: one for name, one in named if _is_a(one, _FSDP2)}
    made: dict[Any, type] = {}
    for name, unit in units.items():
        holds = any(one.startswith(f"{name}.") for one in units)
        key = type(unit), holds
        if key not in made:
            made[key] = _called_apart(type(unit), alone=not holds)
        yield unit, made[key]


def _called_apart(kind: type, *, alone: bool) -> type:
    """Modules of a class whose weights are gathered ahead of all else that a call does, and freed
    behind it; what is in between is captured by itself, or, not ``alone``, as others inside are.

    NOTE [Why around the call]: up to 5.17 layers of transformers checkpoint all of a call, hooks
    included. Dynamo finds a hook there that it cannot trace, calls the checkpoint as it is, and
    traces nothing inside of one. When a checkpoint runs again, weights are there anyway.
    """

    def inside(self: Any, args: Any, kwargs: Any) -> Any:
        return kind.__call__(self, *args, **kwargs)

    @never_captured("FSDP gathers the weights of a module ahead of it, and frees them behind")
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = _PARTS.get()
        run = partial(parts.alone, inside) if alone else inside
        if not parts.gathers:
            return run(self, args, kwargs)
        state = self._get_fsdp_state()
        args, kwargs = state._pre_forward(self, args, kwargs)
        return state._post_forward(self, args, run(self, args, kwargs))

    return type(kind.__name__, (kind,), {"__call__": call})


@contextmanager
def _apart(unit: Any, kind: type) -> Iterator[None]:
    """Inside, a module is of this kind, and its two hooks are not there; but as ever where another
    hook stands before or behind them, or where several modules are gathered as one."""
    state = _state_of(unit)
    if len(state._modules) > 1 or not _outermost(*_hooks(state)):
        yield
        return
    with ExitStack() as stack:
        for hooks, key in _hooks(state):
            stack.enter_context(_without(hooks, key))
        stack.enter_context(swapped(unit, __class__=kind))
        yield


def _outermost(before: _Hook, after: _Hook) -> bool:
    """Whether no hook runs before the first, and none behind the second."""
    first, last = next(iter(before[0]), None), next(reversed(after[0]), None)
    return (first, last) == (before[1], after[1])


def _hooks(state: Any) -> list[_Hook]:
    """The two of FSDP; of modules that are gathered as one, two of each."""
    first, second = state._pre_forward_hook_handle, state._post_forward_hook_handle
    handles = getattr(first, "handles", (first, second))
    return [(handle.hooks_dict_ref(), handle.id) for handle in handles]


def _under(wrapper: nn.Module, first: type, **members: Any) -> Any:
    """The wrapper under a class of its own, that has these members and those of ``first`` before
    its own: one ``__dict__`` for both."""
    inner: Any = object.__new__(type(type(wrapper).__name__, (first, type(wrapper)), members))
    inner.__dict__ = wrapper.__dict__
    return inner


def _moved(values: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(device), values)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """With its tensors of floats in ``dtype``, if there is one."""
    if dtype is None:
        return values
    return pytree.tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values
    )


@contextmanager
def _without(hooks: OrderedDict[int, Any], key: int) -> Iterator[None]:
    """Inside, one hook is not there; it comes back to its place among the others.

    NOTE [Why no stand-in for it]: a module with any hook keeps its result in a cell, which a graph
    that began amid its forward would have to write: the logits would leave it.
    """
    ahead = {*itertools.takewhile(lambda other: other != key, hooks)}
    hook = hooks.pop(key)
    try:
        yield
    finally:
        hooks[key] = hook
        for behind in [other for other in hooks if other not in {key, *ahead}]:
            hooks.move_to_end(behind)


def _misses(model: nn.Module, opened: Wrapper) -> Iterator[Remark]:
    """One remark for each kind of wrapper that stays closed, at the first place it stands."""
    seen: set[str] = set()
    if isinstance(opened, _Sharded):
        seen.add("FSDP")
        yield _units_apart(model)
    for name, module in model.named_modules():
        kind, reason, cure = _closed(module)
        if kind and kind not in seen and (name or type(opened) is Wrapper):
            seen.add(kind)
            yield _miss(name or "model", reason, cure or _cure_of_sharding(model))
    for name, parameter in model.named_parameters() if not seen & _SHARDING else ():
        if reason := _taken_apart(parameter):
            yield _miss(name, reason, _cure_of_sharding(model))
            break


def _units_apart(model: nn.Module) -> Remark:
    units = sum(_is_a(module, _FSDP2) for module in model.modules()) - 1
    reason = (
        f"FSDP gathers and frees the weights of {units} modules in it by hooks, where graphs end"
    )
    return Remark(RemarkKind.ANALYSIS, "capture", "model", "", reason)


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
_FSDP2 = ("torch.distributed.fsdp", "FSDPModule")
_FSDP = (*_FSDP2, "FullyShardedDataParallel")
_REPLICATED = ("torch.distributed._composable.replicate", "DDP")
_DEEPSPEED = ("deepspeed", "DeepSpeedEngine")
_DTENSOR = ("torch.distributed.tensor", "DTensor")


def _is_a(value: object, names: tuple[str, ...]) -> bool:
    module, *classes = names
    found = sys.modules.get(module)
    return found is not None and isinstance(value, tuple(getattr(found, name) for name in classes))
