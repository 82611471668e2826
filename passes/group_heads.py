"""Run a layer's attention a group of heads at a time, where the plan says so.

    %q = mm(%x, %wq)                                 [N, heads * D]
    %o = scaled_dot_product_attention(%q, %k, %v)    [B, heads, T, D]
    %y = mm(%o, %wo)                                 [N, H]
becomes, inside the layer's region,
    %y = fxrl.region([%x, %wq, %wk, %wv, %wo])       one group of heads at a time, summed

A region inside a region: its backward computes a group's queries, keys and values again, so only
one group's heads are alive at a time, in both directions. If the layer's cut is "inputs", the
attention is computed again, too. With other cuts the groups keep what their attention returned; if
the cut is "attention", the layer's backward computes ``%y`` again from that. What lies between the
products is found by its structure (``analysis.head_groups``).

NOTE [Why sums in fp32]: without groups, the output and the gradient of the layer's rows are rounded
once. Each group rounds its own part, so the parts are added in fp32: the error is that of one more
rounding, whatever the number of groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxrl.analysis.head_groups import HeadGroups, find_head_groups
from fxrl.analysis.shares import Share
from fxrl.ir.bodies import clone
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    as_node,
    base_of,
    bound,
    is_call,
    is_tensor,
    is_view,
    last_input,
    needs_grad,
    replace_by,
    share_views,
    val_of,
)
from fxrl.ir.graph_pass import Applied, PassDoc, tidy
from fxrl.ir.plan import CutLayer
from fxrl.ir.region import (
    Cut,
    InputSpec,
    Region,
    call_region,
    differentiated,
    mark_grads,
    once_for,
    set_region,
)
from fxrl.ir.remark import Refusal
from fxrl.ir.sizes import SizeTable
from fxrl.passes.recompute import LayerPass, OutlinedLayer

aten = torch.ops.aten


@dataclass(frozen=True)
class GroupHeads(LayerPass):
    """Run each layer's attention in groups of heads as the plan says."""

    name = "group-heads"
    requires = ("outline-layers", "recompute")
    doc = PassDoc(
        "a layer that was outlined and whose plan says `head_groups`",
        "all but one group's queries, keys, values, attention output and their gradients",
        "the group's products once more in backward, whatever else is kept, and with `inputs` its "
        "attention twice more; smaller products; sums over groups in fp32",
        "something mixes the heads (a norm over the features of all of them, one product for "
        "queries, keys and values), or a weight is quantised",
    )

    def obey(self, site: OutlinedLayer, choice: CutLayer) -> Applied | None:
        if not choice.head_groups:
            return None
        refused: list[Refusal] = []
        for call in site.calls:
            try:
                set_region(call, group_heads(call.meta["region"], choice.head_groups))
            except Refusal as refusal:
                refused.append(refusal)
        if len(refused) == len(site.calls):
            raise refused[0]
        return Applied(f"attention runs in {choice.head_groups} groups of heads")


def group_heads(region: Region, groups: int) -> Region:
    """The region with its attention in ``groups`` groups of heads. Raises ``Refusal`` if its heads
    are not computed each by itself."""
    cut = "inputs" if region.cut == "inputs" else "attention"
    return replace(region, forward=_grouped(region.forward, region.trained, groups, cut))


@once_for
def _grouped(
    forward: fx.GraphModule, trained: tuple[bool, ...], groups: int, cut: Cut
) -> fx.GraphModule:
    """A copy of the region's graph that calls one of its heads in groups."""
    gm = clone(forward)
    mark_grads(gm.graph, trained)
    share_views(gm.graph)
    found = find_head_groups(gm, groups)
    body = _Body(found)
    feeds, inner = body.feeds, replace(body.region(), cut=cut)
    for node in gm.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        source = as_node(node.args[0])
        if source in found.found.steps and source not in found.sums:  # then told by another value
            with gm.graph.inserting_before(node):
                replace_by(node, SizeTable(gm.graph).arg(node.meta["val"]))
    with gm.graph.inserting_after(last_input(gm.graph)):
        results = [val_of(node) for node in found.sums]
        values = call_region(gm.graph, inner, feeds, 0, results)
        builder = Builder(gm.graph)
        for node, value in zip(found.sums, values, strict=True):
            if "mat1" in (given := bound(node)):  # what it is added to is added once
                value = builder.call(aten.add.Tensor, value, given["self"])
            node.replace_all_uses_with(value)
    tidy(gm)
    return gm


class _Body:
    """What one group computes, as a graph of its own."""

    def __init__(self, found: HeadGroups) -> None:
        self._found, self._steps = found, found.found.steps
        self._graph = fx.Graph()
        self._places: dict[fx.Node, fx.Node] = {}
        self._specs: list[InputSpec] = []
        self.feeds: list[fx.Node] = []
        self._parts: dict[tuple[fx.Node, int | None], fx.Node] = {}
        for node, step in self._steps.items():
            for arg in self._operands(node):
                share = found.found.given.get(arg) or step.needs.get(arg)
                if share is not None:
                    self._feed(arg, share)
                elif arg not in self._steps:
                    self._feed(base_of(arg, _is_view_of_tensor), None)
        self._sizes = SizeTable(self._graph)
        self._builder = Builder(self._graph)

    def region(self) -> Region:
        """The region of all groups."""
        for node in self._steps:
            self._places[node] = self._copy(node)
        self._graph.output(tuple(self._places[node] for node in self._found.sums))
        body = fx.GraphModule({}, self._graph)
        pairs = zip(self._specs, differentiated(body), strict=True)
        specs = tuple(replace(spec, needs_grad=spec.needs_grad and back) for spec, back in pairs)
        return Region(body, specs, groups=self._found.groups)

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The tensors that a group's node reads; of a product that sums over heads, the factors."""
        given = bound(node) if node in self._found.products else {}
        skipped = given["self"] if "mat1" in given else None
        return [arg for arg in node.all_input_nodes if is_tensor(arg) and arg is not skipped]

    def _feed(self, node: fx.Node, share: Share | None) -> None:
        """An input of the body: a value of the layer, or a group's part of it."""
        split = None if share is None else share.dim
        if (node, split) in self._parts:
            return
        val = val_of(node)
        if share is not None:
            val = val.narrow(share.dim, 0, val.shape[share.dim] // self._found.groups)
        kind = "shared" if split is None else "part"
        place = self._graph.placeholder(f"{kind}_{len(self.feeds)}")
        place.meta["val"] = val
        trained = needs_grad(node) and val.is_floating_point()
        self._specs.append(InputSpec(val, tiled=False, needs_grad=trained, split=split))
        self.feeds.append(node)
        self._parts[node, split] = place

    def _copy(self, node: fx.Node) -> fx.Node:
        step = self._steps[node]

        def place(arg: fx.Node) -> Any:
            share = self._found.found.given.get(arg) or step.needs.get(arg)
            return self._value(arg) if share is None else self._parts[arg, share.dim]

        call = self._builder.call
        if node in self._found.products:
            left, right = self._operands(node)
            return call(aten.mm.default, place(left), place(right))
        if step.same is not None:
            return self._places[step.same]
        if step.sizes is not None and isinstance(step.shares, Share):
            sizes = list(step.sizes)
            sizes[step.shares.dim] = step.shares.size(self._found.groups)
            expands = is_call(node, aten.expand.default)
            target = node.target if expands else aten.reshape.default
            return call(target, place(as_node(node.args[0])), [*map(self._sizes.arg, sizes)])
        args, kwargs = fx.map_arg((node.args, node.kwargs), place)
        return call(node.target, *args, **kwargs)

    def _value(self, node: fx.Node) -> Any:
        """A group's value, a size, or what is whole: looks at an input are made here."""
        if (node, None) in self._parts:
            return self._parts[node, None]
        if isinstance(node.meta["val"], torch.SymInt):
            return self._sizes.arg(node.meta["val"])
        if node not in self._places:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            self._places[node] = self._builder.call(node.target, *args, **kwargs)
        return self._places[node]


def _is_view_of_tensor(node: fx.Node) -> bool:
    """Whether a value is a view of a tensor, which the body computes from the whole tensor."""
    return is_view(node) and is_tensor(node.args[0])
