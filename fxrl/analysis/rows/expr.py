"""Row expressions: what one token's row computes, free of batch, length and layout.

A value that depends on the LM head is *row-local* if its entries for a token depend on that token's
hidden row only. Such a value is a pair of

* a ``RowExpr``: an expression over ``[n, local dims...]`` tensors (n rows, any rows), and
* tags, one per dim of the graph value: ``"t"`` a token dim, ``"v"`` a vocabulary-sized local dim,
  ``"k"`` any other local dim (``RowValue``).

Row selections (slices, shifts, masks, index-selects) never appear inside an expression: they are
pushed to its leaves as ``RowStep`` and become ops on the small inputs, above the matmul, so rows
that nobody reads are never projected. A write into some of the rows stands in the expression
(``PATCHED``) until a selection of just these rows takes what was written.

NOTE [Why hash-consing]: ``logits[:, :-1]`` written twice must be one value, so that everything over
these rows ends up in one region. Interning makes equal expressions one object: they are compared by
identity, and the emitted body shares every subexpression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxrl.ir.graph import Size
from fxrl.ir.remark import Refusal

Tag = str
TOKEN, VOCAB, LOCAL = "t", "v", "k"
#: ``(old rows, written rows, the step that selects them)``: no op, for its rows differ in kind.
PATCHED = "patched"


@dataclass(frozen=True, slots=True)
class RowStep:
    """One selection or permutation of rows, on a tensor whose token dims come first."""

    # ``"slice"`` (dim, start, end, step), ``"select"`` (dim, index), ``"split"`` (op, dim, sizes,
    # index of the part), ``"permute"`` (order), ``"index"`` (one index tensor or None per token
    # dim), ``"place"`` (index tensors of the result: where the rows are among rows of zeros),
    # ``"write"`` (dim, bounds of the slice of zeros that is written, sizes of this slice),
    # ``"zeros"`` (), ``"expand"`` () to as many rows as data knows, ``"cat"`` and ``"stack"``
    # (dim, parts: the steps and token sizes of each).
    kind: str
    args: tuple[Any, ...]  # dims count token dims only; graph values (indices) are ``fx.Node``
    # Sizes of the token dims that the step expects; a tensor with the same rows under other token
    # dims is reshaped to these first.
    sizes: tuple[Any, ...]
    result: tuple[Any, ...]  # sizes of the token dims afterwards

    def takes(self, kind: str) -> bool:
        """Whether it is a step of this kind, or joins parts with one."""
        parts = self.args[1] if self.kind in ("cat", "stack") else ()
        return self.kind == kind or any(step.takes(kind) for chain, _ in parts for step in chain)

    def selects_as(self, other: RowStep) -> bool:
        """Whether both select the same rows of the same tokens."""
        return self.kind == other.kind and all(
            list(map(spelled, mine)) == list(map(spelled, its))
            for mine, its in ((self.args, other.args), (self.sizes, other.sizes))
        )


def spelled(arg: Any) -> str:
    """A size or a number of the graph by its value, anything else by its name."""
    val = arg.meta.get("val") if isinstance(arg, fx.Node) else arg
    return str(arg if isinstance(val, torch.Tensor) else val)


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of the row program."""

    node: fx.Node  # the graph value
    # Ops ``(target, args after the tensor)`` that bring its token dims to the front (and expand
    # those it lacks); they run outside the region.
    prepare: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    # Its token dims then; None for a shared input, the same for every row.
    token_sizes: tuple[Any, ...] | None = None
    local_sizes: tuple[Size, ...] = ()  # its local dims
    steps: tuple[RowStep, ...] = ()  # row selections, in order

    @property
    def tiled(self) -> bool:
        """Whether each row has its own part of this input."""
        return self.token_sizes is not None

    def takes(self, kind: str) -> bool:
        """Whether a step of this kind is among those that select its rows, or parts of them."""
        return any(step.takes(kind) for step in self.steps)


@dataclass(frozen=True, slots=True, eq=False)
class GivenGradient:
    """What an expression calls for values whose gradient is given; see ``ir.bodies.WITH_GRADIENT``.

    Its operands are the inputs that get a gradient, the values, and what ``backward`` reads.
    """

    backward: fx.GraphModule  # of rows
    inputs: int
    values: int


@dataclass(slots=True, eq=False, repr=False)
class RowExpr:
    """A node of the expression DAG: a leaf, or an op over expressions. Compare by identity."""

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    leaf: Leaf | None = None

    def operands(self) -> Iterator[RowExpr]:
        for arg in (*self.args, *(value for _, value in self.kwargs)):
            yield from _exprs(arg)


def _exprs(arg: Any) -> Iterator[RowExpr]:
    if isinstance(arg, RowExpr):
        yield arg
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            yield from _exprs(item)


def map_exprs(arg: Any, function: Callable[[RowExpr], Any]) -> Any:
    """``arg`` with every expression in it, at any depth, replaced by ``function`` of it."""
    if isinstance(arg, RowExpr):
        return function(arg)
    if isinstance(arg, (tuple, list)):
        return tuple(map_exprs(item, function) for item in arg)
    return arg


class ExprPool:
    """Makes row expressions; equal ones are one object."""

    def __init__(self) -> None:
        self._interned: dict[Any, RowExpr] = {}
        self._shifted: dict[tuple[int, Any], RowExpr] = {}
        self._reshaped: dict[int, tuple[RowExpr, list[int]]] = {}  # of what, and its local sizes
        self._numbers: dict[str, fx.Node] = {}  # the first with each value

    def leaf(self, leaf: Leaf) -> RowExpr:
        return self._intern(("leaf", _key(leaf)), lambda: RowExpr(None, leaf=leaf))

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> RowExpr:
        """The expression ``target(*args, **kwargs)``; lists become tuples. Raises ``Refusal`` if an
        argument is a number computed in the graph, which code for one row cannot hold."""
        numbers = [one for one in (*args, *kwargs.values()) if isinstance(one, fx.Node)]
        if numbers:
            raise Refusal(
                f"{target} takes a number that only the running step knows", at=numbers[0]
            )
        flat_args = map_exprs(args, lambda expr: expr)
        flat_kwargs = tuple(sorted(kwargs.items()))
        key = ("call", target, _key(flat_args), _key(flat_kwargs))
        return self._intern(key, lambda: RowExpr(target, flat_args, flat_kwargs))

    def reshaped(self, expr: RowExpr, old: list[int], new: list[int]) -> RowExpr:
        """``expr`` with local sizes ``new`` for ``old``; reshaped back it is what it was."""
        expr, old = self._reshaped.get(id(expr), (expr, old))
        if old == new:
            return expr
        result = self.call(torch.ops.aten.reshape.default, expr, (-1, *new))
        self._reshaped[id(result)] = expr, old
        return result

    def _intern(self, key: Any, make: Callable[[], RowExpr]) -> RowExpr:
        if key not in self._interned:
            self._interned[key] = make()
        return self._interned[key]

    def shift(self, expr: RowExpr, step: RowStep) -> RowExpr:
        """``expr`` over the rows that ``step`` selects: the step moves down to the leaves. Steps by
        equal numbers are one, wherever the graph computes these."""
        step = replace(step, args=fx.map_arg(step.args, self._number))
        key = (id(expr), _key(step))
        if key not in self._shifted:
            self._shifted[key] = self._shift(expr, step)
        return self._shifted[key]

    def _shift(self, expr: RowExpr, step: RowStep) -> RowExpr:
        if expr.leaf is not None:
            return self.leaf(_moved(expr.leaf, step)) if expr.leaf.tiled else expr
        if expr.target == PATCHED and expr.args[2].selects_as(step):
            written: RowExpr = expr.args[1]
            return written
        args = map_exprs(expr.args, lambda operand: self.shift(operand, step))
        kwargs = {name: map_exprs(v, lambda o: self.shift(o, step)) for name, v in expr.kwargs}
        return self.call(expr.target, *args, **kwargs)

    def _number(self, node: fx.Node) -> fx.Node:
        if isinstance(node.meta.get("val"), torch.SymInt):
            return self._numbers.setdefault(spelled(node), node)
        return node

    def join(
        self, kind: str, dim: int, parts: Sequence[tuple[RowExpr, tuple[Any, ...]]], left: Any
    ) -> RowExpr:
        """Selections of the rows of one expression, each with its token sizes, by a ``"cat"`` or a
        ``"stack"`` in token dim ``dim``. Raises ``Refusal`` if they are computed differently."""
        exprs, sizes = zip(*parts, strict=True)
        first: RowExpr = exprs[0]
        if first.leaf is not None:
            return self.leaf(_beside([expr.leaf for expr in exprs], kind, dim, sizes, left))

        def same(*args: Any) -> Any:
            if all(isinstance(arg, RowExpr) for arg in args):
                return self.join(kind, dim, list(zip(args, sizes, strict=True)), left)
            if all(isinstance(arg, tuple) and len(arg) == len(args[0]) for arg in args):
                return tuple(map(same, *args))
            if any(_key(arg) != _key(args[0]) for arg in args):
                raise Refusal("the rows that are joined are not computed alike")
            return args[0]

        same(*(expr.target for expr in exprs))
        args = same(*(expr.args for expr in exprs))
        kwargs = same(*(expr.kwargs for expr in exprs))
        return self.call(first.target, *args, **dict(kwargs))


def _moved(leaf: Leaf, step: RowStep) -> Leaf:
    """``leaf`` with one more step. Zeros stay zeros under any step, selecting an entry of a stack
    gives that part, and a write takes rows of any number."""
    before = leaf.steps[-1] if leaf.steps else None
    if step.kind == "zeros":
        return replace(leaf, steps=(replace(step, sizes=leaf.token_sizes or ()),))
    if before is None:
        return replace(leaf, steps=(step,))
    if before.kind == "zeros":
        return replace(leaf, steps=(replace(before, result=step.result),))
    earlier = leaf.steps[:-1]
    if before.kind == "stack" and _takes_entry(step, before):
        chain, _ = before.args[1][step.args[1]]
        return replace(leaf, steps=(*earlier, *chain))
    if step.kind in ("write", "expand") and before.kind == "expand":
        return replace(leaf, steps=(*earlier, replace(step, sizes=before.sizes)))
    return replace(leaf, steps=(*leaf.steps, step))


def _takes_entry(step: RowStep, stack: RowStep) -> bool:
    alike = list(map(spelled, step.sizes)) == list(map(spelled, stack.result))
    return alike and step.kind == "select" and step.args[:1] == stack.args[:1]


def _beside(
    parts: list[Leaf | None], kind: str, dim: int, sizes: tuple[Any, ...], left: Any
) -> Leaf:
    """One leaf for the joined rows of several leaves of one tensor; common steps come first."""
    first = parts[0]
    alike = {_key(replace(leaf, steps=())) if leaf is not None else None for leaf in parts}
    if first is None or len(alike) > 1:
        raise Refusal("the rows that are joined are read from different tensors")
    if not first.tiled:
        return first
    chains = [leaf.steps for leaf in parts if leaf is not None]
    common = 0
    while len({_key(chain[common : common + 1]) for chain in chains}) == 1 and common < min(
        map(len, chains)
    ):
        common += 1
    before = first.steps[common - 1].result if common else first.token_sizes
    rest = tuple((chain[common:], size) for chain, size in zip(chains, sizes, strict=True))
    step = RowStep(kind, (dim, rest), before, left)  # type: ignore[arg-type]
    return replace(first, steps=(*first.steps[:common], step))


def _key(arg: Any) -> Any:
    """A hashable stand-in that tells ``1`` from ``1.0`` and ``True``, and nodes by identity."""
    if isinstance(arg, RowExpr):
        return ("expr", id(arg))
    if isinstance(arg, (tuple, list)):
        return tuple(_key(item) for item in arg)
    if isinstance(arg, (Leaf, RowStep)):
        return tuple(_key(getattr(arg, name)) for name in arg.__slots__)
    return (type(arg).__name__, str(arg) if isinstance(arg, Size) else arg)


def walk(roots: list[RowExpr]) -> list[RowExpr]:
    """Every expression under ``roots`` once, operands first."""
    order: dict[int, RowExpr] = {}
    stack: list[tuple[RowExpr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        expr, done = stack.pop()
        if id(expr) in order:
            continue
        if done:
            order[id(expr)] = expr
        else:
            stack.append((expr, True))
            stack.extend((operand, False) for operand in reversed(list(expr.operands())))
    return list(order.values())


def leaves(roots: list[RowExpr]) -> list[RowExpr]:
    """The leaf expressions under ``roots``, in a stable order."""
    return [expr for expr in walk(roots) if expr.leaf is not None]


@dataclass(frozen=True, slots=True)
class RowValue:
    """A graph value as rows: its expression and what each of its dims is.

    The expression has shape ``[n, *local sizes]``, the local dims in the value's own order.
    """

    expr: RowExpr
    tags: tuple[Tag, ...]
    sizes: tuple[Size, ...]

    @property
    def wide(self) -> bool:
        """Whether it still carries a vocabulary-sized dim."""
        return VOCAB in self.tags

    @property
    def token_sizes(self) -> tuple[Size, ...]:
        return tuple(s for s, tag in zip(self.sizes, self.tags, strict=True) if tag == TOKEN)

    @property
    def local_sizes(self) -> tuple[Size, ...]:
        return tuple(s for s, tag in zip(self.sizes, self.tags, strict=True) if tag != TOKEN)

    @property
    def tokens(self) -> tuple[bool, ...]:
        """Of each dim whether it runs over tokens."""
        return tuple(tag == TOKEN for tag in self.tags)

    def is_token(self, dim: int) -> bool:
        return self.tags[dim] == TOKEN

    def token_dim(self, dim: int) -> int:
        """Place of the token dim ``dim`` among the token dims."""
        return self.tags[:dim].count(TOKEN)

    def local_dim(self, dim: int) -> int:
        """Dim of the row expression that holds the value's local dim ``dim``."""
        assert self.tags[dim] != TOKEN
        return 1 + sum(tag != TOKEN for tag in self.tags[:dim])

    def retagged(self, dim: int, tag: Tag) -> tuple[Tag, ...]:
        return (*self.tags[:dim], tag, *self.tags[dim + 1 :])
