"""Open an ``autograd.Function`` that reads the logits, so that the passes over heads see into it.

    %values = autograd_function_apply(@forward, @backward, %logits, %ids)
becomes
    %plain  = detach(%logits)
    ...                                 the ops of the forward
    %values = with_gradient(@backward, %logits, %plain_values, what the forward saves)

Libraries write the log-probability of a token as such a function, so that less is kept than by
autograd (Megatron's cross entropy over shards of a vocabulary, filters by top-k and top-p). The
head's own rewrite saves as much. The gradient stays the user's: ``@backward`` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrl.analysis.rows.heads import find_heads
from fxrl.ir.bodies import AUTOGRAD_FUNCTION, HALVES, WITH_GRADIENT, Halves, hold, splice
from fxrl.ir.graph import ancestors, hint, is_tensor, needs_grad, shape_of
from fxrl.ir.graph_pass import Applied, Miss, Normalisation, PassDoc, Site
from fxrl.ir.remark import Refusal

aten = torch.ops.aten


@dataclass(frozen=True)
class OpenLossFunctions(Normalisation[Site]):
    """Inline the forward of each ``autograd.Function`` of logits, and give it its gradient."""

    name = "open-loss-functions"
    doc = PassDoc(
        "an `autograd.Function` of the user's that reads the logits",
        "nothing by itself: the head's passes see into it",
        "nothing",
        "it writes into its input, draws random numbers, or calls a kernel",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Site | Miss]:
        calls = gm.graph.find_nodes(op="call_function", target=AUTOGRAD_FUNCTION)
        heads = set(find_heads(gm.graph)) if calls else set()
        for call in calls:
            halves = call.meta.get(HALVES)
            if halves is None or not _reads_logits(call, heads):
                continue
            if isinstance(halves, str):
                yield Miss(call, Refusal(f"the autograd.Function could not be lowered: {halves}"))
            else:
                yield Site(call, 0)

    def respell(self, gm: fx.GraphModule, site: Site) -> Applied:
        _open(gm, site.anchor, site.anchor.meta[HALVES])
        return Applied("an autograd.Function of the logits is opened; its gradient is its backward")


def _reads_logits(call: fx.Node, heads: set[fx.Node]) -> bool:
    return any(
        hint(shape_of(head)[-1]) in map(hint, shape_of(arg))
        for arg in call.all_input_nodes
        if is_tensor(arg)
        for head in heads & {arg, *ancestors([arg])}
    )


def _open(gm: fx.GraphModule, call: fx.Node, halves: Halves) -> None:
    """Replace ``call`` by the forward's ops and a call that attaches their gradient."""
    graph, inputs = gm.graph, call.args[2:]
    results: Any = halves.forward.graph.output_node().args[0]
    with graph.inserting_before(call):
        plain = [_without_gradient(graph, arg) for arg in inputs]
        places, _ = splice(graph, halves.forward, plain)
        values, saved = fx.map_arg(results, places.__getitem__)
        trained = [values[index] for index in halves.trained]
        backward = graph.get_attr(hold(gm, halves.backward))
        counts = len(inputs), len(trained)
        opened = graph.call_function(WITH_GRADIENT, (backward, *counts, *inputs, *trained, *saved))
    opened.meta = {key: value for key, value in call.meta.items() if key != HALVES}
    opened.meta["val"] = tuple(value.meta["val"] for value in trained)
    for item in list(call.users):
        index: Any = item.args[1]
        if index in halves.trained:
            item.args = (opened, halves.trained.index(index))
        else:
            item.replace_all_uses_with(values[index])
            graph.erase_node(item)
    graph.erase_node(call)


def _without_gradient(graph: fx.Graph, arg: Any) -> Any:
    if not isinstance(arg, fx.Node) or not needs_grad(arg):
        return arg
    plain = graph.call_function(aten.detach.default, (arg,))
    plain.meta = {**arg.meta, "val": arg.meta["val"].detach(), "requires_grad": False}
    return plain
