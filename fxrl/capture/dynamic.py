"""Which sizes of a batch vary from step to step: the batch and the length, not the model's.

NOTE [Why not dynamic=True]: it would make every size and every float symbolic, the vocabulary and
the temperature included. Marking the two sizes that vary keeps the rest constants of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxrl.capture._torch import maybe_mark_dynamic


def mark_batch(batch: Any) -> None:
    """Mark batch and length of every tensor as dynamic (softly: a constant stays legal).

    The index and bool tensors of two or more dims (token ids, masks) say what batch and length are.
    A tensor's dim 0 is the batch when it has that size; dim 1 is a length when the tensor holds
    integers or bools, or its size is a length seen there (or one less: shifted).
    """
    leaves = pytree.tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_nested]
    tokens = [t for t in tensors if _is_index(t) and t.dim() >= 2]
    batches = {t.shape[0] for t in tokens}
    lengths = {t.shape[1] for t in tokens} | {t.shape[1] - 1 for t in tokens}
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] not in batches:
            continue
        _mark(tensor, 0)
        small = tensor.dim() == 2 and not tensor.requires_grad
        if tensor.dim() >= 2 and (small or tensor.shape[1] in lengths):
            _mark(tensor, 1)


def _is_index(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.bool)  # int8 may be a weight


def _mark(tensor: torch.Tensor, dim: int) -> None:
    if tensor.shape[dim] > 1:
        maybe_mark_dynamic(tensor, dim)
