"""Which dim of each value is split into parts, and how each op is computed part by part.

    tokens   ids [B, T] -> embedding [B, T, H] -> view [B * T, H] -> ...   ranks have tokens each
    heads    mm [N, heads * D] -> view [B, T, heads, D] -> transpose ...   groups have heads each

*Shared out* means that each rank (or group) holds a part of a value's entries. A slice along the
shared dim moves no data: a ``Share`` says which token or head its first entry is for, and how many
there are. How ops treat rows is told by the table of ``analysis.rows``; here is what each kind of
op does to the shared dim.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from fxrl.analysis.rows import compute, joins, layout
from fxrl.analysis.rows.analysis import RULES
from fxrl.analysis.rows.rules import dims_of
from fxrl.ir.graph import (
    OpOverload,
    Size,
    bound,
    hint,
    is_call,
    is_equal,
    is_piecewise_product,
    is_pointwise,
    is_tensor,
    numel_hint,
    op_name,
    order_of_dims,
    shape_of,
)
from fxrl.ir.remark import Refusal
from fxrl.ir.sizes import share_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Share(ABC):
    """How a value is split: its dim of tokens among ranks, or its dim of heads among groups."""

    one: ClassVar[str]  # what is shared out
    whole: ClassVar[str]  # what all of them make

    dim: int  # the dim with ``outer * length * inner`` entries, what is shared out in the middle
    start: Size  # what the first entry is for
    length: Size  # how many have entries
    outer: Size = 1
    inner: Size = 1

    @property
    @abstractmethod
    def total(self) -> Size:
        """How many there are to be shared out."""

    @property
    def many(self) -> str:
        """What they are, in words."""
        return f"{self.one}s of a {self.whole}"

    def local(self, parts: int) -> Size:
        """How many are in one of so many parts."""
        return share_of(self.total, parts)

    def size(self, parts: int) -> Size:
        """The size of ``dim`` in one of so many parts."""
        return self.outer * self.local(parts) * self.inner

    def alike(self, other: Share) -> bool:
        """Whether a part of the one is for the same as that of the other, wherever the dim is."""
        mine, theirs = ((s.total, s.start, s.length, s.outer, s.inner) for s in (self, other))
        return all(map(is_equal, mine, theirs))


Shares = Share | None | tuple[Share | None, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The way in which a node that reads shared values is computed in parts."""

    shares: Shares  # what its result is; None where it is whole
    # Whole operands of which a part is read.
    needs: Mapping[fx.Node, Share] = field(default_factory=dict)
    # Shared operands that are read whole.
    gathers: Mapping[fx.Node, Share] = field(default_factory=dict)
    sizes: tuple[Size, ...] | None = None  # the result's, where they are an argument
    same: fx.Node | None = None  # the operand that a part of its result is
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
        """The part of an operand that is held; None if the operand is whole."""
        found = self.shares.get(node) if isinstance(node, fx.Node) else None
        return found if isinstance(found, Share) else None


def follow(
    into: SharedGraph, node: fx.Node, step: Callable[[fx.Node, list[fx.Node]], Step]
) -> None:
    """Record how a node that reads shared values is computed, as ``step(node, those)`` says. A size
    that is read stays the size of the whole."""
    reads = [arg for arg in node.all_input_nodes if into.shares.get(arg) is not None]
    if not reads or is_call(node, aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default):
        return
    if is_call(node, operator.getitem):
        parts: Any = into.shares[reads[0]]
        found = Step(parts[node.args[1]])
    else:
        found = step(node, reads)
    into.steps[node], into.shares[node] = found, found.shares


def step_of(into: SharedGraph, node: fx.Node) -> Step:
    """How an op that reads shared values is computed in parts; a Refusal if it mixes parts."""
    if is_piecewise_product(node):
        return _quantized_product(into, node)
    target: Any = node.target
    if not isinstance(target, OpOverload):
        raise Refusal(f"{op_name(node)} is opaque to fxrl", "write it in PyTorch ops")
    kind: Any = RULES.get(target)
    if kind is None and is_pointwise(node):
        kind = compute.pointwise
    if kind not in _KINDS:
        raise _may_mix(into, node)
    return _KINDS[kind](into, node)


def _may_mix(into: SharedGraph, node: fx.Node) -> Refusal:
    many = next(s.many for arg in node.all_input_nodes if (s := into.share(arg)) is not None)
    return Refusal(f"{op_name(node)} may mix the {many}")


# ---------------------------------------------------------------------------- what ops do
Rule = Callable[[SharedGraph, fx.Node], Step]


def _of(into: SharedGraph, node: object) -> Share:
    share = into.share(node)
    if share is None:
        raise Refusal("what is shared out comes in by an argument that fxrl does not follow")
    return share


def _along(into: SharedGraph, node: fx.Node) -> tuple[Share, list[int]]:
    """The share of an op's operand, and the dims (one, several or all) that the op is along."""
    given = bound(node)
    rank = len(shape_of(given["self"]))
    return _of(into, given["self"]), dims_of(given.get("dim", given.get("dims")), rank)


def _apart(node: fx.Node, share: Share, dims: Sequence[int]) -> None:
    if share.dim in dims:
        raise Refusal(f"{op_name(node)} runs over the {share.many}")


def _aligned(into: SharedGraph, node: fx.Node, places: Mapping[fx.Node, int]) -> Step:
    """A result with the dims of its operands, each so many dims further to the right.

    Shared operands must be split in the same place; of whole operands a part is read, or all if
    there is one entry for all parts.
    """
    found = {arg: s for arg in places if (s := into.share(arg)) is not None}
    at = {share.dim + places[arg] for arg, share in found.items()}
    first, *others = found.values()
    if len(at) > 1 or not all(first.alike(other) for other in others):
        raise Refusal(f"{op_name(node)} combines different {first.many}")
    (dim,) = at
    needs = {
        arg: replace(first, dim=dim - shift)
        for arg, shift in places.items()
        if arg not in found and dim >= shift and not _is_one(shape_of(arg)[dim - shift])
    }
    if needs and _is_one(first.outer * first.length * first.inner):
        raise Refusal(f"{op_name(node)} spreads one {first.one} over the others")
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
    """Runs along its dims and leaves them there."""
    share, dims = _along(into, node)
    _apart(node, share, dims)
    return Step(_of_each(node, share))


def _reduction(into: SharedGraph, node: fx.Node) -> Step:
    share, dims = _along(into, node)
    _apart(node, share, dims)
    if not bound(node).get("keepdim"):
        share = replace(share, dim=share.dim - sum(dim < share.dim for dim in dims))
    return Step(_of_each(node, share))


def _layer_norm(into: SharedGraph, node: fx.Node) -> Step:
    given = bound(node)
    share = _of(into, given["input"])
    rank = len(shape_of(given["input"]))
    _apart(node, share, range(rank - len(given["normalized_shape"]), rank))
    return Step(_of_each(node, share))


def _product(into: SharedGraph, node: fx.Node) -> Step:
    """``mm``, ``addmm``, ``bmm``, ``mv``: the dim that is summed over must not be shared."""
    given = bound(node)
    summand = given["self"] if "mat1" in given else None
    left = given["self" if summand is None else "mat1"]
    right = given["vec" if "vec" in given else "mat2"]
    rank = len(shape_of(left))
    mine, theirs = into.share(left), into.share(right)
    if summand is not None and (counted := into.share(summand)) is not None:
        raise Refusal(f"a product's summand counts {counted.one}s")
    if any(share is not None and share.dim < rank - 2 for share in (mine, theirs)):
        return _aligned(into, node, {left: 0, right: 0})
    if mine is not None and theirs is not None:
        cure = "attn_implementation='sdpa', if it is attention"
        raise Refusal(f"a product pairs {mine.one}s with {theirs.one}s", cure)
    share = mine or theirs
    assert share is not None
    _apart(node, share, [rank - 1 if share is mine else rank - 2])
    needs = {}
    if summand is not None:
        dim = share.dim - (len(shape_of(node)) - len(shape_of(summand)))
        if dim >= 0 and not _is_one(shape_of(summand)[dim]):
            needs[summand] = replace(share, dim=dim)
    return Step(share, needs=needs)


def _quantized_product(into: SharedGraph, node: fx.Node) -> Step:
    """Rows [M, K] by a frozen weight in 8 or 4 bits, or one that is sharded among ranks."""
    share = _of(into, node.args[0])
    _apart(node, share, [1])
    return Step(share)


def _picked(into: SharedGraph, node: fx.Node) -> Step:
    """``gather`` and ``scatter``: operands with the same dims, along one that is not shared."""
    given = bound(node)
    operands = [*filter(is_tensor, node.all_input_nodes)]
    step = _aligned(into, node, dict.fromkeys(operands, 0))
    share = _share_in(step)
    _apart(node, share, dims_of(given["dim"], len(shape_of(node))))
    sizes = {hint(shape_of(arg)[share.dim]) for arg in operands}
    if len(sizes) > 1:
        raise Refusal(f"{op_name(node)} reads fewer {share.one}s of one operand than of another")
    return step


def _index(into: SharedGraph, node: fx.Node) -> Step:
    """``table[ids]``: entries of a whole value, by indices that are shared."""
    source, indices = node.args[:2]
    share = into.share(indices[0]) if len(indices) == 1 else None  # type: ignore[arg-type, index]
    if share is None or into.share(source) is not None:
        raise _may_mix(into, node)
    return Step(share)


# ---------------------------------------------------------------------------- dims and shapes
def _view(into: SharedGraph, node: fx.Node) -> Step:
    """The share of a view: its dim with as many entries before and after what is shared."""
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
    raise Refusal(f"{op_name(node)} joins {share.many} with other dims")


def _quotient(size: Size, divisor: Size) -> Size | None:
    if hint(divisor) == 0 or hint(size) % hint(divisor):
        return None
    found = size // divisor
    return found if is_equal(found * divisor, size) else None


def _expand(into: SharedGraph, node: fx.Node) -> Step:
    source: Any = node.args[0]
    shift = len(shape_of(node)) - len(shape_of(source))
    step = _aligned(into, node, {source: shift})
    share = _share_in(step)
    if not is_equal(shape_of(source)[share.dim - shift], shape_of(node)[share.dim]):
        raise Refusal(f"{op_name(node)} spreads one {share.one} over the others")
    return replace(step, sizes=shape_of(node))


def _unsqueeze(into: SharedGraph, node: fx.Node) -> Step:
    source: Any = node.args[0]
    share = _of(into, source)
    dim = dims_of(node.args[1], len(shape_of(source)) + 1)[0]
    return Step(replace(share, dim=share.dim + (dim <= share.dim)))


def _permute(into: SharedGraph, node: fx.Node) -> Step:
    share = _of(into, bound(node)["self"])
    return Step(replace(share, dim=order_of_dims(node).index(share.dim)))


def _slice(into: SharedGraph, node: fx.Node) -> Step:
    given = bound(node)
    source = given["self"]
    share, (dim,) = _along(into, node)
    if dim != share.dim:
        return Step(share)
    if is_equal(shape_of(node)[share.dim], shape_of(source)[share.dim]):
        return Step(share, same=source)
    if given["step"] != 1 or not is_equal(share.outer, 1) or not is_equal(share.inner, 1):
        raise Refusal(f"{op_name(node)} takes {share.many} apart")
    start: Any = given["start"] or 0
    start = start.meta["val"] if isinstance(start, fx.Node) else start
    if hint(start) < 0:
        start = share.length + start
    start = 0 if hint(start) < 0 else start  # more than there is: all of it
    length = shape_of(node)[share.dim]
    return Step(replace(share, start=share.start + start, length=length), same=source)


def _select(into: SharedGraph, node: fx.Node) -> Step:
    share, (dim,) = _along(into, node)
    if dim == share.dim:
        raise Refusal(f"one {share.one} of each {share.whole} is picked")
    return Step(replace(share, dim=share.dim - (dim < share.dim)))


def _split(into: SharedGraph, node: fx.Node) -> Step:
    """``split``, and ``unbind``, which removes the dim."""
    share, (dim,) = _along(into, node)
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
    joins.join: _join,
    joins.pad: _pad,
    layout.gather: _picked,
    layout.scatter: _picked,
    layout.index: _index,
}
