"""What the vocabulary-sized values of a site cost in eager mode, and how large a tile may be."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.analysis import HeadSite
from fxrl.ir.graph import hint, is_tensor, nbytes, needs_grad, tensor_val

aten = torch.ops.aten

_VIEWS: frozenset[Any] = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.slice.Tensor, aten.select.int,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.expand.default, aten.detach.default, aten.alias.default,
    aten.unbind.int, aten.split.Tensor, operator.getitem,
})  # fmt: skip

#: Ops whose backward reads their own output, and ops whose backward reads their inputs.
_KEEPS_OUTPUT = {
    aten._softmax.default, aten._log_softmax.default, aten.exp.default, aten.tanh.default,
    aten.sigmoid.default, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default,
}  # fmt: skip
_KEEPS_INPUT = {
    aten.mul.Tensor, aten.div.Tensor, aten.log.default, aten.log1p.default, aten.abs.default,
    aten.pow.Tensor_Scalar, aten.logsumexp.default, aten.clamp.default, aten.xlogy.Tensor,
    aten.special_entr.default, aten.maximum.default, aten.minimum.default, aten.amax.default,
    aten.cumsum.default, aten.bmm.default, aten.mm.default,
}  # fmt: skip

#: Bytes of the largest intermediate of one tile: large enough to keep the matmul busy, small
#: beside what the rewrite frees.
_TILE_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}


def _owner(node: fx.Node) -> fx.Node:
    """The value whose storage a view shares."""
    while node.target in _VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def eager_bytes(site: HeadSite) -> int:
    """Predicted peak of the site's vocabulary-sized tensors in eager mode.

    What autograd keeps, plus the two largest that are alive at once while the gradient is formed
    (or while the values are, without a gradient).
    """
    wide = {node for node in site.wide if is_tensor(node)}
    owned = {_owner(node) for node in wide} & wide
    kept: set[fx.Node] = set()
    for node in wide:
        if node.target in _KEEPS_OUTPUT and needs_grad(node):
            kept.add(node)
        for user in node.users:
            if user.target in _KEEPS_INPUT and needs_grad(user):
                other = [a for a in user.all_input_nodes if a is not node]
                if user.target not in (aten.mul.Tensor, aten.div.Tensor) or other:
                    kept.add(_owner(node))
    largest = max((nbytes(node) for node in owned), default=0)
    return sum(nbytes(node) for node in kept & owned) + 2 * largest


def row_bytes(site: HeadSite) -> int:
    """Bytes of one row of the site's largest intermediate."""
    widest = 0
    for node in site.wide:
        val = tensor_val(node)
        value = site.rules.row(node)
        if val is None or value is None:
            continue
        local = 1
        for size in value.local_sizes:
            local *= hint(size)
        widest = max(widest, local * val.element_size())
    return widest


def tile_rows(per_row: int, device: torch.device, wanted: int) -> int:
    """Rows per tile: as asked, else what fits the tile's bytes, in multiples of 16."""
    if wanted:
        return wanted
    budget = _TILE_BYTES.get(device.type, _TILE_BYTES["cuda"])
    rows = max(16, budget // max(per_row, 1))
    return int(rows) // 16 * 16
