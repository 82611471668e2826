"""Undo loops over the batch: one op for all tokens instead of one per sequence or chunk.

    stack([logsumexp(select(x, 0, 0)), logsumexp(select(x, 0, 1)), ...])
    cat([logsumexp(slice(x, 0, 0, 7)), logsumexp(slice(x, 0, 7, 14)), ...])
    slice_scatter(slice_scatter(buffer, logsumexp(slice(x, 0, 0, 7)), 0, 0, 7), ...)
become
    logsumexp(x)

Code that walks ``for row in logits``, or chunks of them (to bound its eager memory), is unrolled by
tracing. The results are put together again, so the same ops on the whole tensor compute the same
values; a loss head then is one site, projected once, instead of one per sequence or chunk.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows import compute, layout
from fxrl.analysis.rows.analysis import RULES
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    COPIES,
    Size,
    ancestors,
    bound,
    draws_random,
    equal_sizes,
    is_call,
    is_pointwise,
    is_same,
    is_tensor,
    shape_of,
    with_arguments,
)
from fxrl.ir.graph_pass import Applied, Normalisation, PassDoc, Site
from fxrl.ir.remark import Refusal

aten = torch.ops.aten

_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
#: Kinds of ops, to the row rules, that act within one sequence, along ``dim``.
_WITHIN = (
    *(compute.reduction, compute.whole_row, layout.gather, layout.scatter),
    *(layout.unsqueeze, layout.select, layout.slice_),
)
_ALONG_A_DIM = {aten.squeeze.dim, *(op for op, kind in RULES.items() if kind in _WITHIN)}


@dataclass(frozen=True, slots=True)
class Loop(Site):
    """What the rounds of a loop gave, stacked (dim is None) or put one after the other."""

    parts: tuple[fx.Node, ...]
    dim: int | None


@dataclass(frozen=True)
class RebatchLoops(Normalisation[Loop]):
    """Replace per-sequence and per-chunk results by the batched computation, where it is one."""

    name = "rebatch-loops"
    doc = PassDoc(
        "`torch.stack([f(row) for row in logits])`, and chunks in `cat` or a buffer, unrolled",
        "an op per sequence or chunk; the loss head is one site, projected once",
        "nothing",
        "the sequences are computed differently, or by an op that knows no batch",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Loop]:
        for node in gm.graph.nodes:
            if is_call(node, aten.stack.default):
                parts = tuple(bound(node)["tensors"])
                if bound(node)["dim"] == 0 and _is_loop(parts):
                    yield Loop(node, 0, parts, None)
            elif is_call(node, aten.cat.default, aten.slice_scatter.default):
                given = bound(node)
                dim = given["dim"] % len(shape_of(node))
                parts = _written(node, dim) if "src" in given else tuple(given["tensors"])
                if len(parts) > 1 and all(_chunk(parts[at], dim) == at for at in (0, 1)):
                    yield Loop(node, 0, parts, dim)

    def respell(self, gm: fx.GraphModule, site: Loop) -> Applied:
        with gm.graph.inserting_before(site.anchor):
            batched = _Loop(gm.graph, len(site.parts), site.dim).batch(site.parts)
        site.anchor.replace_all_uses_with(batched)
        what = "sequences" if site.dim is None else "chunks"
        return Applied(f"a loop over {len(site.parts)} {what} runs on all at once")


def _is_loop(parts: Any) -> bool:
    """Whether the first two values come from the first two slices of one tensor."""
    if len(parts) < 2:
        return False
    firsts, seconds = (list(_sources(part, at)) for at, part in enumerate(parts[:2]))
    return any(is_same(one, other) for one in firsts for other in seconds)


def _sources(node: fx.Node, at: int) -> Iterator[Any]:
    """The tensors whose slice number ``at`` the value is computed from."""
    for made in ancestors([node]):
        if is_call(made, aten.select.int) and made.args[1:] == (0, at):
            yield made.args[0]


def _chunk(node: Any, dim: int) -> int | None:
    """0 if a value is computed from the first chunk along ``dim``, 1 if from a later one."""
    while isinstance(node, fx.Node) and node.args:
        if is_call(node, aten.slice.Tensor) and node.args[1:2] == (dim,):
            return int(bound(node)["start"] not in (0, None))
        if is_call(node, operator.getitem) and is_call(node.args[0], *_SPLITS):
            return min(int(node.args[1]), 1)  # type: ignore[arg-type]
        node = node.args[0]
    return None


def _written(node: fx.Node, dim: int) -> tuple[fx.Node, ...]:
    """What is written slice by slice, in order, if that fills a whole buffer; else nothing."""
    total, writes = shape_of(node)[dim], list[dict[str, Any]]()
    while is_call(node, aten.slice_scatter.default) and bound(node)["step"] == 1:
        writes.insert(0, bound(node))
        node = writes[0]["self"]
    parts = tuple(write["src"] for write in writes)
    here = all(write["dim"] % len(shape_of(node)) == dim for write in writes)
    starts = [write["start"] or 0 for write in writes]
    return parts if here and _follow(starts, parts, dim, total) else ()


def _follow(starts: list[Any], parts: Sequence[fx.Node], dim: int, total: Size) -> bool:
    """Whether parts that begin there along ``dim`` are all of ``total`` entries, in order."""
    at: Size = 0
    for start, part in zip(starts, parts, strict=False):
        if not equal_sizes(start.meta["val"] if isinstance(start, fx.Node) else start, at):
            return False
        at = at + shape_of(part)[dim]
    return len(starts) == len(parts) and equal_sizes(at, total)


class _Loop:
    def __init__(self, graph: fx.Graph, count: int, dim: int | None) -> None:
        self.graph = graph
        self.count = count
        self.dim = dim
        self.done: dict[tuple[fx.Node, ...], fx.Node] = {}

    def batch(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """The value whose slices along the loop's dim (None: a new first one) are ``nodes``."""
        if nodes not in self.done:
            source = self._selected(nodes) if self.dim is None else self._chunked(nodes, self.dim)
            self.done[nodes] = self._repeat(nodes) if source is None else source
        return self.done[nodes]

    def _selected(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        first = nodes[0]
        if not is_call(first, aten.select.int) or first.args[1] != 0:
            return None
        source: Any = first.args[0]
        for index, node in enumerate(nodes):
            if not is_call(node, aten.select.int) or node.args[1:] != (0, index):
                return None
            if not is_same(node.args[0], source):  # a write leaves each reader a view of its own
                return None
        return source if equal_sizes(shape_of(source)[0], self.count) else None

    def _chunked(self, nodes: tuple[fx.Node, ...], dim: int) -> fx.Node | None:
        first = nodes[0]
        if is_call(first, operator.getitem) and is_call(first.args[0], *_SPLITS):
            given = bound(first.args[0])
            whole = len(first.args[0].meta["val"]) == self.count
            picks = [node.args == (first.args[0], at) for at, node in enumerate(nodes)]
            here = given["dim"] % len(shape_of(given["self"])) == dim
            return given["self"] if whole and here and all(picks) else None
        if not is_call(first, aten.slice.Tensor) or bound(first)["dim"] != dim:
            return None
        source: Any = first.args[0]
        slices = [bound(node) for node in nodes if is_call(node, aten.slice.Tensor)]
        where = ((one["self"], one["dim"], one["step"]) for one in slices)
        alike = all(is_same(place, (source, dim, 1)) for place in where)
        starts = [one["start"] or 0 for one in slices]
        if not alike or not _follow(starts, nodes, dim, shape_of(source)[dim]):
            raise Refusal("the chunks are not all of one tensor, one after another", at=first)
        return source  # type: ignore[no-any-return]

    def _repeat(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        first = nodes[0]
        if any(node.op != "call_function" or node.target != first.target for node in nodes):
            raise Refusal("the sequences are not computed by the same ops", at=first)
        if first.target is operator.getitem and len({node.args[1] for node in nodes}) == 1:
            several: Any = tuple(node.args[0] for node in nodes)
            return Builder(self.graph, first).call(
                operator.getitem, self.batch(several), first.args[1]
            )
        if not _known(first):
            raise Refusal(f"{first.target} is not known to act within one sequence", at=first)
        given = [bound(node) for node in nodes]
        if self.dim is not None and all(_rank(value) <= self.dim for value in given[0].values()):
            raise Refusal("a chunk's values are reduced over its rows", at=first)
        if self.dim is not None and not all(_aligned(one.values(), self.dim) for one in given):
            raise Refusal("a chunk's values meet fewer rows of another tensor", at=first)
        changed = {
            name: self._argument(first, name, [arguments[name] for arguments in given])
            for name in given[0]
        }
        kept = {name: value for name, value in changed.items() if value is not given[0][name]}
        args, kwargs = with_arguments(first, **kept)
        return Builder(self.graph, first).call(first.target, *args, **kwargs)

    def _argument(self, node: fx.Node, name: str, given: list[Any]) -> Any:
        operand: Any = node.args[0]
        rank = len(shape_of(node if is_tensor(node) else operand))
        if is_tensor(given[0]):
            same = all(item is given[0] for item in given)
            free = rank if self.dim is None else rank - self.dim - 1  # dims behind that of the loop
            if same and given[0] is not node.args[0] and len(shape_of(given[0])) <= free:
                return given[0]  # read alike by every sequence: broadcasting stays right-aligned
            width = len(shape_of(given[0]))
            if node.target not in _ALONG_A_DIM and width != rank:
                raise Refusal("a sequence's values are broadcast against others", at=node)
            return self.batch(tuple(given))
        if any(item != given[0] for item in given):
            raise Refusal("the sequences are computed with different arguments", at=node)
        if name == "dim" and node.target in _ALONG_A_DIM:
            return self._from_the_end(node, given[0])
        return given[0]

    def _from_the_end(self, node: fx.Node, dims: Any) -> Any:
        """Dims counted from the end, so that a new first dim does not shift them."""
        if dims is None or dims == []:
            raise Refusal("a sequence's values are all reduced at once", at=node)
        several, source = isinstance(dims, (list, tuple)), bound(node)["self"]
        rank = len(shape_of(source)) + (node.target is aten.unsqueeze.default)
        counted = [int(d) % rank - rank for d in (dims if several else [dims])]
        if self.dim is not None and min(counted) <= self.dim - rank:
            raise Refusal("what is computed runs along the chunks", at=node)
        return counted if several else counted[0]


def _rank(value: Any) -> int:
    return len(shape_of(value)) if is_tensor(value) else 0


def _aligned(arguments: Iterable[Any], dim: int) -> bool:
    """Whether the operands of the highest rank all have the same size along ``dim``."""
    shapes = [shape_of(value) for value in arguments if is_tensor(value)]
    return len({str(s[dim]) for s in shapes if len(s) == max(map(len, shapes))}) <= 1


def _known(node: fx.Node) -> bool:
    if node.target in _ALONG_A_DIM or node.target in COPIES:
        return True
    return is_pointwise(node) and not draws_random(node)
