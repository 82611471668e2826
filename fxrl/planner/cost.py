"""Seconds that a compiled body takes, by the kernels that it will run as.

A kernel takes as long as the slower of its arithmetic and its traffic with GPU memory (S. Williams
et al., "Roofline", 2009), at the rates that the target reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import fx

from fxrl.ir.graph import PRODUCTS, bound, is_piecewise_product, shape_of, val_of
from fxrl.planner.memory_profile import nbytes
from fxrl.planner.schedule import (
    Kernel,
    Measure,
    is_attention,
    is_backward,
    is_scaled,
    shared_weight,
)
from fxrl.planner.target import Target

#: Products of a causal attention's backward for each of its forward's: dV, dP, dQ, dK, and P again.
_BACKWARD_PRODUCTS = 2.5
#: What a product's left operand is called, op by op.
_ROWS = ("mat1", "batch1", "self", "a", "rows")
#: Products in fp32, which tensor cores do not do (an H200's data sheet: 67 TFLOP/s of 989).
_FP32_SLOWER = 14


def seconds(
    kernels: Sequence[Kernel],
    target: Target,
    measure: Measure,
    inside: Callable[[fx.Node], float] = lambda call: 0.0,
) -> float:
    """Of all kernels, one after the other.

    Args:
        measure: what the sizes are.
        inside: seconds that a call of a region takes.
    """
    return sum(
        max(
            _traffic(kernel, measure) / target.bandwidth,
            _arithmetic(kernel.calls, target, measure),
            target.launch,
        )
        + (0.0 if kernel.calls is None else inside(kernel.calls))
        for kernel in kernels
    )


def _traffic(kernel: Kernel, measure: Measure) -> int:
    return sum(nbytes(node, measure) for node in (*kernel.makes, *kernel.reads))


def _arithmetic(call: fx.Node | None, target: Target, measure: Measure) -> float:
    if call is None:
        return 0.0
    if is_scaled(call):
        return product_flops(call, measure) / (target.fp8_flops or target.product_flops)
    if call.target in PRODUCTS or is_piecewise_product(call):
        slower = 1 if val_of(call).element_size() <= 2 else _FP32_SLOWER
        product = slower * product_flops(call, measure) / target.product_flops
        return max(product, brought_bytes(call, measure) / target.peer_link)
    if not is_attention(call):
        return 0.0
    flops = attention_flops(call, measure)
    if is_backward(call):
        return _BACKWARD_PRODUCTS * flops / target.attention_backward_flops
    return flops / target.attention_flops


def brought_bytes(call: fx.Node, measure: Measure) -> int:
    """Bytes of a call's weight that come from other ranks, while what is ahead of it runs."""
    if (read := shared_weight(call)) is None:
        return 0
    part, rows = read
    return max(0, rows * int(shape_of(part)[1]) - nbytes(part, measure))


def product_flops(call: fx.Node, measure: Measure) -> int:
    """Of a matrix product, batched or not."""
    given = bound(call)
    left = next(given[name] for name in _ROWS if name in given)
    return 2 * prod(map(measure, shape_of(call))) * measure(shape_of(left)[-1])


def attention_flops(call: fx.Node, measure: Measure) -> int:
    """Of an attention's forward; half of it where it is causal, or under a computed mask, which is
    causal at least where a language model is trained."""
    given: dict[str, Any] = bound(call)
    rows, keys = shape_of(given["query"]), shape_of(given["key"])
    full = 4 * prod(map(measure, rows)) * measure(keys[-2])
    return full // 2 if given.get("is_causal") or "mask" in given else full
