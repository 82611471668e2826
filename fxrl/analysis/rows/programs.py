"""Row programs: the narrow values that replace a site's wide ones, grouped by what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import RowExpr, RowValue, leaves, walk
from fxrl.ir.graph import ancestors

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RowOutput:
    """A narrow value that the region hands out: the node it replaces and its rows.

    ``post`` marks a reduction over vocabulary *and* tokens: the region does the vocabulary part,
    and the node itself stays, reading it.
    """

    node: fx.Node
    value: RowValue
    post: bool = False


@dataclass(frozen=True, slots=True)
class RowProgram:
    """Outputs computed together over the same rows of the same heads."""

    outputs: tuple[RowOutput, ...]

    @property
    def roots(self) -> list[RowExpr]:
        return [output.value.expr for output in self.outputs]


def programs(outputs: list[RowOutput]) -> list[RowProgram]:
    """Group outputs that share a head's rows; split where one feeds an input of another.

    NOTE [Why stages]: an output may come back through token-mixing code, such as a weight from
    the batch's mean entropy. One region cannot hold both ends of that cycle, so the later
    outputs form a second region that recomputes the logits.
    """
    nodes = {output.node for output in outputs}
    position = {node: i for i, node in enumerate(outputs[0].node.graph.nodes)}
    stage: dict[fx.Node, int] = {}
    groups: dict[Any, list[RowOutput]] = {}
    group_of: dict[tuple[int, int], int] = {}
    for output in sorted(outputs, key=lambda o: position[o.node]):
        root = output.value.expr
        inputs = [leaf.leaf.node for leaf in leaves([root]) if leaf.leaf is not None]
        before = [stage[node] for node in ancestors(inputs) if node in nodes]
        stage[output.node] = here = 1 + max(before, default=-1)
        keys = [(rows, here) for rows in sorted(_product_rows([root]))]
        group = next((group_of[key] for key in keys if key in group_of), len(groups))
        group_of.update(dict.fromkeys(keys, group))
        groups.setdefault(group, []).append(output)
    return [RowProgram(tuple(group)) for group in groups.values()]


def _product_rows(roots: list[RowExpr]) -> set[int]:
    """Identities of the leaves that a product reads as rows."""
    found = set()
    for expr in walk(roots):
        if expr.target in (aten.mm.default, aten.addmm.default):
            rows = expr.args[0] if expr.target is aten.mm.default else expr.args[1]
            if rows.leaf is not None:
                found.add(id(rows))
    return found
