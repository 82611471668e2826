"""Row rules of what computes values: elementwise ops, functions of a row, products.

All run over local dims; over a token dim they would mix tokens, and are refused.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.expr import LOCAL, TOKEN, VOCAB, Leaf, RowExpr, RowValue, Tag
from fxrl.analysis.rows.heads import factors
from fxrl.analysis.rows.layout import normalised
from fxrl.analysis.rows.rules import (
    RowRules,
    Rows,
    common_tags,
    dims_of,
    op_name,
    operand,
    shared_leaf,
    sole_row,
    static,
)
from fxrl.ir.graph import Size, bound, hint, is_tensor, shape_of, val_of, with_arguments
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


# ---------------------------------------------------------------------------- elementwise
def pointwise(rules: RowRules, node: fx.Node) -> RowValue:
    """Any elementwise op, tagged so or not: the same op on rows, operands lined up."""
    operands = [arg for arg in node.all_input_nodes if is_tensor(arg)]
    sizes = shape_of(node)
    tags = common_tags(rules, operands, len(sizes))

    def convert(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            if not is_tensor(arg):
                raise Refusal(f"%{arg} is a Python number computed from data", "keep it a tensor")
            return operand(rules, arg, tags, sizes)
        return tuple(map(convert, arg)) if isinstance(arg, (list, tuple)) else arg

    args = [convert(arg) for arg in node.args]
    kwargs = {name: convert(arg) for name, arg in node.kwargs.items()}
    return RowValue(rules.pool.call(node.target, *args, **kwargs), tags, sizes)


def elementwise_loss(rules: RowRules, node: fx.Node) -> RowValue:
    """Losses of pairs: pointwise when they reduce nothing."""
    if shape_of(node) == () and any(shape_of(arg) for arg in node.all_input_nodes):
        raise Refusal(
            f"{op_name(node)} reduces over tokens and vocabulary at once",
            "take reduction='none', and sum over the vocabulary first",
        )
    return pointwise(rules, node)


def log_sigmoid(rules: RowRules, node: fx.Node) -> tuple[RowValue, ...]:
    """Its second output is a buffer for the backward alone, which no user code can read."""
    value = sole_row(rules, node)
    expr = rules.pool.call(aten.log_sigmoid.default, value.expr)
    return (RowValue(expr, value.tags, value.sizes),)


def copy_of(rules: RowRules, node: fx.Node) -> RowValue:
    """The same values, maybe in another dtype or cut from autograd."""
    value = sole_row(rules, node)
    source, result = val_of(node.args[0]), val_of(node)
    if source.device != result.device:
        raise Refusal(f"the logits move from {source.device} to {result.device}")
    if node.target is aten.clone.default:
        return RowValue(value.expr, value.tags, shape_of(node))
    kwargs = {k: v for k, v in node.kwargs.items() if k == "dtype"}
    return RowValue(rules.pool.call(node.target, value.expr, **kwargs), value.tags, shape_of(node))


def filled(rules: RowRules, node: fx.Node) -> RowValue:
    """``zeros_like(logits)`` or ``logits.new_zeros(logits.shape)``: a constant for each row."""
    value, sizes, given = sole_row(rules, node), shape_of(node), bound(node)
    if list(map(str, sizes)) != list(map(str, value.sizes)):
        what = f"{op_name(node)} reads the logits for their dtype only"
        raise Refusal(what, "make it with torch.full")
    fill = given.get("fill_value", int("ones" in op_name(node)))
    dtype = val_of(node).dtype
    expr = rules.pool.call(aten.full_like.default, value.expr, fill, dtype=dtype)
    return RowValue(expr, value.tags, sizes)


# ---------------------------------------------------------------------------- functions of a row
def reduction(rules: RowRules, node: fx.Node) -> Rows:
    """Over some local dims; ``dim`` is one, several or (None) all of them."""
    value, given = sole_row(rules, node), bound(node)["dim"]
    dims = dims_of(given, len(value.tags))
    if any(map(value.is_token, dims)):
        cure = "reduce over the vocabulary first: what that gives per token may then be reduced"
        raise Refusal(f"{op_name(node)} reduces over tokens", cure)
    local = tuple(map(value.local_dim, dims))
    flat = node.target in (aten.argmax.default, aten.argmin.default)  # of one dim, or of all
    if flat and len(local) != 1:
        raise Refusal(f"{op_name(node)} reduces several dims at once")
    dim = local[0] if flat or isinstance(given, int) else local
    first = node.meta["val"]
    first = first[0] if isinstance(first, (tuple, list)) else first
    keep = first.dim() == len(value.tags)
    tags = tuple(
        LOCAL if d in dims else tag for d, tag in enumerate(value.tags) if keep or d not in dims
    )
    return _results(rules, node, tags, self=value.expr, dim=dim)


def whole_row(rules: RowRules, node: fx.Node) -> Rows:
    """Softmaxes, scans and sorts along one local dim; ``topk`` keeps a part of it."""
    value, given = sole_row(rules, node), bound(node)
    dim = given["dim"] % len(value.tags)
    if value.is_token(dim):
        cure = "take it over the vocabulary (dim=-1), or over what is computed per token"
        raise Refusal(f"{op_name(node)} runs over tokens", cure)
    tags = value.tags
    if node.target is aten.topk.default:
        tags = value.retagged(dim, rules.tag_of_size(given["k"]))
    return _results(rules, node, tags, self=value.expr, dim=value.local_dim(dim))


def _results(rules: RowRules, node: fx.Node, tags: tuple[Tag, ...], **changed: Any) -> Rows:
    """One row value, or one per output when the op returns several tensors."""
    args, kwargs = with_arguments(node, **changed)
    expr = rules.pool.call(node.target, *args, **kwargs)
    val = node.meta["val"]
    if isinstance(val, torch.Tensor):
        return RowValue(expr, tags, tuple(val.shape))
    return tuple(
        RowValue(rules.pool.call(operator.getitem, expr, index), tags, tuple(item.shape))
        for index, item in enumerate(val)
    )


def layer_norm(rules: RowRules, node: fx.Node) -> tuple[RowValue, ...]:
    value, given = sole_row(rules, node), bound(node)
    over = given["normalized_shape"]
    rank, count = len(value.tags), len(over)
    if TOKEN in value.tags[rank - count :]:
        raise Refusal("a layer norm runs over tokens")
    affine = {
        name: operand(rules, given[name], value.tags[-count:], over)
        for name in ("weight", "bias")
        if is_tensor(given[name])
    }
    shape = [static(size) for size in over]
    args, kwargs = with_arguments(node, input=value.expr, normalized_shape=shape, **affine)
    expr = rules.pool.call(node.target, *args, **kwargs)
    kept = (*value.tags[: rank - count], *(LOCAL,) * count)
    return tuple(
        RowValue(rules.pool.call(operator.getitem, expr, index), tags, tuple(item.shape))
        for index, (item, tags) in enumerate(
            zip(node.meta["val"], (value.tags, kept, kept), strict=True)
        )
    )


# ---------------------------------------------------------------------------- products
def seed(rules: RowRules, head: fx.Node) -> RowValue:
    """The logits of an LM head as rows of its hidden states.

    Raises:
        Refusal: a feature or vocabulary dim is symbolic, or the product has options.
    """
    rows, weight, bias = factors(head)
    if head.kwargs:
        raise Refusal("the head's addmm has alpha or beta")
    width = static(shape_of(weight)[-1])
    features = static(shape_of(weight)[-2])
    hidden = rules.pool.leaf(Leaf(rows, (), tuple(shape_of(rows)[:-1]), (features,)))
    matrix = shared_leaf(rules, weight)
    if head.target is aten.bmm.default:
        matrix = rules.pool.call(aten.reshape.default, matrix, (features, width))
    expr = _product(rules, hidden, matrix, bias)
    tokens = (TOKEN,) * (len(shape_of(head)) - 1)
    return normalised(rules, RowValue(expr, (*tokens, VOCAB), shape_of(head)))


def _product(rules: RowRules, rows: RowExpr, matrix: RowExpr, bias: fx.Node | None) -> RowExpr:
    if bias is None:
        return rules.pool.call(aten.mm.default, rows, matrix)
    if len(shape_of(bias)) != 1:
        raise Refusal("the head's bias differs between tokens")
    return rules.pool.call(aten.addmm.default, shared_leaf(rules, bias), rows, matrix)


def matrix_product(rules: RowRules, node: fx.Node) -> RowValue:
    """Rows times a fixed matrix: row-local; refused where the result is vocabulary-sized again."""
    rows, weight, bias = factors(node)
    value = rules.row(rows)
    if value is None or rules.row(weight) is not None:
        raise Refusal("a matrix product contracts tokens")
    if not value.wide:
        raise Refusal("a product on narrow rows stays outside")
    if value.is_token(-1) or not value.is_token(0):
        raise Refusal("a matrix product contracts tokens")
    tag = rules.tag_of_size(shape_of(weight)[-1])
    if tag == VOCAB:
        raise Refusal("the logits re-enter a layer that keeps the vocabulary dim")
    expr = _product(rules, value.expr, shared_leaf(rules, weight), bias)
    return RowValue(expr, (TOKEN, tag), shape_of(node))


def vector_product(rules: RowRules, node: fx.Node) -> RowValue:
    """Rows times a vector, such as the mean of a categorical value head."""
    value, vector = sole_row(rules, node), bound(node)["vec"]
    if not value.is_token(0) or value.is_token(1) or rules.row(vector) is not None:
        raise Refusal("a matrix product contracts tokens")
    expr = rules.pool.call(aten.mv.default, value.expr, shared_leaf(rules, vector))
    return RowValue(expr, (TOKEN,), shape_of(node))


def row_products(rules: RowRules, node: fx.Node) -> RowValue:
    """A product of two values per token, such as ``einsum("nv,nv->n")``; one may be an input."""
    exprs = []
    for side in (bound(node)["self"], bound(node)["mat2"]):
        row, sizes = rules.row(side), shape_of(side)
        tags = row.tags if row is not None else (TOKEN, *_local_tags(rules, sizes[1:]))
        if tags[0] != TOKEN:
            raise Refusal("a batched product contracts tokens or re-enters a layer")
        if TOKEN in tags[1:]:
            raise Refusal("a batched product pairs tokens with tokens")
        exprs.append(operand(rules, side, tags, sizes, each=True))
    sizes = shape_of(node)
    tags = (TOKEN, *_local_tags(rules, sizes[1:]))
    return RowValue(rules.pool.call(aten.bmm.default, *exprs), tags, sizes)


def _local_tags(rules: RowRules, sizes: tuple[Size, ...]) -> tuple[Tag, ...]:
    for size in sizes:
        static(size)
    return tuple(rules.tag_of_size(size) if hint(size) > 1 else LOCAL for size in sizes)
