"""Gather the gradient of permuted rows by the inverse permutation. The algebra is exact.

    %o = sort(%x)[1]                                    a permutation; or the inverse of one
    %g = index_put(zeros, [%o], %v, accumulate)         the gradient of x[o]
becomes
    %g = index(%v, [inverse(%o)])

    %g = index_put(zeros, [%o // k], %v, accumulate)    the gradient of x[o // k]
becomes
    %g = sum(view(index(%v, [inverse(%o)]), [n, k, ...]), 1)

A mixture of experts sorts its tokens by expert (a token once for each expert that it goes to) and
puts them back. Autograd does not know that such an index names each row once: it fills a tensor
with zeros, sorts the index again and adds. That the index is the result of a sort proves it. The
kernel that needs the rows then reads them itself, and those of one token are summed in a fixed
order, in fp32.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fxrl.analysis.constants import filled_with
from fxrl.ir.build import Builder
from fxrl.ir.graph import COPIES, as_node, bound, equal_shapes, is_call, is_equal, shape_of, val_of
from fxrl.ir.graph_pass import Applied, Normalisation, Site, Stage
from fxrl.ir.sizes import SizeTable

aten, prims = torch.ops.aten, torch.ops.prims

_PUTS = (
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten._index_put_impl.default,  # ``compile.bodies.trace`` has it in bf16
)


@dataclass(frozen=True, slots=True)
class PermutedRows(Site):
    """Rows that are added at the places ``order``, or at ``order // times``."""

    order: fx.Node  # the permutation
    times: int  # how often each row is named


@dataclass(frozen=True)
class GatherByInverse(Normalisation[PermutedRows]):
    """Rows scattered by a permutation as rows gathered by its inverse."""

    name = "gather-by-inverse"
    stage = Stage.CLEAN

    def match(self, gm: fx.GraphModule) -> Iterator[PermutedRows]:
        for target in _PUTS:
            for put in gm.graph.find_nodes(op="call_function", target=target):
                if (found := _permuted(put)) is not None:
                    yield PermutedRows(put, 0, *found)

    def respell(self, gm: fx.GraphModule, site: PermutedRows) -> Applied:
        put = site.anchor
        with Builder(gm.graph).before(put) as build:
            rows = build.call(
                aten.index.Tensor, as_node(put.args[2]), [_inverse(build, site.order)]
            )
            if site.times > 1:
                sizes = SizeTable(gm.graph)
                one, *rest = (sizes.arg(size, at=put) for size in shape_of(put))
                rows = build.call(aten.view.default, rows, [one, site.times, *rest])
                rows = build.call(aten.sum.dim_IntList, rows, [1])
        put.replace_all_uses_with(rows)
        return Applied("rows that a permutation took are taken back by its inverse")


def _permuted(put: fx.Node) -> tuple[fx.Node, int] | None:
    """The permutation by which a call adds rows to zeros, and how often it names each."""
    zeros, places, rows, *accumulate = put.args
    if accumulate[:1] != [True] or filled_with(zeros) != 0 or len(cast(list[Any], places)) != 1:
        return None
    order, times = _read(as_node(cast(list[Any], places)[0])), 1
    if is_call(order, aten.div.Tensor_mode, aten.floor_divide.default):
        given: dict[str, Any] = bound(order)
        if given.get("rounding_mode", "floor") != "floor" or not isinstance(given["other"], int):
            return None
        order, times = _read(given["self"]), given["other"]
    if times < 1 or not _is_permutation(order):
        return None
    one, *rest = shape_of(put)
    each = [times * one, *rest]  # of the rows: nothing is broadcast
    whole = is_equal(shape_of(order)[0], each[0])
    return (order, times) if whole and equal_shapes(shape_of(as_node(rows)), each) else None


def _read(index: fx.Node) -> fx.Node:
    """The value whose numbers an index repeats in the same order."""
    while is_call(index, *_KEEP_NUMBERS) and _is_index(index):
        if not _is_index(source := as_node(index.args[0])):
            break
        index = source
    return index


_KEEP_NUMBERS = (
    *(*COPIES, aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    prims.convert_element_type.default,
)


def _is_index(node: fx.Node) -> bool:
    """Whether its entries name rows: uint8 is a mask, and fewer bits hold no number of a row."""
    return val_of(node).dim() == 1 and val_of(node).dtype in (torch.int32, torch.int64)


# ---------------------------------------------------------------------------- permutations
def _is_permutation(order: fx.Node) -> bool:
    """Whether an index is known to name each row once."""
    made = _sorted(order) is not None or _inverted(order) is not None
    return _is_index(order) and (made or is_call(order, aten.randperm.default))


def _sorted(order: fx.Node) -> fx.Node | None:
    """The sort whose indices ``order`` is."""
    sort = order.args[0] if is_call(order, operator.getitem) and order.args[1] == 1 else None
    return as_node(sort) if is_call(sort, aten.sort.default, aten.sort.stable) else None


def _inverted(order: fx.Node) -> fx.Node | None:
    """The permutation whose inverse ``order`` is, made by ``order[other] = arange(n)`` or by
    sorting it."""
    if (sort := _sorted(order)) is not None:
        given = bound(sort)
        other = _read(given["self"])
        return other if not given["descending"] and _is_permutation(other) else None
    if not is_call(order, aten.index_put.default, aten.scatter.src) or not _is_index(order):
        return None
    given = bound(order)
    (other, *more), numbers = (
        (given["indices"], given["values"])
        if "indices" in given
        else ([given["index"]], given["src"])
    )
    if more or given.get("accumulate"):
        return None
    other = _read(other)
    whole = all(equal_shapes(shape_of(order), shape_of(one)) for one in (other, numbers))
    return other if whole and _counts(numbers) and _is_permutation(other) else None


def _counts(numbers: fx.Node) -> bool:
    """Whether ``numbers`` are 0, 1, 2, ..."""
    given = _read(numbers)
    if is_call(given, aten.arange.default):
        return True
    ranges = (prims.iota.default, aten.arange.start, aten.arange.start_step)
    named = bound(given) if is_call(given, *ranges) else {"start": None}
    return named["start"] == 0 and named.get("step", 1) == 1


def _inverse(build: Builder, order: fx.Node) -> fx.Node:
    """The inverse of a permutation: the one that the graph has, if it has one."""
    if (other := _inverted(order)) is not None:
        return other
    for user in order.users:
        for made in (user, *user.users):
            if _inverted(made) is order:
                return made
    val = val_of(order)
    kind = {"dtype": torch.int64, "device": val.device, "requires_grad": False}
    size = SizeTable(build.graph).arg(val.shape[0], at=order)
    numbers = build.call(prims.iota.default, size, start=0, step=1, **kind)
    return build.call(aten.scatter.src, numbers, 0, order, numbers)
