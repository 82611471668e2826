"""What masks had done to attention: repeated keys are taken back, masks that stay are explained.

Libraries give grouped queries to attention itself where there is no mask, and repeat the keys of
each group where there is one, since no fused kernel takes both. A tracer always gets the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrl.ir.graph import (
    RESHAPES,
    bound,
    eliminate_dead_code,
    hint,
    is_call,
    shape_of,
    tensor_val,
    with_arguments,
)
from fxrl.ir.remark import Remark, RemarkKind, Report
from fxrl.ir.source import user_source

aten = torch.ops.aten
_SDPA = aten.scaled_dot_product_attention.default
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_LARGEST_HEAD = 256  # features a head up to which the fused kernels take grouped queries


def group_queries(gm: fx.GraphModule) -> Report:
    """Undo repeated keys where no mask is left; one remark for the masks that are."""
    masked = _group(gm)
    for call in gm.graph.find_nodes(op="call_function", target=_CHECKPOINT):
        body = getattr(gm, str(call.args[0].target))
        inputs = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True))
        masked += [(attention, inputs.get(mask, mask)) for attention, mask in _group(body)]
    return _explain(masked)


def _group(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Group the queries of one graph; returns the calls that keep a mask, and their masks."""
    masked = []
    for call in gm.graph.find_nodes(op="call_function", target=_SDPA):
        given = bound(call)
        if given["attn_mask"] is not None:
            masked.append((call, given["attn_mask"]))
            continue
        keys, values = _before_repeat(given["key"]), _before_repeat(given["value"])
        if keys is not None and values is not None:
            args, kwargs = with_arguments(call, key=keys, value=values, enable_gqa=True)
            call.args, call.kwargs = tuple(args), kwargs
    eliminate_dead_code(gm.graph)
    gm.recompile()
    return masked


def _explain(masked: list[tuple[fx.Node, fx.Node]]) -> Report:
    if not masked:
        return Report()
    call, mask = masked[0]
    data = _data_of(mask)
    if data is None:
        why, cure = "it is not plainly causal", ""
    else:
        why = f"it depends on the values of %{data}"
        cure = "leave out attention_mask and position_ids where no token is padding"
    reason = f"{len(masked)} attention calls keep their mask: {why}"
    kind, source = RemarkKind.ANALYSIS, user_source(call)
    return Report((Remark(kind, "restore-causal-attention", call.name, source, reason, cure),))


def _data_of(mask: fx.Node) -> fx.Node | None:
    """The first input of the graph whose values, not only sizes, a mask depends on."""
    seen, stack = {mask}, [mask]
    while stack:
        node = stack.pop()
        if node.op in ("placeholder", "get_attr") and tensor_val(node) is not None:
            return node
        for arg in node.all_input_nodes:
            if arg not in seen and not is_call(arg, aten.sym_size.int):
                seen.add(arg)
                stack.append(arg)
    return None


def _before_repeat(node: Any) -> fx.Node | None:
    """``x`` of ``reshape(expand(unsqueeze(x, 2)))``: [B, Hkv, T, D] repeated to [B, H, T, D]."""
    if not is_call(node, *RESHAPES):
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
