"""Compile the repeated layers of the model, once for all that are alike, and plan what they keep.

    %a = ...(%x, %w_q, ...)                  norm, projections, rope
    %o = scaled_dot_product_attention(%q, %k, %v)
    %y = ...(%o, %x, %w_o, ...)              projection, residual, norm, MLP, residual
becomes
    %q, %k, %v = fxrl.kept_region([%x, %w_q, ...])
    %o = scaled_dot_product_attention(%q, %k, %v)
    %y = fxrl.kept_region([%o, %x, %w_o, ...])

A layer runs op by op otherwise, and autograd keeps whatever each op asks for. A region's body is
fused, and its backward keeps matrix products and computes norms and activations again ("keep").
Where the user switched activation checkpointing on, the regions stand inside the checkpointed
body: only the layer's input is kept ("recompute").

NOTE [Why attention stays outside]: which kernel runs it is decided by the call's own sizes, the
device and the user's ``sdpa_kernel``; a body could only freeze one choice. Outside, attention keeps
its own output and log-sum-exp and is never computed twice, dropout draws what it draws in eager
mode, and what is left of a layer is token-wise, so that one body serves every batch and length.
NOTE [Why no threshold of saved bytes]: fusing the layer is worth its compile time by itself; what a
layer saves is reported, not weighed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import fxrl.ops.kept_region
import fxrl.ops.region  # noqa: F401  (declare torch.ops.fxrl.region and kept_region)
from fxrl.analysis.layers import Layer, layer_nodes, part_views, signature, split_layer
from fxrl.analysis.legality import illegal
from fxrl.analysis.outline import OutlineError, find_outline, finish_outlines, outline
from fxrl.analysis.saved_tensors import predict_saved
from fxrl.ir.graph import HigherOrderOperator, is_call, is_tensor, numel_hint, tensor_val
from fxrl.ir.graph_pass import Applied, Miss, RewritePass, Site
from fxrl.ir.plan import Choice, Plan
from fxrl.ir.region import Region, regions_of, replace_region
from fxrl.ir.remark import Refusal

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_RARE = 3  # one call in so many may compute gradients that nobody reads
_MANY_PARTS = 8  # more calls than that in a layer cost what fusing them gives


@dataclass(frozen=True, slots=True)
class LayerSite(Site):
    """Layers that are alike.

    Attributes:
        layers: each with the graph that holds it: the outer one, or a checkpointed body.
    """

    layers: tuple[tuple[fx.GraphModule, Layer], ...]
    recompute: bool


class Recompute(RewritePass[LayerSite]):
    """Outline layers into compiled regions whose backward keeps little."""

    name: ClassVar[str] = "recompute"
    saves_memory: ClassVar[bool] = False

    def match(self, gm: fx.GraphModule) -> Iterator[LayerSite | Miss]:
        alike: dict[object, list[tuple[fx.GraphModule, Layer]]] = {}
        for owner, layer in _layers(gm):
            key = (owner is gm, signature(layer.nodes), layer.kinds_of_barriers)
            alike.setdefault(key, []).append((owner, layer))
        for group in alike.values():
            yield from _judged(gm, tuple(group))

    def decline(self, site: LayerSite, plan: Plan) -> str | None:
        val = tensor_val(site.anchor)
        assert val is not None
        if not plan.compile_regions:
            return f"{_names(site.layers)} run op by op: compile_regions=False"
        least = plan.least_hidden.get(val.device.type, 0)
        have = _hidden_values(site)
        if have < least:
            return (
                f"{_names(site.layers)} run op by op: {have} hidden values (tokens x width) are "
                f"below {least}, from where compiling them pays on this device"
            )
        return None

    def rewrite(self, gm: fx.GraphModule, site: LayerSite, choice: Choice) -> Applied:
        regions: list[tuple[fx.GraphModule, Region]] = []
        failed: list[OutlineError] = []
        lost = 0  # bytes, predicted for parts that are not outlined
        for owner, layer in site.layers:
            for part in part_views(owner.graph, layer.parts):
                try:
                    regions.append((owner, outline(owner, part, keep=True, finish=False)))
                except OutlineError as error:
                    failed.append(error)
                    lost += predict_saved(part)
        if not regions:
            raise Refusal(f"{_names(site.layers)}: {failed[0]}")
        bodies = _share(regions)
        for owner in {id(owner): owner for owner, _ in site.layers}.values():
            finish_outlines(owner)
            regions_of(gm).update(regions_of(owner))
        what = "recompute: of each only its input is kept" if site.recompute else "keep"
        left = f"; {len(failed)} parts run op by op: {failed[0]}" if failed else ""
        return Applied(
            f"{what}: {_names(site.layers)} in {len(regions)} calls of {bodies} compiled bodies"
            f"{left}",
            max(0, site.saved_bytes - lost),
        )


# ---------------------------------------------------------------------------- what there is
def _layers(gm: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, Layer]]:
    """The layers of the graph, and the bodies of checkpointed calls, each of which is one."""
    for node in gm.graph.nodes:
        if (body := _checkpointed(gm, node)) is not None:
            inner = [n for n in body.graph.nodes if n.op == "call_function"]
            path = str(body.meta.get("layer_path", node.name))
            yield body, split_layer(path, inner, stays_outside)
    for (_, path), nodes in layer_nodes(gm.graph).items():
        yield gm, split_layer(path, nodes, stays_outside)


def stays_outside(node: fx.Node) -> str | None:
    """Why a call of a layer is no part of a body; None where it can be."""
    return "is attention, whose kernel the call chooses" if is_call(node, _SDPA) else illegal(node)


def _checkpointed(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    if not isinstance(node.target, HigherOrderOperator) or "checkpoint" not in str(node.target):
        return None
    body = getattr(gm, str(node.args[0].target), None)  # type: ignore[union-attr]
    return body if isinstance(body, fx.GraphModule) else None


def _judged(
    gm: fx.GraphModule, layers: tuple[tuple[fx.GraphModule, Layer], ...]
) -> Iterator[LayerSite | Miss]:
    """A site, a miss with its reason, or nothing where a layer holds nothing to fuse."""
    owner, layer = layers[0]
    if (why := owner.meta.get("not_lowered")) is not None:
        anchor = next(iter(owner.graph.nodes))
        yield Miss(anchor, f"{_names(layers)}: the checkpointed body could not be lowered: {why}")
        return
    if not layer.parts:
        return
    anchor = next(node for node in layer.parts[0] if is_tensor(node))
    if len(layer.parts) > _MANY_PARTS:
        barrier = layer.barriers[0]
        why = f"{_names(layers)} fall into {len(layer.parts)} parts: %{barrier.node} "
        yield Miss(anchor, why + barrier.reason, "", barrier.node)
        return
    try:
        for part in layer.parts:
            find_outline(owner.graph, part)
    except OutlineError as error:
        yield Miss(anchor, f"{_names(layers)}: {error}")
        return
    saved = sum(map(predict_saved, layer.parts)) * len(layers)
    recompute = owner is not gm
    yield LayerSite(anchor, 0 if recompute else saved, layers, recompute)


def _hidden_values(site: LayerSite) -> int:
    """Tokens x width: the largest value that enters the layer's first part."""
    part = set(site.layers[0][1].parts[0])
    inputs = {arg for node in part for arg in node.all_input_nodes if arg not in part}
    sizes = [numel_hint(arg) for arg in inputs if _varies(arg)]
    return max(sizes, default=0)


def _varies(node: fx.Node) -> bool:
    val = tensor_val(node)
    return val is not None and val.dim() > 2 and val.is_floating_point()


def _names(layers: tuple[tuple[fx.GraphModule, Layer], ...]) -> str:
    """``layers.0, layers.2 to layers.5``"""
    runs: list[list[str]] = []
    for _, layer in layers:
        stem, _, number = layer.path.rpartition(".")
        if runs and number.isdecimal() and runs[-1][-1] == f"{stem}.{int(number) - 1}":
            runs[-1].append(layer.path)
        else:
            runs.append([layer.path])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


# ---------------------------------------------------------------------------- what is done
def _share(regions: list[tuple[fx.GraphModule, Region]]) -> int:
    """Let layers that differ in which inputs need a gradient share one body; count the bodies.

    The first layer's input needs none where the embeddings are frozen. A body of its own would cost
    its compile time; a gradient that nobody reads costs a few products of one layer.
    """
    alike: dict[str, dict[str, list[tuple[fx.GraphModule, Region]]]] = {}
    for owner, region in regions:
        variants = alike.setdefault(region.id_without_grads, {})
        variants.setdefault(region.id, []).append((owner, region))
    count = 0
    for variants in alike.values():
        calls = sum(map(len, variants.values()))
        firsts = [group[0][1] for group in variants.values()]
        widest = max(firsts, key=lambda region: sum(spec.needs_grad for spec in region.inputs))
        for group in variants.values():
            first = group[0][1]
            rare = _RARE * len(group) <= calls
            if first is not widest and rare and _covers(widest, first):
                for owner, region in group:
                    replace_region(owner, region, widest)
            else:
                count += 1
    return count


def _covers(wide: Region, narrow: Region) -> bool:
    pairs = zip(wide.inputs, narrow.inputs, strict=True)
    return all(w.needs_grad or not n.needs_grad for w, n in pairs)
