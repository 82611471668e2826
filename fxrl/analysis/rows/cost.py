"""What the vocabulary-sized values of a site cost in eager mode, and how large a tile may be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from fxrl.analysis.layers import is_product
from fxrl.analysis.rows.analysis import HeadSite, RowOutput
from fxrl.analysis.saved_tensors import read_later
from fxrl.ir.bodies import WITH_GRADIENT
from fxrl.ir.graph import base_of, hint, inputs_of, is_call, is_tensor, nbytes, tensor_val
from fxrl.ir.region import InputSpec

aten = torch.ops.aten
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


def made_in_forward(
    body: fx.GraphModule, inputs: Sequence[InputSpec], outputs: Sequence[RowOutput]
) -> bool:
    """Whether a tile's forward can make gradients that its backward only scales (see
    ``fxrl.ops.region.tiles.new_vectors``), and this takes fewer products.

    It can if only rows are trained, each differentiated output has one number per row, and no
    gradient is the user's own, for those need not be linear in the incoming gradient. With K such
    outputs, P products and D products of gradients, that is P + K D products instead of 2 P + D.

    NOTE [Why not in float16]: a ``GradScaler`` multiplies the loss by 2^16 so that small gradients
    survive. In the forward the incoming gradient is not known yet, so they would be lost.
    """
    nodes = list(body.graph.nodes)
    trained = [spec for spec in inputs if spec.needs_grad]
    differentiated = [output for output in outputs if output.attached]
    if not (
        trained
        and all(spec.tiled for spec in trained)
        and all(math.prod(map(hint, out.value.local_sizes)) == 1 for out in differentiated)
        and not any(node.target is WITH_GRADIENT for node in nodes)
        and not any(spec.example.dtype == torch.float16 for spec in inputs)
        and not any(torch.float16 in (*node.args, *node.kwargs.values()) for node in nodes)
    ):
        return False
    products = [node for node in nodes if is_product(node)]
    return (len(differentiated) - 1) * _products_back(body, inputs) < len(products)


def _products_back(body: fx.GraphModule, inputs: Sequence[InputSpec]) -> int:
    """How many products a body's gradients take: one for each operand that leads to an input that
    needs one."""
    places = zip(inputs_of(body.graph), inputs, strict=True)
    leads = {node for node, spec in places if spec.needs_grad}
    count = 0
    for node in body.graph.nodes:
        operands = leads.intersection(node.all_input_nodes)
        if operands and not is_call(node, aten.detach.default):
            leads.add(node)
            count += is_product(node) * len(operands)
    return count


def tile_rows(per_row: int, device: torch.device, wanted: int) -> int:
    """Rows per tile: as asked, else what fits the tile's bytes, in multiples of 16."""
    if wanted:
        return wanted
    budget = _TILE_BYTES.get(device.type, _TILE_BYTES["cuda"])
    rows = max(16, budget // max(per_row, 1))
    return int(rows) // 16 * 16
