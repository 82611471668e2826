"""Make the repeated layers of the model regions, one compiled body for all that are alike.

    %a = ...(%x, %w_q, ...)                  norm, projections, rope
    %o = scaled_dot_product_attention(%q, %k, %v)
    %y = ...(%o, %x, %w_o, ...)              projection, residual, norm, MLP, residual
becomes
    %y = fxrl.region([%x, %w_q, ..., %w_o, ...])

Without a region, a layer runs op by op, and autograd keeps whatever each op asks for. A region's
body is fused, attention is a call inside it, and the plan chooses what is kept for its backward
(``recompute``). Random numbers, writes and data-dependent sizes stay outside and split the layer.

NOTE [Why attention stands inside]: its output and log-sum-exp are values of the body, so the cut
says whether they are kept or computed again. Outside of regions, every recomputation of the layer
would run attention again. The price: attention's kernel is chosen when the body is built
(``compile.bodies.attention``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import fx

from fxrl.analysis.layers import Layer, layer_nodes, part_views, signature, split_layer
from fxrl.analysis.outline import find_outline, outline, share_widest
from fxrl.config import Config
from fxrl.ir.bodies import CALL_LAYER, body_of
from fxrl.ir.graph import is_call, is_tensor, numel_hint, tensor_val
from fxrl.ir.graph_pass import SETTLED, Applied, Miss, Pass, PassDoc, Site, tidy
from fxrl.ir.plan import Choice, CutLayer, Keep, Plan, Rewrite
from fxrl.ir.region import region_calls
from fxrl.ir.remark import Refusal
from fxrl.ir.site import module_path

_MANY_PARTS = 8  # more calls than that in a layer cost what fusing them gives

#: Hidden values (tokens x width) of a layer, by device, from where compiling the layer pays. A tiny
#: model would wait longer for the compiler than for all its steps; on a CPU a layer's time is its
#: matrix products', which no compiler makes faster. ``meta`` stands for a CPU.
_LEAST_HIDDEN = {"cpu": 2**24, "meta": 2**24, "cuda": 2**20}


@dataclass(frozen=True, slots=True)
class LayerSite(Site):
    """Equal layers, each with the graph that holds it: the outer one, or a checkpointed body."""

    layers: tuple[tuple[fx.GraphModule, Layer], ...]

    @property
    def name(self) -> str:
        """From the first layer's name to the end of the last one's: ``0:model.layers.0-35``.

        Never a layer's own name, under which a plan says how that layer is cut.
        """
        path = self.layers[-1][1].site.partition(":")[2]
        return f"{self.layers[0][1].site}-{path.rpartition('.')[2]}"


@dataclass(frozen=True)
class OutlineLayers(Pass[LayerSite]):
    """Repeated layers as regions.

    Attributes:
        least_hidden: device type -> hidden values of a layer below which it runs op by op.
        compile_regions: whether region bodies will be compiled.
    """

    least_hidden: Mapping[str, int] = field(default_factory=dict)
    compile_regions: bool = field(default=True, metadata=SETTLED)

    name = "outline-layers"
    doc = PassDoc(
        "the model's repeated layers (members of a list, or equal ones that names count: `h0`, "
        "`h1`), or the bodies of activation checkpointing that is switched on",
        "an op at a time: a layer becomes a compiled body, attention inside, compiled once for all "
        "layers that are alike",
        "seconds of compilation",
        "random numbers, writes and data-dependent sizes cut a layer into more than eight parts "
        "(they run op by op in between), or a checkpointed body cannot be lowered",
    )

    @classmethod
    def of(cls, config: Config) -> Self:
        """Layers too small to pay are left alone, unless the configuration asks for the pass."""
        if cls.name in (config.passes or ()):
            return cls()
        return cls(dict(_LEAST_HIDDEN), config.compile_regions)

    def sparing(self) -> Self:
        """A layer that is no region keeps all, however small it is."""
        return replace(self, least_hidden={})

    def match(self, gm: fx.GraphModule) -> Iterator[LayerSite | Miss]:
        alike: dict[object, list[tuple[fx.GraphModule, Layer]]] = {}
        known: dict[tuple[fx.Node, ...], object] = {}
        for owner, layer in _layers(gm):
            if layer.nodes not in known:
                known[layer.nodes] = signature(layer.nodes)
            barriers = tuple(str(node.target) for node, _ in layer.barriers)
            key = (owner is gm, known[layer.nodes], barriers)
            alike.setdefault(key, []).append((owner, layer))
        for group in alike.values():
            yield from _judged(tuple(group))

    def planned(self, site: LayerSite, plan: Plan) -> Choice | None:
        """The plan's choice for the site; a rewrite, too, where the plan cuts one of its layers."""
        cuts = (plan.choices.get(layer.site) for _, layer in site.layers)
        asked = Rewrite(self.name) if any(isinstance(cut, CutLayer) for cut in cuts) else None
        return plan.choices.get(site.name) or asked

    def decide(self, site: LayerSite) -> Choice:
        """A layer that is too small stays; that is no miss."""
        if not self.compile_regions:
            reason = f"{names_of(site)} run op by op: compile_regions=False"
            return Keep(reason, missed=False)
        val = tensor_val(site.anchor)
        least = 0 if val is None else self.least_hidden.get(val.device.type, 0)
        have = _hidden_values(site)
        if have < least:
            reason = (
                f"{names_of(site)} run op by op: {have} hidden values (tokens x width) are "
                f"below {least}, from where compiling them pays on this device"
            )
            return Keep(reason, missed=False)
        return Rewrite(self.name)

    def rewrite(self, gm: fx.GraphModule, site: LayerSite, choice: Choice) -> Applied:
        made: list[fx.Node] = []
        failed: list[Refusal] = []
        calls, times = 0, Counter([gm, *(body for body, _ in _called(gm, None))])
        distinct: dict[Any, Layer] = {}
        for owner, layer in site.layers:
            distinct.setdefault((owner, layer.parts), layer)
        for (owner, _), layer in distinct.items():
            for part in part_views(owner.graph, layer.parts):
                try:
                    made.append(outline(owner, part, cut="products", layer=layer.site))
                    calls += times[owner]
                except Refusal as refusal:
                    failed.append(refusal)
        if not made:
            raise failed[0]
        tidy(gm)
        share_widest(gm, [call for call in region_calls(gm) if call.meta["region"].layer])
        bodies = len({call.meta["region"].id for call in made})
        compiled = "compiled body" if bodies == 1 else "compiled bodies"
        what = f"{names_of(site)} in {calls} calls of {bodies} {compiled}"
        if len(parts := site.layers[0][1].parts) > 1:
            what += f", {len(parts)} parts each: {_why_cut(site.layers[0][1])}"
        left = f"; {len(failed)} parts run op by op: {failed[0]}" if failed else ""
        return Applied(what + left)


# ---------------------------------------------------------------------------- what there is
def _layers(gm: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, Layer]]:
    """The layers of the graph; each call of a body (a layer's or a checkpointed one) is one."""
    known: dict[fx.GraphModule, Layer] = {}
    for body, path in _called(gm, None):
        if body not in known:
            inner = [n for n in body.graph.nodes if n.op == "call_function"]
            known[body] = split_layer(path, inner)
        yield body, known[body].at(path)
    for path, nodes in layer_nodes(gm.graph).items():
        yield gm, split_layer(path, nodes)


def _called(owner: fx.GraphModule, path: str | None) -> Iterator[tuple[fx.GraphModule, str]]:
    """The body of each call in a graph, and the path of the layer that it is."""
    for call in owner.graph.nodes:
        if (body := body_of(owner, call)) is not None:
            own = path or (module_path(call) if is_call(call, CALL_LAYER) else None)
            own = own or str(body.meta.get("layer_path", call.name))
            yield body, own
            yield from _called(body, own)


def _judged(layers: tuple[tuple[fx.GraphModule, Layer], ...]) -> Iterator[LayerSite | Miss]:
    """A site, a miss with its reason, or nothing where a layer holds nothing to fuse."""
    owner, layer = layers[0]
    if (why := owner.meta.get("not_lowered")) is not None:
        anchor = next(iter(owner.graph.nodes))
        yield Miss(anchor, Refusal(f"the checkpointed body could not be lowered: {why}"))
        return
    if not layer.parts:
        return
    anchor = next(node for node in layer.parts[0] if is_tensor(node))
    site = LayerSite(anchor, 0, layers)
    try:
        if len(layer.parts) > _MANY_PARTS:
            reason = f"fall into {len(layer.parts)} parts: {_why_cut(layer)}"
            raise Refusal(reason, at=layer.barriers[0][0])
        for part in layer.parts:
            find_outline(owner.graph, part)
    except Refusal as refusal:
        reason = f"{names_of(site)}: {refusal.reason}"
        yield Miss(anchor, Refusal(reason, refusal.cure, refusal.at))
    else:
        yield site


def _why_cut(layer: Layer) -> str:
    """The first call that stays outside of a layer's bodies, and why."""
    node, why = layer.barriers[0]
    return f"%{node} {why}"


def _hidden_values(site: LayerSite) -> int:
    """Tokens x width: the largest value that enters the layer's first part."""
    part = set(site.layers[0][1].parts[0])
    inputs = {arg for node in part for arg in node.all_input_nodes if arg not in part}
    sizes = [numel_hint(arg) for arg in inputs if _varies(arg)]
    return max(sizes, default=0)


def _varies(node: fx.Node) -> bool:
    val = tensor_val(node)
    return val is not None and val.dim() > 2 and val.is_floating_point()


def names_of(site: LayerSite) -> str:
    """``layers.0, layers.2 to layers.5``"""
    runs: list[list[str]] = []
    for _, layer in site.layers:
        stem, _, number = layer.path.rpartition(".")
        if runs and number.isdecimal() and runs[-1][-1] == f"{stem}.{int(number) - 1}":
            runs[-1].append(layer.path)
        else:
            runs.append([layer.path])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
