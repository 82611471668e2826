"""How much attention looks at under the masks that a step computes, read off its first batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxrl.capture._torch import FakeTensor
from fxrl.ir.graph import ancestors, bound, hint, inputs_of
from fxrl.ops.masked_attention import share_of_blocks


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
