"""Finding the loss heads: the matmuls whose vocabulary-sized results only feed the loss.

A head differs from other widening matmuls (an MLP's up-projection, a LoRA factor) in that no layer
of the model comes after it. No name, config or module class is consulted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.analysis.layers import is_in_layer
from fxrl.ir.bodies import AUTOGRAD_FUNCTION, WRAPPERS
from fxrl.ir.graph import (
    COPIES,
    FP8_LINEAR,
    IS_PART,
    MATRIX_PRODUCTS,
    PRODUCTS,
    HigherOrderOperator,
    OpOverload,
    ancestors,
    base_of,
    fixed_size,
    hint,
    is_call,
    is_grouped_product,
    is_pointwise,
    is_quantized_product,
    is_tensor,
    is_view,
    library_weight,
    reached,
    shape_of,
    val_of,
)

aten = torch.ops.aten

#: Ops that treat a dim as a set of classes; reading a matmul's output makes it a head.
CLASS_OPS = (
    *(aten._softmax.default, aten._log_softmax.default, aten.logsumexp.default),
    *(aten.gather.default, aten.argmax.default, aten.topk.default, aten.sort.default),
    aten.multinomial.default,
)
#: fxrl's ops that compute nothing: they hand tokens from rank to rank, or look at a value.
_NO_LAYERS = ("fxrl.shard_tokens", "fxrl.gather_tokens", "fxrl.check", "fxrl.counted")


def factors(call: Any) -> tuple[Any, Any, Any]:
    """``(rows, weight, bias)`` of a product: a node, or what else has a target and arguments."""
    args: Any = call.args
    if isinstance(call, fx.Node) and (weight := library_weight(call)) is not None:
        return call.all_input_nodes[0], weight, None
    if is_quantized_product(call):
        return args[0], args[3] if str(call.target) == FP8_LINEAR else args[1][0], None
    if call.target in (aten.addmm.default, aten.baddbmm.default):
        return args[1], args[2], args[0]
    return args[0], args[1], None


def find_heads(graph: fx.Graph) -> list[fx.Node]:
    """The loss heads of a graph, in order.

    A widening product is a head when no other layer comes after it (later products may only keep
    the width, such as a learned adapter on the logits, and an autograd.Function may be the loss),
    or when a softmax, gather, argmax or sort reads it through elementwise and layout ops only. In a
    layer of a graph that holds a part of the loss only the latter counts: the rest of the layer may
    be in another graph.
    """
    is_part = IS_PART in getattr(graph.owning_module, "meta", {})
    products = [node for node in graph.nodes if _is_layer(node)]
    after = _downstream(graph, products)
    heads = []
    for node in products:
        if not is_amplifier(node):
            continue
        width = hint(shape_of(node)[-1])
        later = (p for i, p in enumerate(products) if after[node] >> i & 1 and p is not node)
        last = all(_is_opaque(p) or _keeps_width(p, width) for p in later)
        last = last and not (is_part and is_in_layer(node))
        no_logits = _from_activations(node) or _of_weights(node) or _adapts(node)
        if (last or feeds_class_op(node)) and not no_logits:
            heads.append(node)
    return heads


def narrow_heads(graph: fx.Graph) -> list[fx.Node]:
    """Products that are like loss heads, but have fewer classes than features, or no tokens."""
    products = [node for node in graph.nodes if _is_layer(node)]
    after = _downstream(graph, products)
    return [
        node
        for node in products
        if is_call(node, *MATRIX_PRODUCTS) and not is_amplifier(node)
        if hint(shape_of(node)[-1]) > 1 and after[node].bit_count() == 1 and feeds_class_op(node)
    ]


def heads_in_functions(graph: fx.Graph) -> list[tuple[fx.Node, bool]]:
    """Calls of the user's own code that stay whole (an ``autograd.Function``, what
    ``allow_in_graph`` marks) and multiply by a head's weight themselves; and whether logits come
    out of them."""
    found = []
    for call in graph.nodes:
        if not (call.op == "call_function" and _stays_whole(call)) or is_in_layer(call):
            continue
        classes = [n for arg in call.all_input_nodes if (n := _classes_of(arg, call))]
        if classes:
            shape = shape_of(call) if is_tensor(call) else ()
            found.append((call, bool(shape) and hint(shape[-1]) in classes))
    return found


def _stays_whole(call: fx.Node) -> bool:
    known = isinstance(call.target, OpOverload | HigherOrderOperator)
    return call.target is AUTOGRAD_FUNCTION or (is_tensor(call) and not known)


def _classes_of(weight: fx.Node, call: fx.Node) -> int:
    """How many classes an argument of a call is the head's weight for; 0 if it is none."""
    held = base_of(weight)
    if not held.meta.get("of_model") or len(shape := shape_of(held)) != 2:
        return 0
    rows = [arg for arg in call.all_input_nodes if is_tensor(arg) and arg is not weight]
    classes, features = map(hint, shape)
    fits = any(shape_of(arg) and hint(shape_of(arg)[-1]) == features for arg in rows)
    return classes if classes > features and fits else 0


def find_wide_products(graph: fx.Graph, width: int) -> list[fx.Node]:
    """Products with weights that give more than ``width`` columns (an MLP's gate and up
    projections, and those of their adapters)."""
    return [
        node
        for node in graph.nodes
        if is_amplifier(node) and hint(shape_of(node)[-1]) > width and not _from_activations(node)
    ]


def is_amplifier(node: fx.Node) -> bool:
    """Whether a product widens its rows: more columns out than features in; one batch."""
    if is_quantized_product(node) or library_weight(node) is not None:
        return hint(shape_of(node)[-1]) > hint(shape_of(factors(node)[0])[-1])
    if not is_call(node, *MATRIX_PRODUCTS, aten.bmm.default):
        return False
    rows, weight, _ = factors(node)
    batched = node.target is aten.bmm.default and hint(shape_of(weight)[0]) != 1
    if batched or 0 in map(fixed_size, shape_of(rows)):
        return False
    return hint(shape_of(weight)[-1]) > hint(shape_of(rows)[-1])


def _is_layer(node: fx.Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        return True
    if is_call(node, *PRODUCTS, aten.mv.default, aten.convolution.default):
        return True
    if node.op != "call_function":
        return False
    name = str(node.target)
    if name.startswith(_NO_LAYERS):
        return False
    return "attention" in name or is_grouped_product(node) or name.startswith("fxrl.")


def _is_opaque(node: fx.Node) -> bool:
    """A call with a body of its own (autograd.Function); a wrapper only runs the same code."""
    return isinstance(node.target, HigherOrderOperator) and node.target not in WRAPPERS


def _keeps_width(node: fx.Node, width: int) -> bool:
    rows_by_matrix = is_call(node, *MATRIX_PRODUCTS)
    return rows_by_matrix and not is_amplifier(node) and hint(shape_of(node)[-1]) >= width


def _downstream(graph: fx.Graph, products: list[fx.Node]) -> dict[fx.Node, int]:
    """The set of products that depend on each node, as a bit mask."""
    bit = {node: 1 << i for i, node in enumerate(products)}
    below: dict[fx.Node, int] = {}
    for node in reversed(list(graph.nodes)):
        mask = bit.get(node, 0)
        for user in node.users:
            mask |= below[user]
        below[node] = mask
    return below


def _from_activations(node: fx.Node) -> bool:
    """Whether the "weight" is computed from what the rows are computed from (keys and queries)."""
    rows, weight, _ = factors(node)
    mine = {n for n in ancestors([weight]) if n.op == "call_function"}
    return bool(mine & {n for n in ancestors([rows]) if n.op == "call_function"})


def _of_weights(node: fx.Node) -> bool:
    """Whether the rows are no tokens but computed from weights alone, such as an adapter's
    scale."""
    read = ancestors([factors(node)[0]])
    inputs = [n for n in read if n.op in ("placeholder", "get_attr") and is_tensor(n)]
    return bool(inputs) and all(
        val_of(n).is_floating_point() and (n.op == "get_attr" or n.meta.get("of_model"))
        for n in inputs  # ids that the loss makes of Python's numbers are constants
    )


def _adapts(node: fx.Node) -> bool:
    """Whether a product is added to one beside it that widens nothing: an adapter's second factor,
    in a graph that ends behind its layer."""

    def scaled(here: fx.Node) -> list[fx.Node]:
        scales = (aten.mul.Tensor, *COPIES)
        return [user for user in here.users if is_view(user) or is_call(user, *scales)]

    for here in reached([node], scaled):
        for add in (user for user in here.users if is_call(user, aten.add.Tensor)):
            others = [base_of(arg) for arg in add.all_input_nodes if arg is not here]
            narrow = [one for one in others if _is_layer(one) and not is_amplifier(one)]
            if any(node not in ancestors([one]) for one in narrow):
                return True
    return False


def feeds_class_op(head: fx.Node, classes: int | None = None) -> bool:
    """Whether a softmax, gather, argmax or sort reads a product through elementwise and layout ops
    alone, as those of a loss head or a router are read. Its columns are ``classes``."""
    width = hint(shape_of(head)[-1]) if classes is None else classes
    seen = reached([head], lambda node: filter(_transparent, node.users))
    return any(
        is_tensor(node) and width in map(hint, shape_of(node))
        for node in seen
        if any(is_call(user, *CLASS_OPS) for user in node.users)
    )


def _transparent(node: fx.Node) -> bool:
    moves = is_view(node) or is_call(node, *COPIES, aten.cat.default, aten.index.Tensor)
    return moves or is_pointwise(node)
