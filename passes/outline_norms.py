"""Make the norm behind the last layer a region, as the norms inside layers are in their regions.

    %y = fxrl.region([%x, ...])              the last layer
    %s = mean(square(float(%y)))
    %h = float(%y) * rsqrt(%s + eps) * %w    becomes    %h = fxrl.region([%y, %w])
    %l = fxrl.linear_logprob(%h, %head, ...)

Op by op it makes several float32 values as large as the hidden states and keeps some of them. At
131,072 tokens of 4,096 features each is 2 GiB, and its backward holds four of them at once, while
everything that the layers keep is still alive.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.layers import layer_path
from fxrl.analysis.outline import computes, find_outline, illegal, outline, share_widest
from fxrl.analysis.saved_tensors import predict_saved
from fxrl.ir.graph import (
    COPIES,
    as_node,
    is_call,
    is_pointwise,
    is_tensor,
    is_view,
    numel_hint,
    reached,
)
from fxrl.ir.graph_pass import Applied, Pass, PassDoc, Site, tidy
from fxrl.ir.plan import Choice
from fxrl.ir.region import region_at, region_calls
from fxrl.ir.remark import Refusal

aten = torch.ops.aten
_REDUCTIONS = (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.var.correction)
_NORMS = (aten.native_layer_norm.default, aten._fused_rms_norm.default)


@dataclass(frozen=True, slots=True)
class NormSite(Site):
    """A group of elementwise ops behind a layer."""

    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class OutlineNorms(Pass[NormSite]):
    """Make each group of elementwise ops behind a layer a region."""

    name = "outline-norms"
    requires = ("outline-layers",)
    doc = PassDoc(
        "elementwise ops and reductions over features of what an outlined layer returns: the "
        "model's last norm",
        "its values in float32: four times the hidden states at once, in the backward",
        "seconds of compilation",
        "nothing",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[NormSite]:
        taken: set[fx.Node] = set()
        for hidden in _returned_by_layers(gm):
            nodes = [node for node in _behind(hidden) if node not in taken]
            if len(found := _stretch(gm.graph, nodes)) < 2:
                continue  # fusing a single op saves nothing
            taken |= set(found)
            yield NormSite(nodes[0], predict_saved(found), found)

    def rewrite(self, gm: fx.GraphModule, site: NormSite, choice: Choice) -> Applied:
        outline(gm, site.nodes, cut="fewest")
        tidy(gm)
        share_widest(gm, [call for call in region_calls(gm) if not call.meta["region"].layer])
        what = f"{len(site.nodes)} ops behind the layers in a compiled body"
        return Applied(what, site.saved_bytes)


def _returned_by_layers(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for node in gm.graph.nodes:
        call: Any = node.args[0] if node.args else None
        region = region_at(call) if isinstance(call, fx.Node) else None
        if region is not None and region.layer and is_tensor(node):
            yield node


def _behind(hidden: fx.Node) -> list[fx.Node]:
    """The values as large as ``hidden`` that elementwise ops and reductions compute from it."""

    def computed(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if not _of_layer(user) and _may_stand(user)]

    made = (node for node in reached([hidden], computed) if node is not hidden)
    values = (node for node in made if is_tensor(node) and not is_view(node))
    own = (node for node in values if not is_call(node, operator.getitem))  # that is its tuple's
    return sorted(node for node in own if numel_hint(node) >= numel_hint(hidden))


def _of_layer(node: fx.Node) -> bool:
    """Whether a layer made a value; what detaches its outputs under ``no_grad`` stands behind."""
    return bool(layer_path(node)) and not is_call(node, aten.detach.default)


def _stretch(graph: fx.Graph, nodes: list[fx.Node]) -> tuple[fx.Node, ...]:
    """These values and what lies between them, up to the first op that cannot be in a region. (A
    residual stream goes on past the next layer.)"""
    while len(nodes) > 1:
        try:
            return find_outline(graph, nodes).nodes
        except Refusal as refusal:
            beyond = set(reached([as_node(refusal.at)], lambda node: node.users))
            nodes = [node for node in nodes if node not in beyond]
    return ()


def _may_stand(node: fx.Node) -> bool:
    """Whether an op is elementwise, a reduction, a norm or a view, and legal in a region."""
    if not computes(node) or illegal(node) is not None:
        return False
    known = is_call(node, operator.getitem, *COPIES, *_REDUCTIONS, *_NORMS)
    return known or is_view(node) or is_pointwise(node)
