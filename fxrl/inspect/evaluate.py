"""Run a step once and note all its numbers, leaving model, batch and random state as they were.

The truth for half precision is a run of the same model and loss in a wider dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxrl.capture.branches import random_state, random_states
from fxrl.errors import FxrlError
from fxrl.ir.remark import format_bytes
from fxrl.ops.out_of_memory import free_bytes
from fxrl.planner.budget import host_free

LossFn = Callable[[Any, Any], Any]
Step = Callable[[Any], Any]
_HEADROOM = 2  # free bytes wanted for each byte of the copies: activations come on top


class EvaluationError(FxrlError, ValueError):
    """A step cannot be evaluated: its result or its side effects allow no comparison."""


@dataclass(slots=True)
class Outcome:
    """All numbers of one run, on the CPU in the dtypes that the run gave them."""

    loss: Tensor  # the scalar loss
    metrics: dict[str, Tensor] = field(default_factory=dict)  # the values returned beside it
    # Gradient by parameter name or ``batch[...]`` path; ``None`` where none arrived.
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    # Buffers of the model that the run changed.
    buffers: dict[str, Tensor] = field(default_factory=dict)
    drew_random: bool = False  # whether torch's random state moved


@dataclass(slots=True)
class Precision:
    """What the modules of a run computed in."""

    dtype: torch.dtype = torch.float64  # the coarsest floating dtype seen
    calls: int = 0  # how many leaf modules ran, which bounds the roundings on one path

    def see(self, dtype: torch.dtype) -> None:
        """Note one value's dtype; integers and 8-bit storage formats do not count."""
        if dtype.is_floating_point and dtype.itemsize > 1:
            self.dtype = max(self.dtype, dtype, key=lambda d: torch.finfo(d).eps)


def evaluate(step: Step, model: nn.Module, params: Mapping[str, Tensor], batch: Any) -> Outcome:
    """Loss, metrics and gradients of ``step(batch)``; everything it touches is put back.

    What the step returns is split by ``split_result``. Gradients are taken for
    ``params`` and for the batch's tensors that require them, on detached leaves, so that nothing
    flows into a graph that they may belong to. The model's buffers, gradients and training flags
    are restored.

    Raises ``EvaluationError`` if the result is no scalar loss, or if the step writes into the
    batch.
    """
    batch, leaves = _with_leaves(batch)
    wanted = {**params, **leaves}
    given = pytree.tree_flatten_with_path(batch)[0]
    tensors = [(p, t) for p, t in given if isinstance(t, Tensor) and not t.is_inference()]
    versions = [(f"batch{pytree.keystr(path)}", t, t._version) for path, t in tensors]
    with preserved(model, wanted.values()) as buffers:
        before = random_states()
        loss, metrics = split_result(step(batch))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        after = random_states()
        outcome = Outcome(
            loss=_copy(loss),
            metrics={name: _copy(value) for name, value in metrics.items()},
            grads={n: None if t.grad is None else _copy(t.grad) for n, t in wanted.items()},
            buffers=_changed(model, buffers),
            drew_random=not all(map(torch.equal, before, after)),
        )
    for name, tensor, version in versions:
        if tensor._version != version:
            raise EvaluationError(
                f"the step writes into {name} of the batch, so a second run would see other "
                "numbers; cure: clone it in the loss function before writing"
            )
    return outcome


def split_result(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss that a step returned, and the other values by name.

    The loss is the result itself, the first of a tuple, or what a mapping or an object (a model's
    output, a dataclass) calls ``loss``. Raises ``EvaluationError`` if that is no scalar.
    """
    of_object = not isinstance(result, Tensor) and hasattr(result, "__dict__")
    plain = of_object and not isinstance(result, (Mapping, tuple))
    named = dict(_named(vars(result) if plain else result))
    name = next((one for one in ("", "[0]", "loss") if one in named), None)
    loss = None if name is None else named.pop(name)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(result).__name__
        raise EvaluationError(
            f"the step returned {shown}; cure: return a scalar loss tensor, "
            '(loss, {"name": tensor}), or one called loss'
        )
    numbers = (Tensor, bool, int, float)
    found = {name: one for name, one in named.items() if isinstance(one, numbers)}
    return loss, {name: torch.as_tensor(value) for name, value in found.items()}


def _named(result: Any) -> Iterator[tuple[str, Any]]:
    """All that a result holds, by its place: names of mappings joined by dots, ``[1]`` for a place
    in a tuple. Metrics beside a loss go by their own."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        yield "[0]", result[0]
        yield from _named(result[1])
        return
    inside: Any = ()
    if isinstance(result, Mapping):
        inside = ((str(name), value) for name, value in result.items())
    elif isinstance(result, tuple) and hasattr(result, "_asdict"):
        inside = result._asdict().items()
    elif isinstance(result, (tuple, list)):
        inside = ((f"[{place}]", value) for place, value in enumerate(result))
    else:
        yield "", result
    for name, value in inside:
        for rest, one in _named(value):
            yield f"{name}.{rest}".removesuffix("."), one


@contextmanager
def preserved(model: nn.Module, leaves: Any = ()) -> Iterator[dict[str, Tensor]]:
    """Give the block empty ``.grad`` and put back gradients, buffers, flags and random state.

    Yields copies of the buffers as they were. Python attributes of modules are not covered.
    """
    held = {id(t): t for t in [*model.parameters(), *leaves]}.values()
    _refuse_optimizer_in_backward(model)
    grads = [(tensor, tensor.grad) for tensor in held]
    modes = [(module, module.training) for module in model.modules()]
    owners = [(m, n, b) for m in model.modules() for n, b in m._buffers.items() if b is not None]
    copies = {id(b): b.detach().clone() for _, _, b in owners}
    names = {name: copies[id(b)] for name, b in model.named_buffers()}
    restore, numpy = random_state(), np.random.get_state()
    for tensor, _ in grads:
        tensor.grad = None
    try:
        yield names
    finally:
        for tensor, grad in grads:
            tensor.grad = grad
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer in owners:
                if not _equal(buffer, copies[id(buffer)]):
                    buffer.copy_(copies[id(buffer)])
                module._buffers[name] = buffer
        restore()
        np.random.set_state(numpy)


@contextmanager
def watch_precision(model: nn.Module) -> Iterator[Precision]:
    """Note what the leaf modules of ``model`` return, which shows autocast wherever it is on."""
    precision = Precision()

    def note(module: nn.Module, args: Any, result: Any) -> None:
        precision.calls += 1
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                precision.see(value.dtype)

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(note) for module in leaves]
    try:
        yield precision
    finally:
        for handle in handles:
            handle.remove()


def named_trainable(model: nn.Module, loss_fn: LossFn) -> dict[str, Tensor]:
    """Parameters that require grad: the model's, and the loss's where it is a module itself."""
    named = dict(model.named_parameters())
    if isinstance(loss_fn, nn.Module):
        known = {id(parameter) for parameter in named.values()}
        extra = loss_fn.named_parameters(prefix="loss_fn")
        named |= {name: parameter for name, parameter in extra if id(parameter) not in known}
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def _with_leaves(batch: Any) -> tuple[Any, dict[str, Tensor]]:
    """``batch`` in fresh containers, its tensors that require grad as leaves, and those by path."""
    leaves: dict[str, Tensor] = {}

    def fresh(path: Any, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        leaf = value.detach().requires_grad_()
        leaves[f"batch{pytree.keystr(path)}"] = leaf
        return leaf

    return pytree.tree_map_with_path(fresh, batch), leaves


def _changed(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    after = dict(model.named_buffers())
    return {
        name: _copy(after[name])
        for name, old in before.items()
        if name in after and not _equal(after[name], old)
    }


def _equal(a: Tensor, b: Tensor) -> bool:
    """Equality in which a NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, so that two sets of gradients never meet on the device."""
    return tensor.detach().to("cpu", copy=True)


def _refuse_optimizer_in_backward(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise EvaluationError(
                f"parameter {name} has a post-accumulate-grad hook (an optimizer in backward?), "
                "which would change the model while it is verified; cure: remove the hook first"
            )


class TruthError(FxrlError, RuntimeError):
    """The model cannot be run in a wider dtype, so there is no truth to compare with."""


class _Together(nn.Module):
    """Model and loss as one module, so that ``functional_call`` can lend them parameters."""

    def __init__(self, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn  # registered as a submodule if it is one

    def forward(self, batch: Any) -> Any:
        return self.loss_fn(self.model, batch)


def evaluate_wider(model: nn.Module, loss_fn: LossFn, batch: Any, dtype: torch.dtype) -> Outcome:
    """``loss_fn(model, batch)`` with parameters, buffers and batch of at least ``dtype``.

    The model keeps its own tensors; wider copies are lent for the call, without the caller's
    autocast. Raises ``TruthError`` if memory is too short, the run fails, or a module still
    computes in a coarser dtype.
    """
    together = _Together(model, loss_fn)
    _require_memory(together, dtype)
    names = {id(parameter): name for name, parameter in named_trainable(model, loss_fn).items()}
    lent: dict[str, Tensor] = {}
    leaves: dict[str, Tensor] = {}
    for name, parameter in together.named_parameters():
        lent[name] = _wider(parameter, dtype)
        if parameter.requires_grad:
            leaves[names[id(parameter)]] = lent[name].requires_grad_()
    for name, buffer in together.named_buffers():
        wide = _wider(buffer, dtype)  # a copy in any case: the run may write into it
        lent[name] = wide.clone() if wide.data_ptr() == buffer.data_ptr() else wide
    wide_batch = pytree.tree_map_only(
        Tensor, lambda leaf: _wider(leaf, dtype).requires_grad_(leaf.requires_grad), batch
    )

    def run(batch: Any) -> Any:
        return torch.func.functional_call(together, lent, (batch,))

    try:
        with ExitStack() as stack:
            for device in {tensor.device.type for tensor in lent.values()}:
                stack.enter_context(torch.autocast(device, enabled=False))
            precision = stack.enter_context(watch_precision(model))
            outcome = evaluate(run, model, leaves, wide_batch)
    except Exception as error:  # user code in a dtype it was not written for
        raise TruthError(f"in {dtype} the loss fails: {type(error).__name__}: {error}") from error
    if _is_coarser(precision.dtype, dtype):
        raise TruthError(f"a module computes in {precision.dtype} even when {dtype} comes in")
    return outcome


def _is_coarser(dtype: torch.dtype, than: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(than).eps


def _wider(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Detached, in ``dtype`` if its own is coarser; 8-bit formats are storage and stay."""
    coarse = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    widen = coarse and _is_coarser(tensor.dtype, dtype)
    return tensor.detach().to(dtype) if widen else tensor.detach()


def _require_memory(module: nn.Module, dtype: torch.dtype) -> None:
    """Refuse copies that would take more than half of what a device has left."""
    needed: Counter[torch.device] = Counter()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point() and _is_coarser(tensor.dtype, dtype):
            copies = 2 if tensor.requires_grad else 1  # the second is its gradient
            needed[tensor.device] += copies * tensor.numel() * dtype.itemsize
    for device, num_bytes in needed.items():
        free = host_free() if device.type == "cpu" else free_bytes(device)
        if free is not None and _HEADROOM * num_bytes > free:
            raise TruthError(
                f"a {dtype} copy of the model needs {format_bytes(num_bytes)} on {device}, "
                f"which has {format_bytes(free)} left"
            )
