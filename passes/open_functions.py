"""Open an ``autograd.Function`` that reads the logits or stands in a layer.

    %values = autograd_function_apply(@forward, @backward, %x, %w)
becomes
    %plain  = detach(%x)
    ...                                 the ops of the forward
    %values = with_gradient(@backward, %x, %w, %plain_values, what the forward saves)

Libraries write the log-probability of a token as such a function, so that less is kept than by
autograd (Megatron's cross entropy over shards of a vocabulary, filters by top-k and top-p), and
the product with a quantised weight (bitsandbytes). As one call it would hide the logits from the
head's passes, and cut a layer. The gradient stays the user's: ``@backward`` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.layers import layer_path
from fxrl.analysis.rows.heads import find_heads
from fxrl.ir.bodies import (
    AUTOGRAD_FUNCTION,
    HALVES,
    WITH_GRADIENT,
    Halves,
    hold,
    modules_of,
    splice,
)
from fxrl.ir.build import Builder
from fxrl.ir.graph import ancestors, hint, is_tensor, shape_of, tensor_val
from fxrl.ir.graph_pass import Applied, Miss, Normalisation, PassDoc, Site
from fxrl.ir.remark import Refusal

aten = torch.ops.aten
_OF_RESULTS = (HALVES, "val", "example_value", "requires_grad")


@dataclass(frozen=True)
class OpenFunctions(Normalisation[Site]):
    """Inline the forward of each such ``autograd.Function``, and give it its gradient."""

    name = "open-functions"
    doc = PassDoc(
        "an `autograd.Function` of the user's that reads the logits, or stands in a layer",
        "nothing by itself: the passes over heads and layers see into it",
        "nothing",
        "it writes into its input, draws random numbers, or calls a kernel",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Site | Miss]:
        calls = [call for owner in modules_of(gm) for call in _calls(owner.graph)]
        outside = [call for call in calls if call.graph is gm.graph and layer_path(call) is None]
        heads = set(find_heads(gm.graph)) if outside else set()
        for call in calls:
            halves, in_layer = call.meta.get(HALVES), call not in outside
            if halves is None or not (in_layer or _reads_logits(call, heads)):
                continue
            if isinstance(halves, Halves):
                yield Site(call, 0)
            elif not in_layer:  # there it is what cuts the layer, which says so
                yield Miss(call, Refusal(f"the autograd.Function could not be lowered: {halves}"))

    def respell(self, gm: fx.GraphModule, site: Site) -> Applied:
        _open(site.anchor, site.anchor.meta[HALVES])
        return Applied("an autograd.Function is opened; its gradient is its backward")


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=AUTOGRAD_FUNCTION)


def _reads_logits(call: fx.Node, heads: set[fx.Node]) -> bool:
    return any(
        hint(shape_of(head)[-1]) in map(hint, shape_of(arg))
        for arg in call.all_input_nodes
        if is_tensor(arg)
        for head in heads & {arg, *ancestors([arg])}
    )


def _open(call: fx.Node, halves: Halves) -> None:
    """Replace ``call`` by the forward's ops and a call that attaches their gradient."""
    graph, inputs = call.graph, call.args[2:]
    assert graph.owning_module is not None
    results: Any = halves.forward.graph.output_node().args[0]
    with Builder(graph).before(call) as builder:
        plain = [_without_gradient(builder, arg) for arg in inputs]
        places, made = splice(graph, halves.forward, plain)
        values, saved = fx.map_arg(results, places.__getitem__)
        trained = [values[index] for index in halves.trained]
        backward = graph.get_attr(hold(graph.owning_module, halves.backward))
        counts = len(inputs), len(trained)
        opened = graph.call_function(WITH_GRADIENT, (backward, *counts, *inputs, *trained, *saved))
    for node in made:
        node.meta |= _place(call)
    opened.meta = _place(call) | {"val": tuple(value.meta["val"] for value in trained)}
    for item in list(call.users):
        index: Any = item.args[1]
        if index in halves.trained:
            item.args = (opened, halves.trained.index(index))
        else:
            item.replace_all_uses_with(values[index])
            graph.erase_node(item)
    graph.erase_node(call)


def _without_gradient(builder: Builder, arg: Any) -> Any:
    """A float's values alone, also where none needs a gradient: in a model's first layer."""
    val = tensor_val(arg)
    floats = val is not None and val.is_floating_point()
    return builder.call(aten.detach.default, arg) if floats else arg


def _place(call: fx.Node) -> dict[str, Any]:
    """What is noted of where a call stands, not of what it returns: true of its ops, too."""
    return {key: value for key, value in call.meta.items() if key not in _OF_RESULTS}
