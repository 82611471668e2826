"""The truth for half precision: the same model and loss, run once in a wider dtype."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxrl.compile.evaluate import (
    LossFn,
    Outcome,
    evaluate,
    named_trainable,
    watch_precision,
)
from fxrl.core.remark import format_bytes
from fxrl.errors import FxrlError

_COPIES = 2  # bytes needed at least: the wider parameters, and once more for what runs over them


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
    _require_memory(model, dtype)
    names = {id(parameter): name for name, parameter in named_trainable(model, loss_fn).items()}
    together = _Together(model, loss_fn)
    lent: dict[str, Tensor] = {}
    leaves: dict[str, Tensor] = {}
    for name, parameter in together.named_parameters():
        lent[name] = _wider(parameter.detach(), dtype, copy=True)
        if parameter.requires_grad:
            leaves[names[id(parameter)]] = lent[name].requires_grad_()
    lent |= {n: _wider(b.detach(), dtype, copy=True) for n, b in together.named_buffers()}
    wide = pytree.tree_map(lambda leaf: _wider_input(leaf, dtype), batch)

    def run(batch: Any) -> Any:
        return torch.func.functional_call(together, lent, (batch,))

    try:
        with ExitStack() as stack:
            for device in _device_types(lent.values()):
                stack.enter_context(torch.autocast(device, enabled=False))
            precision = stack.enter_context(watch_precision(nn.Module()))
            stack.enter_context(_watched(model, precision))
            outcome = evaluate(run, model, leaves, wide)
    except Exception as error:  # user code in a dtype it was not written for
        raise TruthError(f"in {dtype} the loss fails: {type(error).__name__}: {error}") from error
    if torch.finfo(precision.dtype).eps > torch.finfo(dtype).eps:
        raise TruthError(f"a module computes in {precision.dtype} even when {dtype} comes in")
    return outcome
