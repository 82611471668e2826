"""The truth for half precision: the same model and loss, run once in a wider dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxrl.errors import FxrlError
from fxrl.inspect.evaluate import LossFn, Outcome, evaluate, named_trainable, watch_precision
from fxrl.ir.remark import format_bytes

_MEMINFO = Path("/proc/meminfo")
_HEADROOM = 2  # free bytes wanted for each byte of the copies: activations come on top


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

    The model keeps its own tensors: wider copies are lent for the call. Autocast of the caller is
    off; where the model computes in a coarser dtype all the same, that is an error, no truth.

    Raises:
        TruthError: too little memory, the run fails, or a module computes in a coarser dtype.
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
    wide_batch = pytree.tree_map(lambda leaf: _wider_input(leaf, dtype), batch)

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


def _wider_input(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _wider(leaf, dtype).requires_grad_(leaf.requires_grad)


def _require_memory(module: nn.Module, dtype: torch.dtype) -> None:
    """Refuse copies that would take more than half of what a device has left."""
    needed: Counter[torch.device] = Counter()
    for tensor in _all(module):
        if tensor.is_floating_point() and _is_coarser(tensor.dtype, dtype):
            copies = 2 if tensor.requires_grad else 1  # the second is its gradient
            needed[tensor.device] += copies * tensor.numel() * dtype.itemsize
    for device, num_bytes in needed.items():
        free = _free_bytes(device)
        if free is not None and _HEADROOM * num_bytes > free:
            raise TruthError(
                f"a {dtype} copy of the model needs {format_bytes(num_bytes)} on {device}, "
                f"which has {format_bytes(free)} left"
            )


def _all(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be taken on ``device``; ``None`` if the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
