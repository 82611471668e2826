"""Let ranks share the tokens of a sequence: each computes its own, and attention its own heads.

    %x = embedding(%w, %ids)                          [B, T, H]
    %o = scaled_dot_product_attention(%q, %k, %v)     [B, heads, T, D]
    %l = ...(%o, ...)                                 log-probabilities [B, T - 1], and the loss
becomes
    %i = fxrl.shard_tokens(%ids, ...)
    %x = embedding(%w, %i)                            [B, T / P, H]
    %h = fxrl.seq_to_head([%q, %k, %v], %ids)         [B, heads / P, T, D]
    %o = scaled_dot_product_attention(*%h)
    %s = fxrl.head_to_seq([%o], %ids)                 [B, heads, T / P, D]
    %l = ...(fxrl.gather_tokens(...(%s, ...)))        log-probabilities [B, T - 1], and the loss
and %w is marked: its gradient is summed over the ranks.

Every rank gets the same whole batch and returns the same whole loss and gradients. For the ops and
their gradients see ``fxrl.ops.context_parallel``; for what may be split among ranks,
``fxrl.analysis.token_shares``.

NOTE [Why the loss is whole on every rank]: once there are only a few numbers for each token, an op
that mixes tokens reads them gathered, and the rest runs on every rank alike. So sums, means, ratios
over sequences and metrics equal those of one process for any loss, to the bit, and so do the
gradients, by the loss's own code; no reduction has to be rewritten. It costs some [B, T] vectors a
step, beside [B, T, H] for each layer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, Self

import torch
from torch import fx

import fxrl.ops.context_parallel  # noqa: F401  # defines the ops
from fxrl.analysis.attention import SDPA, options_of, set_options
from fxrl.analysis.rows.rules import dims_of
from fxrl.analysis.shares import Share, SharedGraph, Step
from fxrl.analysis.token_shares import Tokens, attention_calls, find_shares, ungrouped
from fxrl.config import Config
from fxrl.ir.bodies import Lender, graphs_of
from fxrl.ir.build import Builder
from fxrl.ir.graph import (
    COPIES,
    PRODUCTS,
    OpOverload,
    Size,
    as_node,
    hint,
    inputs_of,
    is_call,
    is_embedding,
    is_pointwise,
    is_tensor,
    last_input,
    needs_grad,
    replace_by,
    shape_of,
)
from fxrl.ir.graph_pass import SETTLED, Applied, Miss, Normalisation, PassDoc, Site
from fxrl.ir.remark import Refusal, RemarkKind
from fxrl.ir.sizes import SizeTable

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Sequences(Site):
    """A model's sequences, and what becomes of each value."""

    found: SharedGraph


@dataclass(frozen=True)
class ShardSequence(Normalisation[Sequences]):
    """Ulysses context parallelism (arXiv 2309.14509) as a rewrite of the captured graph."""

    ranks: int = field(default=1, metadata=SETTLED)  # P, how many ranks share a sequence

    name = "shard-sequence"
    applied = RemarkKind.APPLIED
    missed = RemarkKind.MISSED
    doc = PassDoc(
        "with `context_parallel=P`: all from the embedding of token ids to a few numbers for each "
        "token; attention by `scaled_dot_product_attention`",
        "activations and time: a rank computes 1 / P of the tokens, and of the heads in attention",
        "two all-to-alls for each attention call, and as many in its backward; an all-reduce of "
        "the gradients",
        "something else mixes tokens (a convolution, a recurrence, eager attention), numbers are "
        "drawn at random, or P does not divide the heads; every rank then computes all of it",
    )

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls(config.context_parallel)

    def match(self, gm: fx.GraphModule) -> Iterator[Sequences | Miss]:
        if self.ranks == 1:
            return
        anchor = _anchor(gm)
        try:
            found = find_shares(gm, self.ranks)
        except Refusal as refusal:
            assert anchor is not None
            yield Miss(anchor, refusal)
            return
        if anchor is not None and found is not None:
            yield Sequences(anchor, 0, found)
        elif anchor is not None:
            reason = "no token ids are embedded here, so no dim is known to count tokens"
            yield Miss(anchor, Refusal(reason, "let the traced code call the model with input_ids"))

    def respell(self, gm: fx.GraphModule, site: Sequences) -> Applied:
        calls = len(attention_calls(site.found))
        _Sharing(gm, site.found, self.ranks).share(site.found)
        return Applied(f"{self.ranks} ranks share the tokens, and the heads in {calls} attentions")


def _anchor(gm: fx.GraphModule) -> fx.Node | None:
    """The embedding; in a graph without one, its first product."""
    nodes = [node for graph in graphs_of(gm) for node in graph.nodes]
    embeddings = filter(is_embedding, nodes)
    products = (node for node in nodes if is_call(node, *PRODUCTS))
    return next(embeddings, None) or next(products, None)


class _Sharing:
    """Rewrites a graph and the graphs that it calls as their steps say."""

    def __init__(self, gm: fx.GraphModule, found: SharedGraph, ranks: int) -> None:
        self._gm, self._ranks = gm, ranks
        self._known: dict[Any, fx.Node] = {}
        self._graphs: dict[fx.Graph, SharedGraph] = {}
        self._lender = Lender(gm)
        self._calls = self._lender.calls
        self._done: set[fx.Graph] = set()
        self._learn(found)
        self._tables: dict[fx.Graph, SizeTable] = {}
        self._builders = {graph: Builder(graph) for graph in self._graphs}
        self._moved: dict[fx.Node, fx.Node] = {}  # what attention handed back: its call

    def _learn(self, found: SharedGraph) -> None:
        """What each graph was rewritten to."""
        if found.module.graph in self._graphs:
            return
        self._graphs[found.module.graph] = found
        for step in found.steps.values():
            if step.body is not None:
                self._learn(step.body)

    # -- graph by graph, callers first
    def share(self, here: SharedGraph) -> None:
        """Rewrite one graph, and those that it calls."""
        for node in list(here.module.graph.nodes):
            step = here.steps.get(node)
            if step is not None:
                self._take(here, node, step)
            elif is_call(node, aten.sym_size.int) and node.args[0] in here.shares:
                with node.graph.inserting_before(node):  # still that of the whole value
                    replace_by(node, self._size(node.graph, node.meta["val"]))

    def _take(self, here: SharedGraph, node: fx.Node, step: Step) -> None:
        for arg in node.all_input_nodes:
            if not (is_call(node, SDPA) and arg is options_of(node).get("attn_mask")):
                new = self._operand(here, step, self._moved.get(arg, arg), arg)
                if new is not arg:
                    node.replace_input_with(arg, new)
        if step.body is not None:
            self._call(node, step.body)
        elif is_call(node, SDPA) and step.shares is not None:
            self._attend(here, node)
        elif node.op == "call_function":
            self._resize(node, step)
            self._builders[node.graph].update(node)

    def _operand(self, here: SharedGraph, step: Step, was: fx.Node, arg: fx.Node) -> fx.Node:
        """What a step reads instead of ``arg``, which has replaced ``was``."""
        if (share := step.needs.get(was)) is not None:
            return self._part(arg, share)
        if (share := step.gathers.get(was)) is not None:
            return self._whole(arg, share)
        outside = here.shares.get(was) is None and is_tensor(arg) and needs_grad(arg)
        shared = step.shares is not None and step.body is None
        return self._summed(arg) if outside and shared else arg

    def _resize(self, node: fx.Node, step: Step) -> None:
        if step.same is not None:
            source = next(
                arg for arg in node.all_input_nodes if self._moved.get(arg, arg) is step.same
            )
            node.target, node.args, node.kwargs = aten.slice.Tensor, (source, 0), {}
        elif step.sizes is not None and isinstance(step.shares, Share):
            sizes = list(step.sizes)
            sizes[step.shares.dim] = step.shares.size(self._ranks)
            with node.graph.inserting_before(node):
                args = [self._size(node.graph, size) for size in sizes]
            if not is_call(node, aten.expand.default):
                node.target = aten.reshape.default
            node.args, node.kwargs = (node.args[0], args), {}

    def _call(self, node: fx.Node, body: SharedGraph) -> None:
        graph = body.module.graph
        if graph not in self._done:
            self._done.add(graph)
            for place, arg in zip(inputs_of(graph), node.args[1:], strict=True):
                place.meta["val"] = _val(arg)
            self.share(body)
        results: Any = graph.output_node().args[0]
        node.meta["val"] = type(node.meta["val"])(_val(result) for result in results)

    def _attend(self, here: SharedGraph, node: fx.Node) -> None:
        """Attention over all tokens, of a rank's heads."""
        share = here.share(node)
        assert isinstance(share, Tokens)
        options, build = options_of(node), self._builders[node.graph]
        query, key, value = (as_node(arg) for arg in node.args[:3])
        key, value = ungrouped(here, key, value)
        heads, groups = (hint(shape_of(arg)[1]) for arg in (query, key))
        each = self._ranks // gcd(groups, self._ranks)  # with fewer heads of keys than ranks
        ids = self._lender.to(node.graph, share.ids)
        with build.before(node):
            given = [query, self._repeated(build, key, each), self._repeated(build, value, each)]
            parts = build.call(torch.ops.fxrl.seq_to_head.default, given, ids, self._ranks)
            query, key, value = (build.call(operator.getitem, parts, i) for i in range(3))
            if not options.get("enable_gqa"):
                per_key = heads // (groups * each)
                key, value = (self._repeated(build, x, per_key) for x in (key, value))
            if (mask := options.get("attn_mask")) is not None:
                set_options(node, attn_mask=self._mask(build, mask, heads))
        node.args = (query, key, value, *node.args[3:])
        build.update(node)
        with build.after(node):
            back = build.call(torch.ops.fxrl.head_to_seq.default, [node], ids, self._ranks)
        with build.after(back):
            whole = build.call(operator.getitem, back, 0)
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not back)
        self._moved[whole] = node

    def _repeated(self, build: Builder, x: fx.Node, times: int) -> fx.Node:
        """Heads of keys or values [B, G, T, D], each so many times in a row."""
        if times == 1:
            return x
        groups = hint(shape_of(x)[1])
        batch, _, *rest = (self._size(x.graph, size) for size in shape_of(x))
        wide = build.call(aten.unsqueeze.default, x, 2)
        wide = build.call(aten.expand.default, wide, [batch, groups, times, *rest])
        return build.call(aten.reshape.default, wide, [batch, groups * times, *rest])

    def _mask(self, build: Builder, mask: fx.Node, heads: int) -> fx.Node:
        dim = len(shape_of(mask)) - 3
        if dim < 0 or hint(shape_of(mask)[dim]) == 1:
            return self._summed(mask) if needs_grad(mask) else mask
        own = heads // self._ranks
        place = (dim, 1, 1, 0, own, False, self._ranks)
        return build.call(torch.ops.fxrl.shard_tokens.default, mask, *place)

    # -- values in another form, each made once
    def _part(self, node: fx.Node, share: Share) -> fx.Node:
        """A rank's part of a whole value.

        Taken as early as the chain of ops that made the value allows: RoPE's values are computed
        from a rank's positions only, once for all layers.
        """
        where = (share.total, share.start, share.length, share.outer, share.inner)
        key = ("part", node, share.dim, *map(str, where))
        if key not in self._known:
            graph, build = node.graph, self._builder(node.graph)
            source, dim = _one_source(node, share.dim)
            if graph in self._calls and node.op == "placeholder":
                made = self._input(node, lambda arg: self._part(arg, share))
            elif source is not None:
                part = self._part(source, replace(share, dim=dim))
                with build.after(node):
                    made = build.call(node.target, part, *node.args[1:], **node.kwargs)
            else:
                with build.after(_behind(node)):
                    build.source = node
                    place = (share.outer, share.inner, share.start, share.local(self._ranks))
                    sizes = [self._size(graph, size) for size in place]
                    op = torch.ops.fxrl.shard_tokens.default
                    made = build.call(op, node, share.dim, *sizes, True, self._ranks)
            self._known[key] = made
        return self._known[key]

    def _whole(self, node: fx.Node, share: Share) -> fx.Node:
        """Gather a shared value."""
        key = ("whole", node)
        if key not in self._known:
            build = self._builder(node.graph)
            with build.after(_behind(node)):
                place = (share.outer, share.inner, share.start, share.length)
                sizes = [self._size(node.graph, size) for size in place]
                op = torch.ops.fxrl.gather_tokens.default
                self._known[key] = build.call(op, node, share.dim, *sizes, self._ranks)
        return self._known[key]

    def _summed(self, node: fx.Node) -> fx.Node:
        """A whole value that every token reads: its gradient is summed over the ranks.

        A weight stays as it is and is marked: whoever runs the graph passes all marked weights
        through ``sum_gradients`` (``compile.outer``). If a weight is also read as a whole (a
        penalty on its size), its other readers get the op here, and what they read that is computed
        from weights is computed again from the op's results.
        """
        key = ("summed", node)
        if key not in self._known:
            made = node
            if node.op == "placeholder" and node.graph in self._calls:
                made = self._input(node, self._summed)
            elif node.op == "placeholder" and not self._is_read_whole(node):
                node.meta["summed_over"] = self._ranks
            elif node.op != "placeholder" and self._is_closed(node):
                made = self._made_anew(node)
            else:
                made = self._through_op(node)
            self._known[key] = made
        return self._known[key]

    def _made_anew(self, node: fx.Node) -> fx.Node:
        sums = {arg: self._summed(arg) for arg in filter(needs_grad, node.all_input_nodes)}
        if all(arg is new for arg, new in sums.items()):
            return node
        build = self._builder(node.graph)
        with build.after(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: sums.get(arg, arg))
            return build.call(node.target, *args, **kwargs)

    def _through_op(self, node: fx.Node) -> fx.Node:
        build = self._builder(node.graph)
        with build.after(_behind(node)):
            sums = build.call(torch.ops.fxrl.sum_gradients.default, [node], self._ranks)
        with build.after(sums):
            return build.call(operator.getitem, sums, 0)

    def _is_closed(self, node: fx.Node) -> bool:
        """Whether a value is computed from weights alone."""
        if node.op == "placeholder":
            return True
        if not isinstance(node.target, OpOverload) or node in self._graphs[node.graph].steps:
            return False
        return all(map(self._is_closed, filter(needs_grad, node.all_input_nodes)))

    def _is_read_whole(self, node: fx.Node) -> bool:
        """Whether a weight, or what is made of weights alone, is read where nothing is shared, or
        in parts: its gradient is whole there."""
        here, parts = self._graphs[node.graph], torch.ops.fxrl.shard_tokens.default
        for user in node.users:
            step = here.steps.get(user)
            if user.op == "output" or is_call(user, SDPA, parts) or (step and node in step.needs):
                return True
            if step is not None and step.body is not None:
                inputs = inputs_of(step.body.module.graph)
                pairs = zip(inputs, user.args[1:], strict=False)
                if any(arg is node and self._is_read_whole(place) for place, arg in pairs):
                    return True
            elif (step is not None and step.shares is not None) or not needs_grad(user):
                continue
            elif not self._is_closed(user) or self._is_read_whole(user):
                return True
        return False

    # -- inputs of graphs that are called
    def _input(self, node: fx.Node, made: Any) -> fx.Node:
        """An input more of a graph: what is made of the one that there is, where it is called."""
        graph = node.graph
        index = inputs_of(graph).index(node) + 1
        given = {call: made(as_node(call.args[index])) for call in self._calls[graph]}
        if all(new is call.args[index] for call, new in given.items()):
            return node
        self._tables.pop(graph, None)
        return self._lender.add(graph, given)

    def _builder(self, graph: fx.Graph) -> Builder:
        return self._builders.setdefault(graph, Builder(graph))

    def _size(self, graph: fx.Graph, size: Size) -> int | fx.Node:
        """A size as an argument; ids tell it where no other input does."""
        if graph not in self._tables:
            self._tables[graph] = SizeTable(graph)
        if graph in self._calls and self._tables[graph].find(size) is None:
            for share in self._graphs[graph].given.values():
                assert isinstance(share, Tokens)
                self._lender.to(graph, share.ids)
            self._tables[graph] = SizeTable(graph)
        return self._tables[graph].arg(size)


def _one_source(node: fx.Node, dim: int) -> tuple[fx.Node | None, int]:
    """The only operand of an op that works entry by entry, and the operand's dim."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not is_tensor(source) or len(node.all_input_nodes) != 1:
        return None, dim
    if is_call(node, aten.unsqueeze.default):
        (added,) = dims_of(node.args[1], len(shape_of(node)))
        return (None, dim) if added == dim else (source, dim - (added < dim))
    return (source if node.target in COPIES or is_pointwise(node) else None), dim


def _behind(node: fx.Node) -> fx.Node:
    """The node behind which a value made from ``node`` may be inserted: never among inputs."""
    return last_input(node.graph) if node.op == "placeholder" else node


def _val(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg
