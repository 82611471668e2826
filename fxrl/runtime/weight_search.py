"""Compares and finds a checkpoint's tensor in vLLM's storages by its bytes, in small blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxrl.runtime.checksum import bits
from fxrl.runtime.weight_layout import Placement

BLOCK_BYTES = 64 * 2**20
"""Moved to the device and compared at a time: beside a vLLM engine little memory is free."""
MAX_HITS = 64
"""Rows that may look like the tensor's first row; with more, it is no fingerprint."""


def row_blocks(tensor: Tensor, max_bytes: int = BLOCK_BYTES) -> list[tuple[int, int]]:
    """(start, length) of blocks of rows of at most ``max_bytes``, at least one row each."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return []
    row_bytes = max(1, tensor[0].numel() * tensor.element_size())
    step = max(1, max_bytes // row_bytes)
    return [(at, min(step, len(tensor) - at)) for at in range(0, len(tensor), step)]


def equal_bits(view: Tensor, reference: Tensor) -> bool:
    """Whether both have the same bytes (NaN equals itself, 0.0 is not -0.0).

    Args:
        view: on any device, any strides.
        reference: same shape, on the CPU, in any floating dtype; cast to ``view``'s.
    """
    if view.dim() == 0:
        view, reference = view.reshape(1), reference.reshape(1)
    return all(
        torch.equal(
            bits(view.narrow(0, start, length)),
            bits(reference.narrow(0, start, length).to(view.device, view.dtype)),
        )
        for start, length in row_blocks(view)
    )


def find_by_content(
    hf_name: str, reference: Tensor, dtype: torch.dtype, tensors: Mapping[str, Tensor]
) -> Placement | str:
    """The one place in the same layer's parameters that holds these bytes, or why there is none.

    For packings that vLLM declares nowhere (mixtures of experts, models that fuse inside
    ``load_weights``) the loaded bytes themselves say where the loader has put them. A constant
    tensor proves nothing, and two places with the same bytes could be two parameters that differ
    after the first update: both are refused.
    """
    if reference.dim() == 0 or bool((reference == reference.flatten()[0]).all()):
        return "all its values are equal, so its bytes show no place"
    found = []
    for name, tensor in tensors.items():
        fits = tensor.dtype == dtype and tensor.dim() == reference.dim() and tensor.numel() > 0
        if fits and layer_numbers(name) == layer_numbers(hf_name):
            found += _places(name, tensor, reference)
    if len(found) == 1:
        return found[0]
    return "its bytes are " + ("at several places" if found else "nowhere in vLLM's layer")


def layer_numbers(name: str) -> tuple[int, ...]:
    """The numbers in a dotted name: layer, expert."""
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def _places(name: str, tensor: Tensor, reference: Tensor) -> list[Placement]:
    rows = len(reference)
    if tensor.shape[1:] != reference.shape[1:] or len(tensor) < rows:
        return []
    first = bits(reference[:1].to(tensor.device, tensor.dtype))
    same = bits(tensor.narrow(0, 0, len(tensor) - rows + 1)) == first
    starts = same.flatten(1).all(1).nonzero() if same.dim() > 1 else same.nonzero()
    if len(starts) > MAX_HITS:
        return []
    return [
        Placement(name, start, rows, False, "found by its bytes")
        for start in starts.flatten().tolist()
        if equal_bits(tensor.narrow(0, start, rows), reference)
    ]
