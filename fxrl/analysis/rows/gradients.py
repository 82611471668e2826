"""The row rule of values whose gradient is given: those of an opened ``autograd.Function``.

    %values = with_gradient(@backward, %logits, %plain_values, what was saved)

The values are rows already. The row rules are applied to ``@backward``, too, with the gradients of
the values and the saved values as its rows; it must give each input's gradient row by row. It then
becomes a part of the row program.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.emit import body_graph
from fxrl.analysis.rows.expr import (
    TOKEN,
    GivenGradient,
    Leaf,
    RowExpr,
    RowValue,
    leaves,
    map_exprs,
    walk,
)
from fxrl.analysis.rows.rules import RowRules, Rows, operand, shared_leaf, static
from fxrl.ir.graph import Size, ancestors, held, inputs_of, is_call, is_tensor, needs_grad, shape_of
from fxrl.ir.remark import Refusal


def with_gradient(rules: RowRules, node: fx.Node) -> Rows:
    """The values, each computed from its own row, and so its gradient."""
    arguments: Any = node.args
    place, inputs, count, *given = arguments
    backward = held(place)
    values = [rules.row(value) for value in given[inputs : inputs + count]]
    rows = [value for value in values if value is not None]
    if len(rows) != len(values):
        raise Refusal("an autograd.Function of the logits returns more than rows of them")
    tokens = rows[0].token_sizes
    saved = [_saved(rules, one, tokens) for one in given[inputs + count :]]
    try:
        body = _Backward(rules.of_backward(), backward, [*rows, *(seen for seen, _ in saved)])
    except Refusal as refusal:
        reason = f"in the backward of an autograd.Function: {refusal.reason}"
        raise Refusal(reason, refusal.cure, node) from refusal
    trained: list[RowExpr] = []
    roots: list[RowExpr] = []
    for one, grad in zip(given[:inputs], backward.graph.output_node().args[0], strict=True):
        if grad is not None and is_tensor(one) and needs_grad(one):
            row = rules.row(one) or _read_as_rows(rules, one, rows)
            if row is None or not _alike(rules, row.token_sizes, tokens):
                raise Refusal("an autograd.Function of the logits trains more than rows of them")
            trained.append(row.expr)
            roots.append(body.gradient(grad, row))
    if not trained:
        return tuple(rows)
    graph, read = body.of_rows(roots, len(rows))
    known = [expr for _, expr in saved]
    call = rules.pool.call(
        GivenGradient(graph, len(trained), len(rows)),
        *trained,
        *(row.expr for row in rows),
        *(known[index] for index in read),
    )
    return tuple(
        RowValue(rules.pool.call(operator.getitem, call, index), row.tags, row.sizes)
        for index, row in enumerate(rows)
    )


aten = torch.ops.aten

#: A tensor that is the same for all rows; a number, which a graph of rows does not read.
_SHARED, _NUMBER = "shared", "number"


def _saved(rules: RowRules, one: Any, tokens: tuple[Size, ...]) -> tuple[Any, Any]:
    """What a saved value is to the backward, and where the row program reads it."""
    if not is_tensor(one):
        return _NUMBER, None
    if (row := rules.row(one)) is None:
        sizes = shape_of(one)
        if not _alike(rules, sizes[: len(tokens)], tokens):
            return _SHARED, shared_leaf(rules, one)
        tags = (*(TOKEN for _ in tokens), *map(rules.tag_of_size, sizes[len(tokens) :]))
        row = RowValue(operand(rules, one, tags, sizes, each=True), tags, sizes)
    if not _alike(rules, row.token_sizes, tokens):
        raise Refusal("an autograd.Function saves other tokens than it returns")
    return row, row.expr


def _read_as_rows(rules: RowRules, one: fx.Node, values: list[RowValue]) -> RowValue | None:
    """An input from outside whose rows the values are computed from: of its ``detach``."""
    for expr in leaves([value.expr for value in values]):
        node = expr.leaf.node if expr.leaf is not None and expr.leaf.tiled else None
        if is_call(node, aten.detach.default) and node.args[0] is one:
            seen, _ = _saved(rules, one, values[0].token_sizes)
            return seen if isinstance(seen, RowValue) else None
    return None


def _alike(rules: RowRules, left: tuple[Size, ...], right: tuple[Size, ...]) -> bool:
    return len(left) == len(right) and all(map(rules.same_size, left, right))


class _Backward:
    """A backward whose arguments are rows: ``given`` are the values, then what was saved."""

    def __init__(self, rules: RowRules, backward: fx.GraphModule, given: Sequence[Any]) -> None:
        self._rules = rules
        self._leaves: list[RowExpr | None] = []  # of each argument
        arguments = inputs_of(backward.graph)
        for node, seen in zip(arguments, given, strict=True):
            leaf = None
            if isinstance(seen, RowValue):
                local = tuple(map(static, seen.local_sizes))
                leaf = rules.pool.leaf(Leaf(node, (), seen.token_sizes, local))
                if node.users:  # else torch 2.11 hands it no value
                    rules.values[node] = RowValue(leaf, seen.tags, shape_of(node))
            elif seen is _SHARED:
                leaf = rules.pool.leaf(Leaf(node))
            self._leaves.append(leaf)
        results = backward.graph.output_node()
        needed = ancestors(results.all_input_nodes)  # without what is only asserted
        for node in backward.graph.nodes:
            reads_rows = any(arg in rules.values for arg in node.all_input_nodes)
            if reads_rows and node in needed and not is_call(node, aten.sym_size.int):
                rules.follow(node)

    def gradient(self, grad: fx.Node, like: RowValue) -> RowExpr:
        found = self._rules.row(grad)
        if found is None or found.tokens != like.tokens:
            raise Refusal("the backward of an autograd.Function gives no row of a gradient")
        return self._closed(found.expr)

    def of_rows(self, roots: list[RowExpr], count: int) -> tuple[fx.GraphModule, list[int]]:
        """The graph ``gradients of the values, what it reads -> roots``, and which it reads of what
        was saved."""
        used = set(map(id, walk(roots)))
        saved = self._leaves[count:]
        read = [i for i, leaf in enumerate(saved) if leaf is not None and id(leaf) in used]
        inputs = [*self._leaves[:count], *(saved[i] for i in read)]
        return body_graph(roots, inputs), read  # type: ignore[arg-type]

    def _closed(self, expr: RowExpr) -> RowExpr:
        """``expr`` of the arguments alone: what is computed of shared ones is computed again."""
        if expr.leaf is None:
            args = map_exprs(expr.args, self._closed)
            kwargs = {name: map_exprs(value, self._closed) for name, value in expr.kwargs}
            return self._rules.pool.call(expr.target, *args, **kwargs)
        if any(expr is leaf for leaf in self._leaves):
            return expr
        node = expr.leaf.node
        if expr.leaf.tiled or node.op != "call_function":
            raise Refusal("the backward of an autograd.Function mixes tokens")

        def again(arg: fx.Node) -> Any:
            return self._closed(self._rules.pool.leaf(Leaf(arg))) if is_tensor(arg) else arg

        args, kwargs = fx.map_arg((node.args, node.kwargs), again)
        return self._rules.pool.call(node.target, *args, **kwargs)
