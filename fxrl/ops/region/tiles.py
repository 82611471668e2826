"""A region tile by tile over rows: its forward, gradients of rows and of what all rows read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxrl.dtypes import wide_dtype
from fxrl.ops.linear_logprob.op import linear_logprob_scale
from fxrl.ops.region.kernels import Body, RegionKernels, backward_of


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
            f"the inputs of region {kernels.key} have different numbers of rows "
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


def forward_by_tiles(kernels: RegionKernels, inputs: list[Tensor], tile: int) -> list[Tensor]:
    """What a tiled region returns, tile by tile."""
    rows = _rows_of(kernels, inputs)
    results: list[Tensor] = []
    for start, stop in tile_bounds(rows, tile, kernels.min_rows):
        # Nothing here holds on to a tile's values: they would stand beside the next one's.
        _put(results, rows, start, _forward_of_tile(kernels, inputs, start, stop))
    return results or [*kernels.region.forward(*inputs), *new_vectors(kernels, inputs)]


def _forward_of_tile(
    kernels: RegionKernels, inputs: list[Tensor], start: int, stop: int
) -> list[Tensor]:
    parts, padding = _tile_inputs(kernels, inputs, start, stop)
    body = kernels.body(kernels.bound.read(parts))
    outputs = list(body.forward(*parts))
    if kernels.makes_vectors:
        outputs = _with_vectors(kernels, body, parts, outputs)
    return [output[: output.shape[0] - padding] for output in outputs]


def _put(results: list[Tensor], rows: int, start: int, made: Sequence[Tensor]) -> None:
    if not results:
        results += [part.new_empty((rows, *part.shape[1:])) for part in made]
    for whole, part in zip(results, made, strict=True):
        whole[start : start + part.shape[0]] = part


def new_vectors(kernels: RegionKernels, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Where a region keeps its gradients: for each input ``[N, ...]`` that needs one, of its dtype,
    ``[N, K, ...]``, the gradients of the K outputs that take one by the input's row.

    NOTE [Why one vector per output]: an output is a number per row, and depends on that row of an
    input alone. So whatever the loss is, its gradient is one vector times the incoming scalar. Made
    beside the tile, it costs the products with the weights once, and the backward none.
    """
    count = len(kernels.grad_outputs) if kernels.makes_vectors else 0
    pairs = zip(inputs, kernels.region.inputs, strict=True)
    wanted = [x for x, spec in pairs if spec.needs_grad and count]
    return [x.new_empty((x.shape[0], count, *x.shape[1:])) for x in wanted]


def _with_vectors(
    kernels: RegionKernels, body: Body, parts: Sequence[Tensor], made: Sequence[Tensor]
) -> list[Tensor]:
    """A tile's outputs and vectors, from what its forward made of its ``parts``."""
    backward = backward_of(body, kernels.key)
    read = [made[i] if kind == "output" else parts[i] for kind, i in backward.read]
    by_output = []
    for output in kernels.grad_outputs:
        units = [made[i].new_full(made[i].shape, float(i == output)) for i in kernels.grad_outputs]
        by_output.append(backward(read, units))
    stacked = (torch.stack(vectors, dim=1) for vectors in zip(*by_output, strict=True))
    return [*made[: body.num_outputs], *stacked]


def scaled(vectors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a region's inputs from ``new_vectors`` and what comes in for its outputs: sums
    in fp32 at least, rounded once."""
    wide = wide_dtype(grads[0].dtype)
    given = torch.stack([grad.reshape(-1).to(wide) for grad in grads])
    found = []
    for each in vectors:
        rows, count, *rest = each.shape
        flat = each.reshape(rows, count, math.prod(rest)).transpose(0, 1)
        scaled = linear_logprob_scale(given, flat, each.dtype)
        found.append(scaled.view(rows, *rest))
    return found


def backward_by_tiles(
    kernels: RegionKernels, inputs: list[Tensor], grads: list[Tensor], tile: int
) -> list[Tensor]:
    """Gradients of tiled inputs tile by tile; those of shared inputs are summed in fp32."""
    pairs = list(zip(inputs, kernels.region.inputs, strict=True))
    wanted = [(x, spec) for x, spec in pairs if spec.needs_grad]
    bounds = tile_bounds(_rows_of(kernels, inputs), tile, kernels.min_rows)
    sums = [accumulator(x, spec.tiled, len(bounds)) for x, spec in wanted]
    tiled = [spec.tiled for _, spec in wanted]
    for start, stop in bounds:  # as in the forward, nothing of a tile outlives it
        _add(sums, tiled, start, _backward_of_tile(kernels, inputs, grads, start, stop))
    return [total.to(x.dtype) for total, (x, _) in zip(sums, wanted, strict=True)]


def _backward_of_tile(
    kernels: RegionKernels, inputs: list[Tensor], grads: list[Tensor], start: int, stop: int
) -> list[Tensor]:
    parts, padding = _tile_inputs(kernels, inputs, start, stop)
    backward = backward_of(kernels.body(kernels.bound.read(parts)), kernels.key)
    given = [_pad(grad[start:stop], padding) for grad in grads]
    return list(backward([parts[i] for _, i in backward.read], given))


def _add(
    sums: Sequence[Tensor], tiled: Sequence[bool], start: int, found: Sequence[Tensor]
) -> None:
    """Add a tile's gradients: of tiled inputs in their place, without the rows that pad it."""
    for total, part, in_place in zip(sums, found, tiled, strict=True):
        if in_place:
            place = total[start : start + part.shape[0]]
            place.copy_(part[: place.shape[0]])
        else:
            total += part


def _pad(grad: Tensor, padding: int) -> Tensor:
    if not padding:
        return grad.contiguous()
    return torch.cat([grad, grad.new_zeros((padding, *grad.shape[1:]))])


def accumulator(x: Tensor, tiled: bool, num_tiles: int) -> Tensor:
    """Where an input's gradient is gathered."""
    if tiled:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.zeros(x.shape, dtype=sum_dtype(x.dtype, num_tiles), device=x.device)


def sum_dtype(dtype: torch.dtype, count: int) -> torch.dtype:
    """The dtype in which ``count`` values of a dtype are added up.

    NOTE [Why fp32 sums]: a shared input's gradient is a sum over tiles, or groups. Rounding each
    partial sum to bf16 biases training over a few dozen steps although each step's error looks the
    same.
    """
    low = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if low and count > 1 else dtype
