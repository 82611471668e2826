"""What autograd keeps of a part of a graph op by op, and what a region of it keeps, in bytes.

A prediction from the graph alone. Eager: the operands and results that each op's derivative reads.
Region: operands of matrix products, and what elementwise derivatives read only where it cannot be
computed again from something smaller that is kept anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from fxrl.analysis.layers import is_product
from fxrl.ir.graph import (
    is_call,
    is_tensor,
    is_view,
    nbytes,
    needs_grad,
    propagate_requires_grad,
    tensor_val,
)
from fxrl.ir.region import Region

aten = torch.ops.aten

#: Ops whose derivative reads their result; a product's reads the other operand; some read nothing.
_BY_RESULT = (
    aten.rsqrt.default,
    aten.sqrt.default,
    aten.exp.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.reciprocal.default,
    aten.relu.default,
    aten._softmax.default,
)
_BY_OTHER = (aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.div.Tensor)
_BY_NOTHING = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.neg.default,
    aten.cat.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.slice.Tensor,
    aten.where.self,
)


def predict_saved(nodes: Sequence[fx.Node]) -> int:
    """Bytes that a region of these nodes keeps less than autograd does op by op."""
    inside = set(nodes)
    eager: dict[fx.Node, bool] = {}  # value -> whether a product reads it
    for node in nodes:
        if needs_grad(node):
            for value in map(_base, _read_later(node)):
                if not _is_parameter(value):
                    eager[value] = eager.get(value, False) or is_product(node)
    kept: set[fx.Node] = set()
    for value, whole in eager.items():
        sources = {value} if whole else _sources(value, inside, kept)
        kept |= sources if _bytes(sources - kept) < nbytes(value) else {value}
    return max(0, _bytes(eager) - _bytes(kept))


def bytes_not_saved(region: Region) -> int:
    """Bytes that a region keeps less than autograd does of the same ops, as its cut says."""
    graph = region.forward.graph
    for node, spec in zip(graph.find_nodes(op="placeholder"), region.inputs, strict=True):
        node.meta["requires_grad"] = spec.needs_grad
    propagate_requires_grad(graph)
    return predict_saved([node for node in graph.nodes if node.op == "call_function"])


def _bytes(values: Iterable[fx.Node]) -> int:
    return sum(nbytes(value) for value in values)


def _read_later(node: fx.Node) -> Iterator[fx.Node]:
    """The values that the op's derivative reads."""
    if is_view(node) or is_call(node, *_BY_NOTHING) or not is_tensor(node):
        return
    if is_call(node, *_BY_RESULT):
        yield node
        return
    operands = [arg for arg in node.args if isinstance(arg, fx.Node) and is_tensor(arg)]
    if not is_call(node, *_BY_OTHER):
        yield from operands
        return
    for at, operand in enumerate(operands[:2]):
        if len(operands) > 1 and needs_grad(operands[1 - at]):
            yield operand


def _base(node: fx.Node) -> fx.Node:
    """The value whose memory ``node`` looks at."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_parameter(node: fx.Node) -> bool:
    val = tensor_val(node)
    return node.op in ("placeholder", "get_attr") and val is not None and val.dim() <= 2


def _sources(value: fx.Node, inside: set[fx.Node], kept: set[fx.Node]) -> set[fx.Node]:
    """What ``value`` is computed from: values kept already, products, inputs; maybe itself."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = [value]
    while stack:
        node = _base(stack.pop())
        if node in seen:
            continue
        seen.add(node)
        if node in kept or node not in inside or is_product(node):
            if not _is_parameter(node):
                found.add(node)
        else:
            stack.extend(arg for arg in node.all_input_nodes if is_tensor(arg))
    return found
