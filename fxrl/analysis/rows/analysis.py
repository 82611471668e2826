"""From a graph to row programs: what of a loss can run row by row, and what cannot, and why.

``analyse`` seeds the loss heads, walks the graph once with the row rules, and collects per
cluster of heads (heads whose logits meet, such as policy and teacher) either the row programs
that replace them or the first reason against. It changes nothing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import fxrl.analysis.rows.functions
import fxrl.analysis.rows.writes  # noqa: F401  (both register their rules)
from fxrl.analysis.rows.expr import TOKEN, RowExpr, RowValue, leaves, walk
from fxrl.analysis.rows.heads import find_heads
from fxrl.analysis.rows.products import factors, seed
from fxrl.analysis.rows.programs import RowOutput, RowProgram, programs
from fxrl.analysis.rows.rules import RowRules, dims_of
from fxrl.ir.graph import ancestors, hint, is_call, shape_of
from fxrl.ir.remark import Refusal

aten = torch.ops.aten

__all__ = ["HeadMiss", "HeadSite", "RowProgram", "analyse"]


@dataclass(frozen=True, slots=True)
class HeadSite:
    """One cluster of heads, the programs that replace it and the wide values that then vanish."""

    anchor: fx.Node
    programs: tuple[RowProgram, ...]
    wide: tuple[fx.Node, ...]
    rules: RowRules


@dataclass(frozen=True, slots=True)
class HeadMiss:
    """One cluster that must stay, at the node that forbids it."""

    anchor: fx.Node
    at: fx.Node
    reason: str
    cure: str = ""


def analyse(graph: fx.Graph) -> list[HeadSite | HeadMiss]:
    """Every loss head of the graph, as a site or as a miss."""
    heads = find_heads(graph)
    if not heads:
        return []
    walked = _Walk(graph, heads)
    return [walked.judge(cluster) for cluster in walked.clusters()]


class _Walk:
    """One pass over the graph with the rules, and the questions asked of it afterwards."""

    def __init__(self, graph: fx.Graph, heads: list[fx.Node]) -> None:
        self.rules = RowRules(min(hint(shape_of(head)[-1]) for head in heads))
        self.heads = heads
        self.refused: dict[fx.Node, Refusal] = {}
        self.posts: dict[fx.Node, RowValue] = {}
        self._heads_of: dict[int, frozenset[fx.Node]] = {}
        self._head_exprs: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in graph.nodes:
            self._visit(node)

    # -- the walk
    def _visit(self, node: fx.Node) -> None:
        if node in self.heads:
            self._seed(node)
            return
        reads = [arg for arg in node.all_input_nodes if arg in self.rules.values]
        if not reads or node.op != "call_function" or is_call(node, aten.sym_size.int):
            return
        if node.target is operator.getitem:
            index: Any = node.args[1]
            self.rules.values[node] = self.rules.values[reads[0]][index]  # type: ignore[index]
            return
        try:
            self.rules.values[node] = self.rules.apply(node)
        except Refusal as refusal:
            post = self._mixed_reduction(node)
            if post is None:
                self.refused[node] = refusal
            else:
                self.posts[node] = post

    def _seed(self, head: fx.Node) -> None:
        try:
            value = seed(self.rules, head)
        except Refusal as refusal:
            self.refused[head] = refusal
            return
        self.rules.values[head] = value
        for expr in walk([value.expr]):
            key = _head_key(expr)
            if key is not None:
                self._head_exprs[key] = head

    def _mixed_reduction(self, node: fx.Node) -> RowValue | None:
        """``sum`` or ``mean`` over tokens and local dims: the local part, dims kept."""
        full = (aten.sum.default, aten.mean.default)
        if not is_call(node, *full, aten.sum.dim_IntList, aten.mean.dim):
            return None
        value = self.rules.row(node.args[0])
        if value is None or not value.wide:
            return None
        rank = len(value.tags)
        given = None if node.target in full else node.args[1]
        local = [d for d in dims_of(given, rank) if value.tags[d] != TOKEN]
        if not local:
            return None
        is_sum = node.target in (aten.sum.default, aten.sum.dim_IntList)
        target = aten.sum.dim_IntList if is_sum else aten.mean.dim
        dims = [value.local_dim(d) for d in local]
        kwargs = {k: v for k, v in node.kwargs.items() if k == "dtype" and v is not None}
        expr = self.rules.pool.call(target, value.expr, dims, True, **kwargs)
        tags = tuple("k" if d in local else tag for d, tag in enumerate(value.tags))
        sizes = tuple(1 if d in local else s for d, s in enumerate(value.sizes))
        return RowValue(expr, tags, sizes)

    # -- questions
    def heads_of(self, expr: RowExpr) -> frozenset[fx.Node]:
        """The heads whose logits an expression reads."""
        for part in walk([expr]):
            if id(part) in self._heads_of:
                continue
            key = _head_key(part)
            found = {self._head_exprs[key]} if key in self._head_exprs else set()
            inner = [self._heads_of[id(operand)] for operand in part.operands()]
            self._heads_of[id(part)] = frozenset(found).union(*inner)
        return self._heads_of[id(expr)]

    def clusters(self) -> list[list[fx.Node]]:
        """Heads grouped by whose logits meet in one expression; refused heads stand alone."""
        parent = {head: head for head in self.heads}

        def root(head: fx.Node) -> fx.Node:
            while parent[head] is not head:
                head = parent[head]
            return head

        for node in self.rules.values:
            for value in self._row_values(node):
                first, *rest = [*self.heads_of(value.expr)] or [self.heads[0]]
                for other in rest:
                    parent[root(other)] = root(first)
        groups: dict[fx.Node, list[fx.Node]] = {}
        for head in self.heads:
            groups.setdefault(root(head), []).append(head)
        return list(groups.values())

    def _row_values(self, node: fx.Node) -> list[RowValue]:
        value = self.rules.values[node]
        return list(value) if isinstance(value, tuple) else [value]

    def judge(self, cluster: list[fx.Node]) -> HeadSite | HeadMiss:
        """The site of a cluster, or the miss."""
        anchor = cluster[0]
        for head in cluster:
            if head in self.refused:
                return HeadMiss(anchor, head, self.refused[head].reason, self.refused[head].cure)
        mine = set(cluster)
        wide = [
            node
            for node in self.rules.values
            if any(v.wide and self.heads_of(v.expr) & mine for v in self._row_values(node))
        ]
        miss = self._escape(anchor, wide)
        if miss is not None:
            return miss
        outputs = self._outputs(wide)
        for output in outputs:
            if self._mixes_rows(output.value.expr):
                return HeadMiss(
                    anchor,
                    output.node,
                    "the logits of different tokens are combined",
                    "take the vocabulary reduction per token first",
                )
        if not outputs:
            return HeadMiss(anchor, anchor, "nothing reads the logits")
        for head in self.heads:
            if ancestors([factors(head)[0]]) & {output.node for output in outputs}:
                reason = "the logits re-enter a layer that leads back to a vocabulary dim"
                return HeadMiss(anchor, head, reason)
        return HeadSite(anchor, tuple(programs(outputs)), tuple(wide), self.rules)

    def _escape(self, anchor: fx.Node, wide: list[fx.Node]) -> HeadMiss | None:
        for node in wide:
            for user in node.users:
                if user in self.rules.values or user in self.posts:
                    continue
                if is_call(user, aten.sym_size.int):
                    continue
                if user.op == "output":
                    return HeadMiss(
                        anchor,
                        node,
                        "the logits leave the traced code: returned, stored or handed to a hook",
                        "return what is computed from them, per token",
                    )
                refusal = self.refused.get(user)
                if refusal is None:
                    return HeadMiss(anchor, user, f"the logits enter %{user}, opaque to fxrl")
                return HeadMiss(anchor, user, refusal.reason, refusal.cure)
        return None

    def _outputs(self, wide: list[fx.Node]) -> list[RowOutput]:
        """Narrow values that read a wide one and are themselves read."""
        found: dict[fx.Node, RowOutput] = {}
        for node in wide:
            for user in node.users:
                self._collect(user, found)
        return list(found.values())

    def _collect(self, user: fx.Node, found: dict[fx.Node, RowOutput]) -> None:
        if user in self.posts:
            found[user] = RowOutput(user, self.posts[user], post=True)
            return
        value = self.rules.values.get(user)
        if isinstance(value, tuple):
            for item in user.users:
                if not self._row_values(item)[0].wide:
                    self._collect(item, found)
        elif value is not None and not value.wide and any(map(self._is_read, user.users)):
            if is_call(user, aten.argmax.default) and all(
                is_call(reader, aten.eq.Tensor) and reader in self.rules.values
                for reader in user.users
            ):  # only the comparison with the target is read: a hit is all that is needed
                for reader in user.users:
                    self._collect(reader, found)
                return
            found[user] = RowOutput(user, value)

    @staticmethod
    def _is_read(user: fx.Node) -> bool:
        return not is_call(user, aten.sym_size.int)

    def _mixes_rows(self, expr: RowExpr) -> bool:
        """Whether one expression reads the same hidden states under two row selections."""
        chains: dict[fx.Node, set[Any]] = {}
        hidden = {node for node, _ in self._head_exprs}
        for leaf in leaves([expr]):
            assert leaf.leaf is not None
            if leaf.leaf.tiled and leaf.leaf.node in hidden:
                chains.setdefault(leaf.leaf.node, set()).add(id(leaf))
        return any(len(found) > 1 for found in chains.values())


def _head_key(expr: RowExpr) -> tuple[fx.Node, int] | None:
    """What a head's product is known by, under any row selection: hidden node and weight."""
    if expr.target is aten.mm.default:
        rows, matrix = expr.args
    elif expr.target is aten.addmm.default:
        _, rows, matrix = expr.args
    else:
        return None
    return (rows.leaf.node, id(matrix)) if rows.leaf is not None else None
