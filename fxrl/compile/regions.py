"""From a Region to kernels: both graphs traced and compiled once for all sizes alike.

NOTE [Why variants]: a graph may hold for some sizes only. Inductor indexes with 32 bits where the
sizes it sees allow it, and an op may take another road for a size of 0 or 1. What was assumed
stands in the shape environment; sizes that break it get a variant of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxrl.compile.inductor import InductorOptions, compile_body, generated_source
from fxrl.compile.keep import TracedKept
from fxrl.compile.trace_region import TracedRegion
from fxrl.ir.graph import Size
from fxrl.ir.region import Region
from fxrl.ops.kept_region import KeptBody, KeptCall
from fxrl.ops.region import RegionKernels, TensorFunction, register, registered

#: More variants than this of one region hint at a size that should not have been specialised.
_MANY_VARIANTS = 8


class ManyVariantsWarning(UserWarning):
    """A region is compiled again and again because its graph holds for single sizes only."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """The two graphs and what runs for them."""

    traced: TracedRegion
    forward: TensorFunction
    vjp: TensorFunction | None


class _Bodies:
    """What runs for one region, by the sizes of its inputs."""

    def __init__(self, region: Region, options: InductorOptions | None) -> None:
        self._region = region
        self._options = options
        self.first = self._build(None)
        self.places = self.first.traced.bound
        self._variants = [self.first]
        self._chosen: dict[tuple[int, ...], _Variant] = {}

    def forward(self, *inputs: Tensor) -> Sequence[Tensor]:
        return self._for(inputs).forward(*inputs)

    def vjp(self, *values: Tensor) -> Sequence[Tensor]:
        vjp = self._for(values[: len(self._region.inputs)]).vjp
        assert vjp is not None
        return vjp(*values)

    def _for(self, inputs: Sequence[Tensor]) -> _Variant:
        return self.at(tuple(map(int, self.places.read(inputs))))

    def at(self, sizes: tuple[int, ...]) -> _Variant:
        """The variant for these sizes, built where none serves."""
        if sizes not in self._chosen:
            self._chosen[sizes] = self._find(dict(zip(self.places.names, sizes, strict=True)))
        return self._chosen[sizes]

    def _find(self, sizes: dict[str, int]) -> _Variant:
        for variant in self._variants:
            if variant.traced.serves(sizes):
                return variant
        # NOTE [Why a thread]: an op's kernel runs with autograd's dispatch keys excluded, so no
        # vjp can be taken there; that state belongs to the thread.
        with ThreadPoolExecutor(1) as pool:
            self._variants.append(pool.submit(self._build, sizes).result())
        if len(self._variants) == _MANY_VARIANTS:
            warnings.warn(
                f"region {self._region.id} was built {_MANY_VARIANTS} times, the last for sizes "
                f"{sizes}; an op in it makes a size constant",
                ManyVariantsWarning,
                stacklevel=2,
            )
        return self._variants[-1]

    def _build(self, sizes: dict[str, int] | None) -> _Variant:
        kind = TracedKept if self._region.keep else TracedRegion
        traced = kind(self._region, sizes, decompose=self._options is not None)
        if self._options is None:
            return _Variant(traced, traced.forward, traced.vjp)
        forward = compile_body(traced.forward, traced.mode, self._options)
        vjp: Any = None
        if traced.vjp is not None:
            vjp = compile_body(traced.vjp, traced.mode, self._options)
        return _Variant(traced, forward, vjp)

    def generated(self) -> dict[str, str]:
        """File name -> source that Inductor generated, over all variants."""
        files: dict[str, str] = {}
        if self._options is None:
            return files
        for number, variant in enumerate(self._variants):
            suffix = f"_{number}" if number else ""
            files[f"forward{suffix}.py"] = generated_source(variant.forward)
            if variant.vjp is not None:
                files[f"vjp{suffix}.py"] = generated_source(variant.vjp)
        return files


class _KeptBodies:
    """The same for a region whose backward keeps."""

    def __init__(self, region: Region, bodies: _Bodies) -> None:
        self._region, self._bodies = region, bodies
        self._calls: dict[tuple[int, ...], KeptCall] = {}

    def sizes_of(self, inputs: Sequence[Tensor]) -> tuple[Size, ...]:
        return self._bodies.places.read(inputs)

    def body(self, sizes: Sequence[Size]) -> KeptBody:
        if all(isinstance(size, int) for size in sizes):
            return self.call(sizes).body  # type: ignore[arg-type]  # all are numbers
        return _kept_body(self._bodies.first)

    def call(self, sizes: Sequence[int]) -> KeptCall:
        key = tuple(sizes)
        if key not in self._calls:
            named = dict(zip(self._bodies.places.names, key, strict=True))
            self._calls[key] = _kept_call(self._bodies.at(key), named)
        return self._calls[key]

    def grad_shapes(self, sizes: Sequence[Size]) -> list[tuple[tuple[Size, ...], torch.dtype]]:
        named = dict(zip(self._bodies.places.names, sizes, strict=True))
        at = self._bodies.places
        return [
            (tuple(at.size(size, named) for size in spec.example.shape), spec.example.dtype)
            for spec in self._region.inputs
            if spec.needs_grad
        ]


def _kept_body(variant: _Variant) -> KeptBody:
    traced = variant.traced
    assert isinstance(traced, TracedKept)
    halves = (traced.forward, traced.vjp)
    return KeptBody(variant.forward, variant.vjp, traced.sources, halves, traced.num_outputs)


def _kept_call(variant: _Variant, sizes: dict[str, int]) -> KeptCall:
    traced = variant.traced
    assert isinstance(traced, TracedKept)

    def strides(examples: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(traced.number(s, sizes) for s in x.stride()) for x in examples)

    return KeptCall(
        _kept_body(variant),
        strides(traced.input_examples),
        strides(traced.grad_examples),
        tuple(traced.number(size, sizes) for size in traced.sizes),
    )


def build_region(region: Region, options: InductorOptions | None) -> RegionKernels:
    """Trace, compile (``options`` None: run op by op) and register a region.

    A body that was built with the same options before is reused.
    """
    known = registered(region.id)
    if known is not None and known.options == options:
        return known
    bodies = _Bodies(region, options)
    traced = bodies.first.traced
    kernels = RegionKernels(
        region,
        bodies.forward,
        None if traced.vjp is None else bodies.vjp,
        traced.grad_outputs,
        min_rows=1 if options is None else 2,
        kept=_KeptBodies(region, bodies) if region.keep else None,
        options=options,
        traced=(traced.forward, traced.vjp),
        generated=bodies.generated,
    )
    register(kernels)
    return kernels
