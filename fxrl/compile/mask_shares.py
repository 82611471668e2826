"""How much attention looks at under the masks that a step computes, read off its first batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxrl.capture._torch import FakeTensor
from fxrl.ir.graph import ancestors, bound, held, hint, inputs_of
from fxrl.ops.masked_attention import share_of_blocks


def shares_seen(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, float]:
    """For each computed mask of a graph, the share of query-key pairs that attention computes.
    Masks whose inputs are fake are left out; reading real ones waits for the device."""
    args = dict(zip(inputs_of(gm.graph), inputs, strict=False))
    shares: dict[str, list[float]] = {}
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.fxrl.mask_blocks.default):
        needed = ancestors([call], {*gm.graph.nodes})
        given = [args.get(node) for node in needed if node.op == "placeholder"]
        if all(map(_has_values, given)):
            blocks = _computed(call, needed, args)
            shares.setdefault(bound(call)["mask"], []).append(share_of_blocks(blocks))
    return {mask: sum(found) / len(found) for mask, found in shares.items()}


def _has_values(given: Any) -> bool:
    """Whether an input is a size, or a tensor that is neither fake nor on ``meta``."""
    if isinstance(given, torch.Tensor):
        return not (given.is_meta or isinstance(given, FakeTensor))
    return isinstance(given, (int, torch.SymInt))


@torch.no_grad()
def _computed(wanted: fx.Node, nodes: Iterable[fx.Node], args: Mapping[fx.Node, Any]) -> Any:
    """Compute the value of ``wanted`` from the values of the graph's inputs."""
    found: dict[fx.Node, Any] = {}
    for node in sorted(nodes):
        if node.op == "placeholder":
            value = args[node]
            found[node] = value if isinstance(value, torch.Tensor) else hint(value)
        elif node.op == "get_attr":
            found[node] = held(node)
        else:
            target: Any = node.target
            taken, named = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = target(*taken, **named)
    return found[wanted]
