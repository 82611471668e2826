"""Python floats that vary (a temperature in the batch) as what they are to the graph: tensors.

    %t = _local_scalar_dense(%temperature)     a number: the host waits, rows cannot follow it
    %z = div(%logits, %t)
becomes
    %z = div(%logits, %temperature)            a 0-d tensor, same value and same result dtype
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxrl.ir.build import Builder
from fxrl.ir.graph import OpOverload, is_call, tensor_val, val_of

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


def use_tensors_for_floats(graph: fx.Graph) -> None:
    """Let elementwise ops read a number's tensor instead of the number, where that is the same."""
    builder = Builder(graph)
    tensors: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        with builder.before(node):
            if is_call(node, aten._local_scalar_dense.default):
                source: Any = node.args[0]
                if val_of(source).is_floating_point():
                    tensors[node] = _scalar(builder, source)
            elif any(arg in tensors for arg in node.all_input_nodes):
                if node.target in _ARITHMETIC:
                    tensors[node] = _compute(builder, node, tensors)
                elif isinstance(node.target, OpOverload) and node.target in _TENSOR_OVERLOADS:
                    _read_tensors(builder, node, tensors)


def _scalar(builder: Builder, source: fx.Node) -> fx.Node:
    """``source`` as a 0-d float64 tensor: Python's own precision."""
    flat = builder.call(aten.reshape.default, source, [])
    wide = builder.call(aten._to_copy.default, flat, dtype=torch.float64)
    return builder.call(aten.detach.default, wide)


def _compute(builder: Builder, node: fx.Node, tensors: dict[fx.Node, fx.Node]) -> fx.Node:
    """The same arithmetic in float64 on 0-d tensors."""
    like = next(tensors[arg] for arg in node.all_input_nodes if arg in tensors)

    def convert(arg: Any) -> fx.Node:
        if isinstance(arg, fx.Node) and arg in tensors:
            return tensors[arg]
        return builder.call(aten.full_like.default, like, arg)

    return builder.call(_ARITHMETIC[node.target], *map(convert, node.args))


def _read_tensors(builder: Builder, node: fx.Node, tensors: dict[fx.Node, fx.Node]) -> None:
    """Point one elementwise op at the tensors, unless its result would get another dtype."""
    val = tensor_val(node)
    if val is None or not val.is_floating_point():
        return
    # A 0-d float64 tensor promotes other 0-d tensors, where a Python number does not.
    dtype = torch.float64 if val.dim() else val.dtype
    if not val.dim() and val.dtype.itemsize < 4:
        return

    def convert(arg: Any) -> Any:
        if not (isinstance(arg, fx.Node) and arg in tensors):
            return arg
        return builder.call(aten._to_copy.default, tensors[arg], dtype=dtype, device=val.device)

    made = builder.call(_TENSOR_OVERLOADS[node.target], *map(convert, node.args), **node.kwargs)
    if val_of(made).dtype == val.dtype:
        made.meta = {**node.meta, "val": made.meta["val"]}
        node.replace_all_uses_with(made)
