"""Row rules of what computes values: elementwise ops, functions of a row, products.

All run over local dims; over a token dim they would mix tokens, and are refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
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
    operand,
    shared_leaf,
    sole_row,
    static,
)
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    FP8_LINEAR,
    Size,
    bound,
    hint,
    is_call,
    is_quantized_product,
    is_tensor,
    library_weight,
    needs_grad,
    op_name,
    shape_of,
    val_of,
    with_arguments,
)
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
    """Elementwise losses (``mse_loss``), which are pointwise if they reduce nothing."""
    if shape_of(node) == () and any(shape_of(arg) for arg in node.all_input_nodes):
        raise Refusal(
            f"{op_name(node)} reduces over tokens and vocabulary at once",
            "take reduction='none', and sum over the vocabulary first",
        )
    return pointwise(rules, node)


def log_sigmoid(rules: RowRules, node: fx.Node) -> tuple[RowValue, ...]:
    """The first output; the second is a buffer for the backward, which no user code can read."""
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
    """``zeros_like(logits)``: a constant for each row."""
    value = sole_row(rules, node)
    fill = bound(node).get("fill_value", int("ones" in op_name(node)))
    dtype = val_of(node).dtype
    expr = rules.pool.call(aten.full_like.default, value.expr, fill, dtype=dtype)
    return RowValue(expr, value.tags, value.sizes)


# ---------------------------------------------------------------------------- functions of a row
#: Reductions over one dim, or over all.
_OF_ONE_DIM = tuple(
    getattr(aten, name).default for name in ("argmax", "argmin", "aminmax", "count_nonzero")
)


def reduction(rules: RowRules, node: fx.Node) -> Rows:
    """Over some local dims; ``dim`` is one, several or (None) all of them."""
    value, given = sole_row(rules, node), bound(node)["dim"]
    dims = dims_of(given, len(value.tags))
    if any(map(value.is_token, dims)):
        cure = "reduce over the vocabulary first: what that gives per token may then be reduced"
        raise Refusal(f"{op_name(node)} reduces over tokens", cure)
    local = tuple(map(value.local_dim, dims))
    flat = is_call(node, *_OF_ONE_DIM)
    if flat and len(local) != 1:
        raise Refusal(f"{op_name(node)} reduces several dims at once")
    dim = local[0] if flat or isinstance(given, int) else local
    first = node.meta["val"]
    first = first[0] if isinstance(first, (tuple, list)) else first
    keep = first.dim() == len(value.tags)
    tags = tuple(
        LOCAL if d in dims else tag for d, tag in enumerate(value.tags) if keep or d not in dims
    )
    return rules.call(node, tags, self=value.expr, dim=dim)


def whole_row(rules: RowRules, node: fx.Node) -> Rows:
    """Softmaxes, scans and sorts along one local dim; ``topk`` keeps a part of it."""
    value, given = sole_row(rules, node), bound(node)
    dim = given["dim"] % len(value.tags)
    if value.is_token(dim):
        cure = "take it over the vocabulary (dim=-1), or over what is computed per token"
        raise Refusal(f"{op_name(node)} runs over tokens", cure)
    tags = value.tags
    if node.target is aten.topk.default:
        if isinstance(given["k"], fx.Node):
            raise Refusal(f"{op_name(node)} takes a number that only the running step knows")
        tags = value.retagged(dim, rules.tag_of_size(given["k"]))
    return rules.call(node, tags, self=value.expr, dim=value.local_dim(dim))


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


# ---------------------------------------------------------------------------- over tokens too
#: What is left to do, outside of the region, with what it gives for each token.
SecondStep = Callable[[Builder, fx.Node], fx.Node]

#: Reductions over tokens and vocabulary, by the op that takes the first step, over the vocabulary.
#: The second one is the reduction itself.
_STEPS: dict[Any, Any] = {
    aten.sum.default: aten.sum.dim_IntList,
    aten.mean.default: aten.mean.dim,
    aten.any.default: aten.any.dims,
    aten.all.default: aten.all.dims,
    aten.max.default: aten.amax.default,
    aten.min.default: aten.amin.default,
    aten.var.correction: aten.var.correction,
    aten.std.correction: aten.var.correction,
} | {op: op for op in (
    aten.sum.dim_IntList, aten.mean.dim, aten.any.dims, aten.all.dims, aten.amax.default,
    aten.amin.default, aten.logsumexp.default, aten.linalg_vector_norm.default,
)}  # fmt: skip
_EXTREMES = (aten.max.default, aten.min.default, aten.amax.default, aten.amin.default)
_SPREADS = (aten.var.correction, aten.std.correction)


def is_trained(node: fx.Node) -> bool:
    """Whether a value may get a gradient: not if every reader detaches it (``no_grad``) or reads it
    as a Python number (``item``)."""
    ends = aten.detach.default, aten._local_scalar_dense.default
    return needs_grad(node) and not all(is_call(user, *ends) for user in node.users)


def in_two_steps(rules: RowRules, node: fx.Node) -> tuple[RowValue, SecondStep] | None:
    """A reduction over vocabulary and tokens as one per token, with all dims kept, and the rest.

    None for other reductions, and for a maximum that is trained: all entries that attain it share
    its gradient, and no token knows how many others there are.
    """
    value = rules.row(node.args[0]) if node.args else None
    if node.target not in _STEPS or value is None or not value.wide:
        return None
    if node.target in _EXTREMES and is_trained(node):
        return None
    given = bound(node)
    local = [d for d in dims_of(given.get("dim"), len(value.tags)) if not value.is_token(d)]
    if not local or given.get("ord") == 0:  # which counts, and counts are to be summed then
        return None
    tags = tuple(LOCAL if d in local else tag for d, tag in enumerate(value.tags))
    sizes = tuple(1 if d in local else s for d, s in enumerate(value.sizes))
    at = [value.local_dim(d) for d in local]
    if node.target in _SPREADS:
        if shape_of(node) != ():
            return None
        count = math.prod(static(value.sizes[d]) for d in local)
        mean = rules.pool.call(aten.mean.dim, value.expr, at, True)
        spread = rules.pool.call(aten.var.correction, value.expr, at, correction=0, keepdim=True)
        both = rules.pool.call(aten.cat.default, (mean, spread), at[-1])
        last = local[-1]
        sizes = (*sizes[:last], 2, *sizes[last + 1 :])
        return RowValue(both, tags, sizes), partial(_pooled, node, last, count)
    order = [given["ord"]] if "ord" in given else []
    dtype = {"dtype": given["dtype"]} if given.get("dtype") is not None else {}
    expr = rules.pool.call(_STEPS[node.target], value.expr, *order, at, True, **dtype)
    return RowValue(expr, tags, sizes), partial(_again, node)


def _again(node: fx.Node, builder: Builder, first: fx.Node) -> fx.Node:
    """The rest of a reduction: the same op over the per-token results."""
    node.update_arg(0, first)
    return node


def _pooled(node: fx.Node, dim: int, count: int, builder: Builder, first: fx.Node) -> fx.Node:
    """The variance of all from means and variances of groups of ``count``, which lie in ``dim``."""
    mean, spread = (builder.call(aten.select.int, first, dim, i) for i in (0, 1))
    away = builder.call(aten.sub.Tensor, mean, builder.call(aten.mean.default, mean))
    squares = builder.call(aten.add.Tensor, spread, builder.call(aten.mul.Tensor, away, away))
    total = builder.call(aten.sum.default, builder.call(aten.mul.Tensor, squares, count))
    numbers = builder.call(aten.sum.default, builder.call(aten.full_like.default, mean, count))
    correction = bound(node)["correction"]
    left = builder.call(aten.sub.Tensor, numbers, 1 if correction is None else correction)
    result = builder.call(aten.div.Tensor, total, builder.call(aten.clamp.default, left, 0))
    return result if node.target is aten.var.correction else builder.call(aten.sqrt.default, result)


# ---------------------------------------------------------------------------- products
def seed(rules: RowRules, head: fx.Node) -> RowValue:
    """The logits of an LM head as rows of its hidden states."""
    rows, _, _ = factors(head)
    if head.kwargs and library_weight(head) is None:
        raise Refusal("the head's addmm has alpha or beta")
    static(shape_of(head)[-1])  # refused where it varies
    features = static(shape_of(rows)[-1])
    hidden = rules.pool.leaf(Leaf(rows, (), tuple(shape_of(rows)[:-1]), (features,)))
    expr = _product(rules, head, hidden)
    tokens = (TOKEN,) * (len(shape_of(head)) - 1)
    return normalised(rules, RowValue(expr, (*tokens, VOCAB), shape_of(head)))


def _product(rules: RowRules, node: fx.Node, rows: RowExpr) -> RowExpr:
    if is_quantized_product(node):
        return _of_quantized(rules, node, rows)
    if library_weight(node) is not None:
        return _of_library(rules, node, rows)
    _, weight, bias = factors(node)
    matrix = shared_leaf(rules, weight)
    if node.target is aten.bmm.default:
        sizes = [static(size) for size in shape_of(weight)[1:]]
        matrix = rules.pool.call(aten.reshape.default, matrix, sizes)
    if bias is None:
        return rules.pool.call(aten.mm.default, rows, matrix)
    if len(shape_of(bias)) != 1:
        raise Refusal("the head's bias differs between tokens")
    return rules.pool.call(aten.addmm.default, shared_leaf(rules, bias), rows, matrix)


def matrix_product(rules: RowRules, node: fx.Node) -> RowValue:
    """Rows times a fixed matrix: row-local; refused where the result is vocabulary-sized again."""
    rows, weight, _ = factors(node)
    value = rules.row(rows)
    if value is None or rules.row(weight) is not None:
        raise Refusal("a matrix product contracts tokens")
    if not (value.wide or rules.narrow_products):
        raise Refusal("a product on narrow rows stays outside")
    if value.is_token(-1) or not value.is_token(0):
        raise Refusal("a matrix product contracts tokens")
    tag = rules.tag_of_size(shape_of(node)[-1])
    if tag == VOCAB and not rules.widens_again:
        raise Refusal("the logits re-enter a layer that keeps the vocabulary dim")
    return RowValue(_product(rules, node, value.expr), (*value.tags[:-1], tag), shape_of(node))


def _of_quantized(rules: RowRules, node: fx.Node, rows: RowExpr) -> RowExpr:
    """Rows times a quantised weight; a product in FP8 quantises its rows inside the region."""
    if str(node.target) != FP8_LINEAR:
        given: Any = node.args[1]
        parts = tuple(rules.pool.leaf(Leaf(part)) for part in given)
        return rules.pool.call(node.target, rows, parts, *node.args[2:])
    _, values, _, weight, scale, gradient = node.args
    quantize: Any = values.args[0]  # type: ignore[union-attr]
    pair = rules.pool.call(quantize.target, rows, quantize.args[1])
    halves = [rules.pool.call(operator.getitem, pair, i) for i in range(2)]
    fixed = [rules.pool.leaf(Leaf(part)) for part in (weight, scale)]  # type: ignore[arg-type]
    return rules.pool.call(node.target, rows, *halves, *fixed, gradient)


def _of_library(rules: RowRules, node: fx.Node, rows: RowExpr) -> RowExpr:
    """Rows times a weight by a library's op: all else that it reads is the same for every row."""
    multiplied, _, _ = factors(node)

    def operand(arg: fx.Node) -> Any:
        return rows if arg is multiplied else shared_leaf(rules, arg)

    args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
    return rules.pool.call(node.target, *args, **kwargs)


def quantized_rows(rules: RowRules, node: fx.Node) -> Rows:
    """Values and scales of rows, each from its own row."""
    value = sole_row(rules, node)
    if value.is_token(-1) or not value.is_token(0):
        raise Refusal("a matrix product contracts tokens")
    return rules.call(node, value.tags, x=value.expr)


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
