"""From a Region to kernels: its halves traced and compiled once for all sizes alike.

NOTE [Why variants]: a graph may hold for some sizes only. Inductor indexes with 32 bits if the
sizes it sees allow it, and an op may behave differently for a size of 0 or 1. The shape environment
holds what was assumed; sizes that break it get a variant of their own.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, fx

from fxrl.compile._torch import keeps_graph
from fxrl.compile.bodies.attention import allowed, calls_attention, kernels_of
from fxrl.compile.bodies.inductor import (
    InductorOptions,
    begin_body,
    generated_source,
    in_own_thread,
)
from fxrl.compile.bodies.trace import TracedBody
from fxrl.ir.bodies import clone
from fxrl.ir.graph import Size, relax_views
from fxrl.ir.plan import Plan
from fxrl.ir.region import Region, region_calls, regions_of
from fxrl.ops.region.groups import group_part, side_by_side
from fxrl.ops.region.kernels import (
    Body,
    Later,
    RegionKernels,
    Strides,
    TensorFunction,
    register,
    registered,
)
from fxrl.ops.region.tiles import new_vectors

#: More variants than this of one region hint at a size that should not have been specialised.
_MANY_VARIANTS = 8


class ManyVariantsWarning(UserWarning):
    """A region is compiled again and again because each graph holds for a single size only."""


@dataclass(slots=True)
class _Variant:
    """The halves as graphs, and what runs for each once it is compiled."""

    traced: TracedBody
    options: InductorOptions | None
    _begun: list[Callable[[], TensorFunction] | None] | None = None
    _made: list[TensorFunction | None] | None = None

    def begin(self) -> None:
        """Lower the halves, and let their kernels be compiled meanwhile; once."""
        if self._begun is None:
            self._begun = [graph and self._begin(graph) for graph in self.traced.graphs]

    def compile(self) -> list[TensorFunction | None]:
        """Make what runs, as ``TracedBody.graphs``; once."""
        if self._made is None:
            self.begin()
            assert self._begun is not None
            self._made = [finish and finish() for finish in self._begun]
            self._begun = []
        return self._made

    def _begin(self, half: fx.GraphModule) -> Callable[[], TensorFunction]:
        if self.options is None:
            return partial(_op_by_op, half)
        traced = self.traced
        return begin_body(half, traced.mode, self.options, decomposed=traced.decomposed)

    def at(self, sizes: dict[str, int]) -> Body:
        """The compiled body for these values of the named sizes."""
        traced, (forward, backward, again) = self.traced, self.compile()
        measure = traced.measure(sizes)
        assert forward is not None

        def strides(examples: Sequence[Tensor]) -> tuple[Strides, ...]:
            return tuple(tuple(map(measure, x.stride())) for x in examples)

        def later(half: Later | None, run: TensorFunction | None) -> Later | None:
            if half is None or run is None:
                return None
            return Later(run, half.sources, tuple(map(measure, half.sizes)))

        return Body(
            forward,
            later(traced.backward, backward),
            traced.num_outputs,
            traced.num_kept,
            later(traced.again, again),
            strides(traced.input_examples),
            strides(traced.grad_examples),
        )


class CompiledRegion(RegionKernels):
    """What runs for one region, by the sizes of its inputs.

    Attributes:
        variants: one for each kind of sizes met so far.
        inside: the regions that this one calls, by id.
    """

    def __init__(
        self,
        key: str,
        region: Region,
        options: InductorOptions | None,
        plan: Plan,
        alike: Alike,
        like: CompiledRegion | None,
    ) -> None:
        self.key, self.region = key, region
        self._options, self._plan = options, plan
        self.min_rows = 1 if options is None else 2
        if like is None:
            given = options, plan, alike
            inner = regions_of(region.forward)
            self.inside = {id: build_region(one, *given) for id, one in inner.items()}
            self._forward = self._linked(region.forward)
            self.variants = [self._build(None)]
        else:
            self.inside, self._forward = like.inside, like._forward
            self.variants = [_Variant(like.traced.with_cut(region), options)]
        first = self.variants[0].traced
        self.grad_outputs, self.num_outputs = first.grad_outputs, first.num_outputs
        self.again = first.again.read if first.again else None
        self.bound = first.bound
        self._bodies: dict[tuple[int, ...], Body] = {}

    @property
    def traced(self) -> TracedBody:
        """The halves of the first variant, for people."""
        return self.variants[0].traced

    @property
    def attention(self) -> str:
        """Names of the kernels that run the first variant's attention, inside regions too."""
        inside = (inner.attention for inner in self.inside.values())
        names = [*kernels_of(self.traced.forward), *filter(None, inside)]
        return ", ".join(dict.fromkeys(names))

    def begin(self) -> None:
        """Lower the halves now, those of the regions inside too. Kernels are compiled meanwhile,
        until ``compile`` waits for them."""
        for inner in self.inside.values():
            inner.begin()
        self.variants[0].begin()

    def compile(self) -> None:
        """Compile the halves now, those of the regions inside too, and not when they first run."""
        for inner in self.inside.values():
            inner.compile()
        self.variants[0].compile()

    def body(self, sizes: Sequence[Size]) -> Body:
        if any(isinstance(size, torch.SymInt) for size in sizes):  # nothing runs
            traced = self.traced
            counts = traced.num_outputs, traced.num_kept
            return Body(traced.forward, traced.backward, *counts, traced.again)
        key = tuple(map(int, sizes))
        if key not in self._bodies:
            named = dict(zip(self.bound.names, key, strict=True))
            self._bodies[key] = self._find(named).at(named)
        return self._bodies[key]

    def runs_again(self) -> bool:
        return keeps_graph()

    def fake_outputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        forward = self.region.forward if self.region.tiled else self.traced.forward
        pairs = zip(inputs, self.region.inputs, strict=True)
        outputs = list[Tensor](forward(*(group_part(x, spec, 0) for x, spec in pairs)))
        if (groups := self.region.groups) > 1:
            kept = outputs[self.num_outputs :]
            outputs[self.num_outputs :] = [side_by_side(x, groups) for x in kept]
        return [*outputs, *new_vectors(self, inputs)]

    def generated(self) -> dict[str, str]:
        """File name -> source that Inductor generated, over all variants."""
        files: dict[str, str] = {}
        if self._options is None:
            return files
        for number, variant in enumerate(self.variants):
            suffix = f"_{number}" if number else ""
            for half, run in zip(("forward", "vjp", "again"), variant.compile(), strict=True):
                if run is not None:
                    files[f"{half}{suffix}.py"] = generated_source(run)
        return files

    def _find(self, sizes: dict[str, int]) -> _Variant:
        for variant in self.variants:
            if variant.traced.serves(sizes):
                return variant
        self.variants.append(in_own_thread(partial(self._build, sizes)))
        if len(self.variants) == _MANY_VARIANTS:
            warnings.warn(
                f"region {self.region.id} was built {_MANY_VARIANTS} times, the last for sizes "
                f"{sizes}; an op in it makes a size constant",
                ManyVariantsWarning,
                stacklevel=2,
            )
        return self.variants[-1]

    def _linked(self, forward: fx.GraphModule) -> fx.GraphModule:
        """The graph with calls of what was built in place of calls by content."""
        if self.inside:
            forward = clone(forward)
            for call in region_calls(forward):
                call.update_arg(1, self.inside[call.meta["region"].id].key)
            forward.recompile()
        return forward

    def _build(self, sizes: dict[str, int] | None) -> _Variant:
        compiled = self._options is not None
        traced = TracedBody(self.region, self._forward, sizes, decompose=compiled, plan=self._plan)
        return _Variant(traced, self._options)


def _op_by_op(half: fx.GraphModule) -> TensorFunction:
    """The graph as it runs uncompiled. Inductor settles every layout itself."""
    half = clone(half)
    relax_views(half.graph)
    half.recompile()
    return half


#: Regions that were built with the same options and plan, by body: their id with the cut "inputs".
Alike = MutableMapping[str, CompiledRegion]


def build_region(
    region: Region,
    options: InductorOptions | None,
    plan: Plan | None = None,
    alike: Alike | None = None,
) -> CompiledRegion:
    """Trace a region for compilation (op by op if ``options`` is None), or find the one already
    built. ``plan`` says which rewrites inside are switched off. A region in ``alike`` with the same
    body lends its trace, also to regions inside; what is built is added to ``alike``.

    The caller owns the kernels: the op finds them only as long as somebody holds them.
    """
    plan, alike = plan or Plan(), {} if alike is None else alike
    body = replace(region, cut="inputs", again="never").id
    key = _key(region, options, plan)
    built = registered(key)
    if not isinstance(built, CompiledRegion):
        built = register(CompiledRegion(key, region, options, plan, alike, alike.get(body)))
        assert isinstance(built, CompiledRegion)
    alike.setdefault(body, built)
    return built


def _key(region: Region, options: InductorOptions | None, plan: Plan) -> str:
    """Content, options, what is switched off inside, and which kernels attention may take."""
    off = sorted(pair for pair in plan.switched_off if pair[1].startswith(region.id))
    kernels = allowed() if calls_attention(region.forward) else ()
    made = hashlib.sha256(f"{options} {off} {kernels}".encode()).hexdigest()[:8]
    return f"{region.id}-{made}"
