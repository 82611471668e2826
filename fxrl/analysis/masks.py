"""Write an attention mask as an expression over vectors, which are read by broadcasting.

    %doc  = index(%ids, ...)               [B, 1, T, 1]     a vector: one entry for each query
    %same = eq(%doc, %doc_of_keys)         [B, 1, T, T]     a square: one for each pair
    %mask = bitwise_and(%le, %same)        [B, 1, T, T]

However a library spells its mask, ops on squares look at one pair at a time, and they read vectors
by broadcasting. So shapes tell where to stop: going up from the mask, a value with a dim for
queries and one for keys must be computed elementwise or be a view; a value that lacks either is a
vector, however it was computed. Indices that the graph proves (``analysis.attention.known``) need
no vector.

    FactoredMask("bitwise_and(le(key, query), eq(v0, v1))", (doc, doc_of_keys))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite
from typing import Any

import torch
from torch import fx

from fxrl.analysis.attention import Positions, known
from fxrl.ir.graph import (
    RESHAPES,
    TRANSPOSES,
    bound,
    draws_random,
    equal_shapes,
    is_call,
    is_pointwise,
    is_tensor,
    order_of_dims,
    shape_of,
    val_of,
)
from fxrl.ir.remark import Refusal

aten = torch.ops.aten

#: For each dim of a value, which dim of the mask [batch, head, query, key] it is; None: of size 1.
Axes = tuple[int | None, ...]
_QUERY, _KEY = 2, 3
_INDEX = {_QUERY: "query", _KEY: "key"}
_AND = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor)
_COMPARE = (
    *(aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor),
    *(aten.gt.Tensor, aten.eq.Tensor, aten.ne.Tensor),
)
#: Calls that leave out or add dims of size 1; a slice, where it is whole.
_OF_ONES = (
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.unsqueeze.default, aten.slice.Tensor),
)
_MOVED = re.compile(r"add\((query|key), (-?\d+)\)")
#: More text than any mask that people write; values that are shared are repeated in it.
_LONGEST = 2000


@dataclass(frozen=True, slots=True)
class FactoredMask:
    """What a mask is computed from."""

    text: str  # the expression, as ``fxrl.ops.masked_attention`` takes it
    # ``v0``, ``v1``, ...: values of the graph, and how they lie.
    vectors: tuple[tuple[fx.Node, Axes], ...]


def is_square(mask: fx.Node) -> bool:
    """Whether a mask has an entry for each pair of a query and a key."""
    return {_QUERY, _KEY} <= set(_axes(mask))


def factored(mask: fx.Node) -> FactoredMask:
    """A boolean mask as an expression over vectors. Raises ``Refusal`` if a [query, key] value is
    an input, or is not computed pair by pair."""
    if val_of(mask).dtype != torch.bool:
        raise Refusal("it adds numbers to the scores", "give attention a mask of bools", mask)
    reader = _Reader()
    text = reader.text(mask, _axes(mask))
    return FactoredMask(text, tuple(reader.vectors))


def is_causal(mask: fx.Node) -> bool:
    """Whether ``mask[..., q, k]`` is ``k <= q`` for square attention, from how it is computed."""
    if len({str(size) for size in shape_of(mask)[-2:]}) > 1:
        return False
    try:
        return factored(mask).text in ("le(key, query)", "ge(query, key)")
    except Refusal:
        return False


def _axes(mask: fx.Node) -> Axes:
    shape = shape_of(mask)
    return tuple(_one(size, dim + 4 - len(shape)) for dim, size in enumerate(shape))


def _one(size: Any, axis: int | None) -> int | None:
    return None if isinstance(size, int) and size == 1 else axis


@dataclass(slots=True)
class _Reader:
    """Reads one mask; ``vectors`` are those met so far."""

    vectors: dict[tuple[fx.Node, Axes], str] = field(default_factory=dict)

    def text(self, node: fx.Node, axes: Axes) -> str:
        """The expression of ``node`` at one pair of a query and a key."""
        made = known(node)
        if isinstance(made, Positions) and (index := _INDEX.get(axes[made.dim] or 0)):
            return _moved(index, made.offset)
        if not {_QUERY, _KEY} <= set(axes):
            return self.vectors.setdefault((node, axes), f"v{len(self.vectors)}")
        if node.op != "call_function":
            reason = f"%{node} has an entry for each pair already"
            raise Refusal(reason, "give the model attention_mask as [B, T], or position_ids", node)
        seen = _through(node, axes)
        text = self._elementwise(node, axes) if seen is None else self.text(*seen)
        if len(text) > _LONGEST:
            raise Refusal(f"the expression of %{node} is longer than {_LONGEST}", at=node)
        return text

    def _elementwise(self, node: fx.Node, axes: Axes) -> str:
        if is_call(node, aten.tril.default):
            given = bound(node)
            below = f"le(key, {_moved('query', given['diagonal'])})"
            if _is_bool(node):
                return _all([*self._factors([given["self"]], axes), below])
            return f"where({below}, {self._number(given['self'], axes)}, 0)"
        if is_call(node, aten._to_copy.default):
            return self._cast(node, axes)
        if is_call(node, *_AND) and all(map(_is_bool, node.args)):
            return _all(self._factors(node.args, axes))
        if not is_pointwise(node) or draws_random(node) or node.kwargs:
            raise Refusal(f"%{node} ({node.target}) is not made pair by pair", at=node)
        args = [self._argument(arg, axes) for arg in node.args]
        if is_call(node, *_COMPARE):
            args = _without_common_offset(*args)
        overload: Any = node.target
        return f"{overload.overloadpacket.__name__}({', '.join(args)})"

    def _factors(self, args: Iterable[Any], axes: Axes) -> list[str]:
        """Those that are not true everywhere."""
        return [self._argument(arg, axes) for arg in args if known(arg) is not True]

    def _argument(self, arg: Any, axes: Axes) -> str:
        if isinstance(arg, (bool, int, float)) and isfinite(arg):
            return repr(arg)
        if not is_tensor(arg):
            raise Refusal(f"{arg} is no finite number and no tensor")
        shape = shape_of(arg)
        own = axes[len(axes) - len(shape) :]
        return self.text(arg, tuple(map(_one, shape, own)))

    def _number(self, node: fx.Node, axes: Axes) -> str:
        made = known(node)
        if not isinstance(made, int):
            return self._argument(node, axes)
        return repr(float(made) if val_of(node).is_floating_point() else int(made))

    def _cast(self, node: fx.Node, axes: Axes) -> str:
        source: Any = node.args[0]
        before, after = val_of(source).dtype, val_of(node).dtype
        text = self._argument(source, axes)
        if after in (before, torch.int64) and not before.is_floating_point:
            return text if before != torch.bool or after == before else f"add({text}, 0)"
        if after == torch.bool:
            return f"ne({text}, 0)"
        raise Refusal(f"%{node} makes {after} of {before}", at=node)


def _moved(index: str, offset: int) -> str:
    return f"add({index}, {offset})" if offset else index


def _without_common_offset(left: str, right: str) -> list[str]:
    """``le(key, query)`` for ``le(add(key, 7), add(query, 7))``."""
    first, second = map(_MOVED.fullmatch, (left, right))
    same = first is not None and second is not None and first[2] == second[2]
    return [first[1], second[1]] if same else [left, right]  # type: ignore[index]


def _is_bool(arg: Any) -> bool:
    return is_tensor(arg) and val_of(arg).dtype == torch.bool


def _all(factors: Sequence[str]) -> str:
    """The conjunction of all factors; refuses a mask that is true everywhere, which has none."""
    if not factors:
        raise Refusal("it hides nothing", "give no mask")
    return reduce("bitwise_and({}, {})".format, factors)


# ---------------------------------------------------------------------------- the same values
def _through(node: fx.Node, axes: Axes) -> tuple[fx.Node, Axes] | None:
    """The value that ``node`` is a view or a copy of, and that value's dims; None for other ops."""
    source: Any = node.args[0] if node.args else None
    if not is_tensor(source):
        return None
    shape, rank = shape_of(source), len(axes)
    if is_call(node, aten.clone.default, aten.detach.default, aten.alias.default):
        return source, axes
    if is_call(node, aten.expand.default):
        return source, tuple(map(_one, shape, axes[rank - len(shape) :]))
    if is_call(node, *TRANSPOSES):
        order = order_of_dims(node)
        return source, tuple(axes[order.index(dim)] for dim in range(rank))
    if is_call(node, *_OF_ONES, *RESHAPES):
        return source, _reshaped(node, source, axes)
    return None


def _reshaped(node: fx.Node, source: fx.Node, axes: Axes) -> Axes:
    """Dims of size 1 come and go; all others must be the same in the same order."""
    shape, wide = shape_of(source), [(s, a) for s, a in zip(shape_of(node), axes, strict=True)]
    wide = [(size, axis) for size, axis in wide if _one(size, 0) is not None]
    sizes = [size for size in shape if _one(size, 0) is not None]
    if not equal_shapes(sizes, (size for size, _ in wide)):
        raise Refusal(f"%{node} ({node.target}) is not made pair by pair", at=node)
    rest = iter(axis for _, axis in wide)
    return tuple(None if _one(size, 0) is None else next(rest) for size in shape)
