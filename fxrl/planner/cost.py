"""Seconds that a compiled body takes, by the kernels that it will run as.

A kernel takes as long as the slower of its arithmetic and its traffic with GPU memory (S. Williams
et al., "Roofline", 2009), at the rates that the target reaches; what ranks exchange within a layer
as long as the link between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from fxrl.ir.graph import (
    SCALED_MM,
    bound,
    is_attention,
    is_call,
    is_exchange,
    is_grouped_product,
    is_matrix_product,
    library_weight,
    shape_of,
    val_of,
)
from fxrl.planner.memory_profile import exchanged_bytes, nbytes
from fxrl.planner.schedule import (
    Kernel,
    Measure,
    is_backward,
    shared_weight,
)
from fxrl.planner.target import Target

#: Products of a causal attention's backward for each of its forward's: dV, dP, dQ, dK, and P again.
_BACKWARD_PRODUCTS = 2.5
#: What a product's left operand is called, op by op.
_ROWS = ("mat1", "batch1", "self", "a", "rows")
#: Of a computed mask's attention, for each pair that it looks at (FlexAttention beside cuDNN on an
#: H200: packed rows 1.6, windows 1.4, padded rows 1.3 to 1.5).
_MASKED_SLOWER = 1.5
#: Grouped products beside one as large: in arithmetic, and where traffic is what they wait for
#: (65,536 rows among the 128 experts of Qwen3-30B-A3B on an H200: 440 to 540 TFLOP/s of the 690,
#: 1.4 to 2.2 TB/s of the 3.6 for an adapter's narrow ones).
_GROUPED_SLOWER = 1.35
_GROUPED_TRAFFIC = 2.0
#: Rows that are added to the places that name them, which are sorted first: 295 us on an H200 for
#: 65,536 rows of 2048 bf16 values, of which 80 are their traffic.
_SORTED_TRAFFIC = 3.7
#: Products in fp32, which tensor cores do not do (an H200's data sheet: 67 TFLOP/s of 989).
_FP32_SLOWER = 14


def seconds(
    kernels: Sequence[Kernel],
    target: Target,
    measure: Measure,
    inside: Callable[[fx.Node], float] = lambda call: 0.0,
    seen: Mapping[str, float] | None = None,
) -> float:
    """Seconds of all kernels, one after the other. ``inside`` gives those of a region that a kernel
    calls; ``seen`` maps computed masks to the share of query-key pairs that are computed."""
    return sum(
        max(
            _traffic(kernel, target, measure),
            _arithmetic(kernel.calls, target, measure, seen or {}),
            target.launch,
        )
        + (0.0 if kernel.calls is None else inside(kernel.calls))
        for kernel in kernels
    )


def _traffic(kernel: Kernel, target: Target, measure: Measure) -> float:
    moved = sum(width * measure(count) for count, width in kernel.moved)
    return _passes(kernel.calls) * moved / target.bandwidth


def _passes(call: fx.Node | None) -> float:
    """How often a kernel's traffic counts, by the op that it is."""
    if call is None:
        return 1.0
    if is_call(call, torch.ops.aten._index_put_impl.default):
        return _SORTED_TRAFFIC
    return _GROUPED_TRAFFIC if is_grouped_product(call) else 1.0


def _arithmetic(
    call: fx.Node | None, target: Target, measure: Measure, seen: Mapping[str, float]
) -> float:
    if call is None:
        return 0.0
    if str(call.target) == SCALED_MM:
        return product_flops(call, measure) / (target.fp8_flops or target.product_flops)
    if is_matrix_product(call):
        slower = 1.0 if val_of(call).element_size() <= 2 else _FP32_SLOWER
        slower *= _GROUPED_SLOWER if is_grouped_product(call) else 1.0
        product = slower * product_flops(call, measure) / target.product_flops
        return max(product, brought_bytes(call, measure) / target.peer_link)
    if is_exchange(call):
        ranks: Any = call.args[2]
        sent: float = exchanged_bytes(call, measure) * (1 - 1 / ranks)
        return sent / target.peer_link
    if not is_attention(call):
        return 0.0
    flops = attention_flops(call, measure, seen)
    if is_backward(call):
        return _BACKWARD_PRODUCTS * flops / target.attention_backward_flops
    return flops / target.attention_flops


def brought_bytes(call: fx.Node, measure: Measure) -> int:
    """Bytes of a call's weight that come from other ranks, while earlier kernels run."""
    if (read := shared_weight(call)) is None:
        return 0
    return max(0, read.rows * read.row_bytes(measure) - nbytes(read.part, measure))


def product_flops(call: fx.Node, measure: Measure) -> int:
    """FLOPs of a matrix product, batched or not. In a grouped product each row belongs to one
    group; if the result has a matrix per group, the groups share the rows that are summed over."""
    given = bound(call)
    rows = (given[name] for name in _ROWS if name in given)
    left = call.all_input_nodes[0] if library_weight(call) else next(rows)
    made, inner = shape_of(call), shape_of(left)[-1]
    if is_grouped_product(call) and len(made) > len(shape_of(left)):
        made = made[1:]
    return 2 * prod(map(measure, made)) * measure(inner)


def attention_flops(call: fx.Node, measure: Measure, seen: Mapping[str, float]) -> float:
    """FLOPs of an attention's forward: half of the full square if it is causal, or under a computed
    mask of unknown content, which in language model training is causal at least."""
    given: dict[str, Any] = bound(call)
    rows, keys = shape_of(given["query"]), shape_of(given["key"])
    full = 4 * prod(map(measure, rows)) * measure(keys[-2])
    if "mask" in given:
        return full * (_MASKED_SLOWER * seen[given["mask"]] if given["mask"] in seen else 0.5)
    return full / 2 if given.get("is_causal") else full
