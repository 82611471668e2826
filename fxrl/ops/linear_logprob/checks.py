"""What ``fxrl::linear_logprob`` accepts, and the one clear error for each thing it does not.

``check_arguments`` runs while a graph is traced: it looks at ranks, dtypes and constants only, so
that no dynamic size is guarded on. ``check_sizes`` and ``check_target`` run with real tensors.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from fxrl.errors import FxrlError
from fxrl.ops.linear_logprob.arguments import (
    DIFFERENTIABLE,
    OUTPUTS,
    LossHead,
    parse_outputs,
)


class LinearLogprobError(FxrlError, ValueError):
    """An argument of ``linear_logprob`` does not fit; the message says which and how to cure it."""


class TargetError(FxrlError, IndexError):
    """A target outside the vocabulary in a row that is not masked."""


def checked_names(argument: str, text: str, allowed: Collection[str]) -> set[str]:
    """``parse_outputs(text)`` as a set, every name of which is in ``allowed``."""
    names = parse_outputs(text)
    if unknown := [name for name in names if name not in allowed]:
        choices = ", ".join(sorted(allowed))
        raise LinearLogprobError(f"{argument}={text!r}: {unknown[0]!r} is not one of [{choices}]")
    return set(names)


def asked_outputs(outputs: str, grad_outputs: str | None) -> tuple[set[str], set[str]]:
    """The outputs that are asked for, and those of them with a gradient: by default all that can
    have one."""
    wanted = checked_names("outputs", outputs, OUTPUTS)
    if grad_outputs is None:
        return wanted, wanted & {*DIFFERENTIABLE}
    return wanted, checked_names("grad_outputs", grad_outputs, wanted & {*DIFFERENTIABLE})


def check_arguments(head: LossHead) -> None:
    """Ranks, devices, dtypes and constants."""
    hidden, weight, target, _, temperature, row_mask, scale, softcap, _ = head
    for name in ("weight", "target", "bias", "temperature", "row_mask"):
        tensor = getattr(head, name)
        if tensor is not None and tensor.device != hidden.device:
            raise LinearLogprobError(
                f"{name} is on {tensor.device} and hidden on {hidden.device}; move it there"
            )
    ranks = {"hidden": 2, "weight": 2, "target": 1, "bias": 1, "row_mask": 1}
    for name, rank in ranks.items():
        tensor = getattr(head, name)
        if tensor is not None and tensor.dim() != rank:
            raise LinearLogprobError(
                f"{name} has {tensor.dim()} dims, expected {rank}; flatten the token dims first"
            )
    if temperature is not None and temperature.dim() > 1:
        raise LinearLogprobError(
            f"temperature has {temperature.dim()} dims; pass one number or one per row"
        )
    if weight.dtype != hidden.dtype or not hidden.is_floating_point():
        raise LinearLogprobError(
            f"weight is {weight.dtype} and hidden {hidden.dtype}; cast both to one float dtype"
        )
    if target.dtype != torch.int64:
        raise LinearLogprobError(f"target is {target.dtype}, expected torch.int64; use .long()")
    if row_mask is not None and row_mask.dtype != torch.bool:
        raise LinearLogprobError(f"row_mask is {row_mask.dtype}, expected torch.bool; use .bool()")
    if scale == 0:
        raise LinearLogprobError("scale=0 makes every token equally likely; use a non-zero scale")
    if softcap < 0:
        raise LinearLogprobError(f"softcap={softcap} is negative; use 0 for no softcap")


def check_sizes(head: LossHead) -> None:
    """Sizes that must agree: rows N, vocabulary V, width H."""
    hidden, weight, target, bias, temperature, row_mask, *_ = head
    (num_rows, width), (vocab, weight_width) = hidden.shape, weight.shape
    if weight_width != width:
        raise LinearLogprobError(
            f"weight has width {weight_width}, hidden {width}; weight is [vocabulary, width]"
        )
    if vocab == 0:
        raise LinearLogprobError("weight has no rows; a log-prob needs a vocabulary of at least 1")
    per_row = (("target", target, num_rows), ("row_mask", row_mask, num_rows))
    for name, tensor, size in (*per_row, ("bias", bias, vocab)):
        if tensor is not None and tensor.shape[0] != size:
            raise LinearLogprobError(f"{name} has {tensor.shape[0]} entries, expected {size}")
    if temperature is not None and temperature.dim() and temperature.shape[0] not in (1, num_rows):
        raise LinearLogprobError(
            f"temperature has {temperature.shape[0]} entries, expected 1 or {num_rows}"
        )


def check_target(head: LossHead) -> None:
    """On the CPU a bad target is one clear error; on a GPU ``gather`` asserts on the device."""
    target, row_mask, vocab = head.target, head.row_mask, head.weight.shape[0]
    if target.device.type != "cpu":
        return
    bad = (target < 0) | (target >= vocab)
    if row_mask is not None:
        bad &= row_mask
    if bad.any():
        row = int(bad.nonzero()[0])
        raise TargetError(
            f"target[{row}]={int(target[row])} is outside the vocabulary [0, {vocab}); "
            "give tokens that do not count an id (labels.clamp(min=0)) and mask their log-probs"
        )
