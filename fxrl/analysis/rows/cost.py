"""What the vocabulary-sized values of a site cost in eager mode, and how large a tile may be."""

from __future__ import annotations

import math

import torch

from fxrl.analysis.rows.analysis import HeadSite
from fxrl.analysis.saved_tensors import read_later
from fxrl.ir.graph import base_of, hint, is_tensor, nbytes, tensor_val

#: Bytes of the largest intermediate of one tile: large enough to keep the matmul busy, small
#: beside what the rewrite frees.
_TILE_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}


def eager_bytes(site: HeadSite) -> int:
    """Predicted peak of the site's vocabulary-sized tensors in eager mode.

    What autograd keeps, plus the two largest that are alive at once while the gradient is formed
    (or while the values are, without a gradient).
    """
    wide = {node for node in site.wide if is_tensor(node)}
    owned = {base_of(node) for node in wide} & wide
    readers = wide.union(*(node.users for node in wide))
    kept = {base_of(value) for reader in readers for value in read_later(reader)}
    largest = max((nbytes(node) for node in owned), default=0)
    return sum(nbytes(node) for node in kept & owned) + 2 * largest


def row_bytes(site: HeadSite) -> int:
    """Bytes of one row of the site's largest intermediate."""
    widest = 0
    for node in site.wide:
        val, value = tensor_val(node), site.rules.row(node)
        if val is not None and value is not None:
            widest = max(widest, math.prod(map(hint, value.local_sizes)) * val.element_size())
    return widest


def tile_rows(per_row: int, device: torch.device, wanted: int) -> int:
    """Rows per tile: as asked, else what fits the tile's bytes, in multiples of 16."""
    if wanted:
        return wanted
    budget = _TILE_BYTES.get(device.type, _TILE_BYTES["cuda"])
    rows = max(16, budget // max(per_row, 1))
    return int(rows) // 16 * 16
