"""What masks say, proven from how they are computed: each element as a formula of its indices.

    %q = unsqueeze(arange(T), 1)        element (q, k) is q
    %m = le(arange(T), %q)              element (q, k) is  k - q <= 0
So a mask made of aranges and comparisons is a conjunction of linear inequalities; one that reads
data (padding, packed positions) has no formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.core.graph import is_call, shape_of, tensor_val

aten = torch.ops.aten

_FAR = 2**62  # an end of a slice that means "to the end"


@dataclass(frozen=True, slots=True)
class Linear:
    """``const + sum(c * index[d])``; ``terms`` holds ``(d, c)`` with d counted from the right."""

    terms: tuple[tuple[int, int], ...] = ()
    const: int = 0

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """``self + factor * other``."""
        sums = dict(self.terms)
        for dim, coefficient in other.terms:
            sums[dim] = sums.get(dim, 0) + factor * coefficient
        terms = tuple(sorted((d, c) for d, c in sums.items() if c))
        return Linear(terms, self.const + factor * other.const)

    def where(self, keep: Callable[[int], int | None]) -> Linear:
        """Dims renamed by ``keep``; None drops a term (its index is always 0)."""
        renamed = ((keep(dim), c) for dim, c in self.terms)
        return Linear(tuple(sorted((d, c) for d, c in renamed if d is not None)), self.const)


#: A mask: True where every one of these is <= 0.
Conjunction = frozenset[Linear]
Formula = Linear | Conjunction

#: k - q <= 0 over the last two dims.
CAUSAL = Linear(((-2, -1), (-1, 1)))


class IndexAlgebra:
    """Formulas of graph values, computed on demand."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Formula | None] = {}

    def formula(self, node: fx.Node) -> Formula | None:
        """The formula of a value's elements; None when they depend on data."""
        stack = [node]
        while stack:
            top = stack[-1]
            todo = [n for n in top.all_input_nodes if n not in self._known]
            if top in self._known or not todo:
                stack.pop()
                self._known.setdefault(top, self._of(top))
            else:
                stack.extend(todo)
        return self._known[node]

    def _of(self, node: fx.Node) -> Formula | None:
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        return rule(self, node) if rule is not None and tensor_val(node) is not None else None

    def read(self, arg: Any) -> Formula | None:
        """An operand's formula, terms of its size-1 dims dropped (they broadcast)."""
        if isinstance(arg, int):  # a bool too
            return Linear(const=arg)
        if not isinstance(arg, fx.Node):
            return None
        found = self._known.get(arg)
        if found is None:
            return None
        sizes = shape_of(arg)
        return _each(found, lambda d: None if _is_one(sizes[d]) else d)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _each(formula: Formula, keep: Callable[[int], int | None]) -> Formula:
    if isinstance(formula, Linear):
        return formula.where(keep)
    return _conjunction(part.where(keep) for part in formula)


def _conjunction(parts: Any) -> Conjunction:
    """Without the parts that always hold."""
    return frozenset(part for part in parts if part.terms or part.const > 0)


# ---------------------------------------------------------------------------- rules
def _arange(_: IndexAlgebra, node: fx.Node) -> Formula | None:
    start = node.args[0] if node.target is aten.arange.start else 0
    dtype = node.meta["val"].dtype
    if not isinstance(start, int) or dtype.is_floating_point:
        return None
    return Linear(((-1, 1),), start)


def _ones(_: IndexAlgebra, node: fx.Node) -> Formula | None:
    filled = node.args[1] if node.target is aten.full.default else True
    return _conjunction(()) if node.meta["val"].dtype == torch.bool and filled is True else None


def _sum(algebra: IndexAlgebra, node: fx.Node) -> Formula | None:
    left, right = map(algebra.read, node.args[:2])
    if not isinstance(left, Linear) or not isinstance(right, Linear) or node.kwargs:
        return None
    if node.meta["val"].dtype.is_floating_point:
        return None
    return left.plus(right, 1 if node.target is aten.add.Tensor else -1)


def _compare(algebra: IndexAlgebra, node: fx.Node) -> Formula | None:
    left, right = map(algebra.read, node.args[:2])
    if not isinstance(left, Linear) or not isinstance(right, Linear):
        return None
    name = str(node.target).split(".")[1]
    difference = left.plus(right, -1) if name in ("le", "lt") else right.plus(left, -1)
    return _conjunction([difference.plus(Linear(const=int(name in ("lt", "gt"))))])


def _and(algebra: IndexAlgebra, node: fx.Node) -> Formula | None:
    left, right = map(algebra.read, node.args[:2])
    if isinstance(left, Linear) or isinstance(right, Linear) or left is None or right is None:
        return None
    return left | right


def _same(algebra: IndexAlgebra, node: fx.Node) -> Formula | None:
    found = algebra.read(node.args[0])
    dtype = node.meta["val"].dtype
    if isinstance(found, Linear):
        return None if dtype == torch.bool or dtype.is_floating_point else found
    return found if dtype == torch.bool else None


def _unsqueeze(algebra: IndexAlgebra, node: fx.Node) -> Formula | None:
    found = algebra.read(node.args[0])
    rank = node.meta["val"].dim()
    at: Any = node.args[1]
    at = at % rank - rank  # the new dim, from the right
    return None if found is None else _each(found, lambda d: d if d > at else d - 1)


def _slice(algebra: IndexAlgebra, node: fx.Node) -> Formula | None:
    found = algebra.read(node.args[0])
    start, end, step = (*node.args[2:], *(0, _FAR, 1)[len(node.args) - 2 :])
    if start in (0, None) and step == 1 and (end is None or isinstance(end, int) and end >= _FAR):
        return found
    return None


_RULES: dict[Any, Callable[[IndexAlgebra, fx.Node], Formula | None]] = (
    dict.fromkeys((aten.arange.default, aten.arange.start), _arange)
    | dict.fromkeys((aten.new_ones.default, aten.ones.default, aten.full.default), _ones)
    | dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), _sum)
    | {getattr(getattr(aten, op), kind): _compare for op in ("le", "lt", "ge", "gt")
       for kind in ("Tensor", "Scalar")}
    | dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), _and)
    | dict.fromkeys((aten._to_copy.default, aten.clone.default, aten.alias.default,
                     aten.detach.default, aten.expand.default), _same)
    | {aten.unsqueeze.default: _unsqueeze, aten.slice.Tensor: _slice}
)  # fmt: skip


def data_of(node: fx.Node) -> fx.Node | None:
    """The first input of the graph that a value depends on, sizes aside."""
    seen, stack = {node}, [node]
    while stack:
        top = stack.pop()
        if top.op in ("placeholder", "get_attr") and tensor_val(top) is not None:
            return top
        for arg in top.all_input_nodes:
            if arg not in seen and not is_call(arg, aten.sym_size.int):
                seen.add(arg)
                stack.append(arg)
    return None
