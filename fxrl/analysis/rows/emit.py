"""From a row program to graph code: the body's graph, the rows its inputs need, the results.

%rows   = reshape(slice(%hidden, ...), [-1, H])       outside, once, small
%out    = region([%rows, %weight, %targets, ...])     the body, any number of rows
%logp   = reshape(%out, [B, T])                       outside, the user's own layout
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import GivenGradient, Leaf, RowExpr, RowStep, RowValue, walk
from fxrl.ir.bodies import WITH_GRADIENT
from fxrl.ir.build import Builder
from fxrl.ir.graph import Size, equal_shapes, has_hint, hint, is_call, shape_of, val_of
from fxrl.ir.remark import Refusal
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten

#: The leaves of a program and the graph value that feeds each.
Feeds = list[tuple[RowExpr, Leaf, fx.Node]]


def body_graph(roots: list[RowExpr], inputs: list[RowExpr]) -> fx.GraphModule:
    """The expressions as a graph module of the given leaves; returns a tuple."""
    graph = fx.Graph()
    root: dict[str, Any] = {}
    env: dict[int, fx.Node] = {}
    for index, leaf in enumerate(inputs):
        assert leaf.leaf is not None
        env[id(leaf)] = graph.placeholder(f"rows_{index}" if leaf.leaf.tiled else f"shared_{index}")
    for expr in walk(roots):
        if id(expr) not in env:
            args = tuple(as_argument(arg, env) for arg in expr.args)
            kwargs = {name: as_argument(value, env) for name, value in expr.kwargs}
            if isinstance(given := expr.target, GivenGradient):
                root[name := f"backward_{len(root)}"] = given.backward
                counts = given.inputs, given.values
                place = graph.get_attr(name)
                env[id(expr)] = graph.call_function(WITH_GRADIENT, (place, *counts, *args))
            else:
                env[id(expr)] = graph.call_function(expr.target, args, kwargs)
    graph.output(tuple(env[id(expr)] for expr in roots))
    graph.lint()
    return fx.GraphModule(root, graph)


def as_argument(arg: Any, env: Mapping[int, fx.Node]) -> Any:
    """A call's argument with the graph values of its expressions."""
    if isinstance(arg, RowExpr):
        return env[id(arg)]
    return [as_argument(item, env) for item in arg] if isinstance(arg, tuple) else arg


class RowEmitter:
    """Writes what surrounds a row program into a graph.

    All calls go to the graph's insertion point; sort the graph afterwards.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.builder = Builder(graph)
        self.sizes = SizeTable(graph)
        self._made: dict[Any, fx.Node] = {}
        self._counted: dict[str, tuple[fx.Node, int]] = {}

    def call(self, target: Any, *args: Any) -> fx.Node:
        """A call, made once; asked for again, the same node is returned."""
        key = (target, str(args), *(id(a) for a in args if isinstance(a, fx.Node)))
        if key not in self._made:
            self._made[key] = self.builder.call(target, *args)
        return self._made[key]

    # -- the way in
    def inputs(self, roots: list[RowExpr]) -> Feeds:
        """Every leaf under ``roots`` with the graph value that feeds it: tiled ones first."""
        found = [(expr, expr.leaf) for expr in walk(roots) if expr.leaf is not None]
        found.sort(key=lambda pair: not pair[1].tiled)
        return [(expr, leaf, self.feed(leaf)) for expr, leaf in found]

    def feed(self, leaf: Leaf) -> fx.Node:
        """The graph value of a leaf: itself when shared, ``[N, locals...]`` when tiled."""
        if leaf.token_sizes is None:
            return leaf.node
        node, tokens = leaf.node, leaf.token_sizes
        for target, args in leaf.prepare:
            node = self.call(target, node, *map(self._sized, args))
        node, tokens = self._run(node, tokens, leaf.steps)
        if len(tokens) == 1 and equal_shapes(shape_of(node)[1:], leaf.local_sizes):
            return node
        return self.call(aten.reshape.default, node, [-1, *map(self._sized, leaf.local_sizes)])

    def _run(
        self, node: fx.Node, tokens: tuple[Any, ...], steps: Iterable[RowStep]
    ) -> tuple[fx.Node, tuple[Any, ...]]:
        """The rows that steps select, and the sizes of their token dims."""
        for step in steps:
            node = self._step(self._regroup(node, tokens, step.sizes), step)
            tokens = step.result
        return node, tokens

    def _sized(self, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [self._sized(item) for item in arg]
        return self.sizes.arg(arg) if isinstance(arg, torch.SymInt) else arg

    def _regroup(self, node: fx.Node, old: tuple[Any, ...], new: tuple[Any, ...]) -> fx.Node:
        """Reshape the token dims; the rows and their order stay."""
        have = shape_of(node)
        if equal_shapes(have[: len(new)], new) and equal_shapes(new, old):
            return node
        rest = have[_token_rank(have, old) :]
        return self.call(aten.reshape.default, node, self.shape(new, rest))

    def shape(self, tokens: tuple[Any, ...], rest: Iterable[Any]) -> list[Any]:
        """A reshape target; one unknown token size may be -1."""
        args = [self.sizes.find(size) for size in tokens]
        missing = args.count(None)
        if missing > 1:
            raise Refusal("two token sizes are not available as graph values")
        if missing == 0 and len(args) == 1:
            args = [-1]
        return [-1 if arg is None else arg for arg in args] + list(map(self._sized, rest))

    def _step(self, node: fx.Node, step: RowStep) -> fx.Node:
        if step.kind == "split":
            target, dim, sizes, index = step.args
            return self.call(operator.getitem, self.call(target, node, sizes, dim), index)
        if step.kind == "permute":
            order = [*step.args, *range(len(step.args), len(shape_of(node)))]
            return self.call(aten.permute.default, node, order)
        if step.kind == "index":
            return self._index(node, step)
        if step.kind in ("zeros", "place", "write"):
            return self._among_zeros(node, step)
        if step.kind in ("cat", "stack"):
            return self._joined(node, step)
        target = {"slice": aten.slice.Tensor, "select": aten.select.int}[step.kind]
        args = self._sized(step.args)
        if step.kind == "slice" and not has_hint(*step.result):
            return self._counted_rows(target, (node, *args), step)
        return self.call(target, node, *args)

    def _among_zeros(self, node: fx.Node, step: RowStep) -> fx.Node:
        """Rows of zeros, and the given ones at their places among them."""
        val, rest = val_of(node), shape_of(node)[len(step.sizes) :]
        sizes, kind = self._sized([*step.result, *rest]), {"dtype": val.dtype, "device": val.device}
        zeros = self.builder.call(aten.full.default, sizes, 0, **kind)
        if step.kind == "place":
            return self.call(aten.index_put.default, zeros, list(step.args), node)
        if step.kind == "zeros":
            return zeros
        dim, bounds, written = step.args
        if not equal_shapes(written, step.sizes):  # one row may be written to several places
            place = self._made_call(aten.slice.Tensor, (zeros, dim, *bounds), (*written, *rest))
            count = self.builder.call(aten.sym_size.int, place, dim)
            counts = [count if d == dim else -1 for d in range(len(shape_of(node)))]
            node = self._made_call(aten.expand.default, (node, counts), (*written, *rest))
        return self._made_call(
            aten.slice_scatter.default, (zeros, node, dim, *bounds), (*step.result, *rest)
        )

    def _joined(self, node: fx.Node, step: RowStep) -> fx.Node:
        dim, parts = step.args
        feeds = [
            self._regroup(*self._run(node, step.sizes, chain), sizes) for chain, sizes in parts
        ]
        target = {"cat": aten.cat.default, "stack": aten.stack.default}[step.kind]
        return self.call(target, feeds, dim)

    def _index(self, node: fx.Node, step: RowStep) -> fx.Node:
        """Rows by positions, or by a mask."""
        masks = [at for at in step.args if at is not None and val_of(at).dtype == torch.bool]
        if not masks:
            return self.call(aten.index.Tensor, node, list(step.args))
        return self._counted_rows(aten.index.Tensor, (node, list(step.args)), step)

    def _counted_rows(self, target: Any, args: tuple[Any, ...], step: RowStep) -> fx.Node:
        """A call that selects as many rows as a tensor says; the graph has a symbol for them."""
        rest = shape_of(args[0])[len(step.sizes) :]
        made = self._made_call(target, args, (*step.result, *rest))
        self._counted |= {str(size): (made, dim) for dim, size in enumerate(step.result)}
        return made

    def _made_call(self, target: Any, args: tuple[Any, ...], shape: tuple[Any, ...]) -> fx.Node:
        """A call for whose data-dependent sizes the graph has symbols already."""
        made = self.builder.graph.call_function(target, args)
        made.meta["val"] = val_of(args[0]).new_empty(shape)
        return made

    def count_rows(self, wide: Iterable[fx.Node]) -> None:
        """Read sizes from the graph's inputs, and counts of selected rows from what feeds the
        program, instead of from ``wide`` values: reading a size would keep all logits alive."""
        users = dict.fromkeys(user for value in wide for user in value.users)
        for reader in [user for user in users if is_call(user, aten.sym_size.int)]:
            size = reader.meta["val"]
            if str(size) in self._counted:
                reader.replace_all_uses_with(
                    self.call(aten.sym_size.int, *self._counted[str(size)])
                )
            elif isinstance(known := self.sizes.of_inputs(size), fx.Node):
                reader.replace_all_uses_with(known)

    # -- the way out
    def check_restorable(self, values: Iterable[RowValue]) -> None:
        """Refuse now what ``restore`` would refuse when the graph is half rewritten."""
        for value in values:
            if value.token_sizes:
                self.shape(value.token_sizes, [])

    def restore(self, rows: fx.Node, value: RowValue) -> fx.Node:
        """Rows back in the layout of the graph value they replace."""
        tokens, node = value.token_sizes, rows
        local = value.local_sizes
        if len(tokens) != 1 or not equal_shapes(shape_of(rows)[1:], local):
            sizes = self.shape(tokens, local) if tokens else self._sized(local)
            node = self.call(aten.reshape.default, rows, sizes)
        order = _inverse_order(value)
        if order != list(range(len(order))):
            node = self.call(aten.permute.default, node, order)
        return node


def _token_rank(have: tuple[Size, ...], tokens: tuple[Size, ...]) -> int:
    """How many leading dims hold tokens, dims of size 1 (which hold none) included."""
    wanted = math.prod(map(hint, tokens))
    rank, held = 0, 1
    while rank < len(have) and (held != wanted or rank < len(tokens)):
        held *= hint(have[rank])
        rank += 1
    return rank


def _inverse_order(value: RowValue) -> list[int]:
    """Permutation from tokens-first to the order of the value's dims."""
    first = sorted(range(len(value.tags)), key=lambda dim: not value.is_token(dim))
    return [first.index(dim) for dim in range(len(first))]
