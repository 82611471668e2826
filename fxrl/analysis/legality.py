"""What can stand inside a region: functional ATen whose result depends on its operands alone."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxrl.ir.graph import HigherOrderOperator, OpOverload, draws_random


def illegal(node: fx.Node) -> str | None:
    """Why a node cannot stand inside a region; None where it can."""
    if isinstance(node.target, HigherOrderOperator):
        return f"calls {node.target}, which has a graph for a body"
    if not isinstance(node.target, OpOverload):
        return None if node.target is operator.getitem else f"calls {node.target}, no ATen op"
    if node.target.namespace == "fxrl":
        return f"is {node.target} already"
    if node.target._schema.is_mutable:
        return f"({node.target}) writes into its input"
    if draws_random(node):
        return f"({node.target}) draws random numbers, which a recompute would draw again"
    if torch.Tag.data_dependent_output in node.target.tags:
        return f"({node.target}) gives a number to the host"
    if torch.Tag.dynamic_output_shape in node.target.tags:
        return f"({node.target}) gives a tensor whose size depends on data"
    return None
