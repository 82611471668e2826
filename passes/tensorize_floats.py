"""Replace Python floats that vary (a temperature in the batch) by the tensors they are read from.

    %t = _local_scalar_dense(%temperature)     a number: the host waits, rows cannot follow it
    %z = div(%logits, %t)
becomes
    %z = div(%logits, %temperature)            a 0-d tensor, same value and same result dtype
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.ir.bodies import graphs_of
from fxrl.ir.build import Builder
from fxrl.ir.graph import OpOverload, tensor_val, val_of
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site

aten = torch.ops.aten

_ARITHMETIC: dict[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.pow: aten.pow.Tensor_Tensor,
    operator.neg: aten.neg.default,
}
#: Overloads that take a number where another one takes a tensor; ``.Tensor`` ones take both.
_TENSOR_OVERLOADS: dict[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
} | {op: op for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)}
#: Comparisons, likewise: in the dtype of what is compared.
_COMPARED: dict[Any, Any] = {
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
}
_TENSOR_OVERLOADS |= _COMPARED


@dataclass(frozen=True, slots=True)
class NumberSite(Site):
    """All numbers that one graph reads off floating-point tensors; some may be computed from
    several of them."""

    scalars: tuple[fx.Node, ...]


@dataclass(frozen=True)
class TensorizeFloats(Normalisation[NumberSite]):
    """Let elementwise ops read a number's tensor instead of the number, if results are the same."""

    name = "tensorize-floats"
    doc = PassDoc(
        "a Python float read off a tensor (`temperature.item()`, a float in the batch)",
        "the host's wait for the number; rows can follow a tensor",
        "nothing",
        "an op that takes numbers only, or whose result's dtype would change, keeps the number",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[NumberSite]:
        for graph in graphs_of(gm):  # a layer may read numbers of its own, such as an epsilon
            reads = graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
            found = tuple(node for node in reads if val_of(node.args[0]).is_floating_point())
            if found:
                yield NumberSite(found[0], 0, found)

    def respell(self, gm: fx.GraphModule, site: NumberSite) -> Applied:
        graph = site.anchor.graph
        builder = Builder(graph)
        tensors: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            with builder.before(node):
                if node in site.scalars:
                    tensors[node] = _scalar(builder, node.args[0])
                elif any(arg in tensors for arg in node.all_input_nodes):
                    if node.target in _ARITHMETIC:
                        tensors[node] = _compute(builder, node, tensors)
                    elif isinstance(node.target, OpOverload) and node.target in _TENSOR_OVERLOADS:
                        _read_tensors(builder, node, tensors)
        return Applied(f"{len(site.scalars)} numbers stay tensors")


def _scalar(builder: Builder, source: Any) -> fx.Node:
    """``source`` as a 0-d float64 tensor: Python's own precision."""
    apart = builder.call(aten.detach.default, source)  # at once: a number's source is not trained
    flat = builder.call(aten.reshape.default, apart, [])
    return builder.call(aten._to_copy.default, flat, dtype=torch.float64)


def _compute(builder: Builder, node: fx.Node, tensors: dict[fx.Node, fx.Node]) -> fx.Node:
    """Do the arithmetic of these numbers in float64 on 0-d tensors."""
    like = next(tensors[arg] for arg in node.all_input_nodes if arg in tensors)

    def convert(arg: Any) -> fx.Node:
        if isinstance(arg, fx.Node) and arg in tensors:
            return tensors[arg]
        return builder.call(aten.full_like.default, like, arg)

    return builder.call(_ARITHMETIC[node.target], *map(convert, node.args))


def _read_tensors(builder: Builder, node: fx.Node, tensors: dict[fx.Node, fx.Node]) -> None:
    """Point one elementwise op at the tensors, unless its result would get another dtype."""
    val = tensor_val(node.args[0] if node.target in _COMPARED else node)
    if val is None or not val.is_floating_point():
        return
    # A 0-d float64 tensor promotes other 0-d tensors, where a Python number does not.
    dtype = torch.float64 if val.dim() else val.dtype
    # Of what is narrower a GPU compares with the number as it is, but with the tensor rounded.
    if val.dtype.itemsize < 4 and (not val.dim() or node.target in _COMPARED):
        return

    def convert(arg: Any) -> Any:
        if not (isinstance(arg, fx.Node) and arg in tensors):
            return arg
        return builder.call(aten._to_copy.default, tensors[arg], dtype=dtype, device=val.device)

    made = builder.call(_TENSOR_OVERLOADS[node.target], *map(convert, node.args), **node.kwargs)
    if val_of(made).dtype == val_of(node).dtype:
        made.meta = {**node.meta, "val": made.meta["val"]}
        node.replace_all_uses_with(made)
