"""The op pair behind every region: ``fxrl::region`` and ``fxrl::region_vjp``.

Opaque on purpose: no later pass can merge the recompute away or batch the tiles again (see
``NOTE [Why an opaque op]``). What runs is looked up by the region's id; the backend registers it.

NOTE [Why an opaque op]: an autograd.Function that AOTAutograd inlines loses the saving under
Inductor, whose CSE merges the recomputed matmul with the forward's, and full-graph Inductor
batches unrolled tiles so that all are alive at once. Behind an op, tile count and token count are
run-time values, and one compiled body serves every shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxrl.ir.region import Region

TensorFunction = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class RegionKernels:
    """What the backend made of a region.

    Attributes:
        region: the region itself; its forward also gives shapes on fake tensors.
        forward: inputs -> outputs.
        kept: the two halves of a region whose backward keeps (``fxrl::kept_region``).
        vjp: inputs and the gradients of the floating-point outputs -> gradients of the inputs
            that need one. None without a gradient.
        grad_outputs: which outputs take an incoming gradient.
        min_rows: fewer rows than this are padded (a compiled body may assume at least 2).
        options: the compiler options they were built with; None for op by op.
        traced: the graphs they were built from, forward and vjp.
        generated: gives file name -> source that the compiler generated.
    """

    region: Region
    forward: TensorFunction
    vjp: TensorFunction | None
    grad_outputs: tuple[int, ...]
    min_rows: int = 1
    kept: Any = None
    options: Any = None
    traced: tuple[fx.GraphModule, fx.GraphModule | None] | None = None
    generated: Callable[[], dict[str, str]] = dict


_KERNELS: dict[str, RegionKernels] = {}


def register(kernels: RegionKernels) -> None:
    """Make a region callable by its id. Registering an equal body again replaces it."""
    _KERNELS[kernels.region.id] = kernels


def registered(region_id: str) -> RegionKernels | None:
    """The kernels under an id, if the backend made them already."""
    return _KERNELS.get(region_id)


def lookup(region_id: str) -> RegionKernels:
    kernels = _KERNELS.get(region_id)
    assert kernels is not None, f"region {region_id} was never built"
    return kernels


# ---------------------------------------------------------------------------- tiles
def tile_bounds(rows: int, tile: int, min_rows: int) -> list[tuple[int, int]]:
    """Split rows into even tiles of at most ``tile`` rows (but at least ``min_rows``).

    Even tiles leave no small remainder, so a body compiled for two or more rows serves all.
    """
    if rows == 0:
        return []
    count = -(-rows // max(tile, 1)) if tile else 1
    count = max(1, min(count, rows // max(min_rows, 1)))
    edges = [rows * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def _rows_of(kernels: RegionKernels, inputs: Sequence[Tensor]) -> int:
    counts = {
        x.shape[0] for x, spec in zip(inputs, kernels.region.inputs, strict=True) if spec.tiled
    }
    if len(counts) != 1:
        raise RuntimeError(
            f"the inputs of region {kernels.region.id} have different numbers of rows "
            f"{sorted(counts)}; the loss pairs tensors of different token counts"
        )
    return counts.pop()


def _tile_inputs(
    kernels: RegionKernels, inputs: Sequence[Tensor], start: int, stop: int
) -> tuple[list[Tensor], int]:
    """The inputs of one tile, and how many of its rows are padding (copies of its last row)."""
    padding = max(0, kernels.min_rows - (stop - start))
    parts = []
    for x, spec in zip(inputs, kernels.region.inputs, strict=True):
        if spec.tiled:
            part = x[start:stop].contiguous()  # bodies are traced for contiguous rows
            x = torch.cat([part, part[-1:].expand(padding, *part.shape[1:])]) if padding else part
        parts.append(x)
    return parts, padding


def _pad(grad: Tensor, padding: int) -> Tensor:
    if not padding:
        return grad.contiguous()
    return torch.cat([grad, grad.new_zeros((padding, *grad.shape[1:]))])


class WithoutAutocast:
    """Bodies already contain the casts that autocast asked for when they were captured."""

    def __init__(self, device: torch.device) -> None:
        self._off = torch.autocast(device.type, enabled=False)

    def __enter__(self) -> None:
        self._off.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        self._off.__exit__(*exc)


# ---------------------------------------------------------------------------- forward
@torch.library.custom_op(
    "fxrl::region",
    mutates_args=(),
    schema="(Tensor[] inputs, str region_id, SymInt tile) -> Tensor[]",
)
def region(inputs: list[Tensor], region_id: str, tile: int) -> list[Tensor]:
    """Run a region's forward, whole or in tiles of ``tile`` rows."""
    kernels = lookup(region_id)
    with WithoutAutocast(inputs[0].device):
        if not kernels.region.tiled:
            return fresh(list(kernels.forward(*inputs)), inputs)
        rows = _rows_of(kernels, inputs)
        results: list[Tensor] = []
        for start, stop in tile_bounds(rows, int(tile), kernels.min_rows):
            parts, padding = _tile_inputs(kernels, inputs, start, stop)
            outputs = kernels.forward(*parts)
            if not results:
                results = [o.new_empty((rows, *o.shape[1:])) for o in outputs]
            for whole, part in zip(results, outputs, strict=True):
                whole[start:stop] = part[: part.shape[0] - padding]
        return results or list(kernels.region.forward(*inputs))


def fresh(outputs: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that share no storage with the inputs or each other, as an op must return."""
    seen = {x.untyped_storage().data_ptr() for x in inputs}
    result = []
    for output in outputs:
        pointer = output.untyped_storage().data_ptr()
        result.append(output.clone() if pointer in seen and output.numel() else output)
        seen.add(result[-1].untyped_storage().data_ptr())
    return result


@region.register_fake
def _(inputs: list[Tensor], region_id: str, tile: int) -> list[Tensor]:
    outputs = lookup(region_id).region.forward(*inputs)
    return [torch.empty_like(output) for output in outputs]


# ---------------------------------------------------------------------------- backward
@torch.library.custom_op(
    "fxrl::region_vjp",
    mutates_args=(),
    schema="(Tensor[] inputs, Tensor[] grads, str region_id, SymInt tile) -> Tensor[]",
)
def region_vjp(
    inputs: list[Tensor], grads: list[Tensor], region_id: str, tile: int
) -> list[Tensor]:
    """Gradients of the inputs that need one; gradients of shared inputs are summed in fp32."""
    kernels = lookup(region_id)
    assert kernels.vjp is not None, f"region {region_id} was captured without a gradient"
    specs = [spec for spec in kernels.region.inputs if spec.needs_grad]
    wanted = [x for x, spec in zip(inputs, kernels.region.inputs, strict=True) if spec.needs_grad]
    with WithoutAutocast(inputs[0].device):
        if not kernels.region.tiled:
            result = kernels.vjp(*inputs, *(grad.contiguous() for grad in grads))
            return fresh(list(result), [*inputs, *grads])
        rows = _rows_of(kernels, inputs)
        bounds = tile_bounds(rows, int(tile), kernels.min_rows)
        sums = [_accumulator(x, spec.tiled, bounds) for x, spec in zip(wanted, specs, strict=True)]
        for start, stop in bounds:
            parts, padding = _tile_inputs(kernels, inputs, start, stop)
            tile_grads = [_pad(grad[start:stop], padding) for grad in grads]
            for total, part, spec in zip(
                sums, kernels.vjp(*parts, *tile_grads), specs, strict=True
            ):
                if spec.tiled:
                    total[start:stop] = part[: part.shape[0] - padding]
                else:
                    total += part
    return [total.to(x.dtype) for total, x in zip(sums, wanted, strict=True)]


def _accumulator(x: Tensor, tiled: bool, bounds: list[tuple[int, int]]) -> Tensor:
    """Where an input's gradient is gathered.

    NOTE [Why fp32 sums]: a shared input's gradient is a sum over tiles. Rounding each partial sum
    to bf16 biases training over a few dozen steps although each step's error looks the same.
    """
    if tiled:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    low = x.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if low and len(bounds) > 1 else x.dtype
    return torch.zeros(x.shape, dtype=dtype, device=x.device)


@region_vjp.register_fake
def _(inputs: list[Tensor], grads: list[Tensor], region_id: str, tile: int) -> list[Tensor]:
    specs = lookup(region_id).region.inputs
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x, spec in zip(inputs, specs, strict=True)
        if spec.needs_grad
    ]


def _setup_context(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    tensors, ctx.region_id, ctx.tile = inputs
    ctx.save_for_backward(*tensors)
    ctx.results = [(tuple(o.shape), o.dtype, o.device) for o in output]


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, None, None]:
    kernels = lookup(ctx.region_id)
    inputs = list(ctx.saved_tensors)
    given = []
    for index in kernels.grad_outputs:
        grad, (shape, dtype, device) = grads[index], ctx.results[index]
        given.append(torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad)
    found = iter(torch.ops.fxrl.region_vjp(inputs, given, ctx.region_id, ctx.tile))
    result = [next(found) if spec.needs_grad else None for spec in kernels.region.inputs]
    return result, None, None


region.register_autograd(_backward, setup_context=_setup_context)
