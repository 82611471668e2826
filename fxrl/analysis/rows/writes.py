"""Row rules of writes into logits: ``z[..., ids] = x``, ``z[mask] = x``, ``z[..., 5:] = x``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import TOKEN, RowExpr, RowValue
from fxrl.analysis.rows.indexing import _local_dim, _spans
from fxrl.analysis.rows.rules import RowRules, is_one, operand, rule, sole_row, static
from fxrl.ir.graph import shape_of, tensor_val
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


@rule(aten.index_put.default)
def _index_put(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    spans = _spans(node.args[1])
    accumulate = len(node.args) > 3 and bool(node.args[3])
    written: Any = node.args[2]
    (dims, index), *more = spans
    scalar = all(is_one(size) for size in shape_of(written))
    if more or accumulate or not scalar:
        raise Refusal("an indexed write fxrl cannot follow")
    val = tensor_val(index)
    assert val is not None
    if val.dtype == torch.bool:
        mask = _mask(rules, value, dims, index)
    elif val.dtype == torch.int64 and val.dim() == 1 and value.tags[dims[0]] != TOKEN:
        mask = _membership(rules, value, dims[0], index)
    else:
        raise Refusal("an indexed write selects tokens")
    filling = operand(rules, written, value.tags, value.sizes)
    return rules.like(node, rules.pool.call(aten.where.self, mask, filling, value.expr), value.tags)


def _mask(rules: RowRules, value: RowValue, dims: list[int], index: fx.Node) -> RowExpr:
    """A bool mask over some dims, so shaped that it broadcasts against the rows."""
    tags = tuple(value.tags[dim] for dim in dims)
    tokens = tags.count(TOKEN)
    if tokens not in (0, value.tags.count(TOKEN)):
        raise Refusal("an indexed write selects some of the token dims")
    if rules.row(index) is not None and not tokens:
        raise Refusal("a mask of the vocabulary depends on the tokens as a whole")
    mask: RowExpr = operand(rules, index, tags, tuple(value.sizes[dim] for dim in dims))
    if len(dims) == len(value.tags):
        return mask
    own = [static(value.sizes[dim]) for dim in dims if value.tags[dim] != TOKEN]
    before = sum(tag != TOKEN for tag in value.tags[: dims[0]])
    after = sum(tag != TOKEN for tag in value.tags[dims[-1] + 1 :])
    rows = (-1,) if tokens else (1,)
    return rules.pool.call(aten.reshape.default, mask, (*rows, *(1,) * before, *own, *(1,) * after))


def _membership(rules: RowRules, value: RowValue, dim: int, index: fx.Node) -> RowExpr:
    """A mask over the local dim that is true at ``index``."""
    from fxrl.analysis.rows.inputs import shared_leaf

    width = static(value.sizes[dim])
    device = node_device(index)
    empty = rules.pool.call(aten.full.default, (width,), False, dtype=torch.bool, device=device)
    mask = rules.pool.call(aten.index_fill.int_Scalar, empty, 0, shared_leaf(rules, index), True)
    after = sum(tag != TOKEN for tag in value.tags[dim + 1 :])
    return rules.pool.call(aten.reshape.default, mask, (width, *(1,) * after))


def node_device(node: fx.Node) -> torch.device:
    """The device of a tensor node."""
    val = tensor_val(node)
    assert val is not None
    return val.device


@rule(aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default)
def _write_part(rules: RowRules, node: fx.Node) -> RowValue:
    value = sole_row(rules, node)
    source: Any = node.args[1]
    if node.target is aten.slice_scatter.default and _covers(node, value):
        whole = rules.row(source)
        if whole is not None and whole.tags == value.tags:
            return whole
    if node.target is aten.copy.default:
        part = operand(rules, source, value.tags, value.sizes)
        return rules.like(node, rules.pool.call(node.target, value.expr, part), value.tags)
    given = node.args[2] if len(node.args) > 2 else 0
    dim = _local_dim(value, given, "a write into a slice")
    row = rules.row(source)
    own = [tag == TOKEN for tag in value.tags]
    if node.target is aten.select_scatter.default:
        del own[dim]
    if row is None or own != [tag == TOKEN for tag in row.tags]:
        raise Refusal("a slice of the vocabulary is overwritten by a value that is no row")
    args = [value.expr, row.expr, value.local_dim(dim), *node.args[3:]]
    return rules.like(node, rules.pool.call(node.target, *args), value.tags)


def _covers(node: fx.Node, value: RowValue) -> bool:
    """Whether a write into a slice overwrites everything (as functionalised writes often do)."""
    start = node.args[3] if len(node.args) > 3 else 0
    step = node.args[5] if len(node.args) > 5 else 1
    whole = list(map(str, shape_of(node.args[1]))) == list(map(str, value.sizes))  # type: ignore[arg-type]
    return bool(whole and start in (0, None) and step == 1)
