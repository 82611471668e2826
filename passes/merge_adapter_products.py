"""Matrix products of a body, rewritten so that less memory is moved. The algebra is exact.

    (s * %g) @ %b             becomes   s * (%g @ %b)            where the product is the smaller
    %x @ %w + (%x @ %a) @ %b  becomes   [%x, %x @ %a] @ [%w; %b]    where the copies cost less

Both serve adapters of low rank: op by op, each of their products writes a value as wide as the
layer, which an elementwise op reads again. A sum inside one product is also rounded only once.
The second form pays where a product's result is wider than its operand (gate and up projections);
several sums over one ``%x`` share the copy of it, with zeros in the other sums' rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    RESHAPES,
    TRANSPOSES,
    ancestors,
    as_node,
    equal_shapes,
    hint,
    is_call,
    nbytes,
    shape_of,
    tensor_val,
    val_of,
)
from fxrl.ir.graph_pass import Applied, Normalisation, Site, Stage
from fxrl.ir.remark import Refusal

aten = torch.ops.aten

NARROW = 256  # columns of an adapter's part of a shared operand


@dataclass(frozen=True)
class MergeAdapterProducts(Normalisation[Site]):
    """Fewer and smaller values around the products of adapters."""

    name = "merge-adapter-products"
    stage = Stage.CLEAN

    def match(self, gm: fx.GraphModule) -> Iterator[Site]:
        first = next((n for n in gm.graph.nodes if is_call(n, aten.mm.default)), None)
        if first is not None:
            yield Site(first, 0)

    def respell(self, gm: fx.GraphModule, site: Site) -> Applied:
        scaled = _scale_results(gm.graph)
        merged = _merge_sums(gm.graph)
        if not scaled and not merged:
            raise Refusal("no copy of operands costs less than the sums of products")
        return Applied(f"{merged} sums of products merged, {scaled} scales moved behind products")


# ---------------------------------------------------------------------------- scales
def _scale_results(graph: fx.Graph) -> int:
    """Multiply by a number after a product instead of before, where the result is smaller."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        factor, moved = 1.0, False
        for at in (0, 1):
            found = _scaled(node.args[at])
            if found is not None and nbytes(found[-1]) > nbytes(node):
                *views, mul = found
                number: Any = mul.args[1]
                factor, moved = factor * number, True
                node.update_arg(at, _on(graph, node, views, mul.args[0]))
        count += moved
        if factor != 1.0:
            with graph.inserting_after(node):
                result = graph.call_function(aten.mul.Tensor, (node, factor))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result, delete_user_cb=lambda user, r=result: user is not r)
    return count


def _scaled(node: Any) -> list[fx.Node] | None:
    """The views from ``node`` down to a multiplication by a number, and that call itself."""
    path = []
    while is_call(node, *RESHAPES, *TRANSPOSES):
        path.append(node)
        node = node.args[0]
    return [*path, node] if _is_scaling(node) else None


def _is_scaling(node: object) -> bool:
    if not is_call(node, aten.mul.Tensor) or not isinstance(node.args[1], (int, float)):
        return False
    value, result = tensor_val(node.args[0]), tensor_val(node)
    return value is not None and result is not None and value.dtype == result.dtype


def _on(graph: fx.Graph, before: fx.Node, views: Sequence[fx.Node], value: Any) -> Any:
    """Copies of these views, applied to ``value``."""
    with graph.inserting_before(before):
        for view in reversed(views):
            copy = graph.call_function(view.target, (value, *view.args[1:]), dict(view.kwargs))  # type: ignore[arg-type]
            copy.meta = dict(view.meta)
            value = copy
    return value


# ---------------------------------------------------------------------------- sums of products
@dataclass(frozen=True, slots=True)
class Product:
    """``scale * left @ right``, one summand; ``top`` is what the sum's ``add`` reads of it."""

    node: fx.Node
    top: fx.Node
    scale: float

    @property
    def left(self) -> fx.Node:
        return as_node(self.node.args[0])

    @property
    def right(self) -> fx.Node:
        return as_node(self.node.args[1])


def _merge_sums(graph: fx.Graph) -> int:
    sums = sums_of_products(graph, aten.mm.default)
    readers: dict[fx.Node, int] = {}
    for summands in sums:
        for left in {product.left for product in summands}:
            readers[left] = readers.get(left, 0) + 1
    chosen = [best for summands in sums if len(best := _worth(summands, readers)) > 1]
    groups: dict[fx.Node, list[list[Product]]] = {}
    for summands in chosen:
        groups.setdefault(summands[0].left, []).append(summands)
    for group in groups.values():
        for shared in [group] if _can_share(group) else [[summands] for summands in group]:
            _merge(graph, shared)
    return len(chosen)


def sums_of_products(graph: fx.Graph, *targets: Any) -> list[list[Product]]:
    """Sums of at least two calls of these targets whose results nothing else reads."""
    return [found for root in _roots(graph) if len(found := _summands(root, targets)) > 1]


def _roots(graph: fx.Graph) -> Iterable[fx.Node]:
    """Sums that are no part of a larger sum."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        user = next(iter(node.users)) if len(node.users) == 1 else None
        while user is not None and is_call(user, *RESHAPES) and len(user.users) == 1:
            user = next(iter(user.users))
        if _is_sum(node) and not _is_sum(user):
            yield node


def _is_sum(node: object) -> bool:
    """Whether ``node`` adds two values of one shape, without a factor."""
    if not is_call(node, aten.add.Tensor) or node.kwargs or len(node.args) != 2:
        return False
    left, right = map(tensor_val, node.args)
    if left is None or right is None or node.args[0] is node.args[1]:
        return False
    return equal_shapes(left.shape, right.shape)


def _summands(root: fx.Node, targets: Sequence[Any]) -> list[Product]:
    found: list[Product] = []

    def visit(node: fx.Node, top: fx.Node, scale: float) -> None:
        if node is not root and len(node.users) > 1:
            return
        if _is_sum(node) and scale == 1.0 and _same_width(node, root):
            for arg in node.args:
                visit(arg, arg, 1.0)  # type: ignore[arg-type]
        elif is_call(node, *RESHAPES) and _same_width(node, root):
            visit(node.args[0], top, scale)  # type: ignore[arg-type]
        elif _is_scaling(node):
            visit(node.args[0], top, scale * node.args[1])  # type: ignore[arg-type, operator]
        elif is_call(node, *targets) and _has_depth(node) and _same_width(node, root):
            found.append(Product(node, top, scale))

    visit(root, root, 1.0)
    return found


def _has_depth(product: fx.Node) -> bool:
    """Whether the length of the dim that the product sums over is known."""
    return isinstance(shape_of(as_node(product.args[0]))[1], int)


def _same_width(node: fx.Node, root: fx.Node) -> bool:
    value, like = tensor_val(node), tensor_val(root)
    assert value is not None
    assert like is not None
    return value.dtype == like.dtype and value.dim() > 1 and value.shape[-1] == like.shape[-1]


def _worth(summands: Sequence[Product], readers: dict[fx.Node, int]) -> list[Product]:
    """The products to merge, the widest left operand first; fewer than two if it does not pay. A
    merged product saves writing and reading a result, and costs copying its operands."""
    saved = 2 * nbytes(summands[0].node)
    costs = {
        product: 2 * (nbytes(product.left) // readers[product.left] + nbytes(product.right))
        for product in summands
    }
    ranked = sorted(summands, key=costs.__getitem__)
    best, most = 0, 0
    for count in range(2, len(ranked) + 1):
        gain = saved * (count - 1) - sum(costs[product] for product in ranked[:count])
        if gain > most:
            best, most = count, gain
    merged = sorted(ranked[:best], key=lambda p: (p.scale != 1.0, -hint(shape_of(p.left)[1])))
    return merged if merged and merged[0].scale == 1.0 else []


def _can_share(group: Sequence[Sequence[Product]]) -> bool:
    """Whether one left operand may serve all sums: no sum needs another one's result, and the
    columns that only one sum reads are few."""
    rests = [product for summands in group for product in summands[1:]]
    if any(hint(shape_of(product.left)[1]) > NARROW for product in rests):
        return False
    products = [product for summands in group for product in summands]
    needed = ancestors(product.left for product in products)
    return needed.isdisjoint(product.node for product in products)


def _merge(graph: fx.Graph, group: Sequence[Sequence[Product]]) -> None:
    """One product for each sum of the group, all over one concatenated left operand.

    The first summand of each sum is left[0] of all: the operand that they share.
    """
    with Builder(graph).before(group[0][0].node) as builder:
        shared = group[0][0].left
        rests = [product for summands in group for product in summands[1:]]
        lefts = [shared, *(scaled_left(builder, product) for product in rests)]
        left = builder.call(aten.cat.default, lefts, 1)
        for summands in group:
            rights: list[fx.Node | int] = [summands[0].right]
            for product in rests:
                width = shape_of(product.left)[1]
                assert isinstance(width, int)
                rights.append(product.right if product in summands else width)
            merged = builder.call(aten.mm.default, left, stacked(builder, rights, 0))
            summands[0].node.replace_all_uses_with(merged)
    for summands in group:
        for product in summands[1:]:
            drop(product.top)


def scaled_left(builder: Builder, product: Product) -> fx.Node:
    """A summand's left operand, multiplied by its scale."""
    if product.scale == 1.0:
        return product.left
    return builder.call(aten.mul.Tensor, product.left, product.scale)


def stacked(builder: Builder, parts: Sequence[fx.Node | int], dim: int) -> fx.Node:
    """Matrices concatenated, transposed if all of them are; a number stands for rows of zeros."""
    nodes = [part for part in parts if isinstance(part, fx.Node)]
    turned = all(is_call(n, *TRANSPOSES) and len(shape_of(n)) == 2 for n in nodes)
    like, width = val_of(nodes[0]), shape_of(nodes[0])[1]

    def piece(part: fx.Node | int) -> Any:
        if isinstance(part, fx.Node):
            return part.args[0] if turned else part
        size = [width, part] if turned else [part, width]
        said = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
        return builder.call(aten.full.default, size, 0, **said)  # an op that Inductor lowers

    along = 1 - dim if turned else dim
    whole = builder.call(aten.cat.default, [piece(part) for part in parts], along)
    return builder.call(aten.permute.default, whole, [1, 0]) if turned else whole


def drop(top: fx.Node) -> None:
    """Take one summand out of the sum that reads it."""
    (add,) = top.users
    (other,) = (arg for arg in add.args if arg is not top)
    add.replace_all_uses_with(as_node(other))
    add.graph.erase_node(add)
