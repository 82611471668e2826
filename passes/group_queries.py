"""Give grouped queries to attention itself where its keys were repeated only because of a mask.

    %k2 = reshape(expand(unsqueeze(%k, 2)))              [B, Hkv, T, D] repeated to [B, H, T, D]
    %o  = scaled_dot_product_attention(%q, %k2, %v2)     no mask
becomes
    %o  = scaled_dot_product_attention(%q, %k, %v, enable_gqa=True)

Libraries repeat the keys of each group where there is a mask, since no fused kernel takes both, and
a tracer always gets the mask; where it turned out to be causal, so did the reason to repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from fxrl.analysis.attention import SDPA, before_repeat, options_of, set_options
from fxrl.ir.bodies import graphs_of
from fxrl.ir.graph import hint, nbytes, shape_of
from fxrl.ir.graph_pass import Applied, Miss, Normalisation, PassDoc, Site
from fxrl.ir.remark import Refusal

_LARGEST_HEAD = 256  # features a head up to which the fused kernels take grouped queries


@dataclass(frozen=True, slots=True)
class RepeatedKeys(Site):
    """An attention call without mask, and its keys and values before they were repeated."""

    keys: fx.Node
    values: fx.Node


@dataclass(frozen=True)
class GroupQueries(Normalisation[RepeatedKeys]):
    """Undo repeated keys where no mask is left."""

    name = "group-queries"
    doc = PassDoc(
        "attention without mask whose keys and values are repeated for each group of queries",
        "the repeated keys and values, and their gradients",
        "nothing",
        f"heads have more than {_LARGEST_HEAD} features, which no fused kernel takes grouped",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[RepeatedKeys | Miss]:
        calls = [n for g in graphs_of(gm) for n in g.find_nodes(op="call_function", target=SDPA)]
        for call in calls:
            if options_of(call).get("attn_mask") is not None:
                continue
            keys, values = map(before_repeat, call.args[1:3])
            if keys is None or values is None:
                continue
            features = hint(shape_of(keys)[-1])
            if features > _LARGEST_HEAD:
                reason = f"heads of {features} features: no fused kernel takes them grouped"
                yield Miss(call, Refusal(reason))
            else:
                yield RepeatedKeys(call, 0, keys, values)

    def respell(self, gm: fx.GraphModule, site: RepeatedKeys) -> Applied:
        repeated = sum(nbytes(arg) for arg in site.anchor.args[1:3] if isinstance(arg, fx.Node))
        site.anchor.args = (site.anchor.args[0], site.keys, site.values, *site.anchor.args[3:])
        set_options(site.anchor, enable_gqa=True)
        return Applied(
            "attention takes grouped queries: keys and values are not repeated", repeated
        )
