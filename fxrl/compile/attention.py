"""Causal masks back into ``is_causal=True``, which is what lets the fast attention kernels run.

Libraries hand attention no mask where it is plainly causal, but to a tracer they hand the whole
[B, 1, T, T] tensor, and repeat the keys of grouped queries to go with it. Where the graph proves
that a mask is causal (``core.index_algebra``), both are undone; where it reads data it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxrl.core.graph import eliminate_dead_code, hint, is_call, shape_of
from fxrl.core.index_algebra import CAUSAL, IndexAlgebra, Linear, data_of
from fxrl.core.remark import Remark, RemarkKind, Report
from fxrl.core.source import user_source

aten = torch.ops.aten
_SDPA = aten.scaled_dot_product_attention.default
_SDPA_FUNCTION = torch._C._nn.scaled_dot_product_attention
_OPTIONS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_FAR = 2**62
_LARGEST_HEAD = 256  # features a head up to which fused kernels take grouped queries


def use_causal_attention(gm: fx.GraphModule) -> Report:
    """Replace proven causal masks; one remark for those replaced, one for those kept."""
    algebra = IndexAlgebra()
    replaced, kept = [], []
    for call, mask, lengths in _masked_attention(gm):
        if _is_causal(algebra, mask, lengths):
            _drop_mask(call)
            replaced.append(call)
        else:
            kept.append((call, mask))
    eliminate_dead_code(gm.graph)
    remarks = []
    if replaced:
        count = len(replaced)
        reason = f"{count} attention calls: the mask is causal, so is_causal=True takes its place"
        remarks.append(_fact(replaced[0], reason))
    if kept:
        data = data_of(kept[0][1])
        why = f"it reads %{data}" if data is not None else "it is not plainly causal"
        reason = f"{len(kept)} attention calls keep their mask: {why}"
        cure = "leave out attention_mask and position_ids where no token is padding"
        remarks.append(_fact(kept[0][0], reason, cure if data is not None else ""))
    return Report(tuple(remarks))


def _masked_attention(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node, tuple[Any, Any]]]:
    """Each attention call with a bool mask, the mask's value in ``gm``, and its two lengths.

    Calls inside of checkpointed bodies count; their mask comes in through the body's inputs.
    """
    for node in list(gm.graph.nodes):
        if is_call(node, _SDPA):
            mask = _options(node)["attn_mask"]
            if _is_mask(mask):
                yield node, mask, tuple(shape_of(mask)[-2:])
        body = _body(gm, node)
        if body is None:
            continue
        inputs = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[1:], strict=False))
        for call in list(body.graph.nodes):
            mask = _options(call)["attn_mask"] if is_call(call, _SDPA_FUNCTION) else None
            if mask in inputs and _is_mask(inputs[mask]):
                yield call, inputs[mask], tuple(shape_of(inputs[mask])[-2:])


def _is_mask(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.meta["val"].dtype == torch.bool


def _body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The body of a checkpointed call that has it for itself."""
    if not is_call(node, torch.ops.higher_order.tag_activation_checkpoint):
        return None
    attr: Any = node.args[0]
    body = getattr(gm, str(attr.target))
    own = sum(n.op == "get_attr" and n.target == attr.target for n in gm.graph.nodes) == 1
    return body if own and isinstance(body, fx.GraphModule) else None


def _options(call: fx.Node) -> dict[str, Any]:
    given = dict(zip(_OPTIONS, call.args[3:], strict=False)) | call.kwargs
    return {"attn_mask": None, "is_causal": False} | given


def _is_causal(algebra: IndexAlgebra, mask: fx.Node, lengths: tuple[Any, Any]) -> bool:
    formula = algebra.formula(mask)
    if not isinstance(formula, frozenset) or CAUSAL not in formula:
        return False
    return all(_holds_below_diagonal(part, lengths[0]) for part in formula - {CAUSAL})


def _holds_below_diagonal(part: Linear, length: Any) -> bool:
    """Whether a sliding window, q - k - window + 1 <= 0, is at least as long as the sequence.

    NOTE [Why a guard]: for a symbolic length the comparison becomes one of Dynamo's guards, and a
    longer batch is captured anew, with its window. Eager code decides the same at every call.
    """
    window = 1 - part.const
    if part.terms != ((-2, 1), (-1, -1)) or hint(length) > window:
        return False
    return bool(length <= window)


def _drop_mask(call: fx.Node) -> None:
    options = _options(call) | {"attn_mask": None, "is_causal": True}
    query, keys, values = call.args[:3]
    if call.target is _SDPA:
        sources = [_before_repeat(keys), _before_repeat(values)]
        if sources[0] is not None and sources[1] is not None:
            keys, values = sources
            options["enable_gqa"] = True
    call.args, call.kwargs = (query, keys, values), options


def _before_repeat(node: Any) -> fx.Node | None:
    """``x`` of ``reshape(expand(unsqueeze(x, 2)))``: [B, Hkv, T, D] repeated to [B, H, T, D]."""
    if not is_call(node, aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return None
    if len(shape_of(node)) != 4 or hint(shape_of(node)[-1]) > _LARGEST_HEAD:
        return None
    inner: Any = node.args[0]
    inner = inner.args[0] if is_call(inner, aten.clone.default) else inner
    if not is_call(inner, aten.expand.default) or len(shape_of(inner)) != 5:
        return None
    heads = shape_of(inner)[1] * shape_of(inner)[2]
    inner = _skip_whole_slices(inner.args[0])
    if not is_call(inner, aten.unsqueeze.default) or inner.args[1] != 2:
        return None
    source: Any = _skip_whole_slices(inner.args[0])
    return source if isinstance(heads, int) and heads == shape_of(node)[1] else None


def _skip_whole_slices(node: Any) -> Any:
    while is_call(node, aten.slice.Tensor) and node.args[2:] == (0, 2**63 - 1):
        node = node.args[0]
    return node


def _fact(call: fx.Node, reason: str, cure: str = "") -> Remark:
    kind = RemarkKind.ANALYSIS
    return Remark(kind, "capture", call.name, user_source(call), reason, cure)
