"""Which sizes of a batch vary from step to step: the batch and the length, not the model's.

NOTE [Why not dynamic=True]: it would make every size and every float symbolic, the vocabulary and
the temperature included. Marking the two sizes that vary keeps the rest constants of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxrl.capture._torch import STATIC_SIZES, maybe_mark_dynamic


def mark_batch(batch: Any) -> bool:
    """Mark batch and length of every tensor as dynamic (softly: a constant stays legal), but for
    sizes that ``torch._dynamo.mark_static`` says do not vary, which are captured faster. Whether
    there are any to mark.

    The index and bool tensors of two or more dims (token ids, masks) say what batch and length are.
    A tensor's dim 0 is the batch when it has that size; dim 1 is a length when the tensor holds
    integers or bools, or its size is a length seen there (or one less: shifted); a vector of a
    length is of a packed row's tokens, or of positions. Two dims of one length at the end are a
    mask's: ``[T, T]``, ``[B, T, T]``, ``[B, 1, T, T]``. In a batch of vectors alone each is a
    sequence, and dim 0 is its length.
    """
    tensors = [tensor for tensor in _tensors(batch) if not tensor.is_nested]
    batches, lengths = _sizes(tensors)
    varies = False
    for tensor in tensors:
        dims = {0} if tensor.dim() == 1 and tensor.shape[0] in lengths else set()
        if tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2] in lengths:
            dims |= {tensor.dim() - 2, tensor.dim() - 1}
        if tensor.dim() > 0 and tensor.shape[0] in batches:
            dims.add(0)
            small = tensor.dim() == 2 and not tensor.requires_grad
            if lengths and tensor.dim() >= 2 and (small or tensor.shape[1] in lengths):
                dims.add(1)
        varies |= _marked(tensor, dims)
    return varies


def sizes_of(batch: Any) -> frozenset[int]:
    """The batch and the lengths that a batch has."""
    batches, lengths = _sizes([tensor for tensor in _tensors(batch) if not tensor.is_nested])
    return frozenset(batches | lengths)


def mark_inside(sizes: frozenset[int], values: Any) -> None:
    """Mark the sizes of a batch in what was computed from it: of a tensor of floats in all dims but
    the last, which has features."""
    for tensor in _tensors(values):
        dims = range(tensor.dim() - (0 if _is_index(tensor) else 1))
        _marked(tensor, {dim for dim in dims if tensor.shape[dim] in sizes})


def _sizes(tensors: list[torch.Tensor]) -> tuple[set[int], set[int]]:
    """The batch and the lengths that tensors of a batch have."""
    index = [t for t in tensors if _is_index(t) and t.dim() > 0]
    tokens = [t for t in index if t.dim() > 1]
    lengths = {t.shape[1] - less for t in tokens for less in (0, 1)}
    batches = {t.shape[0] for t in tokens}
    if all(tensor.dim() < 2 for tensor in tensors):
        batches = {t.shape[0] - less for t in index for less in (0, 1)}
    return batches, lengths


def _tensors(batch: Any, deep: int = 3) -> Iterator[torch.Tensor]:
    """The tensors of a batch, whatever containers and objects hold them; no deeper, as an object
    may lead back to itself, or to all of a program."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif deep and (held := _held(leaf)):
            yield from _tensors(held, deep - 1)


def _held(leaf: Any) -> dict[str, Any]:
    """What a mapping or an object holds. A model's tensors are none of a batch."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if isinstance(leaf, (nn.Module, ModuleType, type)):
        return {}
    slots = (getattr(kind, "__slots__", ()) for kind in type(leaf).__mro__)
    named = {name for one in slots for name in ([one] if isinstance(one, str) else one)}
    return {name: getattr(leaf, name, None) for name in named} | getattr(leaf, "__dict__", {})


def _is_index(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.bool)  # int8 may be a weight


def _marked(tensor: torch.Tensor, dims: set[int]) -> bool:
    static = getattr(tensor, STATIC_SIZES, ())  # the caller's word, which this mark would hide
    varying = [dim for dim in dims if tensor.shape[dim] > 1 and dim not in static]
    for dim in varying:
        maybe_mark_dynamic(tensor, dim)
    return bool(varying)
