"""Multiply by an adapter's two factors instead of adding their product to the weight.

    %w = baddbmm(%own [e, n, k], %b [e, n, r], %a [e, r, k], alpha=s)       or own + s * (b @ a)
    %y = _grouped_mm(%x, transpose(%w), %offs)
becomes
    %y = _grouped_mm(%x, own^T, %offs) + _grouped_mm(s * _grouped_mm(%x, a^T, %offs), b^T, %offs)

PEFT's ``target_parameters`` adapts the experts of a mixture this way, and
``torch.nn.utils.parametrize`` can adapt any weight. The sum is a second weight for each layer, kept
for the backward. Its gradient is a third one, made by a product as large as the layer's own, though
only the factors are trained. Neither is needed. In bf16 the sum would also round away what an
adapter adds to a weight 256 times as large.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import fx

from fxrl.ir.bodies import graphs_of
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    MATRIX_PRODUCTS,
    RESHAPES,
    TRANSPOSES,
    base_of,
    bound,
    equal_shapes,
    equal_sizes,
    hint,
    is_call,
    is_grouped_product,
    nbytes,
    shape_of,
    swaps_last_dims,
    val_of,
    with_arguments,
)
from fxrl.ir.graph_pass import Applied, Miss, Normalisation, PassDoc, Site
from fxrl.ir.remark import Refusal, RemarkKind

aten = torch.ops.aten

_ADDS = (aten.add.Tensor, aten.sub.Tensor)
_SUMS = (aten.addmm.default, aten.baddbmm.default)
_ALIGNED = 16  # bytes; what ``_grouped_mm`` asks of the distance between rows


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix, or a stack of them, as a product reads it."""

    node: fx.Node
    transposed: bool = False

    @property
    def flipped(self) -> Self:
        return replace(self, transposed=not self.transposed)

    @property
    def sizes(self) -> tuple[Any, ...]:
        *stack, rows, columns = shape_of(self.node)
        return (*stack, columns, rows) if self.transposed else (*stack, rows, columns)


@dataclass(frozen=True, slots=True)
class _LowRank:
    """``scale * left @ right``."""

    left: _Matrix
    right: _Matrix
    scale: float = 1.0

    @property
    def flipped(self) -> Self:
        return replace(self, left=self.right.flipped, right=self.left.flipped)

    @property
    def rank(self) -> int:
        return hint(self.left.sizes[-1])


@dataclass(frozen=True, slots=True)
class _Product:
    """A product that reads an adapted weight, or its transpose."""

    node: fx.Node
    rows: str  # the names of two of its arguments
    weight: str
    picks: tuple[fx.Node, ...]  # of a stack, the calls that take the matrices that are multiplied
    transposed: bool


@dataclass(frozen=True, slots=True)
class AdaptedWeight(Site):
    """A weight with the product of two narrow factors added, and the products that read it."""

    own: fx.Node
    delta: _LowRank
    products: tuple[_Product, ...]


@dataclass(frozen=True)
class SplitAdaptedWeights(Normalisation[AdaptedWeight]):
    """``x @ (own + s * b @ a)`` as ``x @ own + s * (x @ b) @ a``."""

    name = "split-adapted-weights"
    applied = RemarkKind.APPLIED
    missed = RemarkKind.MISSED
    doc = PassDoc(
        "products with a weight to which an adapter's product is added (PEFT's "
        "`target_parameters`: experts; LoRA by `parametrize`)",
        "the adapted weight, kept for the backward, and its gradient; the product that makes that",
        "two narrow products of the rows",
        "something else reads the adapted weight; the rows have another dtype; grouped products "
        "whose rank is no multiple of 16 bytes",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[AdaptedWeight | Miss]:
        for graph in graphs_of(gm):
            for node in graph.nodes:
                if (found := _adapted(node)) is None:
                    continue
                products, others = _readers(node)
                if products and others:
                    reason = "the sum of weight and adapter is read by more than products of rows"
                    yield Miss(node, Refusal(reason, at=others[0]))
                elif products:
                    yield AdaptedWeight(node, nbytes(node), *found, tuple(products))

    def respell(self, gm: fx.GraphModule, site: AdaptedWeight) -> Applied:
        dtypes = {val_of(bound(one.node)[one.rows]).dtype for one in site.products}
        if len({val_of(site.anchor).dtype, val_of(site.own).dtype, *dtypes}) > 1:
            raise Refusal("weight, adapter and rows have different dtypes")
        for product in site.products:
            _check_alignment(product.node, site.delta)
        for product in site.products:
            _split(product, site)
        count, rank = len(site.products), site.delta.rank
        what = f"{count} products" if count > 1 else "a product"
        what += f" of rows with an adapter's factors, of rank {rank}: no sum of weight and adapter"
        return Applied(what, nbytes(site.anchor))


# ---------------------------------------------------------------------------- the sum
def _adapted(node: fx.Node) -> tuple[fx.Node, _LowRank] | None:
    """A weight, and what is added to it, if that is of lower rank."""
    found: list[tuple[Any, _LowRank | None]] = []
    given: dict[str, Any] = bound(node) if is_call(node, *_SUMS, *_ADDS) else {}
    if is_call(node, *_ADDS):
        one, other = given["self"], given["other"]
        scale = given["alpha"] if is_call(node, aten.add.Tensor) else -given["alpha"]
        found += [(one, _scaled(_low_rank(other), scale))]
        found += [(other, _low_rank(one))] if scale == 1 else []
    elif given and given["beta"] == 1:
        own, *factors = list(given.values())[:3]
        left, right = map(_Matrix, factors)
        found += [(own, _LowRank(left, right, given["alpha"]))]
    for own, delta in found:
        if delta is not None and _is_narrow(node, own, delta):
            return own, delta
    return None


def _is_narrow(total: fx.Node, own: object, delta: _LowRank) -> bool:
    """Whether the factors have fewer entries than the sum, neither summand is broadcast, and
    ``own`` is an input, as a weight is: products are added to activations, too."""
    if not isinstance(own, fx.Node) or base_of(own).op != "placeholder":
        return False
    if not isinstance(delta.scale, (int, float)):
        return False
    sizes = shape_of(total)
    made = (*delta.left.sizes[:-1], delta.right.sizes[-1])
    if not equal_shapes(shape_of(own), sizes) or not equal_shapes(made, sizes):
        return False
    *_, rows, columns = map(hint, sizes)
    return delta.rank * (rows + columns) < rows * columns


def _low_rank(node: Any) -> _LowRank | None:
    """``s * left @ right``, maybe transposed or under the shape that it has."""
    given: Any = node.args if isinstance(node, fx.Node) else ()
    if is_call(node, aten.mm.default, aten.bmm.default):
        left, right = map(_Matrix, given)
        return _LowRank(left, right)
    if is_call(node, *TRANSPOSES):
        inner = _low_rank(given[0]) if swaps_last_dims(node) else None
        return inner and inner.flipped
    if is_call(node, *RESHAPES) and equal_shapes(shape_of(node), shape_of(given[0])):
        return _low_rank(given[0])
    if is_call(node, aten.mul.Tensor) and not isinstance(given[1], fx.Node):
        return _scaled(_low_rank(given[0]), given[1])
    if is_call(node, aten.div.Tensor) and not isinstance(given[1], fx.Node):
        return _scaled(_low_rank(given[0]), 1 / given[1])
    return None


def _scaled(delta: _LowRank | None, factor: Any) -> _LowRank | None:
    return delta and replace(delta, scale=delta.scale * factor)


# ---------------------------------------------------------------------------- its readers
def _readers(weight: fx.Node) -> tuple[list[_Product], list[fx.Node]]:
    """The products that read a weight, its transpose or matrices of it, and what else does."""
    products: list[_Product] = []
    others: list[fx.Node] = []
    waiting: list[tuple[fx.Node, tuple[fx.Node, ...], bool]] = [(weight, (), False)]
    for node, picks, transposed in waiting:  # which grows meanwhile
        for user in node.users:
            if swaps_last_dims(user):
                waiting.append((user, picks, not transposed))
            elif _is_pick(user):
                waiting.append((user, (*picks, user), transposed))
            elif (names := _operands(user)) and bound(user)[names[1]] is node:
                products.append(_Product(user, *names, picks, transposed))
            else:
                others.append(user)
    return products, others


def _is_pick(node: fx.Node) -> bool:
    """Whether a call takes one matrix of a stack, or some.

    NOTE [Why by a fixed number alone]: a view by a number that is read off a tensor begins at a new
    symbol each time that it is made.
    """
    if not is_call(node, aten.select.int, aten.index.Tensor):
        return False
    given: dict[str, Any] = bound(node)
    if len(shape_of(given["self"])) < 3:
        return False
    if is_call(node, aten.select.int):
        return given["dim"] == 0 and isinstance(given["index"], int)
    return len(given["indices"]) == 1


def _operands(node: fx.Node) -> tuple[str, str] | None:
    """The names of a product's rows and of its weight, unless it reads one for both."""
    if is_grouped_product(node):
        first, second, *_ = bound(node)
    elif is_call(node, *MATRIX_PRODUCTS):
        first, second = ("mat1", "mat2") if is_call(node, aten.addmm.default) else ("self", "mat2")
    elif is_call(node, aten.bmm.default):
        first, second = "self", "mat2"
    else:
        return None
    given = bound(node)
    alone = given.get("alpha", 1) == 1 and given[first] is not given[second]
    return (first, second) if alone else None


# ---------------------------------------------------------------------------- the split
def _check_alignment(product: fx.Node, delta: _LowRank) -> None:
    if is_call(product, aten._grouped_mm.default):
        entry = val_of(product).itemsize
        if delta.rank * entry % _ALIGNED:
            raise Refusal(
                f"grouped products take {val_of(product).dtype} rows of {_ALIGNED} bytes and their "
                f"multiples, and the adapter's rank is {delta.rank}",
                f"a rank that is a multiple of {_ALIGNED // entry}",
            )


def _split(product: _Product, site: AdaptedWeight) -> None:
    node, own, delta = product.node, _Matrix(site.own), site.delta
    if product.transposed:
        delta, own = delta.flipped, own.flipped
    with Builder(node.graph).before(node) as builder:
        rows = bound(node)[product.rows]
        narrow = _times(builder, product, rows, delta.left)
        if delta.scale != 1:
            narrow = builder.call(aten.mul.Tensor, narrow, delta.scale)
        added = _times(builder, product, narrow, delta.right)
        args, kwargs = with_arguments(node, **{product.weight: _read(builder, product, own)})
        total = builder.call(node.target, *args, **kwargs)
        total = builder.call(aten.add.Tensor, total, added)
    node.replace_all_uses_with(total)


def _times(builder: Builder, product: _Product, rows: fx.Node, matrix: _Matrix) -> fx.Node:
    """``rows @ matrix`` by the product's own op, without its bias."""
    node, weight = product.node, _read(builder, product, matrix)
    if is_call(node, *MATRIX_PRODUCTS):
        return builder.call(aten.mm.default, rows, weight)
    if is_grouped_product(node):
        weight = _dense(builder, weight)
    changed: dict[str, Any] = {product.rows: rows, product.weight: weight}
    if bound(node).get("bias") is not None:
        changed["bias"] = None
    args, kwargs = with_arguments(node, **changed)
    return builder.call(node.target, *args, **kwargs)


def _read(builder: Builder, product: _Product, matrix: _Matrix) -> fx.Node:
    """A matrix, or those of a stack, as the product reads the weight."""
    node = matrix.node
    for pick in product.picks:
        node = builder.call(pick.target, node, *pick.args[1:])
    return builder.call(aten.transpose.int, node, -2, -1) if matrix.transposed else node


def _dense(builder: Builder, weight: fx.Node) -> fx.Node:
    """A stack whose matrices are contiguous one after the other: PEFT has experts innermost."""
    stack, rows, columns = val_of(weight).stride()
    if min(rows, columns) == 1 and equal_sizes(stack, shape_of(weight)[1] * shape_of(weight)[2]):
        return weight
    return builder.call(aten.clone.default, weight, memory_format=torch.contiguous_format)
