"""From a row program to graph code: the body's graph, the rows its inputs need, the results.

%rows   = reshape(slice(%hidden, ...), [-1, H])       outside, once, small
%out    = region([%rows, %weight, %targets, ...])     the body, any number of rows
%logp   = reshape(%out, [B, T])                       outside, the user's own layout
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import TOKEN, Leaf, RowExpr, RowStep, RowValue, leaves, walk
from fxrl.ir.graph import hint, tensor_val
from fxrl.ir.remark import Refusal
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten


def body_graph(roots: list[RowExpr], inputs: list[RowExpr]) -> fx.GraphModule:
    """The expressions as a graph module of the given leaves; returns a tuple."""
    graph = fx.Graph()
    env: dict[int, fx.Node] = {}
    for index, leaf in enumerate(inputs):
        assert leaf.leaf is not None
        env[id(leaf)] = graph.placeholder(f"rows_{index}" if leaf.leaf.tiled else f"shared_{index}")
    for expr in walk(roots):
        if id(expr) not in env:
            args = tuple(_as_arg(arg, env) for arg in expr.args)
            kwargs = {name: _as_arg(value, env) for name, value in expr.kwargs}
            env[id(expr)] = graph.call_function(expr.target, args, kwargs)
    graph.output(tuple(env[id(root)] for root in roots))
    graph.lint()
    return fx.GraphModule({}, graph)


def _as_arg(arg: Any, env: dict[int, fx.Node]) -> Any:
    if isinstance(arg, RowExpr):
        return env[id(arg)]
    return [_as_arg(item, env) for item in arg] if isinstance(arg, tuple) else arg


class RowEmitter:
    """Writes what surrounds a row program into a graph.

    All calls go to the graph's insertion point; sort the graph afterwards.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.sizes = SizeTable(graph)
        self._made: dict[Any, fx.Node] = {}

    def call(self, target: Any, *args: Any, val: torch.Tensor | None = None) -> fx.Node:
        """A call with its meta value, made once per equal call.

        The meta value is computed on the operands' fake tensors unless it is given (a
        data-dependent row count would otherwise get a second, unequal symbol).
        """
        key = (target, str(args), *(id(a) for a in args if isinstance(a, fx.Node)))
        if key in self._made:
            return self._made[key]
        if val is None:
            real = fx.node.map_arg(args, lambda node: node.meta["val"])
            val = target(*real)
        node = self.graph.call_function(target, args)
        node.meta["val"] = val
        self._made[key] = node
        return node

    def inputs(self, roots: list[RowExpr]) -> list[tuple[RowExpr, fx.Node]]:
        """Every leaf under ``roots`` with the graph value that feeds it: tiled ones first."""
        found = leaves(roots)
        ordered = [e for e in found if e.leaf.tiled] + [e for e in found if not e.leaf.tiled]  # type: ignore[union-attr]
        return [(expr, self.feed(expr.leaf)) for expr in ordered]  # type: ignore[arg-type]

    def feed(self, leaf: Leaf) -> fx.Node:
        """The graph value of a leaf: itself when shared, ``[N, locals...]`` when tiled."""
        if not leaf.tiled:
            return leaf.node
        assert leaf.token_sizes is not None
        node, tokens = self.in_tokens(leaf)
        if len(tokens) == 1 and tuple(node.meta["val"].shape[1:]) == leaf.local_sizes:
            return node
        val = tensor_val(node)
        assert val is not None
        count = 1
        for size in tokens:
            count = count * size
        flat = val.new_empty((count, *leaf.local_sizes))
        return self.call(aten.reshape.default, node, [-1, *leaf.local_sizes], val=flat)

    def in_tokens(self, leaf: Leaf) -> tuple[fx.Node, tuple[Any, ...]]:
        """A tiled leaf after its steps, token dims first, and those dims' sizes."""
        node = leaf.node
        for target, args in leaf.prepare:
            node = self.call(target, node, *(self._sized(arg) for arg in args))
        tokens: tuple[Any, ...] = leaf.token_sizes or ()
        for step in leaf.steps:
            node = self._regroup(node, tokens, step.sizes)
            node = self._step(node, step)
            tokens = step.result
        return node, tokens

    def _sized(self, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [self._sized(item) for item in arg]
        return self._size(arg) if isinstance(arg, (int, torch.SymInt)) else arg

    def _size(self, size: Any) -> Any:
        node = self.sizes.arg(size)
        if node is None:
            raise Refusal(f"the size {size} is not available as a graph value")
        return node

    def _regroup(self, node: fx.Node, old: tuple[Any, ...], new: tuple[Any, ...]) -> fx.Node:
        """Reshape the token dims; the rows and their order stay."""
        if [str(size) for size in old] == [str(size) for size in new] and len(old) <= _rank(node):
            val = tensor_val(node)
            assert val is not None
            if [str(s) for s in val.shape[: len(new)]] == [str(s) for s in new]:
                return node
        val = tensor_val(node)
        assert val is not None
        rest = list(val.shape[self._token_rank(val, old) :])
        result = val.new_empty((*new, *rest))
        return self.call(aten.reshape.default, node, self.shape(new, rest), val=result)

    @staticmethod
    def _token_rank(val: torch.Tensor, tokens: tuple[Any, ...]) -> int:
        """How many leading dims hold tokens, dims of size 1 (which hold none) included."""
        wanted = 1
        for size in tokens:
            wanted *= hint(size)
        rank, have = 0, 1
        while rank < val.dim() and (have != wanted or rank < len(tokens)):
            have *= hint(val.shape[rank])
            rank += 1
        return rank

    def shape(self, tokens: tuple[Any, ...], rest: list[Any]) -> list[Any]:
        """A reshape target; one unknown token size may be -1."""
        args = [self.sizes.arg(size) for size in tokens]
        missing = args.count(None)
        if missing > 1:
            raise Refusal("two token sizes are not available as graph values")
        if missing == 0 and len(args) == 1:
            args = [-1]
        return [-1 if arg is None else arg for arg in args] + [int(size) for size in rest]

    def _step(self, node: fx.Node, step: RowStep) -> fx.Node:
        val = tensor_val(node)
        assert val is not None
        rest = list(val.shape[len(step.sizes) :])
        if step.kind == "slice":
            return self.call(aten.slice.Tensor, node, *step.args)
        if step.kind == "select":
            return self.call(aten.select.int, node, *step.args)
        if step.kind == "split":
            target, dim, sizes, index = step.args
            parts = self.call(target, node, sizes, dim)
            return self.call(operator.getitem, parts, index)
        if step.kind == "permute":
            order = [*step.args, *range(len(step.args), val.dim())]
            return self.call(aten.permute.default, node, order)
        assert step.kind == "index", step.kind
        result = val.new_empty((*step.result, *rest))
        return self.call(aten.index.Tensor, node, list(step.args), val=result)

    def check_restorable(self, values: Iterable[RowValue]) -> None:
        """Refuse now what ``restore`` would refuse later, with the graph half rewritten.

        Raises:
            Refusal: two token sizes of a value are not available as graph values.
        """
        for value in values:
            if value.token_sizes:
                self.shape(value.token_sizes, [])

    def restore(self, rows: fx.Node, value: RowValue) -> fx.Node:
        """Rows back in the layout of the graph value they replace."""
        tokens = value.token_sizes
        local = [int(size) for size in value.local_sizes]
        val = tensor_val(rows)
        assert val is not None
        node = rows
        if len(tokens) != 1 or list(val.shape[1:]) != local:
            target = self.shape(tokens, local) if tokens else local
            node = self.call(
                aten.reshape.default, node, target, val=val.new_empty((*tokens, *local))
            )
        order = _inverse_order(value.tags)
        if order != list(range(len(order))):
            node = self.call(aten.permute.default, node, order)
        return node


def _rank(node: fx.Node) -> int:
    val = tensor_val(node)
    assert val is not None
    return val.dim()


def _inverse_order(tags: tuple[str, ...]) -> list[int]:
    """Permutation from tokens-first to the order of ``tags``."""
    tokens = [d for d, tag in enumerate(tags) if tag == TOKEN]
    first = tokens + [d for d, tag in enumerate(tags) if tag != TOKEN]
    return [first.index(d) for d in range(len(tags))]
