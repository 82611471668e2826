"""How much attention looks at under the masks that a step computes, read off its first batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxrl.capture._torch import FakeTensor
from fxrl.ir.graph import ancestors, bound, hint
from fxrl.ops.masked_attention import share_of_blocks


def shares_seen(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, float]:
    """The share of pairs of query and key that attention looks at under each computed mask of a
    graph; nothing of a mask whose batch is fake.

    Args:
        inputs: of the graph; reading them waits for the device.
    """
    args = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False))
    shares: dict[str, list[float]] = {}
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.fxrl.mask_blocks.default):
        needed = ancestors([call], {*gm.graph.nodes})
        given = [args.get(node) for node in needed if node.op == "placeholder"]
        if all(_is_number(x) or _is_real(x) for x in given):
            blocks = _computed(call, needed, args)
            shares.setdefault(bound(call)["mask"], []).append(share_of_blocks(blocks))
    return {mask: sum(found) / len(found) for mask, found in shares.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt))


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_meta or isinstance(value, FakeTensor))


@torch.no_grad()
def _computed(wanted: fx.Node, nodes: Iterable[fx.Node], args: Mapping[fx.Node, Any]) -> Any:
    """What a node returns, from the values of the graph's inputs."""
    found: dict[fx.Node, Any] = {}
    for node in sorted(nodes):
        if node.op == "placeholder":
            found[node] = hint(args[node]) if _is_number(args[node]) else args[node]
        elif node.op == "get_attr":
            found[node] = getattr(node.graph.owning_module, str(node.target))
        else:
            target: Any = node.target
            taken, named = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = target(*taken, **named)
    return found[wanted]
