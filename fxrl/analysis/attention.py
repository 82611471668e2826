"""Attention calls in one form, and the masks that the graph alone determines.

Such masks are computed from index tensors: positions along a dim, or one constant. Following these
symbolically proves a mask causal for every length, without looking at data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxrl.analysis.constants import filled_with_whole
from fxrl.ir.bodies import body_of
from fxrl.ir.graph import (
    COPIES,
    RESHAPES,
    bound,
    inputs_of,
    is_call,
    is_tensor,
    reached,
    shape_of,
    skip_whole_slices,
    val_of,
)
from fxrl.ir.printer import input_name

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
_OPTIONS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def is_masked(node: fx.Node) -> bool:
    """Whether a call is attention that computes its mask (``fxrl.ops.masked_attention``)."""
    return node.op == "call_function" and str(node.target) == "fxrl.masked_attention.default"


def options_of(call: fx.Node) -> dict[str, Any]:
    """The options of an attention call by name, however they were given."""
    return dict(zip(_OPTIONS, call.args[3:], strict=False)) | call.kwargs


def set_options(call: fx.Node, **options: Any) -> None:
    """Give an attention call these options beside those that it has."""
    call.args, call.kwargs = call.args[:3], options_of(call) | options


def calls_by_mask(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Masks, each with the attention calls that read it, once for each run.

    The mask of a call in a body is the value that the outer graph passes in, or the body's own
    input if calls of the body pass in different values.
    """
    masks_of: dict[fx.Node, list[fx.Node]] = {}
    for call, mask in _calls(gm):
        masks_of.setdefault(call, []).append(mask)
    found: dict[fx.Node, list[fx.Node]] = {}
    for call, masks in masks_of.items():
        one = masks[0] if len(set(masks)) == 1 else options_of(call)["attn_mask"]
        found.setdefault(one, []).extend([call] * len(masks))
    return found


def _calls(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    for node in gm.graph.nodes:
        if is_call(node, SDPA):
            mask = options_of(node).get("attn_mask")
            if mask is not None:
                yield node, mask
        elif (body := body_of(gm, node)) is not None:
            inputs = inputs_of(body.graph)
            given = dict(zip(inputs, node.args[1:], strict=True))
            for call, mask in _calls(body):
                yield call, given.get(mask, mask)


def data_of(mask: fx.Node) -> str | None:
    """The first input of the graph whose values, not only sizes, a mask depends on, by its name in
    the user's code."""

    def read(node: fx.Node) -> list[fx.Node]:
        return [arg for arg in node.all_input_nodes if not is_call(arg, aten.sym_size.int)]

    made_of = reached([mask], read)
    data = (n for n in made_of if n.op in ("placeholder", "get_attr") and is_tensor(n))
    return next((input_name(node.name) for node in data), None)


def before_repeat(node: Any) -> fx.Node | None:
    """``x`` of ``reshape(expand(unsqueeze(x, 2)))``: [B, Hkv, T, D] repeated to [B, H, T, D]."""
    if not is_call(node, *RESHAPES) or len(shape_of(node)) != 4:
        return None
    inner: Any = node.args[0]
    inner = inner.args[0] if is_call(inner, aten.clone.default) else inner
    if not is_call(inner, aten.expand.default) or len(shape_of(inner)) != 5:
        return None
    heads = shape_of(inner)[1] * shape_of(inner)[2]
    inner = skip_whole_slices(inner.args[0])
    if not is_call(inner, aten.unsqueeze.default) or inner.args[1] != 2:
        return None
    source: Any = skip_whole_slices(inner.args[0])
    return source if isinstance(heads, int) and heads == shape_of(node)[1] else None


# ---------------------------------------------------------------------------- the proof
@dataclass(frozen=True, slots=True)
class Positions:
    """Each entry is its index along ``dim`` (counted from the end) plus ``offset``."""

    dim: int
    offset: int
    count: str


Known = Positions | int | bool  # a number where every entry is that

_COMPARE: dict[Any, Callable[[Any, Any], bool]] = {
    aten.eq.Scalar: operator.eq,
    aten.ne.Scalar: operator.ne,
    aten.eq.Tensor: operator.eq,
    aten.ne.Tensor: operator.ne,
}
_AND = (aten.bitwise_and.Tensor, aten.logical_and.default)
_SAME = (*COPIES, aten.expand.default)


def known(node: Any) -> Known | None:
    """The value of ``node`` in closed form; None if the graph alone does not tell it."""
    if isinstance(node, int):
        return node
    if not is_tensor(node) or node.op != "call_function":
        return None
    if is_call(node, aten.arange.default) and len(node.args) == 1:
        return Positions(-1, 0, str(shape_of(node)[0]))
    if (number := filled_with_whole(node)) is not None:
        return number
    if is_call(node, aten.add.Tensor, aten.sub.Tensor):
        return _sum(node)
    if is_call(node, aten.cumsum.default):
        return 0 if known(node.args[0]) == 0 else None
    if is_call(node, aten.cat.default):
        return _joined(node)
    if is_call(node, aten.index.Tensor):
        return _indexed(node)
    if node.target in _COMPARE or is_call(node, *_AND):
        return _compared(node)
    return _view(node)


def _compared(node: fx.Node) -> Known | None:
    left, right = known(node.args[0]), known(node.args[1])
    if not (isinstance(left, int) and isinstance(right, int)):
        return None
    if node.target in _COMPARE:
        return _COMPARE[node.target](left, right)
    return bool(left and right) if val_of(node).dtype == torch.bool else None


def _sum(node: fx.Node) -> Known | None:
    if node.kwargs:
        return None
    left, right = known(node.args[0]), known(node.args[1])
    sign = -1 if node.target is aten.sub.Tensor else 1
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    if isinstance(left, Positions) and isinstance(right, int):
        return replace(left, offset=left.offset + sign * right)
    if isinstance(left, Positions) and isinstance(right, Positions) and sign == -1:
        same = (left.dim, left.count) == (right.dim, right.count)
        return left.offset - right.offset if same else None
    return None


def _joined(node: fx.Node) -> Known | None:
    """``cat`` of one position and those that follow it."""
    parts: Any = node.args[0]
    rank = len(shape_of(node))
    dim = bound(node)["dim"] % rank - rank
    if len(parts) != 2:
        return None
    first, second = known(parts[0]), known(parts[1])
    if not (isinstance(first, Positions) and isinstance(second, Positions)):
        return None
    follows = first.count == "1" and first.offset + 1 == second.offset
    if not follows or (first.dim, second.dim) != (dim, dim):
        return None
    return Positions(dim, first.offset, str(shape_of(node)[dim]))


def _indexed(node: fx.Node) -> Known | None:
    """``positions[rows, at]``, where ``at`` are known positions."""
    source, indices = node.args[:2]
    inner = known(source)
    if not isinstance(inner, Positions):
        return inner
    at: Any = indices[inner.dim] if len(indices) == len(shape_of(source)) else None  # type: ignore[index, arg-type]
    where = known(at)
    if not isinstance(where, Positions) or len(shape_of(at)) != len(shape_of(node)):
        return None
    return replace(where, offset=where.offset + inner.offset)


def _view(node: fx.Node) -> Known | None:
    source: Any = node.args[0] if node.args else None
    inner = known(source)
    if inner is None:
        return None
    if isinstance(inner, int):
        views = (aten.unsqueeze.default, aten.slice.Tensor, aten.squeeze.dim, aten.view.default)
        if node.target not in (*_SAME, *views):
            return None
        return bool(inner) if val_of(node).dtype == torch.bool else inner
    rank = len(shape_of(node))
    if is_call(node, aten.unsqueeze.default):
        at = int(node.args[1]) % rank - rank  # type: ignore[arg-type]
        return replace(inner, dim=inner.dim - (at > inner.dim - 1))
    if is_call(node, aten.slice.Tensor):
        return _sliced(node, inner, rank)
    if node.target in _SAME:
        same = str(shape_of(node)[inner.dim]) == inner.count
        return inner if same else None
    return None


def _sliced(node: fx.Node, inner: Positions, rank: int) -> Positions | None:
    given = bound(node)
    if given["dim"] % rank - rank != inner.dim:
        return inner
    start = given["start"] or 0
    if not isinstance(start, int) or start < 0 or given["step"] != 1:
        return None
    return Positions(inner.dim, inner.offset + start, str(shape_of(node)[inner.dim]))
