"""What a region's two halves need and how long they take, read off their graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxrl.compile.bodies.variants import CompiledRegion
from fxrl.ir.graph import Size, bound, inputs_of, is_call, val_of
from fxrl.ops.region.tiles import sum_dtype, tile_bounds
from fxrl.planner.cost import seconds
from fxrl.planner.memory_profile import MemoryProfile, nbytes, tensor_bytes
from fxrl.planner.schedule import Kernel, Measure, kernels, result, volume
from fxrl.planner.target import Target

fxrl = torch.ops.fxrl


@dataclass(frozen=True, slots=True)
class Figures:
    """Memory and time of a body at one set of sizes."""

    # Peaks of forward and backward. What is returned and the incoming gradients are included, but
    # where the region runs part by part, ``beside``: each part makes its own.
    forward_bytes: int
    backward_bytes: int
    forward_s: float
    backward_s: float
    # Source (as in ``ops.region.kernels.Later``) and bytes of each tensor that the backward reads.
    saved: tuple[tuple[tuple[str, int], int], ...]
    again_bytes: int = 0  # peak of what makes outputs again
    again_s: float = 0.0
    beside: bool = False


class BodyProfile:
    """Memory and time of a region's two halves at any sizes; ``of`` gives the profiles of the
    regions inside, ``seen`` is as in ``planner.cost.seconds``."""

    def __init__(
        self,
        built: CompiledRegion,
        of: Callable[[CompiledRegion], BodyProfile],
        seen: Mapping[str, float] | None = None,
    ) -> None:
        self._built, traced = built, built.traced
        self._halves = [None if gm is None else _Half(gm, seen) for gm in traced.graphs]
        self._saved = self._memory_saved()
        self._inside = {inner.key: of(inner) for inner in built.inside.values()}
        self._known: dict[Any, Figures] = {}

    def at(
        self, inputs: Sequence[Tensor], measure: Measure, target: Target, tile: int = 0
    ) -> Figures:
        """Figures for the region's inputs, whose sizes ``measure`` knows; ``tile``: rows of each
        tile, of a tiled region."""
        return self.of(self._built.bound.read(inputs), measure, target, tile)

    def of(
        self, sizes_of: Sequence[Size], measure: Measure, target: Target, tile: int = 0
    ) -> Figures:
        """As ``at``, for what ``RegionKernels.bound`` reads of the inputs."""
        names = self._built.bound.names
        sizes = dict(zip(names, map(measure, sizes_of), strict=True))
        if self._built.region.groups > 1:
            return self._by_groups(sizes, target)
        if not tile:
            return self._at(sizes, target)
        bounds = tile_bounds(sizes["rows"], tile, self._built.min_rows)
        found = self._at({**sizes, "rows": bounds[-1][1] - bounds[-1][0]}, target)
        count = len(bounds)
        if self._built.makes_vectors:
            return self._with_vectors(sizes, found, count, target)
        return self._by_tiles(sizes, found, count)

    def _by_tiles(self, sizes: dict[str, int], one: Figures, count: int) -> Figures:
        """The figures of ``count`` tiles like ``one``: each runs beside the sums of the tiles
        before it, which are rounded at the end."""
        traced, region = self._built.traced, self._built.region
        measure = traced.measure(sizes)
        incoming = sum(tensor_bytes(grad, measure) for grad in traced.grad_examples)
        pairs = zip(traced.input_examples, region.inputs, strict=True)
        shared = [x for x, spec in pairs if spec.needs_grad and not spec.tiled]
        results, sums = _summed(shared, count, measure)
        return replace(
            one,
            forward_s=count * one.forward_s,
            backward_s=count * one.backward_s,
            backward_bytes=max(
                sums if sums > results else 0,  # else they are the results
                sums - results + one.backward_bytes - incoming // count,
            ),
            beside=True,
        )

    def _with_vectors(
        self, sizes: dict[str, int], one: Figures, count: int, target: Target
    ) -> Figures:
        """The figures of ``count`` tiles like ``one`` whose forward makes gradients: each runs the
        backward for each output at once, beside the vectors of all rows, which are scaled later."""
        traced, num_outputs = self._built.traced, len(self._built.grad_outputs)
        measure = traced.measure(sizes)
        pairs = zip(traced.input_examples, self._built.region.inputs, strict=True)
        grads = [tensor_bytes(x, measure) for x, spec in pairs if spec.needs_grad]
        vectors = [num_outputs * size for size in grads]
        kept = sum(size for (kind, _), size in one.saved if kind == "output")
        incoming = sum(tensor_bytes(grad, measure) for grad in traced.grad_examples)
        scaled = sum(vectors) + sum(grads) + incoming
        return Figures(
            sum(vectors) + max(one.forward_bytes, kept + one.backward_bytes),
            sum(grads) + incoming,
            count * (one.forward_s + num_outputs * one.backward_s),
            scaled / target.bandwidth,
            tuple((("output", traced.num_outputs + i), size) for i, size in enumerate(vectors)),
        )

    def _by_groups(self, sizes: dict[str, int], target: Target) -> Figures:
        """The figures of groups: each runs beside the sums of the groups before it."""
        one, traced, region = self._at(sizes, target), self._built.traced, self._built.region
        measure = traced.measure(sizes)
        pairs = zip(traced.input_examples, region.inputs, strict=True)
        summed = [x for x, spec in pairs if spec.needs_grad and spec.split is None]
        incoming = sum(tensor_bytes(grad, measure) for grad in traced.grad_examples)

        def half(values: Sequence[Tensor], peak: int, seconds: float) -> tuple[int, float]:
            results, sums = _summed(values, region.groups, measure)
            added = (results + 2 * sums) / target.bandwidth
            return max(sums + peak - results, sums), region.groups * (seconds + added)

        returned: Any = traced.forward.graph.output_node().args[0]
        results = [*map(val_of, returned)]
        outputs, kept = results[: traced.num_outputs], results[traced.num_outputs :]
        forward = half(outputs, one.forward_bytes, one.forward_s)
        copied = 2 * region.groups * sum(tensor_bytes(value, measure) for value in kept)
        backward = half(summed, one.backward_bytes - incoming, one.backward_s)
        again = half(outputs, one.again_bytes, one.again_s)
        return Figures(
            forward[0],
            backward[0],
            forward[1] + copied / target.bandwidth,
            backward[1],
            one.saved,
            *again,
            beside=True,
        )

    def _memory_saved(self) -> dict[fx.Node, tuple[str, int]]:
        """The region's inputs and outputs that the backward reads, each with its kind and place.
        Views need no memory of their own, nor does a copy on a GPU with its source's layout."""
        traced = self._built.traced
        results: Any = traced.forward.graph.output_node().args[0]
        places = {"input": inputs_of(traced.forward.graph), "output": results}
        read = traced.backward.read if traced.backward else ()
        return {result(places[kind][i]): (kind, i) for kind, i in reversed(read)}

    def _at(self, sizes: dict[str, int], target: Target) -> Figures:
        key = (target, *sizes.items())
        if key not in self._known:
            self._known[key] = self._computed(sizes, target)
        return self._known[key]

    def _computed(self, sizes: dict[str, int], target: Target) -> Figures:
        traced = self._built.traced
        measure = traced.measure(sizes)

        def inner(call: fx.Node) -> tuple[int, float]:
            return self._called(call, measure, target)

        forward, backward, again = (
            (0, 0.0) if half is None else half.at(measure, target, inner) for half in self._halves
        )
        incoming = sum(tensor_bytes(grad, measure) for grad in traced.grad_examples)
        saved = [(source, nbytes(node, measure)) for node, source in self._saved.items()]
        return Figures(
            forward[0], backward[0] + incoming, forward[1], backward[1], tuple(saved), *again
        )

    def _called(self, call: fx.Node, measure: Measure, target: Target) -> tuple[int, float]:
        """Bytes and seconds of a call of a region inside this one; none for other calls."""
        whole, again = fxrl.region.default, fxrl.region_again.default
        if not is_call(call, whole, again, fxrl.region_vjp.default):
            return 0, 0.0
        given: dict[str, Any] = bound(call)
        body, tile = self._inside[given["key"]], int(given.get("tile", 0))
        if is_call(call, whole):
            found = body.at([val_of(node) for node in given["inputs"]], measure, target, tile)
            return found.forward_bytes, found.forward_s
        sizes = [size if isinstance(size, int) else size.meta["val"] for size in given["sizes"]]
        found = body.of(sizes, measure, target, tile)
        if is_call(call, again):
            return found.again_bytes, found.again_s
        return found.backward_bytes, found.backward_s


def _summed(values: Sequence[Tensor], count: int, measure: Measure) -> tuple[int, int]:
    """Bytes of what tiles or groups add up, as it is returned and as ``count`` of them sum it."""
    results = sum(tensor_bytes(value, measure) for value in values)
    wide = ((value, sum_dtype(value.dtype, count).itemsize) for value in values)
    return results, sum(measure(volume(value)) * size for value, size in wide)


class _Half:
    """One graph as kernels."""

    def __init__(self, gm: fx.GraphModule, seen: Mapping[str, float] | None) -> None:
        self._seen = seen
        self._kernels: list[Kernel] = kernels(gm)
        self._memory = MemoryProfile(gm, self._kernels)

    def at(
        self, measure: Measure, target: Target, inner: Callable[[fx.Node], tuple[int, float]]
    ) -> tuple[int, float]:
        """Bytes and seconds; ``inner`` knows those of calls of other bodies."""
        peak = self._memory.peak(measure, lambda call: inner(call)[0])
        took = seconds(self._kernels, target, measure, lambda call: inner(call)[1], self._seen)
        return peak, took
