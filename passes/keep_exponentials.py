"""Let a trained loss head keep its exponentials, where the plan has room for them.

    fxrl.linear_logprob(%hidden, %weight, ...)                           the backward makes the
                                                                         logits again: 6NHV FLOPs
    fxrl.linear_logprob(%hidden, %weight, ..., keep_exponentials=True)   it makes none: 4NHV

NOTE [Why only what the plan leaves over]: keeping ``[N, V]`` numbers spares a product of 2NHV
FLOPs, so a byte kept here saves about as much time as a byte of a layer's product. The planner
decides about the layers first, and gives the head what memory is left. Without a plan that is
unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fxrl.ir.graph import bound, hint, needs_grad, shape_of
from fxrl.ir.graph_pass import Applied, Pass, PassDoc, Site, Stage
from fxrl.ir.plan import Choice, CutHead
from fxrl.ir.remark import Refusal
from fxrl.passes.fuse_linear_logprob import differentiated_outputs


@dataclass(frozen=True)
class KeepExponentials(Pass[Site]):
    """Tell the trained heads that the plan names to keep their exponentials."""

    name = "keep-exponentials"
    stage = Stage.ACT
    requires = ("fuse-linear-logprob",)
    doc = PassDoc(
        "a fused loss head that is trained, whose log-probs alone are differentiated, where the "
        "plan has room",
        "the backward's matmul for the logits",
        "`[N, V]` exponentials from the head's forward to its backward",
        "nothing",
    )

    def match(self, gm: fx.GraphModule) -> Iterator[Site]:
        return trained_heads(gm)

    def decide(self, site: Site) -> Choice:
        return CutHead()

    def rewrite(self, gm: fx.GraphModule, site: Site, choice: Choice) -> Applied | None:
        if not isinstance(choice, CutHead):
            raise Refusal(f"the plan's choice for a loss head is {choice}, which is for another")
        if choice.kept == "rows":
            return None
        call = site.anchor
        call.update_kwarg("keep_exponentials", True)
        given = bound(call)
        rows, entries = (hint(shape_of(given[name])[0]) for name in ("hidden", "weight"))
        return Applied(f"keep: exponentials [{rows} x {entries}]; the backward makes no logits")


def trained_heads(gm: fx.GraphModule) -> Iterator[Site]:
    """The heads that may keep their exponentials (``ops.linear_logprob.kept``)."""
    op = torch.ops.fxrl.linear_logprob.default
    for call in gm.graph.find_nodes(op="call_function", target=op):
        given = bound(call)
        others = needs_grad(given["bias"]) or needs_grad(given["temperature"])
        alone = differentiated_outputs(call) == {"logprob"} and given["row_mask"] is None
        if alone and needs_grad(given["weight"]) and not others:
            yield Site(call, 0)
