"""Which dim of a value counts a sequence's tokens, from the embedding on, op by op.

    ids [B, T] -> embedding [B, T, H] -> view [B * T, H] -> ... -> logits[:, :-1] -> logp [B, T - 1]
    dim   1                 1                 0                       1                 1

What is computed token by token can be computed by ranks that hold some of the tokens each. A slice
of tokens moves no data: a ``Share`` says which token its first entry is for, and how many there
are. Attention has its own rule; ``analysis.shares`` has those of other ops. Any other op that mixes
tokens reads them gathered if they are a few numbers each (a loss reads log-probabilities), and is a
refusal if they are more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from fxrl.analysis.attention import SDPA, before_repeat, options_of
from fxrl.analysis.shares import Share, SharedGraph, Step, follow, step_of
from fxrl.ir.bodies import CALL_LAYER, CHECKPOINT, body_of, graphs_of
from fxrl.ir.graph import (
    Size,
    as_node,
    draws_random,
    hint,
    inputs_of,
    is_call,
    is_embedding,
    is_equal,
    is_tensor,
    numel_hint,
    op_name,
    shape_of,
)
from fxrl.ir.remark import Refusal

aten = torch.ops.aten
#: Numbers for each token up to which a value is gathered where an op needs it whole.
_FEW = 8


@dataclass(frozen=True, slots=True)
class Tokens(Share):
    """The tokens of a sequence, of which a rank holds some."""

    one: ClassVar[str] = "token"
    whole: ClassVar[str] = "sequence"

    ids: fx.Node = field(kw_only=True)  # the embedding's indices; their last dim counts all T

    @property
    def total(self) -> Size:
        """T, of which a rank holds 1 / P."""
        return shape_of(self.ids)[-1]


def find_shares(gm: fx.GraphModule, ranks: int) -> SharedGraph | None:
    """What ``ranks`` ranks may share of a graph; None where it embeds no sequence."""
    seeds = _seeds(gm.graph)
    if not seeds:
        return None
    if all(hint(shape_of(_ids(seed))[-1]) == 1 for seed in seeds):
        raise Refusal("its sequences have one token each, and a token is not shared")
    for graph in graphs_of(gm):
        for node in graph.nodes:
            if draws_random(node):
                raise Refusal(
                    f"{op_name(node)} draws random numbers, and each rank would draw its own",
                    "set dropout to 0, or call model.eval()",
                    node,
                )
    return _Walk(ranks, seeds).walk(SharedGraph(gm, {}))


def attention_calls(found: SharedGraph) -> list[fx.Node]:
    """The shared attention calls, as often as the model makes them."""
    calls = []
    for node, step in found.steps.items():
        if step.body is not None:
            calls += attention_calls(step.body)
        elif is_call(node, SDPA) and step.shares is not None:
            calls.append(node)
    return calls


def _seeds(graph: fx.Graph) -> set[fx.Node]:
    """The embeddings of ids [B, T] and of as many positions; without any, those of ids [T]."""
    calls = [node for node in graph.nodes if is_embedding(node)]
    rows = [call for call in calls if len(shape_of(_ids(call))) > 1]
    tokens = [shape_of(_ids(call))[-1] for call in rows]
    vectors = [call for call in calls if len(shape_of(_ids(call))) == 1]
    alike = [v for v in vectors if any(is_equal(n, shape_of(_ids(v))[0]) for n in tokens)]
    return {*rows, *alike} if rows else set(vectors)


class _Walk:
    """Follows a graph and the graphs that it calls, each of these once."""

    def __init__(self, ranks: int, seeds: set[fx.Node]) -> None:
        self.ranks, self._seeds = ranks, seeds
        self._bodies: dict[fx.GraphModule, SharedGraph] = {}
        self._tokens = max(numel_hint(_ids(seed)) for seed in seeds)

    def walk(self, into: SharedGraph) -> SharedGraph:
        into.shares |= into.given
        for node in into.module.graph.nodes:
            self._visit(into, node)
        return into

    def _visit(self, into: SharedGraph, node: fx.Node) -> None:
        if node in self._seeds and into.share(_ids(node)) is None:
            into.steps[node] = step = _seed(node)
            into.shares[node] = step.shares
        elif node.op == "output" and into.given:
            results: Any = node.args[0]
            into.results = tuple(into.share(result) for result in results)
        else:
            follow(into, node, partial(self._step, into))

    def _step(self, into: SharedGraph, node: fx.Node, reads: list[fx.Node]) -> Step:
        try:
            step = self._apart(into, node)
            if step.needs and all(self._is_narrow(read, 1) for read in reads):
                raise Refusal("it is one number for each token")
        except Refusal as refusal:
            return self._gathered(into, node, reads, refusal)
        return step

    # NOTE [Why narrow values meet whole ones as a whole]: a rank pads its part with copies of an
    # entry. There a log-probability would meet the old policy's for another token; their ratio may
    # be inf, and its gradient zero times inf. Gathered, each meets its own.
    def _gathered(
        self, into: SharedGraph, node: fx.Node, reads: list[fx.Node], refusal: Refusal
    ) -> Step:
        """The node as it is, over operands that are gathered: a few numbers for each token."""
        shares = {read: share for read in reads if (share := into.share(read)) is not None}
        if len(shares) < len(reads) or not all(map(self._is_narrow, reads)):
            wide = next((read for read in reads if not self._is_narrow(read)), node)
            refusal.at = refusal.at or (wide if node.op == "output" else node)
            raise refusal
        return Step(None, gathers=shares)

    def _is_narrow(self, node: fx.Node, numbers: int = _FEW) -> bool:
        """Whether a value is at most so many numbers for each token."""
        return is_tensor(node) and numel_hint(node) <= numbers * self._tokens

    def _apart(self, into: SharedGraph, node: fx.Node) -> Step:
        """The node computed by each rank from its own tokens."""
        if node.op == "output":
            cure = "return what is computed from them, a few numbers for each token"
            raise Refusal("values as wide as this leave the traced code", cure)
        if is_call(node, CALL_LAYER, CHECKPOINT):
            return self._call(into, node)
        if is_call(node, SDPA):
            return _attention(into, node, self.ranks)
        if is_embedding(node):
            share = into.share(_ids(node))
            assert share is not None
            return Step(share)
        return step_of(into, node)

    def _call(self, into: SharedGraph, node: fx.Node) -> Step:
        """A layer, or a checkpointed function: its graph is followed once for all calls."""
        body = body_of(into.module, node)
        if body is None or body.meta.get("not_lowered") is not None:
            raise Refusal(f"{op_name(node)} calls a graph that is opaque to fxrl")
        inputs = inputs_of(body.graph)
        given = {
            place: share
            for place, arg in zip(inputs, node.args[1:], strict=True)
            if (share := into.share(arg)) is not None
        }
        if body not in self._bodies:
            self._bodies[body] = self.walk(SharedGraph(body, given))
        known = self._bodies[body]
        same = known.given.keys() == given.keys() and all(
            share.dim == given[place].dim and share.alike(given[place])
            for place, share in known.given.items()
        )
        if not same:
            raise Refusal("layers that are one graph are given tokens in different ways")
        return Step(known.results, body=known)


def _ids(embedding: fx.Node) -> fx.Node:
    return as_node(embedding.args[int(is_call(embedding, aten.embedding.default))])


def _seed(node: fx.Node) -> Step:
    ids = _ids(node)
    share = Tokens(len(shape_of(ids)) - 1, 0, shape_of(ids)[-1], ids=ids)
    return Step(share, needs={ids: share})


# ---------------------------------------------------------------------------- attention
def _attention(into: SharedGraph, node: fx.Node, ranks: int) -> Step:
    """Attention: for all tokens of queries, keys and values [B, heads, T, D], by heads per rank."""
    options = options_of(node)
    operands: Any = node.args[:3]
    shares = [into.share(arg) for arg in operands]
    for arg, share in zip(operands, shares, strict=True):
        if share is None or len(shape_of(arg)) != 4 or share.dim != 2:
            raise Refusal("attention is not over [batch, heads, tokens, features] of one sequence")
        whole = is_equal(share.start, 0) and is_equal(share.length, share.total)
        if not whole or not share.alike(shares[0]):  # type: ignore[arg-type]
            raise Refusal("attention is over a part of the tokens")
    heads, groups = (hint(shape_of(arg)[1]) for arg in operands[:2])
    if heads % ranks:
        fitting = [n for n in range(2, heads + 1) if heads % n == 0]
        cure = f"context_parallel may be {', '.join(map(str, fitting)) or 1}"
        raise Refusal(f"{heads} query heads do not divide among {ranks} ranks", cure)
    if groups != heads and not options.get("enable_gqa"):
        raise Refusal(f"{groups} heads of keys for {heads} of queries")
    mask = options.get("attn_mask")
    if into.share(mask) is not None:
        raise Refusal("attention's mask is computed from hidden states")
    if mask is not None and len(shape_of(mask)) > 2:
        rows = hint(shape_of(mask)[-3])
        if rows not in (1, heads):
            raise Refusal(f"attention's mask has {rows} heads of {heads}")
    return Step(shares[0])


def ungrouped(found: SharedGraph, *pair: fx.Node) -> list[fx.Node]:
    """Keys and values before they were repeated for each group of queries; themselves if not."""
    sources = [source for arg in pair if (source := before_repeat(arg)) is not None]
    shares = [found.share(source) for source in sources]
    whole = len(sources) == len(pair) and all(s is not None and s.dim == 2 for s in shares)
    return sources if whole else list(pair)
