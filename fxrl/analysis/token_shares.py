"""Which dim of a value counts a sequence's tokens, from the embedding on, op by op.

    ids [B, T] -> embedding [B, T, H] -> view [B * T, H] -> ... -> logits[:, :-1] -> logp [B, T - 1]
    dim   1                 1                 0                       1                 1

What is made token by token can be made by ranks that hold some tokens each. A slice of tokens moves
nothing then: it says which token the first entry is for, and how many there are. Attention is a
place of its own kind. Whatever else mixes tokens reads them gathered where they are a few numbers
each (a loss does, of log-probabilities), and is a refusal where they are more.

How an op treats rows is told once, by the table of ``analysis.rows``; here is what each of its
kinds does to the one dim that counts tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from fxrl.analysis.attention import SDPA, before_repeat, options_of
from fxrl.analysis.rows import compute, layout
from fxrl.analysis.rows.analysis import RULES
from fxrl.analysis.rows.rules import dims_of, op_name
from fxrl.ir.graph import (
    CALL_LAYER,
    CHECKPOINT,
    OpOverload,
    Size,
    as_node,
    body_of,
    bound,
    draws_random,
    graphs_of,
    hint,
    is_call,
    is_embedding,
    is_piecewise_product,
    is_pointwise,
    is_tensor,
    numel_hint,
    shape_of,
)
from fxrl.ir.remark import Refusal
from fxrl.ir.sizes import is_equal, share_of

aten = torch.ops.aten
#: Numbers for each token up to which a value is gathered where an op needs it whole.
_FEW = 8
_SIZES = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a value that a rank holds."""

    ids: fx.Node  # the embedding's indices; their last dim counts all T tokens
    dim: int  # the dim with ``outer * length * inner`` entries, tokens in the middle
    start: Size  # the token that the first entry is for
    length: Size  # how many tokens have entries
    outer: Size = 1
    inner: Size = 1

    @property
    def tokens(self) -> Size:
        """T, of which a rank holds 1 / P."""
        return shape_of(self.ids)[-1]

    def local(self, ranks: int) -> Size:
        """Tokens that a rank holds."""
        return share_of(self.tokens, ranks)

    def size(self, ranks: int) -> Size:
        """The size of ``dim`` on a rank."""
        return self.outer * self.local(ranks) * self.inner

    def alike(self, other: Share) -> bool:
        """Whether the same rank holds what is for the same token, wherever the dim is."""
        mine, theirs = ((s.tokens, s.start, s.length, s.outer, s.inner) for s in (self, other))
        return all(map(is_equal, mine, theirs))


Shares = Share | None | tuple[Share | None, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The way in which a node that reads shared values is computed on a rank."""

    shares: Shares  # what its result is; None where it is whole
    # Whole operands of which a rank's part is read.
    needs: Mapping[fx.Node, Share] = field(default_factory=dict)
    # Shared operands that are read whole.
    gathers: Mapping[fx.Node, Share] = field(default_factory=dict)
    sizes: tuple[Size, ...] | None = None  # the result's, where they are an argument
    same: fx.Node | None = None  # the operand that its result is on a rank
    body: SharedGraph | None = None  # what becomes of the nodes of the graph that it calls


@dataclass(slots=True)
class SharedGraph:
    """One graph, and the steps of its nodes."""

    module: fx.GraphModule
    given: dict[fx.Node, Share]  # the inputs of a body that are shared
    shares: dict[fx.Node, Shares] = field(default_factory=dict)  # what every shared value is
    steps: dict[fx.Node, Step] = field(default_factory=dict)
    results: tuple[Share | None, ...] = ()  # of a body, what it returns

    def share(self, node: object) -> Share | None:
        """The part of an operand that a rank holds; None if the operand is whole."""
        found = self.shares.get(node) if isinstance(node, fx.Node) else None
        return found if isinstance(found, Share) else None


def find_shares(gm: fx.GraphModule, ranks: int) -> SharedGraph | None:
    """What ``ranks`` ranks may share of a graph; None where it embeds no sequence."""
    seeds = _seeds(gm.graph)
    if not seeds:
        return None
    if all(_is_one(shape_of(_ids(seed))[-1]) for seed in seeds):
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
    """Embeddings of ids in rows, and of as many positions; where there are none, of one row."""
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
            return
        reads = [arg for arg in node.all_input_nodes if into.shares.get(arg) is not None]
        if not reads or is_call(node, *_SIZES):
            return
        if is_call(node, operator.getitem):
            parts: Any = into.shares[reads[0]]
            into.shares[node] = parts[node.args[1]]
            return
        if node.op == "output" and into.given:
            results: Any = node.args[0]
            into.results = tuple(into.share(result) for result in results)
            return
        try:
            step = self._step(into, node)
            if step.needs and all(self._is_narrow(read, 1) for read in reads):
                raise Refusal("it is one number for each token")
        except Refusal as refusal:
            step = self._gathered(into, node, reads, refusal)
        into.steps[node], into.shares[node] = step, step.shares

    # NOTE [Why narrow values meet whole ones as a whole]: a rank has places without an entry, where
    # the copy of one stands, and log-probabilities of one token beside another's of the last policy
    # may have a ratio of inf, whose gradient is zero times inf. Gathered, each meets its own.
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

    def _step(self, into: SharedGraph, node: fx.Node) -> Step:
        if node.op == "output":
            cure = "return what is computed from them, a few numbers for each token"
            raise Refusal("values as wide as this leave the traced code", cure)
        if is_call(node, CALL_LAYER, CHECKPOINT):
            return self._call(into, node)
        if is_call(node, SDPA):
            return _attention(into, node, self.ranks)
        if is_piecewise_product(node):
            return _quantized_product(into, node)
        if is_embedding(node):
            return Step(_of(into, _ids(node)))
        target: Any = node.target
        if not isinstance(target, OpOverload):
            raise Refusal(f"{op_name(node)} is opaque to fxrl", "write it in PyTorch ops")
        kind: Any = RULES.get(target)
        if kind is None and is_pointwise(node):
            kind = compute.pointwise
        if kind not in _KINDS:
            raise Refusal(f"{op_name(node)} may mix the tokens of a sequence")
        return _KINDS[kind](into, node)

    def _call(self, into: SharedGraph, node: fx.Node) -> Step:
        """A layer, or a checkpointed function: its graph is followed once for all calls."""
        body = body_of(into.module, node)
        if body is None or body.meta.get("not_lowered") is not None:
            raise Refusal(f"{op_name(node)} calls a graph that is opaque to fxrl")
        inputs = body.graph.find_nodes(op="placeholder")
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
    share = Share(ids, len(shape_of(ids)) - 1, 0, shape_of(ids)[-1])
    return Step(share, needs={ids: share})


# ---------------------------------------------------------------------------- what ops do
Rule = Callable[[SharedGraph, fx.Node], Step]


def _of(into: SharedGraph, node: object) -> Share:
    share = into.share(node)
    if share is None:
        raise Refusal("tokens come in by an argument that fxrl does not follow")
    return share


def _apart(node: fx.Node, share: Share, dims: Sequence[int]) -> None:
    if share.dim in dims:
        raise Refusal(f"{op_name(node)} runs over the tokens of a sequence")


def _aligned(into: SharedGraph, node: fx.Node, places: Mapping[fx.Node, int]) -> Step:
    """A result with the dims of its operands, each so many dims further to the right.

    What is shared has its tokens at one place; of the rest a rank's part is read, or all of it
    where it has one entry for all tokens.
    """
    found = {arg: s for arg in places if (s := into.share(arg)) is not None}
    at = {share.dim + places[arg] for arg, share in found.items()}
    first, *others = found.values()
    if len(at) > 1 or not all(first.alike(other) for other in others):
        raise Refusal(f"{op_name(node)} combines different tokens of a sequence")
    (dim,) = at
    needs = {
        arg: replace(first, dim=dim - shift)
        for arg, shift in places.items()
        if arg not in found and dim >= shift and not _is_one(shape_of(arg)[dim - shift])
    }
    if needs and _is_one(first.outer * first.length * first.inner):
        raise Refusal(f"{op_name(node)} spreads one token over the others")
    return Step(replace(first, dim=dim), needs=needs)


def _share_in(step: Step) -> Share:
    assert isinstance(step.shares, Share)
    return step.shares


def _of_each(node: fx.Node, share: Share) -> Shares:
    """The same share for each tensor that a node returns."""
    val = node.meta["val"]
    return share if isinstance(val, torch.Tensor) else (share,) * len(val)


def _is_one(size: Size) -> bool:
    return hint(size) == 1


def _pointwise(into: SharedGraph, node: fx.Node) -> Step:
    if bound(node).get("reduction") not in (None, 0):
        raise Refusal(f"{op_name(node)} runs over the tokens of a sequence")
    val = node.meta["val"]
    rank = (val if isinstance(val, torch.Tensor) else val[0]).dim()
    operands = filter(is_tensor, node.all_input_nodes)
    step = _aligned(into, node, {arg: rank - len(shape_of(arg)) for arg in operands})
    return replace(step, shares=_of_each(node, _share_in(step)))


def _same_dims(into: SharedGraph, node: fx.Node) -> Step:
    """Runs along one dim (``dim``, or all of ``dims``) and leaves it there."""
    given = bound(node)
    share = _of(into, given["self"])
    dims = given["dim"] if "dim" in given else given["dims"]
    _apart(node, share, dims_of(dims, len(shape_of(given["self"]))))
    return Step(_of_each(node, share))


def _reduction(into: SharedGraph, node: fx.Node) -> Step:
    given = bound(node)
    share = _of(into, given["self"])
    dims = dims_of(given.get("dim"), len(shape_of(given["self"])))
    _apart(node, share, dims)
    if not given.get("keepdim"):
        share = replace(share, dim=share.dim - sum(dim < share.dim for dim in dims))
    return Step(_of_each(node, share))


def _layer_norm(into: SharedGraph, node: fx.Node) -> Step:
    given = bound(node)
    share = _of(into, given["input"])
    rank = len(shape_of(given["input"]))
    _apart(node, share, range(rank - len(given["normalized_shape"]), rank))
    return Step(_of_each(node, share))


def _product(into: SharedGraph, node: fx.Node) -> Step:
    """``mm``, ``addmm``, ``bmm``, ``mv``: a dim that is summed over counts no tokens."""
    given = bound(node)
    summand = given["self"] if "mat1" in given else None
    left = given["self" if summand is None else "mat1"]
    right = given["vec" if "vec" in given else "mat2"]
    rank = len(shape_of(left))
    mine, theirs = into.share(left), into.share(right)
    if summand is not None and into.share(summand) is not None:
        raise Refusal("a product's summand counts tokens")
    if any(share is not None and share.dim < rank - 2 for share in (mine, theirs)):
        return _aligned(into, node, {left: 0, right: 0})
    if mine is not None and theirs is not None:
        cure = "attn_implementation='sdpa', if it is attention"
        raise Refusal("a product pairs tokens with tokens", cure)
    if mine is not None and mine.dim == rank - 2:
        share = mine
    elif theirs is not None and theirs.dim == rank - 1:
        share = theirs
    else:
        raise Refusal(f"{op_name(node)} runs over the tokens of a sequence")
    needs = {}
    if summand is not None:
        dim = share.dim - (len(shape_of(node)) - len(shape_of(summand)))
        if dim >= 0 and not _is_one(shape_of(summand)[dim]):
            needs[summand] = replace(share, dim=dim)
    return Step(share, needs=needs)


def _quantized_product(into: SharedGraph, node: fx.Node) -> Step:
    """Rows [M, K] by a frozen weight in 8 or 4 bits, or of which ranks have parts."""
    share = _of(into, node.args[0])
    _apart(node, share, [1])
    return Step(share)


def _picked(into: SharedGraph, node: fx.Node) -> Step:
    """``gather`` and ``scatter``: operands with the same dims, along one that counts no tokens."""
    given = bound(node)
    operands = [*filter(is_tensor, node.all_input_nodes)]
    step = _aligned(into, node, dict.fromkeys(operands, 0))
    share = _share_in(step)
    _apart(node, share, dims_of(given["dim"], len(shape_of(node))))
    sizes = {hint(shape_of(arg)[share.dim]) for arg in operands}
    if len(sizes) > 1:
        raise Refusal(f"{op_name(node)} reads fewer tokens of one operand than of another")
    return step


def _index(into: SharedGraph, node: fx.Node) -> Step:
    """``table[ids]``: entries of a whole value, by one index for each token."""
    source, indices = node.args[:2]
    share = into.share(indices[0]) if len(indices) == 1 else None  # type: ignore[arg-type, index]
    if share is None or into.share(source) is not None:
        raise Refusal(f"{op_name(node)} may mix the tokens of a sequence")
    return Step(share)


# ---------------------------------------------------------------------------- dims and shapes
def _view(into: SharedGraph, node: fx.Node) -> Step:
    """The result's dim with the same entries ahead of a token and behind it."""
    source: Any = node.args[0]
    share, before = _of(into, source), shape_of(source)
    after = shape_of(node)
    ahead = prod(before[: share.dim]) * share.outer
    behind = share.inner * prod(before[share.dim + 1 :])
    for dim, size in enumerate(after):
        outer = _quotient(ahead, prod(after[:dim]))
        inner = _quotient(behind, prod(after[dim + 1 :]))
        if outer is not None and inner is not None:
            found = replace(share, dim=dim, outer=outer, inner=inner)
            if is_equal(outer * share.length * inner, size):
                return Step(found, sizes=after)
    raise Refusal(f"{op_name(node)} joins tokens of a sequence with other dims")


def _quotient(size: Size, divisor: Size) -> Size | None:
    if hint(divisor) == 0 or hint(size) % hint(divisor):
        return None
    found = size // divisor
    return found if is_equal(found * divisor, size) else None


def _expand(into: SharedGraph, node: fx.Node) -> Step:
    source: Any = node.args[0]
    shift = len(shape_of(node)) - len(shape_of(source))
    step = _aligned(into, node, {source: shift})
    dim = _share_in(step).dim
    if not is_equal(shape_of(source)[dim - shift], shape_of(node)[dim]):
        raise Refusal(f"{op_name(node)} spreads one token over the others")
    return replace(step, sizes=shape_of(node))


def _unsqueeze(into: SharedGraph, node: fx.Node) -> Step:
    source: Any = node.args[0]
    share = _of(into, source)
    dim = dims_of(node.args[1], len(shape_of(source)) + 1)[0]
    return Step(replace(share, dim=share.dim + (dim <= share.dim)))


def _permute(into: SharedGraph, node: fx.Node) -> Step:
    given = bound(node)
    share, rank = _of(into, given["self"]), len(shape_of(node))
    order = list(range(rank))
    if "dims" in given:
        order = dims_of(given["dims"], rank)
    elif rank > 1:
        one, other = dims_of([given.get("dim0", 0), given.get("dim1", 1)], rank)
        order[one], order[other] = order[other], order[one]
    return Step(replace(share, dim=order.index(share.dim)))


def _slice(into: SharedGraph, node: fx.Node) -> Step:
    given = bound(node)
    source = given["self"]
    share, rank = _of(into, source), len(shape_of(source))
    if dims_of(given["dim"], rank)[0] != share.dim:
        return Step(share)
    if is_equal(shape_of(node)[share.dim], shape_of(source)[share.dim]):
        return Step(share, same=source)
    if given["step"] != 1 or not is_equal(share.outer, 1) or not is_equal(share.inner, 1):
        raise Refusal(f"{op_name(node)} takes tokens of a sequence apart")
    start: Any = given["start"] or 0
    start = start.meta["val"] if isinstance(start, fx.Node) else start
    if hint(start) < 0:
        start = share.length + start
    start = 0 if hint(start) < 0 else start  # more than there is: all of it
    length = shape_of(node)[share.dim]
    return Step(replace(share, start=share.start + start, length=length), same=source)


def _select(into: SharedGraph, node: fx.Node) -> Step:
    given = bound(node)
    share = _of(into, given["self"])
    (dim,) = dims_of(given["dim"], len(shape_of(given["self"])))
    if dim == share.dim:
        raise Refusal("one token of each sequence is picked")
    return Step(replace(share, dim=share.dim - (dim < share.dim)))


def _split(into: SharedGraph, node: fx.Node) -> Step:
    """``split`` and, where the dim goes, ``unbind``."""
    given = bound(node)
    share = _of(into, given["self"])
    (dim,) = dims_of(given["dim"], len(shape_of(given["self"])))
    _apart(node, share, [dim])
    if is_call(node, aten.unbind.int):
        share = replace(share, dim=share.dim - (dim < share.dim))
    return Step(_of_each(node, share))


def _join(into: SharedGraph, node: fx.Node) -> Step:
    """``cat`` and ``stack``; PyTorch joins an empty vector with anything."""
    parts: Any = [part for part in node.args[0] if numel_hint(part) or len(shape_of(part)) > 1]  # type: ignore[union-attr, arg-type]
    (dim,) = dims_of(bound(node)["dim"], len(shape_of(node)))
    if is_call(node, aten.cat.default) and len(parts) == 1:
        return Step(_of(into, parts[0]), same=parts[0])
    step = _aligned(into, node, dict.fromkeys(parts, 0))
    share = _share_in(step)
    if is_call(node, aten.stack.default):
        return replace(step, shares=replace(share, dim=share.dim + (dim <= share.dim)))
    _apart(node, share, [dim])
    return step


def _pad(into: SharedGraph, node: fx.Node) -> Step:
    given = bound(node)
    share = _of(into, given["self"])
    rank = len(shape_of(node))
    _apart(node, share, [rank - 1 - place // 2 for place, n in enumerate(given["pad"]) if n != 0])
    return Step(share)


# ---------------------------------------------------------------------------- attention
def _attention(into: SharedGraph, node: fx.Node, ranks: int) -> Step:
    """All tokens of queries, keys and values [B, heads, T, D]; ranks share the heads meanwhile."""
    options = options_of(node)
    operands: Any = node.args[:3]
    shares = [into.share(arg) for arg in operands]
    for arg, share in zip(operands, shares, strict=True):
        if share is None or len(shape_of(arg)) != 4 or share.dim != 2:
            raise Refusal("attention is not over [batch, heads, tokens, features] of one sequence")
        whole = is_equal(share.start, 0) and is_equal(share.length, share.tokens)
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


_KINDS: dict[Any, Rule] = {
    compute.pointwise: _pointwise,
    compute.elementwise_loss: _pointwise,
    compute.log_sigmoid: _pointwise,
    compute.copy_of: _pointwise,
    compute.filled: _pointwise,
    compute.reduction: _reduction,
    compute.whole_row: _same_dims,
    compute.layer_norm: _layer_norm,
    compute.matrix_product: _product,
    compute.vector_product: _product,
    compute.row_products: _product,
    layout.view: _view,
    layout.unsqueeze: _unsqueeze,
    layout.expand: _expand,
    layout.permute: _permute,
    layout.reorder: _same_dims,
    layout.slice_: _slice,
    layout.select: _select,
    layout.unbind: _split,
    layout.split: _split,
    layout.join: _join,
    layout.pad: _pad,
    layout.gather: _picked,
    layout.scatter: _picked,
    layout.index: _index,
}
