"""What a body's graph runs as once it is compiled: kernels in order, and the buffers between them.

    products, attention, other regions      a kernel each; what they read and return are buffers
    elementwise ops, reductions, copies     run inside the kernel of whoever reads them, and are
                                            buffers only where somebody else than such a kernel
                                            reads them: a product, the graph's output

A model of what Inductor does, made from the graph alone: so a plan needs neither GPU nor compiler.
NOTE [Why a model]: reading the buffers off the compiled body would be exact, but compiling every
body that a plan may choose takes minutes, and a GPU. Plans made with it are checked
against measured steps (tests/planner/test_against_measurements.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from fxrl.ir.graph import (
    PRODUCTS,
    SHARDED_MM,
    SHARDED_ROWS,
    as_node,
    base_of,
    bound,
    is_call,
    is_loss_head,
    is_view,
    reached,
    readers_of,
    shape_of,
    tensor_val,
)
from fxrl.ops.piecewise_head import PART

aten = torch.ops.aten
#: A size, or a product of sizes, as an expression: comparing it adds no guard to a graph.
Volume = Any
#: What a size or a volume is, as a number.
Measure = Callable[[Any], int]

#: Ops of ATen that Inductor calls as they are. Ops of other libraries are called likewise.
_CALLED = (
    "scaled_dot_product", "grouped_mm", "sort", "topk", "convolution", "dense_backward", "cdist",
    "_fft", "histc", "_index_put_impl",
)  # fmt: skip
_REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "var_mean", "prod", "any", "all", "argmax")
#: A value with several readers that itself reads more than this is computed once and kept.
_MANY_READS = 4


@dataclass(frozen=True)
class Kernel:
    """One launch."""

    # The buffers that it writes; those that no other kernel reads are in registers.
    makes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]  # the buffers and inputs that it reads
    # The values that it computes, each with the buffers and inputs that it takes.
    values: tuple[tuple[fx.Node, frozenset[fx.Node]], ...] = ()
    calls: fx.Node | None = None  # the op that it is, where it is no generated kernel

    @cached_property
    def moved(self) -> list[tuple[Volume, int]]:
        """Of each tensor that it writes or reads the number of elements and their bytes; kept, as
        a search for sizes asks for the bytes at each of them."""
        values = (value for node in (*self.makes, *self.reads) for value in tensors(node))
        return [(volume(value), value.element_size()) for value in values]


def kernels(gm: fx.GraphModule) -> list[Kernel]:
    """The kernels of a graph, in the order in which they run."""
    return _Schedule(gm).kernels()


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node returns."""
    val = node.meta.get("val")
    parts = val if isinstance(val, (list, tuple)) else [val]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def volume(tensor: torch.Tensor) -> Volume:
    """The number of elements of a tensor."""
    return prod(size if isinstance(size, int) else size.node.expr for size in tensor.shape)


def is_backward(call: fx.Node) -> bool:
    """Whether an attention kernel is a backward."""
    return any(name in str(call.target) for name in ("backward", "vjp"))


class SharedWeight(NamedTuple):
    """A weight of which each rank has a part (``fxrl.ops.sharded``)."""

    part: fx.Node
    rows: int  # of the weight
    dtype: torch.dtype  # that they have when they are read
    format: str  # of values in 8 or 4 bits, else ""

    def row_bytes(self, measure: Measure) -> int:
        """Bytes of a row as it is stored."""
        return measure(shape_of(self.part)[1])


def shared_weight(call: fx.Node) -> SharedWeight | None:
    """The weight that a call reads, where each rank has a part of one."""
    if str(call.target) in (SHARDED_MM, SHARDED_ROWS):
        given: dict[str, Any] = bound(call)
        return SharedWeight(given["weight"][0], given["outputs"], given["dtype"], given["format"])
    head: dict[str, Any] = bound(call) if is_loss_head(call) else {}
    kind, _, format = head.get("format", "").partition(":")
    if kind != PART:
        return None
    return SharedWeight(head["weight"], head["vocab"], head["dtype"], format)


def _holds_tensors(node: fx.Node) -> bool:
    return bool(tensors(node))


def owner(node: fx.Node) -> fx.Node:
    """The node that owns the memory of a value."""
    return base_of(node, _looks)


def result(node: fx.Node) -> fx.Node:
    """Like ``owner``, but of a call with several results the element, not the call."""
    return base_of(node, lambda node: _looks(node) and not is_call(node, operator.getitem))


def _looks(node: fx.Node) -> bool:
    return is_view(node) or is_call(node, operator.getitem) or _copies_nothing(node)


def _copies_nothing(node: fx.Node) -> bool:
    """Whether a copy is laid out as what it copies: it is left out then."""
    if not is_call(node, aten.clone.default):
        return False
    source, copy = tensor_val(node.args[0]), tensor_val(node)
    return source is not None and copy is not None and source.stride() == copy.stride()


def _is_called(node: fx.Node) -> bool:
    namespace, _, name = str(node.target).partition(".")
    return (
        namespace not in ("aten", "prims")
        or node.target in PRODUCTS
        or any(part in name for part in _CALLED)
    )


def _is_reduction(node: fx.Node) -> bool:
    return str(node.target).split(".")[1] in _REDUCTIONS


class _Schedule:
    def __init__(self, gm: fx.GraphModule) -> None:
        self._given = set(map(owner, gm.graph.output_node().all_input_nodes))
        self._nodes = [
            node
            for node in gm.graph.nodes
            if node.op == "call_function" and not _looks(node) and _holds_tensors(node)
        ]
        self._called = {node for node in self._nodes if _is_called(node)}
        self._reads: dict[fx.Node, frozenset[fx.Node]] = {}
        self._buffers = self._find_buffers()

    def kernels(self) -> list[Kernel]:
        made = [node for node in self._nodes if node in self._buffers]
        return [self._kernel(group) for group in self._ordered(self._group(made))]

    # -- which values are buffers
    def _find_buffers(self) -> set[fx.Node]:
        buffers = set(self._called)
        for node in self._nodes:
            readers = list(readers_of(node, _looks))
            stays = node in self._given or _is_reduction(node)
            if stays or not self._called.isdisjoint(readers):
                buffers.add(node)
            found: set[fx.Node] = set()
            for arg in filter(_holds_tensors, map(owner, node.all_input_nodes)):
                found |= {arg} if arg.op != "call_function" or arg in buffers else self._reads[arg]
            self._reads[node] = frozenset(found)
            if len(readers) > 1 and len(found) > _MANY_READS:
                buffers.add(node)
        return buffers

    # -- which of them one kernel writes
    def _group(self, made: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """The buffers by the kernel that writes them: each joins the last one that it can, and the
        others whose values it reads come along."""
        groups: list[list[fx.Node]] = []
        for node in made:
            for group in reversed(groups) if node not in self._called else ():
                if self._together(group, node) and not self._behind([node], group, groups):
                    group.append(node)
                    self._take_along(group, node, groups)
                    break
            else:
                groups.append([node])
        return groups

    def _take_along(self, group: list[fx.Node], node: fx.Node, groups: list[list[fx.Node]]) -> None:
        """Let those run in the kernel of a value, later than they could, that it reads too."""
        read = (other for other in groups if not self._reads[node].isdisjoint(other))
        for other in [other for other in read if other is not group]:
            between = self._behind(group, other, groups) or self._behind(other, group, groups)
            if self._together(other, node) and not between:
                group[:0] = other
                groups.remove(other)

    def _together(self, group: Sequence[fx.Node], node: fx.Node) -> bool:
        reads = frozenset().union(*(self._reads[before] for before in group))
        shared = not self._reads[node].isdisjoint([*group, *reads])
        return (
            shared
            and group[0] not in self._called
            and self._iterates(node) == self._iterates(group[0])
        )

    def _behind(
        self,
        values: Sequence[fx.Node],
        group: Sequence[fx.Node],
        groups: Sequence[Sequence[fx.Node]],
    ) -> bool:
        """Whether values need the group through something else, so that they cannot join."""
        group_of = {n: g for g in groups for n in g}

        def needs(value: fx.Node) -> list[fx.Node]:
            return [read for made in group_of.get(value, ()) for read in self._reads[made]]

        read = frozenset[fx.Node]().union(*(self._reads[value] for value in values))
        ahead = reached(read.difference(group, values), needs)
        return not {*group}.isdisjoint(ahead)

    def _iterates(self, node: fx.Node) -> Volume:
        """Elements that a kernel goes over for a value: all that a reduction reads."""
        return volume(tensors(as_node(node.args[0]) if _is_reduction(node) else node)[0])

    def _ordered(self, groups: Sequence[Sequence[fx.Node]]) -> list[Sequence[fx.Node]]:
        """The groups in an order in which each comes behind all that it reads, else as early as its
        first value."""
        group_of = {node: place for place, group in enumerate(groups) for node in group}
        done: dict[int, None] = {}

        def put(place: int) -> None:
            if place in done:
                return
            reads = {group_of[r] for n in groups[place] for r in self._reads[n] if r in group_of}
            for before in sorted(reads - {place}):
                put(before)
            done[place] = None

        for place in range(len(groups)):
            put(place)
        return [groups[place] for place in done]

    def _kernel(self, group: Sequence[fx.Node]) -> Kernel:
        inside = set(group)
        reads = {r: None for node in group for r in sorted(self._reads[node], key=str)}
        outside = tuple(node for node in group if self._leaves(node, inside))
        calls = group[0] if group[0] in self._called else None
        values = tuple((node, self._reads[node]) for node in group)
        return Kernel(outside, tuple(r for r in reads if r not in inside), values, calls)

    def _leaves(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether anybody outside of its kernel reads a value."""
        return node in self._given or any(
            node in reads and reader in self._buffers and reader not in inside
            for reader, reads in self._reads.items()
        )
