"""What autograd keeps of a part of a graph op by op, and what a region of it keeps, in bytes.

A prediction from the graph alone. Eager: the operands and results that each op's derivative reads.
Region: operands of matrix products, and what elementwise derivatives read only where it cannot be
computed again from something smaller that is kept anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from fxrl.analysis.layers import is_product
from fxrl.ir.graph import (
    DEQUANTIZED_MM,
    FP8_LINEAR,
    QUANTIZE_ROWS,
    OpOverload,
    base_of,
    bound,
    is_tensor,
    is_view,
    nbytes,
    needs_grad,
    tensor_val,
)
from fxrl.ir.region import Region, mark_grads

#: What an op's derivative reads, as ``derivatives.yaml`` of PyTorch says: ``x: y, z`` is "the
#: gradient of x is computed from y and z"; no clause, from the incoming gradient alone. Ops that
#: are not listed are taken to read all their operands.
_FORMULAS = {
    "exp sigmoid tanh sqrt rsqrt reciprocal relu _softmax _log_softmax": "self: result",
    "cumprod prod": "self: self, result",
    "logsumexp amax amin logcumsumexp linalg_vector_norm norm std": "self: self, result",
    "max.default min.default median.default": "self: self, result",
    "log log1p log2 log10 abs sin cos silu gelu softplus": "self: self",
    "log_sigmoid_forward special_entr erf leaky_relu var cummax cummin": "self: self",
    "clamp clamp_min clamp_max": "self: self, min, max; min: self, min, max; max: self, min, max",
    "mul": "self: other; other: self",
    "div": "self: other; other: self, other",
    "mm": "self: mat2; mat2: self",
    "bmm": "self: mat2; mat2: self",
    "addmm": "mat1: mat2; mat2: mat1",
    f"{FP8_LINEAR} {DEQUANTIZED_MM} {QUANTIZE_ROWS}": "",  # but for weights, which live anyway
    "baddbmm": "batch1: batch2; batch2: batch1",
    "maximum minimum": "self: self, other; other: self, other",
    "xlogy": "self: self, other; other: self, other",
    "where": "self: condition; other: condition",
    "masked_fill": "self: mask; value: mask",
    "gather": "self: self, index",
    "index_select": "self: index",
    "scatter": "self: index; src: index",
    "scatter_add": "src: index",
    "index": "self: indices",
    "native_layer_norm": "input: input, weight, bias; weight: input, weight, bias",
    "slice_scatter select_scatter": "self: src",
    "add sub rsub neg cat stack clone _to_copy detach mean sum cumsum flip roll": "",
    "slice select constant_pad_nd copy fill": "",
    "sort topk max.dim min.dim median.dim kthvalue": "",  # the positions found, of another kind
}


def _clauses(formula: str) -> list[tuple[str, list[str]]]:
    pairs = (clause.split(": ") for clause in formula.split("; ") if clause)
    return [(name, reads.split(", ")) for name, reads in pairs]


_READS = {op: _clauses(formula) for ops, formula in _FORMULAS.items() for op in ops.split()}


def read_later(node: fx.Node) -> Iterator[fx.Node]:
    """The values that autograd keeps for an op's derivative, where it takes one."""
    if not needs_grad(node) or is_view(node) or not isinstance(node.target, OpOverload):
        return
    name = str(node.target).removeprefix("aten.")
    clauses = _READS.get(name, _READS.get(name.partition(".")[0]))
    if clauses is None:
        yield from (arg for arg in node.all_input_nodes if is_tensor(arg))
        return
    given = bound(node) | {"result": node}
    for name, reads in clauses:
        if needs_grad(given.get(name)):
            for value in map(given.get, reads):
                parts = value if isinstance(value, (list, tuple)) else [value]
                yield from (part for part in parts if is_tensor(part))


def predict_saved(nodes: Sequence[fx.Node]) -> int:
    """Bytes that a region of these nodes keeps less than autograd does op by op."""
    inside = set(nodes)
    eager: dict[fx.Node, bool] = {}  # value -> whether a product reads it
    for node in nodes:
        for value in map(base_of, read_later(node)):
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
    mark_grads(graph, region.inputs)
    return predict_saved([node for node in graph.nodes if node.op == "call_function"])


def _bytes(values: Iterable[fx.Node]) -> int:
    return sum(nbytes(value) for value in values)


def _is_parameter(node: fx.Node) -> bool:
    val = tensor_val(node)
    return node.op in ("placeholder", "get_attr") and val is not None and val.dim() <= 2


def _sources(value: fx.Node, inside: set[fx.Node], kept: set[fx.Node]) -> set[fx.Node]:
    """What ``value`` is computed from: values kept already, products, inputs; maybe itself."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = [value]
    while stack:
        node = base_of(stack.pop())
        if node in seen:
            continue
        seen.add(node)
        if node in kept or node not in inside or is_product(node):
            if not _is_parameter(node):
                found.add(node)
        else:
            stack.extend(arg for arg in node.all_input_nodes if is_tensor(arg))
    return found
