"""Bytes that autograd keeps for a part of a graph run op by op, and bytes that a region keeps.

Predicted from the graph alone. Op by op: the operands and results that each op's derivative reads.
As a region: operands of matrix products, and of what elementwise derivatives read only values that
cannot be computed again from something smaller that is kept anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxrl.analysis.layers import is_product, is_weight
from fxrl.ir.graph import (
    DEQUANTIZED_MM,
    EXCHANGES,
    FP8_LINEAR,
    QUANTIZE_ROWS,
    SHARDED_MM,
    OpOverload,
    base_of,
    bound,
    inputs_of,
    is_attention,
    is_tensor,
    is_view,
    maker_of,
    nbytes,
    needs_grad,
    reached,
)
from fxrl.ir.region import Cut, Region, mark_grads, once_for

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
    # But for weights and token ids, which live anyway.
    " ".join((FP8_LINEAR, DEQUANTIZED_MM, SHARDED_MM, QUANTIZE_ROWS, *EXCHANGES)): "",
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
    """By how many bytes less a region of these nodes keeps than autograd does op by op."""
    eager = _kept_op_by_op(nodes)
    return max(0, _bytes(eager) - _bytes(_kept_for_products(nodes, eager)))


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes between a region's forward and its backward, weights apart."""

    inputs: int  # that the region keeps
    made: int  # that it keeps of what it computes
    by_autograd: int  # that would be kept of its ops, run one by one


def kept_by(region: Region) -> Kept:
    """The values that a region keeps under its cut.

    The cut "fewest" is estimated by what the products need.
    """
    cut = "inputs" if region.again == "forward" else region.cut  # what is more, it makes later
    return _kept(region.forward, region.trained, cut)


@once_for
def _kept(body: fx.GraphModule, trained: tuple[bool, ...], cut: Cut) -> Kept:
    graph = body.graph
    mark_grads(graph, trained)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    eager = _kept_op_by_op(nodes)
    inputs = set(inputs_of(graph))
    read = {x for x in inputs if x.users and is_tensor(x) and not is_weight(x)}
    if cut in ("inputs", "attention"):
        attention = cut == "attention"
        kept = read | {value for value in eager if attention and is_attention(maker_of(value))}
    else:
        kept = _kept_for_products(nodes, eager)
    return Kept(_bytes(kept & read), _bytes(kept - inputs), _bytes(eager))


def _kept_op_by_op(nodes: Sequence[fx.Node]) -> dict[fx.Node, bool]:
    """Each value that autograd keeps, and whether a product reads it."""
    kept: dict[fx.Node, bool] = {}
    for node in nodes:
        for value in map(base_of, read_later(node)):
            if not is_weight(value):
                kept[value] = kept.get(value, False) or is_product(node)
    return kept


def _kept_for_products(nodes: Sequence[fx.Node], eager: Mapping[fx.Node, bool]) -> set[fx.Node]:
    """The values that a region keeps if it runs norms and activations again, but no product."""
    inside = set(nodes)
    kept: set[fx.Node] = set()
    for value, whole in eager.items():
        sources = {value} if whole else _sources(value, inside, kept)
        kept |= sources if _bytes(sources - kept) < nbytes(value) else {value}
    return kept


def _bytes(values: Iterable[fx.Node]) -> int:
    return sum(nbytes(value) for value in values)


def _sources(value: fx.Node, inside: set[fx.Node], kept: set[fx.Node]) -> set[fx.Node]:
    """What ``value`` can be computed again from: kept values, products and inputs; maybe only
    itself."""

    def is_source(node: fx.Node) -> bool:
        return node in kept or node not in inside or is_product(node)

    def made_of(node: fx.Node) -> Iterable[fx.Node]:
        return () if is_source(node) else map(base_of, filter(is_tensor, node.all_input_nodes))

    made = reached([base_of(value)], made_of)
    return {node for node in made if is_source(node) and not is_weight(node)}
