"""What regions cost: their bodies as they will be compiled, traced and read as kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from fxrl.capture._torch import FakeTensor
from fxrl.compile.bodies.figures import BodyProfile, Figures
from fxrl.compile.bodies.inductor import InductorOptions
from fxrl.compile.bodies.variants import CompiledRegion, build_region
from fxrl.ir.bodies import clone
from fxrl.ir.graph import (
    ancestors,
    bound,
    hint,
    inputs_of,
    is_call,
    is_tensor,
    is_view,
    memory_like,
    needs_grad,
    tensor_val,
)
from fxrl.ir.plan import CutLayer, Plan
from fxrl.ir.region import Again, Cut, Region, is_differentiated, once_for
from fxrl.ir.remark import Refusal
from fxrl.ops.masked_attention import share_of_blocks
from fxrl.passes.group_heads import group_heads
from fxrl.passes.recompute import makes_again
from fxrl.passes.tile_tokens import tile_widest
from fxrl.planner.eager_profile import CallCost
from fxrl.planner.memory_profile import nbytes
from fxrl.planner.schedule import Measure
from fxrl.planner.target import Target

_EAGER_PASSES = 6  # over each value: written and read, forward and backward, and its gradient

#: A region's body as kernels; traced when it is first asked for.
Profiles = Callable[[Region], BodyProfile]


def known_profiles(
    options: InductorOptions | None, plan: Plan, seen: Mapping[str, float] | None = None
) -> Profiles:
    """Profiles of regions as they will be compiled, each computed once; ``seen`` are
    ``shares_seen``."""
    known: dict[str, BodyProfile] = {}
    alike: dict[str, CompiledRegion] = {}

    def of(built: CompiledRegion) -> BodyProfile:
        id = built.region.id
        if id not in known:
            known[id] = BodyProfile(built, of, seen)
        return known[id]

    def profile(region: Region) -> BodyProfile:
        if region.id in known:
            return known[region.id]
        return of(build_region(region, options, plan, alike))

    return profile


def as_chosen(
    regions: Sequence[Region], choice: CutLayer, *, asked: bool = False
) -> list[Region] | None:
    """The regions that the passes will make of a layer's, whose outputs are ``asked`` for again;
    None where it has nothing to tile, or no heads to group."""
    again = makes_again(choice)
    if asked and again == "never":
        again = "outputs"
    made = [_with_cut(region, choice.kept, again) for region in regions]
    for count, rewrite in ((choice.tile_tokens, _by_tiles), (choice.head_groups, _by_groups)):
        if count:
            found = [rewrite(region, count) for region in made]
            if not any(found):
                return None
            made = [new or region for new, region in zip(found, made, strict=True)]
    return made


# Kept with the region: a search for sizes asks for the same choices at each of them, and a region
# knows its id.
@once_for
def _with_cut(region: Region, cut: Cut, again: Again) -> Region:
    return replace(off_meta(region), cut=cut, again=again)


@once_for
def _by_tiles(region: Region, tile: int) -> Region | None:
    return tile_widest(region, tile)


@once_for
def _by_groups(region: Region, groups: int) -> Region | None:
    try:
        return group_heads(region, groups)
    except Refusal:
        return None


#: Fake tensors on ``meta``, and the same on a CPU.
_TWINS: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


def off_meta(region: Region) -> Region:
    """A region on ``meta`` as a CPU's: only there does attention stay a kernel when traced."""
    if not any(spec.example.is_meta for spec in region.inputs):
        return region
    specs = tuple(replace(spec, example=_on_cpu(spec.example)) for spec in region.inputs)
    return replace(region, forward=_moved(region.forward), inputs=specs)


@once_for
def _moved(body: fx.GraphModule) -> fx.GraphModule:
    moved = clone(body)
    for node in moved.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        if (val := tensor_val(node)) is not None and val.is_meta:
            node.meta["val"] = _on_cpu(val)
    return moved


def _on_cpu(fake: Any) -> torch.Tensor:
    if fake not in _TWINS:
        with fake.fake_mode:
            _TWINS[fake] = memory_like(fake, device="cpu")
    return _TWINS[fake]


def call_cost(call: fx.Node, figures: Figures, measure: Measure) -> CallCost:
    """The memory of a region's call, without its results and their gradients."""
    inputs: Any = call.args[0]
    results = {user.args[1]: user for user in call.users if is_call(user, getitem)}
    of_kind: dict[str, dict[Any, fx.Node]] = {"input": dict(enumerate(inputs)), "output": results}
    read = [(of_kind.get(kind, {}).get(place), size) for (kind, place), size in figures.saved]
    made = sum(nbytes(result, measure) for result in results.values())
    kept = sum(size for value, size in read if value is None)
    graded = {*filter(needs_grad, inputs), *filter(needs_grad, results.values())}
    later = tuple(value for value, _ in read if value is not None)
    if figures.beside:
        return CallCost(later, kept, figures.forward_bytes, figures.backward_bytes)
    return CallCost(
        later,
        kept,
        max(0, figures.forward_bytes - made - kept),
        max(0, figures.backward_bytes - sum(nbytes(value, measure) for value in graded)),
    )


@once_for
def as_profiled(region: Region) -> Region:
    """One for all regions that differ in how their outputs are made again: they have the same
    halves."""
    if region.cut == "attention":
        return replace(region, again="outputs")
    return replace(region, again="never") if region.again == "forward" else region


def of_call(call: fx.Node, figures: Figures) -> Figures:
    """A region's figures for one of its calls: where no backward comes to it, nothing waits."""
    if is_differentiated(call):
        return figures
    return replace(figures, saved=(), backward_bytes=0, backward_s=0.0, again_s=0.0)


def handed(figures: Figures) -> tuple[Figures, int]:
    """Figures of a region whose forward keeps nothing until it runs again, and what it hands to its
    own backward then."""
    waits = tuple((source, size) for source, size in figures.saved if source[0] == "input")
    made = sum(size for _, size in figures.saved) - sum(size for _, size in waits)
    return replace(figures, saved=waits, again_s=figures.forward_s), made


def input_bytes(figures: Figures, places: Collection[int]) -> int:
    """Bytes of some of the inputs that a region keeps."""
    return sum(size for (kind, i), size in figures.saved if kind == "input" and i in places)


def away_bytes(call: fx.Node, figures: Figures, own: Sequence[int], choice: CutLayer) -> int:
    """Bytes of what a region keeps that wait on the host.

    Its own outputs are the next layer's inputs, and what several layers read is no layer's.
    """
    count, host = len(call.meta["val"]), 0
    for (kind, place), size in figures.saved:
        if kind == "output" and place >= count:
            host += size if choice.kept_on == "host" else 0
        elif kind == "input" and place in own:
            host += size if choice.inputs_on == "host" else 0
    return host


def eager_seconds(nodes: Iterable[fx.Node], measure: Measure, target: Target) -> float:
    """Seconds of ops that run one by one, forward and backward."""
    values = [n for n in nodes if is_tensor(n) and not is_view(n) and n.target is not getitem]
    return _EAGER_PASSES * sum(nbytes(n, measure) for n in values) / target.bandwidth


# ---------------------------------------------------------------------------- computed masks
def shares_seen(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, float]:
    """For each computed mask of a graph, the share of query-key pairs that attention computes.
    Masks whose inputs are fake are left out; reading real ones waits for the device."""
    args = dict(zip(inputs_of(gm.graph), inputs, strict=False))
    run, shares = fx.Interpreter(gm), dict[str, list[float]]()
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.fxrl.mask_blocks.default):
        needed = ancestors([call])
        given = {node: args.get(node) for node in needed if node.op == "placeholder"}
        if all(map(_has_values, given.values())):
            run.env = {n: hint(x) if isinstance(x, torch.SymInt) else x for n, x in given.items()}
            with torch.no_grad():
                for node in sorted(needed - given.keys()):
                    run.env[node] = run.run_node(node)
            shares.setdefault(bound(call)["mask"], []).append(share_of_blocks(run.env[call]))
    return {mask: sum(found) / len(found) for mask, found in shares.items()}


def _has_values(given: Any) -> bool:
    """Whether an input is a size, or a tensor that is neither fake nor on ``meta``."""
    if isinstance(given, torch.Tensor):
        return not (given.is_meta or isinstance(given, FakeTensor))
    return isinstance(given, (int, torch.SymInt))
