"""Which part of a layer's attention can be computed by one group of heads at a time.

    %q = mm(%x, %wq)                                 [N, heads * D]     columns for each group
    %o = scaled_dot_product_attention(%q, %k, %v)    [B, heads, T, D]   heads for each group
    %y = mm(%o, %wo)                                 [N, H]             a sum over all groups

Attention under a computed mask (``fxrl.ops.masked_attention``) works, too.

From the products that make queries, keys and values (adapters' too) to those that sum over all
heads, each group needs its rows or columns of the weights and nothing of the other groups. RoPE and
norms of single heads may lie between; an op that mixes heads is a refusal.

    %y + (%o @ %a) @ %b * s                          the same sum, where each summand is one

Linear ops that combine such sums are computed by groups, too: a product and its adapter's give one
value as wide as the layer, not two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import fx

from fxrl.analysis.attention import SDPA, is_masked
from fxrl.analysis.layers import is_product
from fxrl.analysis.shares import Share, SharedGraph, Step, follow, step_of
from fxrl.ir.graph import (
    MATRIX_PRODUCTS,
    TRANSPOSES,
    Size,
    ancestors,
    as_node,
    bound,
    draws_random,
    is_call,
    is_quantized_product,
    is_tensor,
    is_view,
    op_name,
    reached,
    shape_of,
    swaps_last_dims,
    val_of,
)
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Heads(Share):
    """The heads of a layer in groups, all of one size."""

    one: ClassVar[str] = "head"
    whole: ClassVar[str] = "layer"

    groups: int = field(kw_only=True)

    @property
    def total(self) -> Size:
        """The number of groups; ``inner`` counts the heads of each."""
        return self.groups


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """What each group computes: ``found.steps``, of parts of the weights ``found.given``."""

    groups: int
    found: SharedGraph
    products: tuple[fx.Node, ...]  # that sum over all heads
    sums: tuple[fx.Node, ...]  # over groups, what the rest of the layer reads


def kv_heads(graph: fx.Graph) -> int:
    """How many heads of keys a layer's attention has, the maximal number of groups; 0 if it is not
    one call."""
    calls = _attentions(graph)
    heads = shape_of(as_node(calls[0].args[1]))[-3:-2] if len(calls) == 1 else ()
    return heads[0] if heads and isinstance(heads[0], int) else 0


def _attentions(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_call(node, SDPA) or is_masked(node)]


def find_head_groups(gm: fx.GraphModule, groups: int) -> HeadGroups:
    """How ``groups`` groups of heads make the attention of a layer's graph. Raises ``Refusal`` if
    they cannot."""
    calls = _attentions(gm.graph)
    if len(calls) != 1:
        raise Refusal(f"{len(calls)} calls of scaled_dot_product_attention")
    (attention,) = calls
    if draws_random(attention):
        raise Refusal("its dropout would draw other numbers", "set attention_dropout to 0")
    if groups < 2 or kv_heads(gm.graph) % groups:
        raise Refusal(f"{kv_heads(gm.graph)} heads of keys are not {groups} groups")
    found = SharedGraph(gm, _weights(attention, groups))
    walk = _Walk(found, attention, groups)
    for node in gm.graph.nodes:
        walk.visit(node)
    if attention not in found.steps:
        raise Refusal("no product makes its queries head by head", at=attention)
    if not walk.sums:
        raise Refusal("no product sums over its heads", at=attention)
    return HeadGroups(groups, found, tuple(walk.sums), _brought_together(found, walk.sums))


def _weights(attention: fx.Node, groups: int) -> dict[fx.Node, Share]:
    """The weights that make queries, keys and values, with the dim that counts heads."""
    weights: dict[fx.Node, Share] = {}
    seen: set[fx.Node] = set()
    for operand in attention.args[:3]:
        nearest = reached([as_node(operand)], _before_products)  # without another one between
        products = {node for node in nearest if is_product(node)}
        for product in sorted(products):
            if product in seen:
                raise Refusal("one product makes queries, keys and values together", at=product)
            if is_quantized_product(product):
                raise Refusal("a quantised weight is not taken apart by heads", at=product)
            if is_call(product, *MATRIX_PRODUCTS):
                weight, dim = _source(as_node(bound(product)["mat2"]), 1)
                width = shape_of(weight)[dim]
                if not isinstance(width, int) or width % groups:
                    raise Refusal(f"{width} columns for {groups} groups of heads", at=product)
                inner = width // groups
                weights[weight] = Heads(dim, 0, groups, inner=inner, groups=groups)
        seen |= products
    return weights


def _before_products(node: fx.Node) -> Sequence[fx.Node]:
    """The operands of a value that is no product."""
    ends = is_product(node) or is_call(node, aten.sym_size.int)
    return () if ends else node.all_input_nodes


def _source(matrix: fx.Node, dim: int) -> tuple[fx.Node, int]:
    """The matrix that this one is the transpose of, and its dim there."""
    while is_call(matrix, *TRANSPOSES) and len(shape_of(matrix)) == 2:
        source = as_node(matrix.args[0])
        matrix, dim = source, 1 - dim if swaps_last_dims(matrix) else dim
    return matrix, dim


def _brought_together(found: SharedGraph, products: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The sums over groups that the rest of a layer reads, given the products that sum over all
    heads; ops that combine them are computed by groups, too."""
    sums = {node for node in products if "mat1" not in bound(node)}  # what is added is added once
    for node in found.module.graph.nodes:
        if _is_linear(node, sums):
            sums.add(node)
    met = [node for node in sums if is_call(node, aten.add.Tensor)]
    inside = ancestors(met, sums)
    for node in sorted(inside.difference(products)):
        found.steps[node] = Step(None)
    made = sorted(inside.union(products))
    return tuple(node for node in made if not inside.issuperset(node.users))


def _is_linear(node: fx.Node, sums: set[fx.Node]) -> bool:
    """Whether a value is a sum over groups because its operands are, and has their dtype."""
    read = [arg for arg in node.all_input_nodes if is_tensor(arg)]
    if not (is_tensor(node) and node.args and node.args[0] in sums):
        return False
    if any(val_of(arg).dtype != val_of(node).dtype for arg in read):
        return False
    if is_call(node, aten.add.Tensor):
        return sums.issuperset(read) and len(read) == 2 and not node.kwargs
    if is_call(node, aten.mm.default):
        return sums.isdisjoint(ancestors([as_node(node.args[1])]))
    scales = is_call(node, aten.mul.Tensor) and isinstance(node.args[1], (int, float))
    return scales or is_view(node)


class _Walk:
    """Follows what is shared out among groups through a layer's graph."""

    def __init__(self, found: SharedGraph, attention: fx.Node, groups: int) -> None:
        self.sums: list[fx.Node] = []
        self._found, self._attention, self._groups = found, attention, groups
        self._behind: set[fx.Node] = set()  # what is computed from a sum over heads
        found.shares |= found.given

    def visit(self, node: fx.Node) -> None:
        """Say how a group computes a node that reads what is shared out."""
        if not self._behind.isdisjoint(node.all_input_nodes):
            self._behind.add(node)
        follow(self._found, node, self._step)

    def _step(self, node: fx.Node, _: list[fx.Node]) -> Step:
        try:
            if node in self._behind:
                raise Refusal("it brings heads together with what all of them make")
            step = self._apart(node)
            if any(share.outer != 1 for share in step.needs.values()):
                raise Refusal("its heads do not lie together")
        except Refusal as refusal:
            refusal.at = refusal.at or node
            raise
        return step

    def _apart(self, node: fx.Node) -> Step:
        if node.op == "output":
            raise Refusal("the layer returns a value of heads")
        if node is self._attention:
            return self._attend(node)
        if is_call(node, *MATRIX_PRODUCTS) and (summed := self._summed(node)) is not None:
            self.sums.append(node)
            self._behind.add(node)
            return summed
        step = step_of(self._found, node)
        shares = step.shares if isinstance(step.shares, tuple) else (step.shares,)
        if any(s is not None and (s.start, s.length) != (0, self._groups) for s in shares):
            raise Refusal(f"{op_name(node)} takes heads of a layer apart")
        return step

    def _summed(self, node: fx.Node) -> Step | None:
        """A product that sums over heads, if it does, and the rows of its weight."""
        given = bound(node)
        left, right = as_node(given.get("mat1", given["self"])), as_node(given["mat2"])
        share = self._found.share(left)
        if share is None or share.dim != 1 or self._found.share(right) is not None:
            return None
        if given.get("beta", 1) != 1 or given.get("alpha", 1) != 1:
            raise Refusal("the product of all heads is scaled")
        return Step(None, needs={right: replace(share, dim=0)})

    def _attend(self, node: fx.Node) -> Step:
        """Attention over queries, keys, values [B, heads, T, D], under masks that are one for all
        heads or have one entry for each."""
        needs: dict[fx.Node, Share] = {}
        operands = [as_node(arg) for arg in node.args[:3]]
        for name, operand in zip(("queries", "keys", "values"), operands, strict=True):
            if len(shape_of(operand)) != 4:
                raise Refusal("attention is not over [batch, heads, tokens, features]")
            share, own = self._found.share(operand), self._by_heads(operand, 1)
            if share is None and name != "queries":
                needs[operand] = own
            elif share is None or share.dim != 1 or not share.alike(own):
                raise Refusal(f"no product makes its {name} head by head")
        for seen in node.all_input_nodes:
            if seen in operands or not is_tensor(seen):
                continue
            if self._found.share(seen) is not None:
                raise Refusal("attention's mask is computed from heads")
            # The lists of a computed mask are [B, heads, ...], a dense one is [..., heads, T, T].
            dim = 1 if is_masked(node) else len(shape_of(seen)) - 3
            if dim >= 0 and shape_of(seen)[dim] != 1:
                needs[seen] = self._by_heads(seen, dim)
        share = self._found.share(operands[0])
        return Step(share if is_tensor(node) else (share, share), needs=needs)

    def _by_heads(self, value: fx.Node, dim: int) -> Heads:
        """A value in groups of the heads that ``dim`` counts."""
        heads = shape_of(value)[dim]
        if not isinstance(heads, int) or heads % self._groups:
            raise Refusal(f"{heads} heads are not {self._groups} groups")
        return Heads(dim, 0, self._groups, inner=heads // self._groups, groups=self._groups)
